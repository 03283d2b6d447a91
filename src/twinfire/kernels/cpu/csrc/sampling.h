// Selections over vocabularies, each row by itself.
#pragma once

#include <cstdint>

namespace tf {

// One per instruction set: TF_FOR_ISA(isa, kSamplingKernels). Rows are [vocab] float32 with
// vocab >= 1; a NaN counts as minus infinity.
struct SamplingKernels {
  // The id of the largest value, the lowest one among equals.
  int64_t (*argmax)(const float* row, int64_t vocab);

  // The k largest in descending order, the lowest id first among equals, at the cut as well.
  // 1 <= k <= vocab.
  void (*top_k)(const float* row, int64_t vocab, int64_t k, float* values, int64_t* ids);

  // log(sum(exp(row))).
  float (*logsumexp)(const float* row, int64_t vocab);

  // Sets row[i] to minus infinity where bit i % 32 of allowed[i / 32] is 0.
  void (*keep_allowed)(float* row, int64_t vocab, const uint32_t* allowed);
};

namespace portable {
extern const SamplingKernels kSamplingKernels;
}
namespace avx2 {
extern const SamplingKernels kSamplingKernels;
}
namespace avx512 {
extern const SamplingKernels kSamplingKernels;
}

}  // namespace tf
