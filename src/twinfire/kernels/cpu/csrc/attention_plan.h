// How one step's attention is cut into tiles, decided once and used by every layer of one window.
//
// A tile is a run of one sequence's queries and a range of its keys, for one KV head. Keys are
// taken in chunks that begin at fixed positions; each chunk's softmax is complete in itself, and
// chunks are merged in order of position. So neither how queries are cut into tiles nor how keys
// are cut into ranges changes a bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "heads.h"

namespace tf {

constexpr int kChunkKeys = 256;

// The step's sequences; the arrays of a StepBatch.
struct AttentionStep {
  int num_sequences;
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  const int32_t* block_tables;  // [num_sequences][table_width]
  int table_width;
};

struct AttentionTile {
  int32_t sequence;
  int32_t first_row;       // of the step's tokens
  int32_t num_tokens;
  int32_t first_position;  // of the first token
  int32_t first_chunk;
  int32_t end_chunk;
  int32_t split;           // index into the plan's splits, or -1 when the tile sees all its keys
  bool writes_kv;          // stores the keys and values of its own tokens first
};

// One run of queries whose keys are shared out among several tiles.
struct AttentionSplit {
  int32_t first_chunk;
  int32_t end_chunk;
  int32_t num_tiles;
  int64_t partial_offset;  // floats, of KV head 0
};

class AttentionPlan {
 public:
  explicit AttentionPlan(const HeadShape& shape) : shape_(shape) {}

  // `window` 0: all keys up to the query. Keeps the pointers of `step` until the next build.
  // Splits keys only as far as `num_threads` need to share the work evenly.
  void build(const AttentionStep& step, int window, int num_threads);

  const AttentionStep& step() const { return step_; }
  const HeadShape& shape() const { return shape_; }
  int window() const { return window_; }
  int num_tiles() const { return int(tiles_.size()) * shape_.num_kv_heads; }
  // Whether tiles store their own tokens' keys and values, which then need no pass before.
  bool writes_kv() const { return writes_kv_; }

  const AttentionTile& tile(int index) const { return tiles_[index / shape_.num_kv_heads]; }
  const AttentionSplit& split(int index) const { return splits_[index]; }
  int64_t partial_floats_per_chunk(int num_tokens) const {
    return int64_t(num_tokens) * shape_.queries_per_kv_head() * (shape_.head_dim + 2);
  }
  // [chunk][rows * (head_dim + 2)] of one split and KV head.
  float* partials(const AttentionTile& tile, int kv_head);
  // Whether the caller is the last of the split's tiles to finish; it must merge the partials.
  bool finish_split_tile(const AttentionTile& tile, int kv_head);

  static int max_tile_tokens(const HeadShape& shape);

 private:
  void split_long_tiles(int num_threads);

  HeadShape shape_;
  AttentionStep step_{};
  int window_ = 0;
  bool writes_kv_ = false;
  std::vector<AttentionTile> tiles_;
  std::vector<AttentionSplit> splits_;
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;
  size_t num_counters_ = 0;
};

}  // namespace tf
