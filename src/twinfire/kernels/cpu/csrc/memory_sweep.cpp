#include "memory_sweep.h"

#include "simd.h"

namespace tf::TF_ISA {

namespace {

float read(const std::byte* bytes, size_t num_bytes) {
  constexpr size_t kStep = 256, kAhead = 4096;
  const auto* words = reinterpret_cast<const float*>(bytes);
  F32 most[4] = {zero(), zero(), zero(), zero()};
  for (size_t at = 0; at < num_bytes; at += kStep) {
    for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(bytes + at + line + kAhead);
    for (int i = 0; i < 4; ++i) most[i] = max(most[i], load(words + at / 4 + size_t(i) * kLanes));
  }
  return largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

}  // namespace

const SweepKernels kSweepKernels = {read};

}  // namespace tf::TF_ISA
