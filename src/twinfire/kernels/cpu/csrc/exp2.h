// Powers of two as softmax weights.
#pragma once

#include "simd.h"

namespace tf::TF_ISA {

// 2**x for x <= 0, relative error below 3e-6: exactly 1 at 0, exactly 0 at minus infinity. Weights
// are rounded to bf16 afterwards, so a shorter polynomial than that of `exp` is enough.
// 2**x = 2**floor(x) * p(x - floor(x)), p being minimax of degree 4 on [0, 1] with p(0) = 1.
inline F32 exp2_weight(F32 x) {
#if defined(TF_AVX512)
  const F32 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const F32 lowest = set1(-126.0f);
  const F32 clamped = max(x, lowest);
#if defined(TF_AVX2)
  const F32 whole = {_mm256_floor_ps(clamped.lo), _mm256_floor_ps(clamped.hi)};
#else
  F32 whole;
  for (int i = 0; i < kLanes; ++i) {
    const int32_t truncated = int32_t(clamped.v[i]);
    whole.v[i] = float(truncated - (float(truncated) > clamped.v[i]));
  }
#endif
  const F32 r = sub(clamped, whole);
#endif
  F32 p = fma(set1(0.013426685706f), r, set1(0.052242472768f));
  p = fma(p, r, set1(0.241280212998f));
  p = fma(p, r, set1(0.693044841290f));
  p = fma(p, r, set1(1.0f));
#if defined(TF_AVX512)
  return _mm512_scalef_ps(p, x);
#else
  const F32 y = scale_by_power(p, whole);
#if defined(TF_AVX2)
  return {_mm256_and_ps(y.lo, _mm256_cmp_ps(x.lo, lowest.lo, _CMP_NLT_UQ)),
          _mm256_and_ps(y.hi, _mm256_cmp_ps(x.hi, lowest.hi, _CMP_NLT_UQ))};
#else
  F32 result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = x.v[i] < lowest.v[i] ? 0.0f : y.v[i];
  return result;
#endif
#endif
}

}  // namespace tf::TF_ISA
