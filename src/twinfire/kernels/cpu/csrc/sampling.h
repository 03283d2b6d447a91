// Selections over vocabularies, each row by itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tf {

// One per instruction set: TF_FOR_ISA(isa, kSamplingKernels). Rows are [vocab] float32; a NaN is
// never selected before a number.
struct SamplingKernels {
  // The id of the largest value, the lowest one among equals.
  int64_t (*argmax)(const float* row, int64_t vocab);

  // The k largest in descending order, the lowest id first among equals, at the cut as well.
  // `scratch` holds top_k_scratch_bytes(vocab). 1 <= k <= vocab.
  void (*top_k)(const float* row, int64_t vocab, int64_t k, float* values, int64_t* ids,
                std::byte* scratch);
  size_t (*top_k_scratch_bytes)(int64_t vocab);

  // log(sum(exp(row))).
  float (*logsumexp)(const float* row, int64_t vocab);
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
