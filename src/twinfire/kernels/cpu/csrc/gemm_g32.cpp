#include "gemm_formats.h"
#include "gemm_tile.h"

namespace tf::TF_ISA {

namespace {

#if defined(TF_AVX512)
constexpr int kGroupRows = 16, kWholePanelRows = 2;
#elif defined(TF_AVX2)
constexpr int kGroupRows = 2, kWholePanelRows = 0;
#else
constexpr int kGroupRows = 1, kWholePanelRows = 0;
#endif

constexpr int kQuads = kGroupSize / 4;
constexpr int kBlockGroups = 8;

// What one run of rows brings to one block of groups, gathered so that all of it is at fixed
// distances. Weights are stored unsigned, q8_0 as value + 128 and q4_0 as value + 8, so a group's
// sum starts at -offset * (sum of the row's bytes).
struct RowGroups {
  alignas(64) int8_t values[kGroupRows][kBlockGroups * kGroupSize];
  float scales[kGroupRows][kBlockGroups];
  int32_t starts[kGroupRows][kBlockGroups];
  float minimum_factors[kGroupRows][kBlockGroups];
};

struct Q8 {
  static constexpr int kOffset = 128, kVectorBytes = 512, kGroupBytes = 34 * kPanelColumns;
  static constexpr bool kHasMinimum = false, kDoublesSingleRow = true;
  static void load_quads(const std::byte* p, I32* quads) {
    for (int i = 0; i < kQuads; ++i)
      quads[i] = load_i32(reinterpret_cast<const int32_t*>(p) + i * kLanes);
  }
};

struct Q4 {
  static constexpr int kVectorBytes = 256;
  static constexpr bool kDoublesSingleRow = false;
  static void load_quads(const std::byte* p, I32* quads) {
    for (int i = 0; i < kQuads / 2; ++i) {
      const I32 both = load_i32(reinterpret_cast<const int32_t*>(p) + i * kLanes);
      quads[i] = low_nibbles(both);
      quads[i + kQuads / 2] = high_nibbles(both);
    }
  }
};

struct Q4WithoutMinimum : Q4 {
  static constexpr int kOffset = 8, kGroupBytes = 18 * kPanelColumns;
  static constexpr bool kHasMinimum = false;
};

struct Q4WithMinimum : Q4 {
  static constexpr int kOffset = 0, kGroupBytes = 20 * kPanelColumns;
  static constexpr bool kHasMinimum = true;
};

// sums += the block's products for kRows rows and kVectors vectors of columns. Each group also asks
// for `kLines` cache lines at `ahead`.
template <typename Block, int kRows, int kVectors, int kLines>
void add_groups(const RowGroups& rows, const std::byte* weights, int first_vector, int num_groups,
                float* sums, const std::byte* ahead) {
  F32 y[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) y[r][v] = load(sums + r * kPanelColumns + v * kLanes);
  for (int g = 0; g < num_groups; ++g, weights += Block::kGroupBytes) {
    const auto* scales =
        reinterpret_cast<const uint16_t*>(weights + kPanelVectors * Block::kVectorBytes);
    for (int line = 0; line < kLines; ++line, ahead += kCacheLine)
      __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int vector = first_vector + v;
      I32 quads[kQuads];
      Block::load_quads(weights + vector * Block::kVectorBytes, quads);
      const F32 scale = load_f16(scales + vector * kLanes);
      F32 minimum;
      if constexpr (Block::kHasMinimum)
        minimum = load_f16(scales + kPanelColumns + vector * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int8_t* a = rows.values[r] + g * kGroupSize;
        I32 dot = set1_i32(rows.starts[r][g]);
#pragma GCC unroll 8
        for (int i = 0; i < kQuads; ++i) {
          uint32_t quad;
          std::memcpy(&quad, a + 4 * i, sizeof quad);
          dot = dot_s8u8(dot, quad, quads[i]);
        }
        y[r][v] = fma(to_f32(dot), mul(scale, set1(rows.scales[r][g])), y[r][v]);
        if constexpr (Block::kHasMinimum)
          y[r][v] = fma(minimum, set1(rows.minimum_factors[r][g]), y[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanelColumns + v * kLanes, y[r][v]);
}

template <typename Block>
struct Groups {
  static constexpr int kBlock = kBlockGroups * kGroupSize;

  static void begin(const TilePart& part, Sums& sums) {
    std::memset(sums.f32, 0, sizeof(float) * size_t(part.num_rows) * kPanelColumns);
  }

  // A single row of q8_0 asks for memory faster than the processor's prefetching likes: computed
  // twice at once, it was half as fast again, and asking ahead as well only made it slower.
  static void add_doubled_row(RowGroups& rows, const std::byte* weights, int count, float* sums) {
    std::memcpy(rows.values[1], rows.values[0], sizeof rows.values[0]);
    std::memcpy(rows.scales[1], rows.scales[0], sizeof rows.scales[0]);
    std::memcpy(rows.starts[1], rows.starts[0], sizeof rows.starts[0]);
    float both[2 * kPanelColumns] = {};
    std::memcpy(both, sums, sizeof(float) * kPanelColumns);
    add_groups<Block, 2, kPanelVectors, 0>(rows, weights, 0, count, both, nullptr);
    std::memcpy(sums, both, sizeof(float) * kPanelColumns);
  }

  template <int kRows>
  static void add_rows(const TilePart& part, int row, int k, int k_end, Sums& sums) {
    const int first = k / kGroupSize, count = (k_end - k) / kGroupSize;
    const int k_padded = part.matrix().k_padded();
    RowGroups rows;
    for (int r = 0; r < kRows; ++r) {
      const void* at = part.row(row + r);
      const auto view = quantised_row(at, k_padded, k_padded / kGroupSize);
      std::memcpy(rows.values[r], view.values + k, size_t(count) * kGroupSize);
      for (int g = 0; g < count; ++g) {
        const int32_t sum = view.sums[first + g];
        rows.scales[r][g] = view.scales[first + g];
        rows.starts[r][g] = -Block::kOffset * sum;
        rows.minimum_factors[r][g] = view.scales[first + g] * float(sum);
      }
    }
    const std::byte* weights = part.weights() + size_t(first) * Block::kGroupBytes;
    float* at = sums.f32 + row * kPanelColumns;
    // One or two rows wait for memory alone and read a panel in its order. Where panels follow each
    // other the processor's own prefetching is best left alone; where the next one lies elsewhere
    // they ask for it. More rows read a panel vector by vector, so that each weight is unpacked
    // once, and the first of them ask for their share of what comes next.
    if constexpr (kRows == 1 && kRows <= kWholePanelRows && Block::kDoublesSingleRow)
      if (part.num_vectors == kPanelVectors) return add_doubled_row(rows, weights, count, at);
    constexpr int kLines = Block::kGroupBytes / kCacheLine;
    const std::byte* ahead = part.after(weights + count * Block::kGroupBytes);
    if constexpr (kRows <= kWholePanelRows)
      if (part.num_vectors == kPanelVectors) {
        constexpr auto asking = &add_groups<Block, kRows, kPanelVectors, kLines>;
        constexpr auto plain = &add_groups<Block, kRows, kPanelVectors, 0>;
        return (ahead && part.jumps() ? asking : plain)(rows, weights, 0, count, at, ahead);
      }
    constexpr int kShare = (kLines + kPanelVectors - 1) / kPanelVectors;
    for (int v = part.first_vector; v < part.first_vector + part.num_vectors; ++v) {
      const int before = (v - part.first_vector) * count * kShare * kCacheLine;
      if (ahead && row == 0)
        add_groups<Block, kRows, 1, kShare>(rows, weights, v, count, at + v * kLanes,
                                            ahead + before);
      else
        add_groups<Block, kRows, 1, 0>(rows, weights, v, count, at + v * kLanes, nullptr);
    }
  }

  // Of the heights that exist the greatest that fits, and again for what is left.
  template <int kRows>
  static void add_all(const TilePart& part, int row, int k, int k_end, Sums& sums) {
    for (; part.num_rows - row >= kRows; row += kRows) add_rows<kRows>(part, row, k, k_end, sums);
    constexpr int kNext = kRows > 8 ? kRows - 4 : kRows - 1;
    if constexpr (kNext > 0) add_all<kNext>(part, row, k, k_end, sums);
  }

  static void accumulate(const TilePart& part, int k, int k_end, Sums& sums) {
    add_all<kGroupRows>(part, 0, k, k_end, sums);
  }

  static F32 value(const TilePart&, const Sums& sums, int row, int v) {
    return load(sums.f32 + row * kPanelColumns + v * kLanes);
  }
};

}  // namespace

void run_q8_0(const GemmArgs& args, int tile) { run_tile<Groups<Q8>>(args, tile); }
void run_q4_0(const GemmArgs& args, int tile) { run_tile<Groups<Q4WithoutMinimum>>(args, tile); }
void run_q4_1(const GemmArgs& args, int tile) { run_tile<Groups<Q4WithMinimum>>(args, tile); }

}  // namespace tf::TF_ISA
