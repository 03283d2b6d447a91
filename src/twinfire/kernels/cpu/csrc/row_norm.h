// The root mean square of a row, for norms of whole rows and of single heads.
#pragma once

#include <cmath>

#include "simd.h"

namespace tf::TF_ISA {

// 1 / sqrt(mean(x**2) + eps). Four running sums hide the latency of the multiply-adds.
inline float inverse_rms(const float* x, int n, float eps) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i < n; i += kLanes) {
    const F32 v = i + kLanes <= n ? load(x + i) : load_first(x + i, n - i);
    sums[0] = fma(v, v, sums[0]);
  }
  const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / std::sqrt(total / float(n) + eps);
}

}  // namespace tf::TF_ISA
