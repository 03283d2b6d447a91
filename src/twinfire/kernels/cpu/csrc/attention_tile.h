// The two products of attention on small tiles held in registers: queries with keys, weights with
// values. Each output has one accumulator and one order of summation whatever the tile's height, so
// heights are chosen freely.
#pragma once

#include <array>
#include <utility>

#include "attention_plan.h"
#include "kv_cache.h"
#include "simd.h"

namespace tf::TF_ISA {

constexpr int kGroupRows = 12;
constexpr int kChunkBlocks = kChunkKeys / kBlockTokens;
constexpr int kBlockVectors = kBlockTokens / kLanes;

// Limits that keep the accumulators and one row of operands in registers.
#if defined(TF_AVX512)
constexpr int kScoreRows = 12, kScoreVectors = 24;
constexpr int kMixRows = 6, kMixVectors = 4;
#else
constexpr int kScoreRows = 3, kScoreVectors = 6;
constexpr int kMixRows = 3, kMixVectors = 2;
#endif

inline uint32_t load_pair(const void* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}

// What will be read next, of the same size as what is read now: few rows cannot hide the latency of
// memory, and the processor's own prefetching stops at every block. Null: nothing.
using Ahead = const uint16_t* const*;

// Into the second-level cache: the first has too few lines in flight to wait for memory.
constexpr int kSecondLevel = 2;

template <int Rows>
inline void prefetch(Ahead ahead, int block, int offset) {
  if constexpr (Rows <= kScoreRows / 2)
    if (ahead) __builtin_prefetch(ahead[block] + offset, 0, kSecondLevel);
}

// scores[row][32 * block + key] of `Rows` queries, whose pairs lie [head_dim / 2][kGroupRows].
template <int Rows, int Blocks>
void score_blocks(const uint32_t* queries, const uint16_t* const* keys, int head_dim, float* scores,
                  Ahead ahead) {
  constexpr int kVectors = Blocks * kBlockVectors;
  F32 acc[Rows][kVectors];
#pragma GCC unroll 24
  for (int i = 0; i < Rows * kVectors; ++i) acc[i / kVectors][i % kVectors] = zero();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      prefetch<Rows>(ahead, v / kBlockVectors,
                     (pair * kBlockTokens + v % kBlockVectors * kLanes) * 2);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        acc[row][v] = dot_bf16(acc[row][v], queries[pair * kGroupRows + row],
                               keys[v / kBlockVectors] +
                                   (pair * kBlockTokens + v % kBlockVectors * kLanes) * 2);
  }
#pragma GCC unroll 24
  for (int i = 0; i < Rows * kVectors; ++i)
    store(scores + i / kVectors * kChunkKeys + i % kVectors * kLanes,
          acc[i / kVectors][i % kVectors]);
}

constexpr int blocks_at_once(int rows) {
  int blocks = 4;
  while (blocks > 1 && rows * blocks * kBlockVectors > kScoreVectors) blocks /= 2;
  return blocks;
}

template <int Rows>
void score_rows(const uint32_t* queries, const uint16_t* const* keys, int first_block,
                int end_block, int head_dim, float* scores, Ahead ahead) {
  constexpr int kBlocks = blocks_at_once(Rows);
  int block = first_block;
  for (; block + kBlocks <= end_block; block += kBlocks)
    score_blocks<Rows, kBlocks>(queries, keys + block, head_dim, scores + block * kBlockTokens,
                                ahead ? ahead + block : nullptr);
  if constexpr (kBlocks > 1)
    for (; block < end_block; ++block)
      score_blocks<Rows, 1>(queries, keys + block, head_dim, scores + block * kBlockTokens,
                            ahead ? ahead + block : nullptr);
}

// Scores of a group's rows with blocks [first_block, end_block) of a chunk.
inline void score_group(const uint32_t* queries, int num_rows, const uint16_t* const* keys,
                        int first_block, int end_block, int head_dim, float* scores, Ahead ahead) {
  using Score = void (*)(const uint32_t*, const uint16_t* const*, int, int, int, float*, Ahead);
  static constexpr auto kByRows = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Score, sizeof...(I)>{score_rows<I + 1>...};
  }(std::make_integer_sequence<int, kScoreRows>());
  for (int row = 0; row < num_rows; row += kScoreRows) {
    const int count = num_rows - row < kScoreRows ? num_rows - row : kScoreRows;
    kByRows[size_t(count - 1)](queries + row, keys, first_block, end_block, head_dim,
                               scores + row * kChunkKeys, ahead);
  }
}

// A chunk's weighted values are merged into what earlier chunks gave: out * keep + mixed * add.
struct Merge {
  const float* keep;
  const float* add;
};

// Rows of weights [kChunkKeys] bf16 with the columns [0, 16 * Vectors) at `column`.
template <int Rows, int Vectors>
void mix_columns(const uint16_t* weights, const uint16_t* const* values, int first_block,
                 int end_block, int head_dim, int column, const Merge* merge, int row, float* out,
                 Ahead ahead) {
  F32 acc[Rows][Vectors];
#pragma GCC unroll 24
  for (int i = 0; i < Rows * Vectors; ++i) acc[i / Vectors][i % Vectors] = zero();
  for (int block = first_block; block < end_block; ++block) {
    const uint16_t* operand = values[block] + column * 2;
    const uint16_t* weight = weights + block * kBlockTokens;
    for (int pair = 0; pair < kBlockTokens / 2; ++pair) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        prefetch<Rows>(ahead, block, (pair * head_dim + column + v * kLanes) * 2);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v)
          acc[r][v] = dot_bf16(acc[r][v], load_pair(weight + r * kChunkKeys),
                               operand + v * kLanes * 2);
      operand += head_dim * 2;
      weight += 2;
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < Rows * Vectors; ++i) {
    const int r = i / Vectors, v = i % Vectors;
    float* line = out + r * head_dim + column + v * kLanes;
    F32 mixed = acc[r][v];
    if (merge)
      mixed = fma(mixed, set1(merge->add[row + r]), mul(load(line), set1(merge->keep[row + r])));
    store(line, mixed);
  }
}

// out[row][head_dim] of a group's rows from blocks [first_block, end_block); without `merge` the
// chunk's own sums are stored.
inline void mix_group(const uint16_t* weights, int num_rows, const uint16_t* const* values,
                      int first_block, int end_block, int head_dim, const Merge* merge, float* out,
                      Ahead ahead) {
  using Mix = void (*)(const uint16_t*, const uint16_t* const*, int, int, int, int, const Merge*,
                       int, float*, Ahead);
  static constexpr auto kByShape = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Mix, sizeof...(I)>{mix_columns<I / kMixVectors + 1, I % kMixVectors + 1>...};
  }(std::make_integer_sequence<int, kMixRows * kMixVectors>());
  for (int row = 0; row < num_rows; row += kMixRows) {
    const int rows = num_rows - row < kMixRows ? num_rows - row : kMixRows;
    for (int column = 0; column < head_dim; column += kMixVectors * kLanes) {
      const int left = (head_dim - column) / kLanes;
      const int vectors = left < kMixVectors ? left : kMixVectors;
      kByShape[size_t((rows - 1) * kMixVectors + vectors - 1)](
          weights + row * kChunkKeys, values, first_block, end_block, head_dim, column, merge, row,
          out + row * head_dim, ahead);
    }
  }
}

}  // namespace tf::TF_ISA
