#include "attention.h"

#include <algorithm>
#include <cfloat>
#include <limits>

#include "attention_tile.h"
#include "exp2.h"
#include "kv_write.h"
#include "simd.h"

namespace tf::TF_ISA {

namespace {

constexpr int kWriteTileTokens = 16;
// Memory is asked for so many planes before it is read.
constexpr int kPlanesAhead = 8;
constexpr float kLog2E = 1.4426950408889634f;
// Where a running maximum starts: finite, so that a chunk of hidden keys makes no NaN.
constexpr float kLowest = -FLT_MAX;

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

int max_tile_rows(const HeadShape& shape) {
  const int rows = AttentionPlan::max_tile_tokens(shape) * shape.queries_per_kv_head();
  return (rows + kGroupRows - 1) / kGroupRows * kGroupRows;
}

// What a thread holds while it computes a tile.
struct Workspace {
  uint32_t* queries;   // [groups][head_dim / 2][kGroupRows] pairs of bf16
  float* mixed;        // [rows][head_dim]
  float* maximum;      // [rows]
  float* total;        // [rows]
  float* scores;       // [kGroupRows][kChunkKeys]
  uint16_t* weights;   // [kGroupRows][kChunkKeys]
  uint16_t* widened;   // int8: [2][kChunkBlocks][kBlockTokens * head_dim]

  static size_t bytes(const HeadShape& shape, KvFormat format) {
    return Workspace(shape, format, nullptr).used_;
  }
  Workspace(const HeadShape& shape, KvFormat format, std::byte* memory) : memory_(memory) {
    const size_t rows = size_t(max_tile_rows(shape)), dim = size_t(shape.head_dim);
    take(queries, rows * dim / 2);
    take(mixed, rows * dim);
    take(maximum, rows);
    take(total, rows);
    take(scores, kGroupRows * kChunkKeys);
    take(weights, kGroupRows * kChunkKeys);
    take(widened, format == KvFormat::int8 ? 2 * kChunkKeys * dim : 0);
  }

 private:
  template <typename T>
  void take(T*& part, size_t count) {
    part = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += aligned(count * sizeof(T));
  }
  std::byte* memory_;
  size_t used_ = 0;
};

// One chunk of keys and values of one head. Blocks that no query sees stand for the nearest one
// that some query does.
template <typename Element>
struct Chunk {
  int index;
  int first_key;
  int end_block;
  const Element* keys[kChunkBlocks];
  const Element* values[kChunkBlocks];
  const float* key_scales[kChunkBlocks];  // null in bf16
  const float* value_scales[kChunkBlocks];
};

// The planes to ask for while those of a chunk are read.
template <typename Element>
struct Ahead {
  const Element* of_keys[kChunkBlocks];
  const Element* of_values[kChunkBlocks];
};

// What one chunk gives a group's rows, in lanes: each row's largest score and sum of weights.
struct ChunkSums {
  alignas(64) float maximum[kLanes];
  alignas(64) float total[kLanes];
};

class TileRun {
 public:
  TileRun(const AttentionArgs& args, int tile, std::byte* scratch)
      : args_(args),
        plan_(*args.plan),
        shape_(plan_.shape()),
        tile_(plan_.tile(tile)),
        kv_head_(tile % shape_.num_kv_heads),
        num_rows_(tile_.num_tokens * shape_.queries_per_kv_head()),
        own_planes_(plan_, args.kv, tile),
        next_planes_(plan_, args.kv, std::max(0, args.next_tile)),
        work_(shape_, args.kv.format, scratch) {}

  void run() {
    const AttentionStep& step = plan_.step();
    if (tile_.writes_kv) {
      const int end = tile_.first_row + tile_.num_tokens;
      store_kv_rows(args_.heads, args_.kv, args_.slots, tile_.first_row, end,
                    step.query_starts[tile_.sequence + 1] - 1, tile_.num_tokens, kv_head_);
    }
    ask_for_next_slot();
    take_queries();
    clear_sums();
    attend_chunks();
    if (tile_.split >= 0) {
      if (!plan_.finish_split_tile(tile_, kv_head_)) return;
      merge_partials();
    }
    write_out();
  }

