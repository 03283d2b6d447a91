// One query or key head made ready for dot products: its norm, then the turn by its position.
#pragma once

#include "row_norm.h"
#include "simd.h"

namespace tf::TF_ISA {

// out[head_dim] = x normed by `norm` and turned by `factors` (either may be null).
// Element i is paired with element i + head_dim / 2 (arXiv:2104.09864).
inline void turn_head(const float* x, const float* norm, float eps, const float* factors,
                      int head_dim, float* out) {
  if (norm) {
    const F32 inverse = set1(inverse_rms(x, head_dim, eps));
    for (int i = 0; i < head_dim; i += kLanes)
      store(out + i, mul(mul(load(x + i), inverse), load(norm + i)));
  } else {
    std::memcpy(out, x, sizeof(float) * size_t(head_dim));
  }
  if (!factors) return;
  const int half = head_dim / 2;
  const float *cosines = factors, *sines = factors + half;
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? half - i : kLanes;
    const F32 first = load_first(out + i, n), second = load_first(out + half + i, n);
    const F32 cosine = load_first(cosines + i, n), sine = load_first(sines + i, n);
    store_first(out + i, fma(first, cosine, sub(zero(), mul(second, sine))), n);
    store_first(out + half + i, fma(second, cosine, mul(first, sine)), n);
  }
}

}  // namespace tf::TF_ISA
