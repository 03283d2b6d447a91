// Sixteen lanes at a time, the same names on every instruction set.
//
// Included by translation units that are compiled once per instruction set with TF_ISA naming their
// namespace (avx512, avx2, portable). Kernels are written over these types only. A lane's result
// never depends on the other lanes, and every reduction has one fixed order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef TF_ISA
#error "TF_ISA must name the namespace of this instruction set"
#endif

namespace tf::TF_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TF_AVX512 1
using F32 = __m512;
// Not __m512i, whose elements are 64 bits wide: arrays of it would not stay in registers.
typedef int32_t I32 __attribute__((vector_size(64)));
#elif defined(__AVX2__) && defined(__FMA__)
#define TF_AVX2 1
struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
#else
#define TF_PORTABLE 1
struct F32 {
  float v[kLanes];
};
struct I32 {
  int32_t v[kLanes];
};
#endif

inline float bf16_to_f32(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(TF_AVX512)

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 set1(float x) { return _mm512_set1_ps(x); }
inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 load_first(const float* p, int n) {
  return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, F32 x, int n) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x);
}
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 magnitude(F32 x) { return _mm512_abs_ps(x); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 round_nearest(F32 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2**n for integral n in [-126, 127].
inline F32 scale_by_power(F32 x, F32 n) { return _mm512_scalef_ps(x, n); }

inline F32 load_bf16(const uint16_t* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store_bf16(uint16_t* p, F32 x) {
  __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
inline void store_bf16(uint16_t* p, F32 first, F32 second) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}
inline F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// 16 pairs of bf16, of signed bytes exactly.
inline I32 load_pairs(const uint16_t* p) { return I32(_mm512_loadu_si512(p)); }
inline I32 load_pairs(const int8_t* p) {
  const __m128i* bytes = reinterpret_cast<const __m128i*>(p);
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
  return I32(_mm512_cvtne2ps_pbh(high, low));
}
// acc[c] += a.first * b[c].first + a.second * b[c].second, b being 16 pairs of bf16.
inline F32 dot_bf16(F32 acc, uint32_t a_pair, I32 b) {
  __m512i av = _mm512_set1_epi32(int(a_pair));
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(av), reinterpret_cast<__m512bh>(b));
}
inline F32 dot_bf16(F32 acc, uint32_t a_pair, const uint16_t* b) {
  return dot_bf16(acc, a_pair, load_pairs(b));
}

inline I32 zero_i32() { return I32{}; }
inline I32 load_i32(const int32_t* p) { return I32(_mm512_loadu_si512(p)); }
inline void store_i32(int32_t* p, I32 x) { _mm512_storeu_si512(p, __m512i(x)); }
inline F32 to_f32(I32 x) { return _mm512_cvtepi32_ps(__m512i(x)); }
inline I32 set1_i32(int32_t x) { return I32(_mm512_set1_epi32(x)); }
inline I32 add_i32(I32 a, I32 b) { return a + b; }
// Round to nearest even; the values must fit.
inline I32 round_to_i32(F32 x) { return I32(_mm512_cvtps_epi32(x)); }
// Stores 16 values that fit in signed bytes.
inline void store_s8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(__m512i(x)));
}
// The lower and the upper four bits of every byte, as bytes.
inline I32 low_nibbles(I32 x) { return x & 0x0f0f0f0f; }
inline I32 high_nibbles(I32 x) { return (x >> 4) & 0x0f0f0f0f; }
// acc[c] += sum of 4 products of signed a (one quad for all lanes) and unsigned b (16 quads).
inline I32 dot_s8u8(I32 acc, uint32_t a_quad, I32 b) {
  return I32(_mm512_dpbusd_epi32(__m512i(acc), __m512i(b), _mm512_set1_epi32(int(a_quad))));
}