 private:
  int group_rows(int first_row) const { return std::min(kGroupRows, num_rows_ - first_row); }
  int position(int row) const {
    return tile_.first_position + row / shape_.queries_per_kv_head();
  }

  void take_queries() {
    const int dim = shape_.head_dim, per_head = shape_.queries_per_kv_head();
    const F32 scale = set1(args_.scale * kLog2E);
    alignas(64) float turned[kMaxHeadDim];
    alignas(64) uint16_t narrow[kMaxHeadDim];
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t token = tile_.first_row + row / per_head;
      const float* query = args_.heads.rows + token * shape_.fused_width() +
                           (kv_head_ * per_head + row % per_head) * dim;
      const float* factors =
          args_.heads.rope_factors ? args_.heads.rope_factors + token * dim : nullptr;
      turn_head(query, args_.heads.query_norm, args_.heads.norm_eps, factors, dim, turned);
      for (int i = 0; i < dim; i += kLanes)
        store_bf16(narrow + i, mul(load(turned + i), scale));
      uint32_t* pairs =
          work_.queries + row / kGroupRows * kGroupRows * (dim / 2) + row % kGroupRows;
      for (int pair = 0; pair < dim / 2; ++pair)
        pairs[pair * kGroupRows] = load_pair(narrow + 2 * pair);
    }
  }

  void clear_sums() {
    std::fill_n(work_.maximum, num_rows_, kLowest);
    std::fill_n(work_.total, num_rows_, 0.0f);
    std::fill_n(work_.mixed, num_rows_ * shape_.head_dim, 0.0f);
  }

  template <typename Element>
  Chunk<Element> chunk_at(int index) const {
    const AttentionStep& step = plan_.step();
    const KvLayer& kv = args_.kv;
    Chunk<Element> chunk{index, index * kChunkKeys, 0, {}, {}, {}, {}};
    const int32_t* table = step.block_tables + int64_t(tile_.sequence) * step.table_width;
    const int last_block = position(num_rows_ - 1) / kBlockTokens;
    const int first_block = lowest_key(0) / kBlockTokens;
    chunk.end_block = std::min(kChunkBlocks, last_block - index * kChunkBlocks + 1);
    for (int i = 0; i < kChunkBlocks; ++i) {
      const int block = std::clamp(index * kChunkBlocks + i, first_block, last_block);
      const std::byte* keys = kv.head(table[block], kv_head_);
      const std::byte* values = keys + kv.plane_bytes();
      chunk.keys[i] = reinterpret_cast<const Element*>(keys);
      chunk.values[i] = reinterpret_cast<const Element*>(values);
      if constexpr (sizeof(Element) == 1) {
        chunk.key_scales[i] = reinterpret_cast<const float*>(values + kv.plane_bytes());
        chunk.value_scales[i] = chunk.key_scales[i] + kBlockTokens;
      }
    }
    return chunk;
  }

  // Signed bytes are exact in bf16; their scales go to the scores and to the weights.
  Chunk<uint16_t> widened(const Chunk<int8_t>& chunk) const {
    const size_t plane_elements = size_t(kBlockTokens * shape_.head_dim);
    Chunk<uint16_t> wide{chunk.index, chunk.first_key, chunk.end_block, {}, {}, {}, {}};
    for (int i = 0; i < chunk.end_block; ++i) {
      uint16_t* wide_keys = work_.widened + size_t(2 * i) * plane_elements;
      wide.keys[i] = widen(chunk.keys[i], plane_elements, wide_keys);
      wide.values[i] = widen(chunk.values[i], plane_elements, wide_keys + plane_elements);
      wide.key_scales[i] = chunk.key_scales[i];
      wide.value_scales[i] = chunk.value_scales[i];
    }
    return wide;
  }

  static const uint16_t* widen(const int8_t* plane, size_t count, uint16_t* wide) {
    for (size_t i = 0; i < count; i += 2 * kLanes)
      store_i32(reinterpret_cast<int32_t*>(wide + i), load_pairs(plane + i));
    return wide;
  }

  int lowest_key(int row) const {
    return plan_.window() ? std::max(0, position(row) - plan_.window() + 1) : 0;
  }

