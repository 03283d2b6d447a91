// The inner loop of formats whose sums run over all of K without scales between: R rows times C
// vectors of columns held in registers.
#pragma once

#include <array>
#include <utility>

#include "gemm_tile.h"

namespace tf::TF_ISA {

#if defined(TF_AVX512)
constexpr int kRegisterSums = 24;
#elif defined(TF_AVX2)
constexpr int kRegisterSums = 4;
#else
constexpr int kRegisterSums = 2;
#endif

// Weights come this far ahead of their use; more than the distance to memory, less than the L1.
constexpr size_t kPrefetchBytes = 2048;

// One step of a row: `kStepElements` elements of K, four bytes.
// Format gives Sum, Weights, load_sums, store_sums and dot.
template <typename Format, int kRows, int kVectors, bool kPrefetch>
void dot_rows(const std::byte* rows, size_t row_bytes, const std::byte* weights, int steps,
              void* sums) {
  typename Format::Sum acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Format::load_sums(sums, r, v);
  constexpr size_t kStepBytes = 4 * kPanelColumns;
  for (int s = 0; s < steps; ++s, weights += kStepBytes, rows += 4) {
    if constexpr (kPrefetch)
      for (int v = 0; v < kVectors; ++v)
        __builtin_prefetch(weights + kPrefetchBytes + v * 4 * kLanes);
    for (int r = 0; r < kRows; ++r) {
      uint32_t a;
      std::memcpy(&a, rows + size_t(r) * row_bytes, sizeof a);
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = Format::dot(acc[r][v], a, weights + v * 4 * kLanes);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Format::store_sums(sums, r, v, acc[r][v]);
}

using DotRows = void (*)(const std::byte*, size_t, const std::byte*, int, void*);

// Element r - 1 does r rows.
template <typename Format, int kVectors, bool kPrefetch, size_t... kIndex>
constexpr std::array<DotRows, sizeof...(kIndex)> dot_table(std::index_sequence<kIndex...>) {
  return {&dot_rows<Format, int(kIndex) + 1, kVectors, kPrefetch>...};
}

// Rows are dealt to equal runs of at most as many as fit in registers; the first reads the weights
// from memory, the others from cache.
template <typename Format, int kVectors>
void dot_strip(const TilePart& part, int k, int k_end, int first_vector, std::byte* sums) {
  constexpr int kMaxRows = kRegisterSums / kVectors;
  static constexpr auto from_memory =
      dot_table<Format, kVectors, true>(std::make_index_sequence<kMaxRows>());
  static constexpr auto from_cache =
      dot_table<Format, kVectors, false>(std::make_index_sequence<kMaxRows>());
  const std::byte* weights = part.weights() + size_t(k) * Format::kElementBytes * kPanelColumns +
                             size_t(first_vector) * 4 * kLanes;
  const int steps = (k_end - k) * Format::kElementBytes / 4;
  const int runs = (part.num_rows + kMaxRows - 1) / kMaxRows;
  for (int run = 0; run < runs; ++run) {
    const int row = part.num_rows * run / runs, end = part.num_rows * (run + 1) / runs;
    const auto& table = run ? from_cache : from_memory;
    table[size_t(end - row - 1)](part.row(row) + size_t(k) * Format::kElementBytes,
                                 part.args.row_bytes, weights, steps,
                                 sums + (size_t(row) * kPanelColumns + first_vector * kLanes) * 4);
  }
}

template <typename Format>
void dot_block(const TilePart& part, int k, int k_end, Sums& sums) {
  auto* base = reinterpret_cast<std::byte*>(&sums);
  if constexpr (kRegisterSums >= 2 * kPanelVectors)
    if (part.num_vectors == kPanelVectors)
      return dot_strip<Format, kPanelVectors>(part, k, k_end, 0, base);
  for (int v = 0; v < part.num_vectors; v += 2)
    dot_strip<Format, 2>(part, k, k_end, part.first_vector + v, base);
}

}  // namespace tf::TF_ISA
