// What the nodes of a program work on: a step's inputs, the buffers between nodes, and what all
// layers share in a step. Owned by the program; nodes only look things up here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "activation_rows.h"
#include "attention.h"
#include "cpu_features.h"
#include "gemm.h"
#include "packing.h"
#include "rows.h"
#include "sampling.h"

namespace tf {

// Bytes at a multiple of 64 that only grow; what they hold is lost when they do, and zero then.
class AlignedBytes {
 public:
  std::byte* data() const { return bytes_.get(); }
  size_t size() const { return size_; }
  void reserve(size_t size) {
    if (size <= size_) return;
    const size_t rounded = (size + 63) / 64 * 64;
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
    if (!bytes_) throw std::bad_alloc();
    std::memset(bytes_.get(), 0, rounded);
    size_ = rounded;
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t size_ = 0;
};

// The arrays of a StepBatch, and which kept rows the tokens read.
struct StepInputs {
  int num_tokens;
  int num_sequences;
  int table_width;
  int num_logit_rows;
  int num_block_copies;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const int32_t* logit_rows;
  const int32_t* block_copies;
  const int32_t* kept_rows = nullptr;  // null: the program reads none
};

// Rows between two nodes: one per token, or one per row of the step that wants logits.
struct Buffer {
  RowFormat format;
  int width;
  bool per_logit_row;
  AlignedBytes bytes;

  // Float rows are dense, as the attention and the embedding expect them.
  size_t row_bytes() const {
    return format == RowFormat::f32 ? sizeof(float) * size_t(width)
                                    : activation_row_bytes(format, width);
  }
};

struct RopeFactors {
  std::vector<float> inv_freq;
  float attention_factor;
  AlignedBytes factors;  // [tokens][head_dim]

  int head_dim() const { return 2 * int(inv_freq.size()); }
};

// One thread's own memory.
struct ThreadScratch {
  AlignedBytes rows;  // a node's input that the thread computed for itself
  AlignedBytes workspace;
  const std::byte* reads_next = nullptr;  // what the thread probably reads after its tile
  uint64_t prepared_phase = 0;  // whose input `rows` holds, counted over all runs
};

struct StepContext {
  StepContext(Isa isa, int num_threads)
      : num_threads(num_threads),
        gemm(TF_FOR_ISA(isa, kGemmKernels)),
        packing(TF_FOR_ISA(isa, kPackingKernels)),
        attention(TF_FOR_ISA(isa, kAttentionKernels)),
        row_ops(TF_FOR_ISA(isa, kRowKernels)),
        sampling(TF_FOR_ISA(isa, kSamplingKernels)) {}

  const int num_threads;
  const GemmKernels& gemm;
  const PackingKernels& packing;
  const AttentionKernels& attention;
  const RowKernels& row_ops;
  const SamplingKernels& sampling;

  StepInputs inputs{};
  KvCache* kv = nullptr;
  std::vector<Buffer> buffers;
  std::vector<std::unique_ptr<RopeFactors>> ropes;
  std::vector<std::unique_ptr<AttentionPlan>> plans;
  std::vector<int> plan_windows;

  int num_rows(int buffer) const {
    return buffers[size_t(buffer)].per_logit_row ? inputs.num_logit_rows : inputs.num_tokens;
  }
  std::byte* data(int buffer) const { return buffers[size_t(buffer)].bytes.data(); }
  float* floats(int buffer) const { return reinterpret_cast<float*>(data(buffer)); }
};

}  // namespace tf
