// y = x @ W.T + bias for any number of rows, cut into independent tiles.
//
// An output element is accumulated in one fixed order over K whatever the other rows are and
// however the tiles are cut, so its bits depend on its own row and the matrix alone.
#pragma once

#include <algorithm>

#include "activation_rows.h"
#include "packed_matrix.h"

namespace tf {

enum class Epilogue : int {
  store_bf16,
  store_f32,
  add_f32,               // out += y, the residual stream
  silu_mul_f32,          // silu(gate) * up of a gated matrix
  silu_mul_bf16,         // the same, as input of a bf16 matrix
  silu_mul_int8_groups,  // the same, as input of a matrix with groups
};

inline bool is_gated(Epilogue epilogue) { return epilogue >= Epilogue::silu_mul_f32; }

struct GemmArgs {
  const PackedMatrix* matrix;
  const std::byte* rows;  // in input_format(matrix->format)
  size_t row_bytes;       // from one row to the next; activation_row_bytes or more
  int num_rows;
  Epilogue epilogue;
  void* out;
  size_t out_row_bytes;  // from one row to the next
  // What the thread probably reads after this tile, asked for meanwhile; null: nothing.
  const std::byte* next = nullptr;
};

// What a matrix of this format reads.
inline RowFormat input_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::bf16: return RowFormat::bf16;
    case WeightFormat::int8: return RowFormat::int8;
    default: return RowFormat::int8_groups;
  }
}

constexpr int kMaxTileRows = 96;

// How a product is cut: every tile has `rows_per_tile` rows and `vectors_per_tile` vectors of 16
// columns, but for the last ones. Tiles of the same columns follow each other, so the weights are
// read from memory once.
struct GemmTiling {
  int rows_per_tile, row_tiles;
  int vectors_per_tile, column_tiles;
};

inline GemmTiling gemm_tiling(const GemmArgs& args) {
  const int panels = args.matrix->num_panels();
  // Enough tiles for the threads to end at about the same time, and large enough to be worth it.
  constexpr int kWantedTiles = 32, kFewRows = 16, kFewestRows = 24, kMostPanels = 4;
  int row_tiles = 1, panels_per_tile = 1;
  if (args.num_rows > kFewRows) {
    const int fewest = (args.num_rows + kMaxTileRows - 1) / kMaxTileRows;
    const int most = (args.num_rows + kFewestRows - 1) / kFewestRows;
    row_tiles = std::max(fewest, std::min(most, (kWantedTiles + panels - 1) / panels));
  } else {
    panels_per_tile = std::clamp(panels / kWantedTiles, 1, kMostPanels);
  }
  const int rows_per_tile = (args.num_rows + row_tiles - 1) / row_tiles;
  return {rows_per_tile, (args.num_rows + rows_per_tile - 1) / rows_per_tile, panels_per_tile * 4,
          (panels + panels_per_tile - 1) / panels_per_tile};
}

// Zero for no rows.
inline int gemm_num_tiles(const GemmArgs& args) {
  if (args.num_rows == 0) return 0;
  const GemmTiling tiling = gemm_tiling(args);
  return tiling.row_tiles * tiling.column_tiles;
}

// Where a tile's weights begin.
inline const std::byte* gemm_tile_weights(const GemmArgs& args, int tile) {
  const GemmTiling tiling = gemm_tiling(args);
  const int panels_per_tile = tiling.vectors_per_tile * 16 / kPanelColumns;
  return args.matrix->panel(tile / tiling.row_tiles * panels_per_tile);
}

// The weights that a thread probably reads after those of `tile`, tiles being claimed in turn; null
// where the next tile has the same ones, or there is none.
inline const std::byte* gemm_weights_after(const GemmArgs& args, int tile, int num_threads) {
  if (tile + num_threads >= gemm_num_tiles(args)) return nullptr;
  const std::byte* next = gemm_tile_weights(args, tile + num_threads);
  return next == gemm_tile_weights(args, tile) ? nullptr : next;
}

struct GemmKernels {
  void (*run)(const GemmArgs& args, int tile);
  // x[k] to a row of `format`, its padding included.
  void (*write_row)(const float* x, int k, RowFormat format, void* row);
};

namespace avx512 { extern const GemmKernels kGemmKernels; }
namespace avx2 { extern const GemmKernels kGemmKernels; }
namespace portable { extern const GemmKernels kGemmKernels; }

}  // namespace tf
