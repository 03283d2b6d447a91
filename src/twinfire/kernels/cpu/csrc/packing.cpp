#include "packing.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "quantise_rows.h"
#include "weight_blocks.h"

namespace tf::TF_ISA {

namespace {

// One row of the source; no data where the panel is padded.
struct SourceRow {
  SourceFormat format = SourceFormat::f32;
  const std::byte* data = nullptr;
};

using PanelRows = std::array<SourceRow, kPanelColumns>;

SourceRow find_row(const PackingSource& source, int row, int k) {
  for (const SourceRows& part : source.parts) {
    if (row < part.num_rows)
      return {part.format, part.data + size_t(row) * source_row_bytes(part.format, k)};
    row -= part.num_rows;
  }
  return {};
}

// Elements [32 * group, + 32) of a row as f32; zero past k.
void decode_group(const SourceRow& row, int group, int k, float* out) {
  const int start = group * kGroupSize, n = std::min(kGroupSize, k - start);
  if (n < kGroupSize || !row.data) std::memset(out, 0, sizeof(float) * kGroupSize);
  if (!row.data) return;
  switch (row.format) {
    case SourceFormat::f32:
      std::memcpy(out, row.data + 4 * size_t(start), sizeof(float) * size_t(n));
      break;
    case SourceFormat::f16:
    case SourceFormat::bf16: {
      uint16_t halves[kGroupSize] = {};
      std::memcpy(halves, row.data + 2 * size_t(start), sizeof(uint16_t) * size_t(n));
      for (int i = 0; i < kGroupSize; i += kLanes)
        store(out + i,
              row.format == SourceFormat::f16 ? load_f16(halves + i) : load_bf16(halves + i));
      break;
    }
    default:
      decode_block(row.format, row.data + group * source_row_bytes(row.format, kGroupSize), out);
  }
}

// words[column][i] to out[i][column].
template <int kWords, int kColumns>
void transpose_words(const uint32_t (*words)[kWords], std::byte* out) {
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int i = 0; i < kWords; ++i)
    for (int column = 0; column < kColumns; ++column) to[i * kColumns + column] = words[column][i];
}

#if defined(TF_AVX512)

// The 16 words at `offset` of 16 rows to 16 vectors `out_stride` apart, past the cache: panels are
// written once, and far more of them than it holds.
void transpose_16x16(const SourceRow* rows, size_t offset, std::byte* out, size_t out_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i].data + offset);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  // Lane l of a[4 q + w] now holds word 4 l + w of rows 4 q to 4 q + 3.
  for (int w = 0; w < 4; ++w) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[w], a[4 + w], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(a[w], a[4 + w], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0xee);
    const __m512i words[4] = {_mm512_shuffle_i32x4(low01, low23, 0x88),
                              _mm512_shuffle_i32x4(low01, low23, 0xdd),
                              _mm512_shuffle_i32x4(high01, high23, 0x88),
                              _mm512_shuffle_i32x4(high01, high23, 0xdd)};
    for (int lane = 0; lane < 4; ++lane)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + size_t(4 * lane + w) * out_stride),
                          words[lane]);
  }
}

bool can_reorder_bf16(const PanelRows& rows, int k, const std::byte* out) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(out) % sizeof(__m512i) == 0;
  return is_aligned && k % kGroupSize == 0 &&
         std::all_of(rows.begin(), rows.end(), [](const SourceRow& row) {
           return row.data && row.format == SourceFormat::bf16;
         });
}

// Sixteen rows at a time, as many streams as a core can prefetch.
void reorder_bf16(const PanelRows& rows, const PackedMatrix& shape, std::byte* out) {
  constexpr size_t kRowBytes = 4 * kPanelColumns;
  for (int column = 0; column < kPanelColumns; column += kLanes)
    for (int group = 0; group < shape.num_groups(); ++group)
      transpose_16x16(&rows[size_t(column)], 2 * size_t(group) * kGroupSize,
                      out + size_t(group) * shape.group_bytes() + 4 * size_t(column), kRowBytes);
  _mm_sfence();
}

#endif

