// Reading memory and doing nothing with it: the least time that a step over as many bytes can take.
#pragma once

#include <cstddef>

namespace tf {

struct SweepKernels {
  // Some value that depends on all of `num_bytes` bytes, a multiple of 256.
  float (*read)(const std::byte* bytes, size_t num_bytes);
};

namespace avx512 { extern const SweepKernels kSweepKernels; }
namespace avx2 { extern const SweepKernels kSweepKernels; }
namespace portable { extern const SweepKernels kSweepKernels; }

}  // namespace tf
