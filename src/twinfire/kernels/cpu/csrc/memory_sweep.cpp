#include "memory_sweep.h"

#include "simd.h"

namespace tf::TF_ISA {

namespace {

uint32_t read(const std::byte* bytes, size_t num_bytes) {
  constexpr size_t kStep = 256, kAhead = 4096;
  const auto* words = reinterpret_cast<const int32_t*>(bytes);
  I32 sums[4] = {zero_i32(), zero_i32(), zero_i32(), zero_i32()};
  for (size_t at = 0; at < num_bytes; at += kStep) {
    for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(bytes + at + line + kAhead);
    for (int i = 0; i < 4; ++i)
      sums[i] = add_i32(sums[i], load_i32(words + at / 4 + size_t(i) * kLanes));
  }
  return uint32_t(sum_i32(add_i32(add_i32(sums[0], sums[1]), add_i32(sums[2], sums[3]))));
}

}  // namespace

const SweepKernels kSweepKernels = {read};

}  // namespace tf::TF_ISA