void pack_bf16(const PanelRows& rows, const PackedMatrix& shape, std::byte* out) {
#if defined(TF_AVX512)
  if (can_reorder_bf16(rows, shape.k, out)) return reorder_bf16(rows, shape, out);
#endif
  constexpr int kPairs = kGroupSize / 2;
  uint32_t pairs[kPanelColumns][kPairs];
  for (int group = 0; group < shape.num_groups(); ++group, out += shape.group_bytes()) {
    const bool whole = (group + 1) * kGroupSize <= shape.k;
    for (int column = 0; column < kPanelColumns; ++column) {
      const SourceRow& row = rows[column];
      if (row.data && whole && row.format == SourceFormat::bf16) {
        std::memcpy(pairs[column], row.data + 2 * group * kGroupSize, sizeof pairs[column]);
        continue;
      }
      float values[kGroupSize];
      decode_group(row, group, shape.k, values);
      for (int i = 0; i < kGroupSize; i += kLanes)
        store_bf16(reinterpret_cast<uint16_t*>(pairs[column]) + i, load(values + i));
    }
    transpose_words<kPairs, kPanelColumns>(pairs, out);
  }
}

void pack_int8(const PanelRows& rows, const PackedMatrix& shape, std::byte* out) {
  constexpr int kQuads = kGroupSize / 4;
  const int k_padded = shape.k_padded();
  std::vector<float> values(size_t(k_padded), 0.0f);
  std::vector<int8_t> bytes(size_t(k_padded) * kPanelColumns);
  auto* scales = reinterpret_cast<float*>(out + shape.value_bytes());
  for (int column = 0; column < kPanelColumns; ++column) {
    for (int group = 0; group < shape.num_groups(); ++group)
      decode_group(rows[column], group, shape.k, values.data() + group * kGroupSize);
    quantise_span(values.data(), k_padded, scales + column,
                  bytes.data() + size_t(column) * size_t(k_padded));
  }
  uint32_t quads[kPanelColumns][kQuads];
  for (int group = 0; group < shape.num_groups(); ++group, out += shape.group_bytes()) {
    for (int column = 0; column < kPanelColumns; ++column) {
      const int8_t* row = bytes.data() + size_t(column) * size_t(k_padded);
      std::memcpy(quads[column], row + group * kGroupSize, kGroupSize);
      for (uint32_t& quad : quads[column]) quad ^= 0x80808080u;
    }
    transpose_words<kQuads, kPanelColumns>(quads, out);
  }
}

bool is_same(SourceFormat source, WeightFormat target) {
  return (source == SourceFormat::q8_0 && target == WeightFormat::q8_0) ||
         (source == SourceFormat::q4_0 && target == WeightFormat::q4_0) ||
         (source == SourceFormat::q4_1 && target == WeightFormat::q4_1);
}

// kWords: of values in a block; kHalves: f16 before them.
template <int kWords, int kHalves>
void pack_groups(const PanelRows& rows, const PackedMatrix& shape, std::byte* out) {
  constexpr size_t kBlockBytes = 4 * kWords + 2 * kHalves;
  constexpr uint32_t kFlip = kWords == kGroupSize / 4 ? 0x80808080u : 0u;
  uint32_t words[kPanelColumns][kWords];
  uint16_t halves[kHalves][kPanelColumns];
  for (int group = 0; group < shape.num_groups(); ++group, out += shape.group_bytes()) {
    for (int column = 0; column < kPanelColumns; ++column) {
      const SourceRow& row = rows[column];
      std::byte encoded[kBlockBytes];
      const std::byte* block = encoded;
      if (row.data && is_same(row.format, shape.format)) {
        block = row.data + size_t(group) * kBlockBytes;
      } else {
        float values[kGroupSize];
        decode_group(row, group, shape.k, values);
        encode_block(shape.format, values, encoded);
      }
      for (int half = 0; half < kHalves; ++half)
        std::memcpy(&halves[half][column], block + 2 * half, sizeof(uint16_t));
      std::memcpy(words[column], block + 2 * kHalves, sizeof words[column]);
      for (uint32_t& word : words[column]) word ^= kFlip;
    }
    for (int column = 0; column < kPanelColumns; column += kLanes)
      transpose_words<kWords, kLanes>(words + column, out + size_t(column) * 4 * kWords);
    std::memcpy(out + sizeof words, halves, sizeof halves);
  }
}

