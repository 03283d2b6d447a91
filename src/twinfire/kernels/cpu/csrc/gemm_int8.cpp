#include "gemm_dots.h"
#include "gemm_formats.h"

namespace tf::TF_ISA {

namespace {

// Weights are stored as value + 128 because the dot product wants one unsigned side; a row's sum
// times 128 is taken off before anything is added. Integer sums are exact in any order.
struct Int8 {
  static constexpr int kBlock = 2048, kElementBytes = 1;
  using Sum = I32;

  static I32 load_sums(const void* sums, int row, int v) {
    return load_i32(static_cast<const int32_t*>(sums) + row * kPanelColumns + v * kLanes);
  }
  static void store_sums(void* sums, int row, int v, I32 x) {
    store_i32(static_cast<int32_t*>(sums) + row * kPanelColumns + v * kLanes, x);
  }
  static I32 dot(I32 acc, uint32_t quad, const std::byte* weights) {
    return dot_s8u8(acc, quad, load_i32(reinterpret_cast<const int32_t*>(weights)));
  }
  static void begin(const TilePart& part, Sums& sums) {
    const int k_padded = part.matrix().k_padded();
    for (int row = 0; row < part.num_rows; ++row) {
      const void* at = part.row(row);
      const I32 start = set1_i32(-128 * *quantised_row(at, k_padded, 1).sums);
      for (int v = 0; v < kPanelVectors; ++v) store_sums(sums.i32, row, v, start);
    }
  }
  static void accumulate(const TilePart& part, int k, int k_end, Sums& sums) {
    dot_block<Int8>(part, k, k_end, sums);
  }
  static F32 value(const TilePart& part, const Sums& sums, int row, int v) {
    const void* at = part.row(row);
    const float row_scale = *quantised_row(at, part.matrix().k_padded(), 1).scales;
    const F32 column_scales = load(part.matrix().scales(part.panel) + v * kLanes);
    return mul(mul(to_f32(load_sums(sums.i32, row, v)), column_scales), set1(row_scale));
  }
};

}  // namespace

void run_int8(const GemmArgs& args, int tile) { run_tile<Int8>(args, tile); }

}  // namespace tf::TF_ISA