  void attend_chunks() {
    if (args_.kv.format == KvFormat::bf16) return attend_in_place<uint16_t>();
    // Bytes are widened on their way into each product, or once for all where there are many.
    if (num_rows_ <= kMixRows) return attend_in_place<int8_t>();
    for (int index = tile_.first_chunk; index < tile_.end_chunk; ++index) {
      const Chunk<uint16_t> chunk = widened(chunk_at<int8_t>(index));
      for (int row = 0; row < num_rows_; row += kGroupRows)
        attend_group<uint16_t>(chunk, row, nullptr);
    }
  }

  template <typename Element>
  void attend_in_place() {
    // Of several groups only the first would wait for memory.
    const bool reads_ahead = num_rows_ <= kGroupRows;
    for (int index = tile_.first_chunk; index < tile_.end_chunk; ++index) {
      const Chunk<Element> chunk = chunk_at<Element>(index);
      const Ahead<Element> ahead = planes_ahead<Element>(index);
      for (int row = 0; row < num_rows_; row += kGroupRows)
        attend_group<Element>(chunk, row, reads_ahead ? &ahead : nullptr);
    }
  }

  template <typename Element>
  Ahead<Element> planes_ahead(int index) const {
    const int first = (index - tile_.first_chunk) * PlaneStream::kChunkPlanes;
    const int num_blocks = own_planes_.blocks_of_chunk(index - tile_.first_chunk);
    Ahead<Element> ahead{};
    for (int i = 0; i < num_blocks; ++i) {
      ahead.of_keys[i] = plane_at<Element>(first + i + kPlanesAhead);
      ahead.of_values[i] = plane_at<Element>(first + num_blocks + i + kPlanesAhead);
    }
    return ahead;
  }

  // What the thread reads at a position of the tile's planes, or so much later.
  template <typename Element>
  const Element* plane_at(int position) const {
    const auto* plane = [&] {
      const int later = position - own_planes_.size();
      if (later < 0) return own_planes_.at(position);
      if (args_.next_tile >= 0) return next_planes_.at(std::min(later, next_planes_.size() - 1));
      return args_.next ? args_.next + later * args_.kv.plane_bytes() : own_planes_.at(0);
    }();
    return reinterpret_cast<const Element*>(plane);
  }

  // The lines that a next tile of one token will write.
  void ask_for_next_slot() const {
    if (args_.next_tile < 0) return;
    const AttentionTile& next = plan_.tile(args_.next_tile);
    if (!next.writes_kv || next.num_tokens > 1) return;
    const int32_t slot = args_.slots[next.first_row];
    const int offset = slot % kBlockTokens, dim = shape_.head_dim;
    const int element = args_.kv.format == KvFormat::bf16 ? 2 : 1;
    const int kv_head = args_.next_tile % shape_.num_kv_heads;
    const std::byte* keys = args_.kv.head(slot / kBlockTokens, kv_head);
    const std::byte* values = keys + args_.kv.plane_bytes();
    for (int pair = 0; pair < dim / 2; ++pair)
      __builtin_prefetch(keys + (pair * kBlockTokens + offset) * 2 * element, 1, kSecondLevel);
    for (int at = 0; at < 2 * dim * element; at += 64)
      __builtin_prefetch(values + offset / 2 * dim * 2 * element + at, 1, kSecondLevel);
  }

