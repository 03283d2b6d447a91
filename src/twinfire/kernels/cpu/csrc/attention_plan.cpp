#include "attention_plan.h"

#include <algorithm>

namespace tf {

namespace {

// Enough rows to use a chunk of keys many times while it is in the second-level cache.
constexpr int kTileQueryRows = 96;
// Work is shared out in pieces of this fraction of a thread's share.
constexpr int kTilesPerThread = 4;
constexpr int kLeastRangeChunks = 2;

int tile_rows(const HeadShape& shape, int num_tokens) {
  return num_tokens * shape.queries_per_kv_head();
}

}  // namespace

int AttentionPlan::max_tile_tokens(const HeadShape& shape) {
  return std::max(1, kTileQueryRows / shape.queries_per_kv_head());
}

void AttentionPlan::build(const AttentionStep& step, int window, int num_threads) {
  step_ = step;
  window_ = window;
  tiles_.clear();
  splits_.clear();
  writes_kv_ = true;
  const int most_tokens = max_tile_tokens(shape_);
  for (int s = 0; s < step.num_sequences; ++s) {
    const int num_tokens = step.query_starts[s + 1] - step.query_starts[s];
    const int first_position = step.context_lens[s] - num_tokens;
    writes_kv_ = writes_kv_ && num_tokens <= most_tokens;
    for (int token = 0; token < num_tokens; token += most_tokens) {
      const int first = first_position + token, count = std::min(most_tokens, num_tokens - token);
      const int lowest_key = window ? std::max(0, first - window + 1) : 0;
      tiles_.push_back({s, step.query_starts[s] + token, count, first, lowest_key / kChunkKeys,
                        (first + count - 1) / kChunkKeys + 1, -1, false});
    }
  }
  for (AttentionTile& tile : tiles_) tile.writes_kv = writes_kv_;
  if (num_threads > 1) split_long_tiles(num_threads);
  const auto work = [&](const AttentionTile& tile) {
    return int64_t(tile.end_chunk - tile.first_chunk) * tile_rows(shape_, tile.num_tokens);
  };
  // The longest first, so that the threads finish together.
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [&](const auto& a, const auto& b) { return work(a) > work(b); });
}

void AttentionPlan::split_long_tiles(int num_threads) {
  // A few rows cost as much as a full group: then reading the keys is what takes time.
  const auto weight = [&](const AttentionTile& tile) {
    return std::max(12, tile_rows(shape_, tile.num_tokens));
  };
  int64_t total = 0;
  for (const AttentionTile& tile : tiles_)
    total += int64_t(tile.end_chunk - tile.first_chunk) * weight(tile) * shape_.num_kv_heads;
  const int64_t most_work = total / (int64_t(num_threads) * kTilesPerThread);

  std::vector<AttentionTile> cut;
  int64_t num_partials = 0;
  for (const AttentionTile& whole : tiles_) {
    const int range = std::max<int>(kLeastRangeChunks, int(most_work / weight(whole)));
    // The tile that writes must see all its own tokens.
    const int own_chunk = whole.first_position / kChunkKeys;
    const int last_start = std::min(own_chunk, whole.end_chunk - 1);
    if (whole.end_chunk - whole.first_chunk <= range || last_start <= whole.first_chunk) {
      cut.push_back(whole);
      continue;
    }
    AttentionSplit split{whole.first_chunk, whole.end_chunk, 0, num_partials};
    for (int chunk = whole.first_chunk; chunk < whole.end_chunk;) {
      const int next = chunk + range > last_start ? whole.end_chunk : chunk + range;
      const bool is_last = next == whole.end_chunk;
      AttentionTile piece = whole;
      piece.first_chunk = chunk;
      piece.end_chunk = next;
      piece.split = int(splits_.size());
      piece.writes_kv = whole.writes_kv && is_last;
      cut.push_back(piece);
      ++split.num_tiles;
      chunk = next;
    }
    num_partials += (split.end_chunk - split.first_chunk) *
                    partial_floats_per_chunk(whole.num_tokens) * shape_.num_kv_heads;
    splits_.push_back(split);
  }
  tiles_ = std::move(cut);
  if (int64_t(partials_.size()) < num_partials) partials_.resize(size_t(num_partials));
  const size_t num_counters = splits_.size() * size_t(shape_.num_kv_heads);
  if (num_counters > num_counters_) {
    unfinished_ = std::make_unique<std::atomic<int>[]>(num_counters);
    num_counters_ = num_counters;
  }
  for (size_t index = 0; index < num_counters; ++index)
    unfinished_[index].store(splits_[index / size_t(shape_.num_kv_heads)].num_tiles,
                             std::memory_order_relaxed);
}

float* AttentionPlan::partials(const AttentionTile& tile, int kv_head) {
  const AttentionSplit& split = splits_[size_t(tile.split)];
  const int64_t floats_per_head =
      (split.end_chunk - split.first_chunk) * partial_floats_per_chunk(tile.num_tokens);
  return partials_.data() + split.partial_offset + kv_head * floats_per_head;
}

bool AttentionPlan::finish_split_tile(const AttentionTile& tile, int kv_head) {
  std::atomic<int>& counter = unfinished_[size_t(tile.split * shape_.num_kv_heads + kv_head)];
  if (counter.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  // The next layer counts again.
  counter.store(splits_[size_t(tile.split)].num_tiles, std::memory_order_relaxed);
  return true;
}

}  // namespace tf
