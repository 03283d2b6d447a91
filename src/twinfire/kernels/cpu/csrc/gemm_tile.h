// How every format walks the tiles of a product: which rows and columns a tile has, the blocks of
// K, and what becomes of the finished sums. A format adds only its inner loops.
//
// Sums of a tile wait in a small buffer between blocks of K; storing and loading them is exact, so
// blocks of K change no bits. Neither do the sizes of tiles.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "quantise_rows.h"
#include "simd.h"

namespace tf::TF_ISA {

constexpr int kPanelVectors = kPanelColumns / kLanes;
constexpr int kCacheLine = 64;

// Sums [rows][64] of a tile, i32 while a format counts in integers.
union Sums {
  alignas(64) float f32[kMaxTileRows * kPanelColumns];
  int32_t i32[kMaxTileRows * kPanelColumns];
};

// A part of a tile: some rows of the input and `num_vectors` vectors of one panel.
struct TilePart {
  const GemmArgs& args;
  int panel, first_vector, num_vectors, first_row, num_rows;
  const std::byte* next;  // read after this panel, or null

  const PackedMatrix& matrix() const { return *args.matrix; }
  const std::byte* weights() const { return matrix().panel(panel); }
  // Whether what is read after this panel lies elsewhere than behind it.
  bool jumps() const { return next && next != matrix().panel(panel + 1); }
  // What is read after the block of K that ends at `block_end`; null where others ask for it.
  const std::byte* after(const std::byte* block_end) const {
    if (block_end - weights() == ptrdiff_t(matrix().value_bytes())) return next;
    return first_row == 0 ? block_end : nullptr;
  }
  const std::byte* row(int index) const {
    return args.rows + size_t(first_row + index) * args.row_bytes;
  }
};

inline F32 silu(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

inline void store_columns(float* out, F32 y, int n) {
  if (n >= kLanes) store(out, y);
  else if (n > 0) store_first(out, y, n);
}

inline void store_columns_bf16(uint16_t* out, F32 y, int n) {
  if (n >= kLanes) return store_bf16(out, y);
  uint16_t all[kLanes];
  store_bf16(all, y);
  if (n > 0) std::memcpy(out, all, sizeof(uint16_t) * size_t(n));
}

// y: the four vectors of one row of a panel, of which those of the part are set.
inline void finish_row(const TilePart& part, int row, const F32* y) {
  const GemmArgs& args = part.args;
  std::byte* out = static_cast<std::byte*>(args.out) +
                   size_t(part.first_row + row) * args.out_row_bytes;
  const int first = part.first_vector, last = first + part.num_vectors;
  const int columns = part.matrix().out_columns();
  switch (args.epilogue) {
    case Epilogue::store_bf16:
      for (int v = first; v < last; ++v) {
        const int column = part.panel * kPanelColumns + v * kLanes;
        store_columns_bf16(reinterpret_cast<uint16_t*>(out) + column, y[v], columns - column);
      }
      break;
    case Epilogue::store_f32:
      for (int v = first; v < last; ++v) {
        const int column = part.panel * kPanelColumns + v * kLanes;
        store_columns(reinterpret_cast<float*>(out) + column, y[v], columns - column);
      }
      break;
    case Epilogue::add_f32:
      for (int v = first; v < last; ++v) {
        const int column = part.panel * kPanelColumns + v * kLanes, n = columns - column;
        float* at = reinterpret_cast<float*>(out) + column;
        if (n >= kLanes) store(at, add(load(at), y[v]));
        else if (n > 0) store_first(at, add(load_first(at, n), y[v]), n);
      }
      break;
    case Epilogue::silu_mul_f32:
      for (int v = first; v < last; v += 2) {
        const int column = part.panel * (kPanelColumns / 2) + v / 2 * kLanes;
        store_columns(reinterpret_cast<float*>(out) + column, mul(silu(y[v]), y[v + 1]),
                      columns - column);
      }
      break;
    case Epilogue::silu_mul_bf16:
      for (int v = first; v < last; v += 2) {
        const int column = part.panel * (kPanelColumns / 2) + v / 2 * kLanes;
        store_columns_bf16(reinterpret_cast<uint16_t*>(out) + column, mul(silu(y[v]), y[v + 1]),
                           columns - column);
      }
      break;
    case Epilogue::silu_mul_int8_groups: {
      const int k_padded = round_up(columns, kGroupSize);
      auto next = quantised_row(static_cast<void*>(out), k_padded, k_padded / kGroupSize);
      float values[kGroupSize];
      store(values, mul(silu(y[0]), y[1]));
      store(values + kLanes, mul(silu(y[2]), y[3]));
      next.sums[part.panel] = quantise_span(values, kGroupSize, next.scales + part.panel,
                                            next.values + part.panel * kGroupSize);
      break;
    }
  }
}

// The common walk. Format gives
//   kBlock                             most elements of K per block, a multiple of 32
//   begin(part, sums)                  sets the sums to their starting values
//   accumulate(part, k, k_end, sums)   adds a block's products
//   value(part, sums, row, v)          a finished vector as F32, before the bias
template <typename Format>
void run_tile(const GemmArgs& args, int tile) {
  const GemmTiling tiling = gemm_tiling(args);
  const PackedMatrix& matrix = *args.matrix;
  const int row_tile = tile % tiling.row_tiles, column_tile = tile / tiling.row_tiles;
  const int first_row = row_tile * tiling.rows_per_tile;
  const int num_rows = std::min(tiling.rows_per_tile, args.num_rows - first_row);
  const int first = column_tile * tiling.vectors_per_tile;
  const int last = std::min(first + tiling.vectors_per_tile, matrix.num_panels() * kPanelVectors);
  const int groups = matrix.num_groups(), block_groups = Format::kBlock / kGroupSize;
  const int num_blocks = (groups + block_groups - 1) / block_groups;
  Sums sums;
  for (int v = first; v < last;) {
    const int in_panel = v % kPanelVectors;
    const int count = std::min(kPanelVectors - in_panel, last - v);
    const int panel = v / kPanelVectors;
    const std::byte* next = v + count < last ? matrix.panel(panel + 1) : args.next;
    const TilePart part{args, panel, in_panel, count, first_row, num_rows, next};
    Format::begin(part, sums);
    for (int block = 0; block < num_blocks; ++block)
      Format::accumulate(part, groups * block / num_blocks * kGroupSize,
                         groups * (block + 1) / num_blocks * kGroupSize, sums);
    const float* bias = matrix.bias(part.panel);
    for (int row = 0; row < num_rows; ++row) {
      F32 y[kPanelVectors];
      for (int u = in_panel; u < in_panel + count; ++u) {
        y[u] = Format::value(part, sums, row, u);
        if (bias) y[u] = add(y[u], load(bias + u * kLanes));
      }
      finish_row(part, row, y);
    }
    v += count;
  }
}

}  // namespace tf::TF_ISA