  template <typename Element>
  void attend_group(const Chunk<Element>& chunk, int first_row, const Ahead<Element>* next) {
    const int rows = group_rows(first_row), dim = shape_.head_dim;
    const int lowest = lowest_key(first_row) - chunk.first_key;
    const int highest = position(first_row + rows - 1) - chunk.first_key;
    ChunkSums sums;
    std::fill_n(sums.maximum, kLanes, kLowest);
    std::fill_n(sums.total, kLanes, 0.0f);
    float* mixed = work_.mixed + first_row * dim;
    const bool is_seen = highest >= 0 && lowest < kChunkKeys;
    const int first_block = std::max(0, lowest) / kBlockTokens;
    const int end_block = std::min(chunk.end_block, highest / kBlockTokens + 1);
    if (is_seen) {
      score_group<Element>(work_.queries + first_row * (dim / 2), rows, chunk.keys, first_block,
                           end_block, dim, work_.scores, next ? next->of_keys : nullptr);
      for (int r = 0; r < rows; ++r)
        weigh_row(chunk, first_block, end_block, first_row + r, r, sums);
    }
    const Planes<Element> ahead = next ? next->of_values : nullptr;
    if (tile_.split >= 0) {
      float* partial = chunk_partial(chunk.index);
      std::copy_n(sums.maximum, rows, partial + first_row);
      std::copy_n(sums.total, rows, partial + num_rows_ + first_row);
      float* partial_mixed = partial + 2 * num_rows_ + first_row * dim;
      if (is_seen)
        mix_group<Element>(work_.weights, rows, chunk.values, first_block, end_block, dim, nullptr,
                           partial_mixed, ahead);
      else
        std::fill_n(partial_mixed, rows * dim, 0.0f);
    } else if (is_seen) {
      alignas(64) float keep[kLanes], add[kLanes];
      merge_sums(sums, first_row, rows, keep, add);
      const Merge merge{keep, add};
      mix_group<Element>(work_.weights, rows, chunk.values, first_block, end_block, dim, &merge,
                         mixed, ahead);
    }
  }

  // Turns one row's scores into weights; keys that it does not see get exactly none.
  template <typename Element>
  void weigh_row(const Chunk<Element>& chunk, int first_block, int end_block, int row, int r,
                 ChunkSums& sums) {
    float* scores = work_.scores + r * kChunkKeys;
    uint16_t* weights = work_.weights + r * kChunkKeys;
    const int begin = first_block * kBlockTokens, end = end_block * kBlockTokens;
    const int first_seen = std::clamp(lowest_key(row) - chunk.first_key, begin, end);
    const int end_seen = std::clamp(position(row) - chunk.first_key + 1, first_seen, end);
    const bool is_int8 = args_.kv.format == KvFormat::int8;
    if (is_int8)
      for (int i = begin; i < end; i += kLanes)
        store(scores + i, mul(load(scores + i), load(chunk.key_scales[i / kBlockTokens] +
                                                     i % kBlockTokens)));
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    std::fill(scores + begin, scores + first_seen, kHidden);
    std::fill(scores + end_seen, scores + end, kHidden);

    F32 highest = set1(kLowest);
    for (int i = begin; i < end; i += kLanes) highest = max(highest, load(scores + i));
    const float maximum = largest(highest);
    const F32 shift = set1(maximum);
    F32 total = zero();
    const auto weight_of = [&](int i) {
      const F32 weight = exp2_weight(sub(load(scores + i), shift));
      total = add(total, weight);
      if (!is_int8) return weight;
      return mul(weight, load(chunk.value_scales[i / kBlockTokens] + i % kBlockTokens));
    };
    for (int i = begin; i < end; i += kBlockTokens) {
      const F32 first = weight_of(i), second = weight_of(i + kLanes);
      store_bf16(weights + i, first, second);
    }
    sums.maximum[r] = maximum;
    sums.total[r] = sum(total);
  }

  // Merges a chunk's sums into those of the rows so far; gives the factors for the values.
  void merge_sums(const ChunkSums& sums, int first_row, int rows, float* keep, float* add) {
    const F32 before = load_first(work_.maximum + first_row, rows);
    const F32 chunk_maximum = load(sums.maximum);
    const F32 maximum = max(before, chunk_maximum);
    const F32 keep_factor = exp2_weight(sub(before, maximum));
    const F32 add_factor = exp2_weight(sub(chunk_maximum, maximum));
    const F32 total = load_first(work_.total + first_row, rows);
    store_first(work_.maximum + first_row, maximum, rows);
    store_first(work_.total + first_row,
                fma(load(sums.total), add_factor, mul(total, keep_factor)), rows);
    store(keep, keep_factor);
    store(add, add_factor);
  }

  float* chunk_partial(int index) {
    const AttentionSplit& split = plan_.split(tile_.split);
    return plan_.partials(tile_, kv_head_) +
           (index - split.first_chunk) * plan_.partial_floats_per_chunk(tile_.num_tokens);
  }

