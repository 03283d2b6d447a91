// Ops on single rows of activations: a tile is a run of rows, and no row sees another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation_rows.h"

namespace tf {

// residual += added; out = residual / sqrt(mean(residual**2) + eps) * weight (arXiv:1910.07467).
struct RmsNormArgs {
  float* residual;     // [num_rows][width]
  const float* added;  // [num_rows][width], or null: the residual is left as it is
  const float* weight;
  float eps;
  int num_rows;
  int width;
  RowFormat format;  // of `out`
  std::byte* out;
  size_t out_row_bytes;
};

// out = silu(first half) * second half of each row.
struct SiluMulArgs {
  const float* gate_up;  // [num_rows][2 * width]
  int num_rows;
  int width;
  RowFormat format;
  std::byte* out;
  size_t out_row_bytes;
};

// Rows of f32 in another format.
struct ConvertRowsArgs {
  const float* rows;  // [num_rows][width]
  int num_rows;
  int width;
  RowFormat format;
  std::byte* out;
  size_t out_row_bytes;
};

// out[i] = rows[indices[i]].
struct TakeRowsArgs {
  const std::byte* rows;
  const int32_t* indices;
  int num_rows;  // of `out`
  size_t row_bytes;
  std::byte* out;
};

// Cosines and sines of each position's angles, for every layer that turns by this table.
// Angles are rounded to float32, as they were when models were trained.
struct RopeFactorsArgs {
  const int32_t* positions;  // [num_rows]
  const float* inv_freq;     // [head_dim / 2]
  float attention_factor;
  int num_rows;
  int head_dim;
  float* factors;  // [num_rows][head_dim]: cosines, then sines
};

// A plain table of rows; packed ones are read by the packing's own `row_to_f32`.
enum class TableFormat { f32, f16, bf16 };

struct EmbedArgs {
  const void* table;  // [vocab][width]
  TableFormat format;
  const int32_t* ids;
  int num_rows;
  int width;
  float* out;  // [num_rows][width]
};

// Rows in a tile of every op here, so that a step of few rows is one tile.
constexpr int kTileRows = 8;
inline int row_tiles(int num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }

// One per instruction set: TF_FOR_ISA(isa, kRowKernels). Rows [first, end).
struct RowKernels {
  // `scratch` holds `width` floats, 64-byte aligned, one per thread.
  void (*rms_norm)(const RmsNormArgs&, int first, int end, float* scratch);
  void (*silu_mul)(const SiluMulArgs&, int first, int end, float* scratch);
  void (*convert_rows)(const ConvertRowsArgs&, int first, int end);
  void (*embed)(const EmbedArgs&, int first, int end);
};

void take_rows(const TakeRowsArgs&, int first, int end);
void rope_factors(const RopeFactorsArgs&, int first, int end);

namespace portable {
extern const RowKernels kRowKernels;
}
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}

}  // namespace tf
