// Rows of f32 as the next matrix's input.
//
// Symmetric: scale = max|x| / 127, value = round to nearest even of x / scale. For kernels that end
// with a row in hand (norms, epilogues) as well as for rows by themselves.
#pragma once

#include "activation_rows.h"
#include "simd.h"

namespace tf::TF_ISA {

// Largest |x| of n values.
inline float largest_magnitude(const float* x, int n) {
  F32 most = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max(most, magnitude(load(x + i)));
  if (i < n) most = max(most, magnitude(load_first(x + i, n - i)));
  return largest(most);
}

// Writes n values as signed bytes and returns their sum.
inline int32_t quantise_values(const float* x, int n, float inverse_scale, int8_t* values) {
  const F32 inverse = set1(inverse_scale);
  I32 total = zero_i32();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    I32 rounded = round_to_i32(mul(load(x + i), inverse));
    total = add_i32(total, rounded);
    store_s8(values + i, rounded);
  }
  if (i < n) {
    I32 rounded = round_to_i32(mul(load_first(x + i, n - i), inverse));
    total = add_i32(total, rounded);
    int8_t bytes[kLanes];
    store_s8(bytes, rounded);
    std::memcpy(values + i, bytes, size_t(n - i));
  }
  return sum_i32(total);
}

inline int32_t quantise_span(const float* x, int n, float* scale, int8_t* values) {
  const float most = largest_magnitude(x, n);
  *scale = most / 127.0f;
  // A scale too small to invert would make the quotients infinite: such a row is zero.
  return quantise_values(x, n, most > 1e-30f ? 127.0f / most : 0.0f, values);
}

// x[k] to a row of `format`, its padding included.
inline void write_activation_row(const float* x, int k, RowFormat format, void* row) {
  const int k_padded = (k + 31) / 32 * 32;
  switch (format) {
    case RowFormat::f32:
      std::memcpy(row, x, sizeof(float) * size_t(k));
      break;
    case RowFormat::bf16: {
      auto* out = static_cast<uint16_t*>(row);
      int i = 0;
      for (; i + kLanes <= k; i += kLanes) store_bf16(out + i, load(x + i));
      for (; i < k; ++i) out[i] = f32_to_bf16(x[i]);
      for (; i < k_padded; ++i) out[i] = 0;
      break;
    }
    case RowFormat::int8: {
      auto view = quantised_row(row, k_padded, 1);
      *view.sums = quantise_span(x, k, view.scales, view.values);
      std::memset(view.values + k, 0, size_t(k_padded - k));
      break;
    }
    case RowFormat::int8_groups: {
      auto view = quantised_row(row, k_padded, k_padded / 32);
      for (int group = 0; group < k_padded / 32; ++group) {
        const int start = group * 32, n = k - start < 32 ? k - start : 32;
        view.sums[group] = quantise_span(x + start, n, view.scales + group, view.values + start);
      }
      std::memset(view.values + k, 0, size_t(k_padded - k));
      break;
    }
  }
}

}  // namespace tf::TF_ISA
