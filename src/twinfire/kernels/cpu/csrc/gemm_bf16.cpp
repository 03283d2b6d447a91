#include "gemm_formats.h"
#include "gemm_dots.h"

namespace tf::TF_ISA {

namespace {

struct Bf16 {
  static constexpr int kBlock = 1024, kElementBytes = 2;
  using Sum = F32;

  static F32 load_sums(const void* sums, int row, int v) {
    return load(static_cast<const float*>(sums) + row * kPanelColumns + v * kLanes);
  }
  static void store_sums(void* sums, int row, int v, F32 x) {
    store(static_cast<float*>(sums) + row * kPanelColumns + v * kLanes, x);
  }
  static F32 dot(F32 acc, uint32_t pair, const std::byte* weights) {
    return dot_bf16(acc, pair, reinterpret_cast<const uint16_t*>(weights));
  }
  static void begin(const TilePart& part, Sums& sums) {
    std::memset(sums.f32, 0, sizeof(float) * size_t(part.num_rows) * kPanelColumns);
  }
  static void accumulate(const TilePart& part, int k, int k_end, Sums& sums) {
    dot_block<Bf16>(part, k, k_end, sums);
  }
  static F32 value(const TilePart&, const Sums& sums, int row, int v) {
    return load_sums(sums.f32, row, v);
  }
};

}  // namespace

void run_bf16(const GemmArgs& args, int tile) { run_tile<Bf16>(args, tile); }

}  // namespace tf::TF_ISA
