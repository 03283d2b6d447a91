// A weight matrix in the one layout that its format has for every number of rows.
//
// The N output columns lie in panels of 64; each panel is one contiguous run of bytes:
//   bf16         [K/2][64][2] bf16
//   int8         [K/4][64][4] bytes, each value + 128, then f32 scale[64]
//   q8_0         per group of 32 of K: [4 vectors][8][16][4] bytes, each value + 128, f16 scale[64]
//   q4_0         per group: [4 vectors][4][16][4] bytes, whose low nibbles are elements 0..15 of
//                the group and whose high nibbles are 16..31, as in GGUF; then f16 scale[64]
//   q4_1         as q4_0, then f16 minimum[64]
// and ends with f32 bias[64] where the matrix has a bias. So the group formats take exactly their
// bytes on disk. K is padded with zero weights to a multiple of 32, N to whole panels.
//
// A gated matrix [gate; up] alternates 16 gate columns and their 16 up columns, so that each panel
// holds what 32 outputs of silu(gate) * up need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tf {

enum class WeightFormat : int { bf16, int8, q8_0, q4_0, q4_1 };

constexpr int kPanelColumns = 64;
constexpr int kGroupSize = 32;

inline int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct PackedMatrix {
  WeightFormat format;
  int n;  // output columns, gate and up both counted
  int k;
  bool gated;
  bool has_bias;
  const std::byte* panels;  // aligned to 64 bytes

  int k_padded() const { return round_up(k, kGroupSize); }
  int num_groups() const { return k_padded() / kGroupSize; }
  int num_panels() const {
    const int per_panel = gated ? kPanelColumns / 2 : kPanelColumns;
    return (out_columns() + per_panel - 1) / per_panel;
  }
  // Columns of the result: those of silu(gate) * up for a gated matrix.
  int out_columns() const { return gated ? n / 2 : n; }

  size_t group_bytes() const {
    switch (format) {
      case WeightFormat::bf16: return 2 * kGroupSize * kPanelColumns;
      case WeightFormat::int8: return kGroupSize * kPanelColumns;
      case WeightFormat::q8_0: return 34 * kPanelColumns;
      case WeightFormat::q4_0: return 18 * kPanelColumns;
      case WeightFormat::q4_1: return 20 * kPanelColumns;
    }
    return 0;
  }
  size_t value_bytes() const { return num_groups() * group_bytes(); }
  size_t scale_bytes() const { return format == WeightFormat::int8 ? 4 * kPanelColumns : 0; }
  size_t panel_bytes() const {
    return value_bytes() + scale_bytes() + (has_bias ? 4 * kPanelColumns : 0);
  }
  size_t num_bytes() const { return num_panels() * panel_bytes(); }

  const std::byte* panel(int index) const { return panels + index * panel_bytes(); }
  // f32 [64] of an int8 panel.
  const float* scales(int index) const {
    return reinterpret_cast<const float*>(panel(index) + value_bytes());
  }
  // f32 [64], or null.
  const float* bias(int index) const {
    if (!has_bias) return nullptr;
    return reinterpret_cast<const float*>(panel(index) + value_bytes() + scale_bytes());
  }

  // The panel and the column in it of row `row` of the unpacked matrix [n, k].
  struct Place {
    int panel, column;
  };
  Place place_of(int row) const {
    if (!gated) return {row / kPanelColumns, row % kPanelColumns};
    const int half = n / 2, is_up = row >= half, out = row - is_up * half;
    return {out / 32, out % 32 / 16 * 32 + is_up * 16 + out % 16};
  }
  // Its inverse; -1 where the panel is padded.
  int row_at(int panel, int column) const {
    if (!gated) {
      const int row = panel * kPanelColumns + column;
      return row < n ? row : -1;
    }
    const int half = n / 2, out = panel * 32 + column / 32 * 16 + column % 16;
    return out < half ? out + column % 32 / 16 * half : -1;
  }
};

}  // namespace tf