void pack(const PackedMatrix& shape, const PackingSource& source, std::byte* panels, int first,
          int last) {
  for (int panel = first; panel < last; ++panel) {
    std::byte* out = panels + size_t(panel) * shape.panel_bytes();
    PanelRows rows;
    for (int column = 0; column < kPanelColumns; ++column) {
      const int row = shape.row_at(panel, column);
      rows[column] = row < 0 ? SourceRow{} : find_row(source, row, shape.k);
    }
    switch (shape.format) {
      case WeightFormat::bf16: pack_bf16(rows, shape, out); break;
      case WeightFormat::int8: pack_int8(rows, shape, out); break;
      case WeightFormat::q8_0: pack_groups<8, 1>(rows, shape, out); break;
      case WeightFormat::q4_0: pack_groups<4, 1>(rows, shape, out); break;
      case WeightFormat::q4_1: pack_groups<4, 2>(rows, shape, out); break;
    }
    if (!shape.has_bias) continue;
    auto* bias = reinterpret_cast<float*>(out + shape.value_bytes() + shape.scale_bytes());
    for (int column = 0; column < kPanelColumns; ++column) {
      const int row = shape.row_at(panel, column);
      bias[column] = row < 0 ? 0.0f : source.bias[row];
    }
  }
}

// A block of one column as it would lie on disk.
template <int kWords, int kHalves>
void gather_block(const std::byte* group, int column, std::byte* block) {
  const std::byte* words = group + size_t(column / kLanes) * 4 * kWords * kLanes;
  constexpr uint32_t kFlip = kWords == kGroupSize / 4 ? 0x80808080u : 0u;
  for (int half = 0; half < kHalves; ++half)
    std::memcpy(block + 2 * half,
                group + 4 * kWords * kPanelColumns + 2 * (half * kPanelColumns + column), 2);
  for (int i = 0; i < kWords; ++i) {
    uint32_t word;
    std::memcpy(&word, words + 4 * (i * kLanes + column % kLanes), sizeof word);
    word ^= kFlip;
    std::memcpy(block + 2 * kHalves + 4 * i, &word, sizeof word);
  }
}

void decode_column_group(const PackedMatrix& matrix, int panel, int column, int group, float* out) {
  const std::byte* at = matrix.panel(panel) + size_t(group) * matrix.group_bytes();
  std::byte block[34];
  switch (matrix.format) {
    case WeightFormat::bf16:
      for (int i = 0; i < kGroupSize; ++i) {
        uint16_t bits;
        std::memcpy(&bits, at + 4 * (i / 2 * kPanelColumns + column) + 2 * (i % 2), sizeof bits);
        out[i] = bf16_to_f32(bits);
      }
      break;
    case WeightFormat::int8:
      for (int i = 0; i < kGroupSize; ++i) {
        const int value = int(at[4 * (i / 4 * kPanelColumns + column) + i % 4]) - 128;
        out[i] = matrix.scales(panel)[column] * float(value);
      }
      break;
    case WeightFormat::q8_0:
      gather_block<8, 1>(at, column, block);
      decode_block(SourceFormat::q8_0, block, out);
      break;
    case WeightFormat::q4_0:
      gather_block<4, 1>(at, column, block);
      decode_block(SourceFormat::q4_0, block, out);
      break;
    case WeightFormat::q4_1:
      gather_block<4, 2>(at, column, block);
      decode_block(SourceFormat::q4_1, block, out);
      break;
  }
}

void row_to_f32(const PackedMatrix& matrix, int row, float* out) {
  const auto [panel, column] = matrix.place_of(row);
  for (int group = 0; group < matrix.num_groups(); ++group) {
    float values[kGroupSize];
    decode_column_group(matrix, panel, column, group, values);
    const int start = group * kGroupSize, n = std::min(kGroupSize, matrix.k - start);
    std::memcpy(out + start, values, sizeof(float) * size_t(n));
  }
}

}  // namespace

const PackingKernels kPackingKernels = {&pack, &row_to_f32};

}  // namespace tf::TF_ISA
