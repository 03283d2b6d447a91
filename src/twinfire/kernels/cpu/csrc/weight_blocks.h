// GGUF's blocks of 32 weights: to f32, and from f32 with the rounding of GGUF's own code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "packing.h"
#include "simd.h"

namespace tf::TF_ISA {

inline float read_f16(const std::byte* p) {
  uint16_t halves[kLanes] = {};
  std::memcpy(halves, p, sizeof(uint16_t));
  float values[kLanes];
  store(values, load_f16(halves));
  return values[0];
}

inline uint16_t f32_to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float size = std::fabs(value);
  if (!(size < 65520.0f)) return uint16_t(sign | (size != size ? 0x7e00u : 0x7c00u));
  // Adding a power of two whose last place is that of the result rounds to nearest even.
  const int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
  const float one_ulp_up = std::ldexp(1.0f, exponent + 13);
  const float rounded = (size + one_ulp_up) - one_ulp_up;
  const uint32_t steps = uint32_t(std::ldexp(rounded, 10 - exponent));
  // Subnormal steps count from zero; others carry the hidden bit, which adds one to the exponent.
  const uint32_t biased = size < 6.103515625e-05f ? 0u : uint32_t(exponent + 14) << 10;
  return uint16_t(sign | (biased + steps));
}

// 32 weights of a block as f32.
inline void decode_block(SourceFormat format, const std::byte* block, float* out) {
  const float scale = read_f16(block);
  if (format == SourceFormat::q8_0) {
    const auto* values = reinterpret_cast<const int8_t*>(block + 2);
    for (int i = 0; i < kGroupSize; ++i) out[i] = scale * float(values[i]);
    return;
  }
  const bool has_minimum = format == SourceFormat::q4_1;
  const float minimum = has_minimum ? read_f16(block + 2) : -8.0f * scale;
  const auto* nibbles = reinterpret_cast<const uint8_t*>(block + (has_minimum ? 4 : 2));
  for (int i = 0; i < kGroupSize / 2; ++i) {
    out[i] = scale * float(nibbles[i] & 15) + minimum;
    out[i + kGroupSize / 2] = scale * float(nibbles[i] >> 4) + minimum;
  }
}

inline void write_f16(std::byte* p, float value) {
  const uint16_t half = f32_to_f16(value);
  std::memcpy(p, &half, sizeof half);
}

// nibble = x * inverse_scale + offset, cut off to an integer of at most 15.
inline void write_nibbles(const float* x, float inverse_scale, float offset, std::byte* nibbles) {
  auto nibble = [&](float value) { return std::min(15, int(value * inverse_scale + offset)); };
  for (int i = 0; i < kGroupSize / 2; ++i)
    nibbles[i] = std::byte(nibble(x[i]) | nibble(x[i + kGroupSize / 2]) << 4);
}

inline void encode_block(WeightFormat format, const float* x, std::byte* block) {
  float lowest = x[0], highest = x[0];
  for (int i = 1; i < kGroupSize; ++i) {
    lowest = std::min(lowest, x[i]);
    highest = std::max(highest, x[i]);
  }
  if (format == WeightFormat::q8_0) {
    const float scale = std::max(-lowest, highest) / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    write_f16(block, scale);
    for (int i = 0; i < kGroupSize; ++i)
      block[2 + i] = std::byte(int8_t(std::lround(x[i] * inverse)));
  } else if (format == WeightFormat::q4_0) {
    // The value of largest magnitude becomes -8 exactly, whatever its sign.
    const float scale = (-lowest > highest ? lowest : highest) / -8.0f;
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    write_f16(block, scale);
    write_nibbles(x, inverse, 8.5f, block + 2);
  } else {
    const float scale = (highest - lowest) / 15.0f;
    write_f16(block, scale);
    write_f16(block + 2, lowest);
    float above[kGroupSize];
    for (int i = 0; i < kGroupSize; ++i) above[i] = x[i] - lowest;
    write_nibbles(above, scale > 0.0f ? 1.0f / scale : 0.0f, 0.5f, block + 4);
  }
}

}  // namespace tf::TF_ISA