  void merge_partials() {
    const AttentionSplit& split = plan_.split(tile_.split);
    const int dim = shape_.head_dim;
    for (int index = split.first_chunk; index < split.end_chunk; ++index) {
      const float* partial = chunk_partial(index);
      for (int first_row = 0; first_row < num_rows_; first_row += kGroupRows) {
        const int rows = group_rows(first_row);
        ChunkSums sums{};
        std::copy_n(partial + first_row, rows, sums.maximum);
        std::copy_n(partial + num_rows_ + first_row, rows, sums.total);
        alignas(64) float keep[kLanes], add[kLanes];
        merge_sums(sums, first_row, rows, keep, add);
        for (int r = 0; r < rows; ++r) {
          float* mixed = work_.mixed + (first_row + r) * dim;
          const float* chunk_mixed = partial + 2 * num_rows_ + (first_row + r) * dim;
          for (int i = 0; i < dim; i += kLanes)
            store(mixed + i, fma(load(chunk_mixed + i), set1(add[r]),
                                 mul(load(mixed + i), set1(keep[r]))));
        }
      }
    }
  }

  void write_out() {
    const int dim = shape_.head_dim, per_head = shape_.queries_per_kv_head();
    const bool is_bf16 = args_.format == RowFormat::bf16;
    const size_t element = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    const size_t width = size_t(shape_.query_width()), padded_width = (width + 31) / 32 * 32;
    for (int row = 0; row < num_rows_; ++row) {
      const size_t token = size_t(tile_.first_row + row / per_head);
      std::byte* out_row = args_.out + token * args_.out_row_bytes;
      std::byte* out = out_row + size_t((kv_head_ * per_head + row % per_head) * dim) * element;
      const float* mixed = work_.mixed + row * dim;
      const F32 inverse = set1(1.0f / work_.total[row]);
      for (int i = 0; i < dim; i += kLanes) {
        // Adding zero gives every zero one sign: which sign it had may depend on hidden keys.
        const F32 value = add(mul(load(mixed + i), inverse), zero());
        if (is_bf16)
          store_bf16(reinterpret_cast<uint16_t*>(out) + i, value);
        else
          store(reinterpret_cast<float*>(out) + i, value);
      }
      if (is_bf16 && kv_head_ == shape_.num_kv_heads - 1)
        std::memset(out_row + width * element, 0, (padded_width - width) * element);
    }
  }

  const AttentionArgs& args_;
  AttentionPlan& plan_;
  const HeadShape& shape_;
  const AttentionTile& tile_;
  const int kv_head_;
  const int num_rows_;
  const PlaneStream own_planes_;
  const PlaneStream next_planes_;
  Workspace work_;
};

int num_write_tiles(const KvWriteArgs& args) {
  return (args.num_tokens + kWriteTileTokens - 1) / kWriteTileTokens;
}

void write_kv(const KvWriteArgs& args, int tile) {
  const AttentionStep& step = args.plan->step();
  int row = tile * kWriteTileTokens;
  const int end = std::min(args.num_tokens, row + kWriteTileTokens);
  const int32_t* starts = step.query_starts;
  int sequence = int(std::upper_bound(starts, starts + step.num_sequences + 1, row) - starts) - 1;
  for (; row < end; ++sequence) {
    const int sequence_end = starts[sequence + 1];
    const int run_end = std::min(end, sequence_end);
    for (int head = 0; head < args.heads.shape.num_kv_heads; ++head)
      store_kv_rows(args.heads, args.kv, args.slots, row, run_end, sequence_end - 1,
                    sequence_end - starts[sequence], head);
    row = run_end;
  }
}

size_t scratch_bytes(const HeadShape& shape, KvFormat format) {
  return Workspace::bytes(shape, format);
}

void attend(const AttentionArgs& args, int tile, std::byte* scratch) {
  TileRun(args, tile, scratch).run();
}

}  // namespace

const AttentionKernels kAttentionKernels = {num_write_tiles, write_kv, scratch_bytes, attend};

}  // namespace tf::TF_ISA
