// Paged attention in place: decode, chunked prefill and mixed steps in one kernel.
//
// Queries and keys are normed and turned here as well, so a layer's attention needs the fused rows
// and one pass before it (`write_kv`), or none where the plan's tiles write their own keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation_rows.h"
#include "attention_plan.h"
#include "heads.h"
#include "kv_cache.h"

namespace tf {

struct KvWriteArgs {
  HeadRows heads;
  KvLayer kv;
  const int32_t* slots;  // [num_tokens] block * kBlockTokens + offset
  const AttentionPlan* plan;
  int num_tokens;
};

struct AttentionArgs {
  HeadRows heads;
  KvLayer kv;
  const int32_t* slots;  // [num_tokens]
  AttentionPlan* plan;
  float scale;
  RowFormat format;  // of `out`: f32 or bf16
  std::byte* out;    // [num_tokens][query_width], in bf16 its padding written too
  size_t out_row_bytes;
  // What the thread probably reads after this tile, asked for meanwhile: that tile, or where it is
  // -1 the bytes at `next`, or where that is null nothing.
  int next_tile = -1;
  const std::byte* next = nullptr;
};

// One per instruction set: TF_FOR_ISA(isa, kAttentionKernels).
struct AttentionKernels {
  // Stores keys and values, for plans whose tiles do not; a tile is a run of tokens.
  int (*num_write_tiles)(const KvWriteArgs&);
  void (*write_kv)(const KvWriteArgs&, int tile);

  // Tiles are those of the plan. `scratch` is 64-byte aligned, one per thread.
  size_t (*scratch_bytes)(const HeadShape&, KvFormat);
  void (*attend)(const AttentionArgs&, int tile, std::byte* scratch);
};

namespace portable {
extern const AttentionKernels kAttentionKernels;
}
namespace avx2 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512 {
extern const AttentionKernels kAttentionKernels;
}

}  // namespace tf
