// Matrices from their form on disk to panels, and single rows back to f32.
//
// A block format that is wanted as it is on disk is only reordered. Everything else goes through
// f32, row by row: int8 rows get scale = max|x| / 127, blocks are rounded as GGUF rounds them.
#pragma once

#include <vector>

#include "packed_matrix.h"

namespace tf {

enum class SourceFormat : int { f32, f16, bf16, q8_0, q4_0, q4_1 };

inline bool is_block_format(SourceFormat format) { return format >= SourceFormat::q8_0; }

inline size_t source_row_bytes(SourceFormat format, int k) {
  const size_t groups = size_t(k) / kGroupSize;
  switch (format) {
    case SourceFormat::f32: return 4 * size_t(k);
    case SourceFormat::f16:
    case SourceFormat::bf16: return 2 * size_t(k);
    case SourceFormat::q8_0: return 34 * groups;
    case SourceFormat::q4_0: return 18 * groups;
    case SourceFormat::q4_1: return 20 * groups;
  }
  return 0;
}

// Rows one after the other without gaps, as in a file. k must be a multiple of 32 in block formats.
struct SourceRows {
  SourceFormat format;
  const std::byte* data;
  int num_rows;
};

struct PackingSource {
  std::vector<SourceRows> parts;  // one above the other; n rows together
  const float* bias;              // [n], or null
};

struct PackingKernels {
  // Writes panels [first, last) of `shape` into `panels`, which starts at panel 0. Panels are
  // independent, so threads may share the work.
  void (*pack)(const PackedMatrix& shape, const PackingSource& source, std::byte* panels, int first,
               int last);
  // Row `row` of the unpacked matrix as `k` floats.
  void (*row_to_f32)(const PackedMatrix& matrix, int row, float* out);
};

namespace avx512 { extern const PackingKernels kPackingKernels; }
namespace avx2 { extern const PackingKernels kPackingKernels; }
namespace portable { extern const PackingKernels kPackingKernels; }

}  // namespace tf