#elif defined(TF_AVX2)

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline F32 load_first(const float* p, int n) {
  float buffer[kLanes] = {};
  std::memcpy(buffer, p, sizeof(float) * n);
  return load(buffer);
}
inline void store_first(float* p, F32 x, int n) {
  float buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, sizeof(float) * n);
}
#define TF_BOTH(name, op)                                     \
  inline F32 name(F32 a, F32 b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
TF_BOTH(add, _mm256_add_ps)
TF_BOTH(sub, _mm256_sub_ps)
TF_BOTH(mul, _mm256_mul_ps)
TF_BOTH(div, _mm256_div_ps)
TF_BOTH(max, _mm256_max_ps)
TF_BOTH(min, _mm256_min_ps)
#undef TF_BOTH
inline F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32 magnitude(F32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
inline F32 round_nearest(F32 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
inline __m256 scale_half(__m256 x, __m256 n) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
inline F32 scale_by_power(F32 x, F32 n) { return {scale_half(x.lo, n.lo), scale_half(x.hi, n.hi)}; }

inline __m256 widen_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F32 load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_bf16(uint16_t* p, F32 x) {
  float buffer[kLanes];
  store(buffer, x);
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_bf16(buffer[i]);
}
inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 dot_half(__m256 acc, __m256 a0, __m256 a1, __m256i b) {
  __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  __m256 second = _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(int(0xffff0000u))));
  return _mm256_fmadd_ps(a1, second, _mm256_fmadd_ps(a0, first, acc));
}
inline I32 load_pairs(const uint16_t* p) {
  const __m256i* pairs = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(pairs), _mm256_loadu_si256(pairs + 1)};
}
inline __m256i widen_bytes(const int8_t* p) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
  __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                                       _mm256_srli_epi32(_mm256_castps_si256(high), 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline I32 load_pairs(const int8_t* p) { return {widen_bytes(p), widen_bytes(p + 16)}; }
inline F32 dot_bf16(F32 acc, uint32_t a_pair, I32 b) {
  __m256 a0 = _mm256_castsi256_ps(_mm256_set1_epi32(int(a_pair << 16)));
  __m256 a1 = _mm256_castsi256_ps(_mm256_set1_epi32(int(a_pair & 0xffff0000u)));
  return {dot_half(acc.lo, a0, a1, b.lo), dot_half(acc.hi, a0, a1, b.hi)};
}
inline F32 dot_bf16(F32 acc, uint32_t a_pair, const uint16_t* b) {
  return dot_bf16(acc, a_pair, load_pairs(b));
}

inline I32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 load_i32(const int32_t* p) {
  const __m256i* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline void store_i32(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.hi);
}
inline F32 to_f32(I32 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
inline I32 add_i32(I32 a, I32 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline I32 round_to_i32(F32 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
inline void store_s8(int8_t* p, I32 x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)));
}
inline I32 low_nibbles(I32 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
}
inline I32 high_nibbles(I32 x) {
  return low_nibbles({_mm256_srli_epi32(x.lo, 4), _mm256_srli_epi32(x.hi, 4)});
}
// Bytes are widened to 16 bits first: the saturating 8-bit multiply-add would lose products.
inline __m256i dot_quads(__m256i acc, __m256i u, __m256i s) {
  __m256i mask = _mm256_set1_epi16(0x00ff);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, mask),
                                   _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline I32 dot_s8u8(I32 acc, uint32_t a_quad, I32 b) {
  __m256i a = _mm256_set1_epi32(int(a_quad));
  return {dot_quads(acc.lo, b.lo, a), dot_quads(acc.hi, b.hi, a)};
}

#else  // TF_PORTABLE: plain loops, which the compiler may vectorise for its baseline.

#define TF_EACH for (int i = 0; i < kLanes; ++i)
inline F32 set1(float x) { F32 r; TF_EACH r.v[i] = x; return r; }
inline F32 zero() { return set1(0.0f); }
inline F32 load(const float* p) { F32 r; TF_EACH r.v[i] = p[i]; return r; }
inline void store(float* p, F32 x) { TF_EACH p[i] = x.v[i]; }
inline F32 load_first(const float* p, int n) {
  F32 r = zero();
  for (int i = 0; i < n; ++i) r.v[i] = p[i];
  return r;
}
inline void store_first(float* p, F32 x, int n) { for (int i = 0; i < n; ++i) p[i] = x.v[i]; }
inline F32 add(F32 a, F32 b) { TF_EACH a.v[i] += b.v[i]; return a; }
inline F32 sub(F32 a, F32 b) { TF_EACH a.v[i] -= b.v[i]; return a; }
inline F32 mul(F32 a, F32 b) { TF_EACH a.v[i] *= b.v[i]; return a; }
inline F32 div(F32 a, F32 b) { TF_EACH a.v[i] /= b.v[i]; return a; }
inline F32 fma(F32 a, F32 b, F32 c) { TF_EACH c.v[i] += a.v[i] * b.v[i]; return c; }
inline F32 magnitude(F32 x) { TF_EACH x.v[i] = __builtin_fabsf(x.v[i]); return x; }
inline F32 max(F32 a, F32 b) { TF_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F32 min(F32 a, F32 b) { TF_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F32 round_nearest(F32 x) { TF_EACH x.v[i] = __builtin_nearbyintf(x.v[i]); return x; }
inline F32 scale_by_power(F32 x, F32 n) {
  TF_EACH {
    uint32_t bits = uint32_t(int32_t(n.v[i]) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    x.v[i] *= power;
  }
  return x;
}
inline F32 load_bf16(const uint16_t* p) { F32 r; TF_EACH r.v[i] = bf16_to_f32(p[i]); return r; }
inline void store_bf16(uint16_t* p, F32 x) { TF_EACH p[i] = f32_to_bf16(x.v[i]); }
inline float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, fraction = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {
    float small = float(fraction) * 5.9604644775390625e-8f;  // 2**-24
    std::memcpy(&bits, &small, sizeof bits);
    bits |= sign;
  } else {
    bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline F32 load_f16(const uint16_t* p) { F32 r; TF_EACH r.v[i] = f16_to_f32(p[i]); return r; }
inline I32 load_pairs(const uint16_t* p) {
  I32 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline I32 load_pairs(const int8_t* p) {
  uint16_t wide[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) wide[i] = f32_to_bf16(float(p[i]));
  return load_pairs(wide);
}
inline F32 dot_bf16(F32 acc, uint32_t a_pair, I32 b) {
  float a0 = bf16_to_f32(uint16_t(a_pair)), a1 = bf16_to_f32(uint16_t(a_pair >> 16));
  TF_EACH acc.v[i] += a0 * bf16_to_f32(uint16_t(b.v[i])) +
                      a1 * bf16_to_f32(uint16_t(uint32_t(b.v[i]) >> 16));
  return acc;
}
inline F32 dot_bf16(F32 acc, uint32_t a_pair, const uint16_t* b) {
  return dot_bf16(acc, a_pair, load_pairs(b));
}
inline I32 set1_i32(int32_t x) { I32 r; TF_EACH r.v[i] = x; return r; }
inline I32 zero_i32() { return set1_i32(0); }
inline I32 load_i32(const int32_t* p) { I32 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store_i32(int32_t* p, I32 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F32 to_f32(I32 x) { F32 r; TF_EACH r.v[i] = float(x.v[i]); return r; }
inline I32 add_i32(I32 a, I32 b) { TF_EACH a.v[i] += b.v[i]; return a; }
inline I32 round_to_i32(F32 x) {
  I32 r;
  TF_EACH r.v[i] = int32_t(__builtin_lrintf(x.v[i]));
  return r;
}
inline void store_s8(int8_t* p, I32 x) { TF_EACH p[i] = int8_t(x.v[i]); }
inline I32 low_nibbles(I32 x) { TF_EACH x.v[i] &= 0x0f0f0f0f; return x; }
inline I32 high_nibbles(I32 x) {
  TF_EACH x.v[i] = int32_t(uint32_t(x.v[i]) >> 4) & 0x0f0f0f0f;
  return x;
}
inline I32 dot_s8u8(I32 acc, uint32_t a_quad, I32 b) {
  TF_EACH for (int j = 0; j < 4; ++j)
    acc.v[i] += int32_t(int8_t(a_quad >> (8 * j))) * int32_t(uint32_t(b.v[i]) >> (8 * j) & 0xffu);
  return acc;
}
#undef TF_EACH

#endif

#if !defined(TF_AVX512)
inline void store_bf16(uint16_t* p, F32 first, F32 second) {
  store_bf16(p, first);
  store_bf16(p + kLanes, second);
}
#endif

// Sum of the lanes as a balanced tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1, on every instruction set.
#if defined(TF_PORTABLE)
inline float sum(F32 x) {
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  return x.v[0];
}
inline float largest(F32 x) {
  float best = x.v[0];
  for (int i = 1; i < kLanes; ++i) best = x.v[i] > best ? x.v[i] : best;
  return best;
}
#else
#if defined(TF_AVX512)
inline __m256 lower_half(F32 x) { return _mm512_castps512_ps256(x); }
inline __m256 upper_half(F32 x) { return _mm512_extractf32x8_ps(x, 1); }
#else
inline __m256 lower_half(F32 x) { return x.lo; }
inline __m256 upper_half(F32 x) { return x.hi; }
#endif
inline float sum(F32 x) {
  __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(F32 x) {
  __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#endif

inline int32_t sum_i32(I32 x) {
  int32_t lanes[kLanes], total = 0;
  std::memcpy(lanes, &x, sizeof lanes);
  for (int32_t lane : lanes) total += lane;
  return total;
}

// e**x by splitting x = n ln 2 + r and a degree-6 polynomial on |r| <= ln 2 / 2 (Cephes expf).
// Relative error below 2e-7; 0 below -87.3 and for minus infinity.
inline F32 exp(F32 x) {
  const F32 lowest = set1(-87.3f), highest = set1(88.3f);
  F32 clamped = min(max(x, lowest), highest);
  F32 n = round_nearest(mul(clamped, set1(1.44269504f)));
  F32 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  F32 y = add(fma(p, mul(r, r), r), set1(1.0f));
  y = scale_by_power(y, n);
#if defined(TF_AVX512)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ), y);
#elif defined(TF_AVX2)
  return {_mm256_and_ps(y.lo, _mm256_cmp_ps(x.lo, lowest.lo, _CMP_GE_OQ)),
          _mm256_and_ps(y.hi, _mm256_cmp_ps(x.hi, lowest.hi, _CMP_GE_OQ))};
#else
  for (int i = 0; i < kLanes; ++i) y.v[i] = x.v[i] >= lowest.v[i] ? y.v[i] : 0.0f;
  return y;
#endif
}

}  // namespace tf::TF_ISA
