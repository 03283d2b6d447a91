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

constexpr size_t kStepBytes = 4 * kPanelColumns;

// A step is four bytes of each row and of each column.
// Format gives Sum, Weights, load_sums, store_sums and dot.
// Each step also asks for `kLines` cache lines at `ahead`.
template <typename Format, int kRows, int kVectors, int kLines>
void dot_rows(const std::byte* rows, size_t row_bytes, const std::byte* weights, int steps,
              void* sums, const std::byte* ahead) {
  typename Format::Sum acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Format::load_sums(sums, r, v);
  for (int s = 0; s < steps; ++s, weights += kStepBytes, rows += 4, ahead += kLines * kCacheLine) {
    for (int line = 0; line < kLines; ++line)
      __builtin_prefetch(ahead + line * kCacheLine, 0, 2);
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

using DotRows = void (*)(const std::byte*, size_t, const std::byte*, int, void*, const std::byte*);

// Element r - 1 does r rows.
template <typename Format, int kVectors, int kLines, size_t... kIndex>
constexpr std::array<DotRows, sizeof...(kIndex)> dot_table(std::index_sequence<kIndex...>) {
  return {&dot_rows<Format, int(kIndex) + 1, kVectors, kLines>...};
}

// Rows are dealt to equal runs of at most as many as fit in registers. A run alone asks for memory
// a fixed distance ahead, as does every step of a sweep. Of several all but the first find their
// weights in cache, so memory is kept busy by each of them asking for its share of what comes next.
template <typename Format, int kVectors>
void dot_strip(const TilePart& part, int k, int k_end, int first_vector, std::byte* sums) {
  constexpr int kMaxRows = kRegisterSums / kVectors, kLines = kStepBytes / kCacheLine;
  constexpr int kStrips = kPanelVectors / kVectors, kStepsAhead = 32;
  using Heights = std::make_index_sequence<kMaxRows>;
  static constexpr std::array<std::array<DotRows, kMaxRows>, kLines + 1> tables = {
      dot_table<Format, kVectors, 0>(Heights()), dot_table<Format, kVectors, 1>(Heights()),
      dot_table<Format, kVectors, 2>(Heights()), {}, dot_table<Format, kVectors, 4>(Heights())};
  const std::byte* weights = part.weights() + size_t(k) * Format::kElementBytes * kPanelColumns;
  const int steps = (k_end - k) * Format::kElementBytes / 4;
  const std::byte* next = part.after(weights + size_t(steps) * kStepBytes);
  const int runs = (part.num_rows + kMaxRows - 1) / kMaxRows, passes = runs * kStrips;
  const auto multiply = [&](int lines, int run, int first, int count, const std::byte* ahead) {
    const int row = part.num_rows * run / runs, end = part.num_rows * (run + 1) / runs;
    tables[size_t(lines)][size_t(end - row - 1)](
        part.row(row) + size_t(k) * Format::kElementBytes + size_t(first) * 4, part.args.row_bytes,
        weights + size_t(first) * kStepBytes + size_t(first_vector) * 4 * kLanes, count,
        sums + (size_t(row) * kPanelColumns + first_vector * kLanes) * 4, ahead);
  };
  if (passes == 1) {
    const int last = std::min(steps, kStepsAhead);
    multiply(kLines, 0, 0, steps - last, weights + size_t(last) * kStepBytes);
    return multiply(next ? kLines : 0, 0, steps - last, last, next);
  }
  for (int run = 0; run < runs; ++run) {
    const int pass = first_vector / kVectors * runs + run;
    const int first_line = kLines * pass / passes, end_line = kLines * (pass + 1) / passes;
    const int lines = next ? end_line - first_line : 0;
    multiply(lines, run, 0, steps, lines ? next + first_line * steps * kCacheLine : nullptr);
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
