// The two products of attention on small tiles held in registers: queries with keys, weights with
// values. Each output has one accumulator and one order of summation whatever the tile's height, so
// heights are chosen freely.
#pragma once

#include <array>
#include <utility>

#include "attention_plan.h"
#include "kv_cache.h"
#include "plane_stream.h"
#include "simd.h"

namespace tf::TF_ISA {

constexpr int kGroupRows = 12;
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

// A run of planes of one chunk's keys or values, in pairs of elements.
template <typename Element>
using Planes = const Element* const*;

// Into the second-level cache: the first has too few lines in flight to wait for memory.
constexpr int kSecondLevel = 2;

// Few rows cannot hide the latency of memory, and the processor's own prefetching stops at every
// block; so the plane that will be read next is fetched at the pace of this one. Null: nothing.
template <int Rows, typename Element>
inline void prefetch(Planes<Element> ahead, int block, int offset) {
  if constexpr (Rows <= kScoreRows / 2)
    if (ahead && offset * sizeof(Element) % 64 == 0)
      __builtin_prefetch(ahead[block] + offset, 0, kSecondLevel);
}

// acc[row][v] += the pair `left(row)` times the vector of pairs `right(v)`. Whichever side is fewer
// stays in registers.
template <int Rows, int Vectors, typename Left, typename Right>
[[gnu::always_inline]] inline void add_products(F32 (&acc)[Rows][Vectors], Left left, Right right) {
  if constexpr (Rows < Vectors) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const I32 operand = right(v);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) acc[row][v] = dot_bf16(acc[row][v], left(row), operand);
    }
  } else {
    I32 operands[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) operands[v] = right(v);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v)
        acc[row][v] = dot_bf16(acc[row][v], left(row), operands[v]);
  }
}

// scores[row][32 * block + key] of `Rows` queries, whose pairs lie [head_dim / 2][kGroupRows].
template <typename Element, int Rows, int Blocks>
void score_blocks(const uint32_t* queries, Planes<Element> keys, int head_dim, float* scores,
                  Planes<Element> ahead) {
  constexpr int kVectors = Blocks * kBlockVectors;
  F32 acc[Rows][kVectors];
#pragma GCC unroll 24
  for (int i = 0; i < Rows * kVectors; ++i) acc[i / kVectors][i % kVectors] = zero();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    const auto offset = [&](int v) {
      return (pair * kBlockTokens + v % kBlockVectors * kLanes) * 2;
    };
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) prefetch<Rows>(ahead, v / kBlockVectors, offset(v));
    add_products(
        acc, [&](int row) { return queries[pair * kGroupRows + row]; },
        [&](int v) { return load_pairs(keys[v / kBlockVectors] + offset(v)); });
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

template <typename Element, int Rows>
void score_rows(const uint32_t* queries, Planes<Element> keys, int first_block, int end_block,
                int head_dim, float* scores, Planes<Element> ahead) {
  constexpr int kBlocks = blocks_at_once(Rows);
  int block = first_block;
  for (; block + kBlocks <= end_block; block += kBlocks)
    score_blocks<Element, Rows, kBlocks>(queries, keys + block, head_dim,
                                         scores + block * kBlockTokens,
                                         ahead ? ahead + block : nullptr);
  if constexpr (kBlocks > 1)
    for (; block < end_block; ++block)
      score_blocks<Element, Rows, 1>(queries, keys + block, head_dim,
                                     scores + block * kBlockTokens,
                                     ahead ? ahead + block : nullptr);
}

// Scores of a group's rows with blocks [first_block, end_block) of a chunk.
template <typename Element>
void score_group(const uint32_t* queries, int num_rows, Planes<Element> keys, int first_block,
                 int end_block, int head_dim, float* scores, Planes<Element> ahead) {
  using Score = void (*)(const uint32_t*, Planes<Element>, int, int, int, float*, Planes<Element>);
  static constexpr auto kByRows = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Score, sizeof...(I)>{score_rows<Element, I + 1>...};
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
template <typename Element, int Rows, int Vectors>
void mix_columns(const uint16_t* weights, Planes<Element> values, int first_block, int end_block,
                 int head_dim, int column, const Merge* merge, int row, float* out,
                 Planes<Element> ahead) {
  F32 acc[Rows][Vectors];
#pragma GCC unroll 24
  for (int i = 0; i < Rows * Vectors; ++i) acc[i / Vectors][i % Vectors] = zero();
  for (int block = first_block; block < end_block; ++block) {
    const uint16_t* weight = weights + block * kBlockTokens;
    int offset = column * 2;
    for (int pair = 0; pair < kBlockTokens / 2; ++pair) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) prefetch<Rows>(ahead, block, offset + v * kLanes * 2);
      add_products(
          acc, [&](int r) { return load_pair(weight + r * kChunkKeys); },
          [&](int v) { return load_pairs(values[block] + offset + v * kLanes * 2); });
      offset += head_dim * 2;
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
template <typename Element>
void mix_group(const uint16_t* weights, int num_rows, Planes<Element> values, int first_block,
               int end_block, int head_dim, const Merge* merge, float* out,
               Planes<Element> ahead) {
  using Mix = void (*)(const uint16_t*, Planes<Element>, int, int, int, int, const Merge*, int,
                       float*, Planes<Element>);
  static constexpr auto kByShape = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Mix, sizeof...(I)>{
        mix_columns<Element, I / kMixVectors + 1, I % kMixVectors + 1>...};
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
