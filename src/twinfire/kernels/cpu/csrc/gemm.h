// y = x @ W.T + bias for any number of rows, cut into independent tiles.
//
// An output element is accumulated in one fixed order over K whatever the other rows are and however
// the tiles are cut, so its bits depend on its own row and the matrix alone.
#pragma once

#include "activation_rows.h"
#include "packed_matrix.h"

namespace tf {

enum class Epilogue : int {
  store_bf16,
  store_f32,
  add_f32,          // out += y, the residual stream
  silu_mul_bf16,    // silu(gate) * up of a gated matrix
  silu_mul_int8_groups,  // the same, quantised as input of a matrix with groups
};

struct GemmArgs {
  const PackedMatrix* matrix;
  const std::byte* rows;  // in input_format(matrix->format)
  size_t row_bytes;       // from one row to the next; activation_row_bytes or more
  int num_rows;
  Epilogue epilogue;
  void* out;
  size_t out_row_bytes;  // from one row to the next
};

// What a matrix of this format reads.
inline RowFormat input_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::bf16: return RowFormat::bf16;
    case WeightFormat::int8: return RowFormat::int8;
    default: return RowFormat::int8_groups;
  }
}

int gemm_num_tiles(const GemmArgs& args);

struct GemmKernels {
  void (*run)(const GemmArgs& args, int tile);
};

namespace avx512 { extern const GemmKernels kGemmKernels; }
namespace avx2 { extern const GemmKernels kGemmKernels; }
namespace portable { extern const GemmKernels kGemmKernels; }

}  // namespace tf
