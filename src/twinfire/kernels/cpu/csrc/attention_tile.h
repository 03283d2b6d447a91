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

// scores[row][32 * block + key] of `Rows` queries, whose pairs lie [head_dim / 2][kGroupRows].
template <int Rows, int Blocks>
void score_blocks(const uint32_t* queries, const uint16_t* const* keys, int head_dim,
                  float* scores) {
  F32 acc[Rows][Blocks * kBlockVectors];
  for (auto& row : acc)
    for (F32& vector : row) vector = zero();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
#pragma GCC unroll 4
    for (int block = 0; block < Blocks; ++block)
#pragma GCC unroll 2
      for (int v = 0; v < kBlockVectors; ++v) {
        const uint16_t* operand = keys[block] + (pair * kBlockTokens + v * kLanes) * 2;
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row) {
          F32& sum = acc[row][block * kBlockVectors + v];
          sum = dot_bf16(sum, queries[pair * kGroupRows + row], operand);
        }
      }
  }
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < Blocks * kBlockVectors; ++v)
      store(scores + row * kChunkKeys + v * kLanes, acc[row][v]);
}

constexpr int blocks_at_once(int rows) {
  int blocks = 4;
  while (blocks > 1 && rows * blocks * kBlockVectors > kScoreVectors) blocks /= 2;
  return blocks;
}

template <int Rows>
void score_rows(const uint32_t* queries, const uint16_t* const* keys, int first_block,
                int end_block, int head_dim, float* scores) {
  constexpr int kBlocks = blocks_at_once(Rows);
  int block = first_block;
  for (; block + kBlocks <= end_block; block += kBlocks)
    score_blocks<Rows, kBlocks>(queries, keys + block, head_dim, scores + block * kBlockTokens);
  if constexpr (kBlocks > 1)
    for (; block < end_block; ++block)
      score_blocks<Rows, 1>(queries, keys + block, head_dim, scores + block * kBlockTokens);
}

// Scores of a group's rows with blocks [first_block, end_block) of a chunk.
inline void score_group(const uint32_t* queries, int num_rows, const uint16_t* const* keys,
                        int first_block, int end_block, int head_dim, float* scores) {
  using Score = void (*)(const uint32_t*, const uint16_t* const*, int, int, int, float*);
  static constexpr auto kByRows = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Score, sizeof...(I)>{score_rows<I + 1>...};
  }(std::make_integer_sequence<int, kScoreRows>());
  for (int row = 0; row < num_rows; row += kScoreRows) {
    const int count = num_rows - row < kScoreRows ? num_rows - row : kScoreRows;
    kByRows[size_t(count - 1)](queries + row, keys, first_block, end_block, head_dim,
                               scores + row * kChunkKeys);
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
                 int end_block, int head_dim, int column, const Merge* merge, int row,
                 float* out) {
  F32 acc[Rows][Vectors];
  for (auto& line : acc)
    for (F32& vector : line) vector = zero();
  for (int block = first_block; block < end_block; ++block)
    for (int pair = 0; pair < kBlockTokens / 2; ++pair) {
      const uint16_t* operand = values[block] + (pair * head_dim + column) * 2;
      const uint16_t* weight = weights + block * kBlockTokens + pair * 2;
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r)
          acc[r][v] = dot_bf16(acc[r][v], load_pair(weight + r * kChunkKeys),
                               operand + v * kLanes * 2);
    }
  for (int r = 0; r < Rows; ++r) {
    float* line = out + r * head_dim + column;
    for (int v = 0; v < Vectors; ++v) {
      F32 mixed = acc[r][v];
      if (merge)
        mixed = fma(mixed, set1(merge->add[row + r]),
                    mul(load(line + v * kLanes), set1(merge->keep[row + r])));
      store(line + v * kLanes, mixed);
    }
  }
}

// out[row][head_dim] of a group's rows from blocks [first_block, end_block); without `merge` the
// chunk's own sums are stored.
inline void mix_group(const uint16_t* weights, int num_rows, const uint16_t* const* values,
                      int first_block, int end_block, int head_dim, const Merge* merge,
                      float* out) {
  using Mix = void (*)(const uint16_t*, const uint16_t* const*, int, int, int, int, const Merge*,
                       int, float*);
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
          out + row * head_dim);
    }
  }
}

}  // namespace tf::TF_ISA
