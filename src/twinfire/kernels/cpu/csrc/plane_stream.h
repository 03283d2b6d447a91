// The planes of keys and values in the order in which a tile of few rows reads them: of every chunk
// first its keys, then its values.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "kv_cache.h"

namespace tf {

constexpr int kChunkBlocks = kChunkKeys / kBlockTokens;

class PlaneStream {
 public:
  // `tile` of `plan`; both are used later.
  PlaneStream(const AttentionPlan& plan, const KvLayer& kv, int tile)
      : kv_(kv), kv_head_(tile % plan.shape().num_kv_heads) {
    const AttentionTile& own = plan.tile(tile);
    const AttentionStep& step = plan.step();
    const int window = plan.window();
    blocks_ = step.block_tables + int64_t(own.sequence) * step.table_width;
    first_chunk_ = own.first_chunk;
    first_block_ = window ? std::max(0, own.first_position - window + 1) / kBlockTokens : 0;
    last_block_ = std::min((own.first_position + own.num_tokens - 1) / kBlockTokens,
                           own.end_chunk * kChunkBlocks - 1);
  }

  // The positions of a chunk's keys and values begin at 2 * kChunkBlocks for each chunk before it.
  static constexpr int kChunkPlanes = 2 * kChunkBlocks;
  int blocks_of_chunk(int chunk) const {
    return std::min(kChunkBlocks, last_block_ - (first_chunk_ + chunk) * kChunkBlocks + 1);
  }
  int size() const {
    const int last = last_block_ / kChunkBlocks - first_chunk_;
    return last * kChunkPlanes + 2 * blocks_of_chunk(last);
  }
  const std::byte* at(int position) const {
    const int chunk = position / kChunkPlanes, plane = position % kChunkPlanes;
    const int num_blocks = blocks_of_chunk(chunk);
    const bool is_value = plane >= num_blocks;
    const int block =
        (first_chunk_ + chunk) * kChunkBlocks + (is_value ? plane - num_blocks : plane);
    return kv_.head(blocks_[std::max(block, first_block_)], kv_head_) +
           (is_value ? kv_.plane_bytes() : 0);
  }

 private:
  const KvLayer& kv_;
  int kv_head_;
  const int32_t* blocks_;
  int first_chunk_, first_block_, last_block_;
};

}  // namespace tf
