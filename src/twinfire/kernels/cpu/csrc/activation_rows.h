// Rows of activations as the matrices read them.
//
//   bf16         k_padded bf16
//   int8         k_padded signed bytes, f32 scale, i32 sum of the bytes
//   int8_groups  k_padded signed bytes, f32 scale[groups], i32 sum[groups], groups of 32
// k_padded is k rounded up to 32. Elements past k must be finite in bf16 rows (their weights are
// zero) and are zero in quantised rows. Rows start at multiples of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tf {

enum class RowFormat : int { f32, bf16, int8, int8_groups };

inline size_t activation_row_bytes(RowFormat format, int k) {
  const size_t k_padded = (size_t(k) + 31) / 32 * 32;
  size_t bytes = 0;
  switch (format) {
    case RowFormat::f32: bytes = 4 * k_padded; break;
    case RowFormat::bf16: bytes = 2 * k_padded; break;
    case RowFormat::int8: bytes = k_padded + 8; break;
    case RowFormat::int8_groups: bytes = k_padded + 8 * (k_padded / 32); break;
  }
  return (bytes + 63) / 64 * 64;
}

// A quantised row in memory; `groups` is 1 for int8.
template <typename Byte, typename Float, typename Int>
struct QuantisedRowView {
  Byte* values;
  Float* scales;
  Int* sums;
};

inline QuantisedRowView<int8_t, float, int32_t> quantised_row(void* row, int k_padded, int groups) {
  auto* values = static_cast<int8_t*>(row);
  auto* scales = reinterpret_cast<float*>(values + k_padded);
  return {values, scales, reinterpret_cast<int32_t*>(scales + groups)};
}
inline QuantisedRowView<const int8_t, const float, const int32_t> quantised_row(const void* row,
                                                                               int k_padded,
                                                                               int groups) {
  auto* values = static_cast<const int8_t*>(row);
  auto* scales = reinterpret_cast<const float*>(values + k_padded);
  return {values, scales, reinterpret_cast<const int32_t*>(scales + groups)};
}

}  // namespace tf
