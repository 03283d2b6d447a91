// The bytes of all KV blocks, mapped once and zeroed, and their way to and from the wire.
//
// All layers of a block lie together, so that the next block touches one new page and not one in
// every layer. In it one layer and head is contiguous, in the order that dot products of pairs read:
// keys [head_dim / 2][32 tokens][2], then values [32 tokens / 2][head_dim][2]. In int8 the
// elements are bytes and two runs of 32 float32 follow, the scales of the keys and of the values.
// The wire order is canonical: [layer][k, v][head][token][head_dim] of the elements, then in int8
// the same of the scales with head_dim 1. Never computes anything; the kernels write the tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tf {

constexpr int kBlockTokens = 32;

enum class KvFormat { bf16, int8 };

struct KvShape {
  int num_layers;
  int num_kv_heads;
  int head_dim;  // a multiple of 16
  KvFormat format;
  int64_t num_blocks;
};

// One layer, as kernels see it.
struct KvLayer {
  std::byte* base;
  int64_t block_stride;  // bytes
  int64_t head_stride;   // bytes
  int head_dim;
  KvFormat format;

  int64_t plane_bytes() const {
    return int64_t(kBlockTokens) * head_dim * (format == KvFormat::bf16 ? 2 : 1);
  }
  std::byte* head(int64_t block, int kv_head) const {
    return base + block * block_stride + kv_head * head_stride;
  }
};

class KvCache {
 public:
  // std::bad_alloc when the address space is refused.
  explicit KvCache(const KvShape& shape);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvShape& shape() const { return shape_; }
  KvLayer layer(int index) const;
  int64_t memory_bytes() const { return memory_bytes_; }
  int64_t bytes_per_block() const;

  // Block ids must lie in [0, num_blocks).
  void copy_block(int64_t source, int64_t destination);
  void export_block(int64_t block, std::span<std::byte> wire) const;
  void import_block(int64_t block, std::span<const std::byte> wire);
  // Takes the pages of blocks [first, first + count) from the system, if it knows how to without
  // changing them. May run beside anything else.
  void populate(int64_t first, int64_t count);

 private:
  KvShape shape_;
  int64_t head_bytes_;
  int64_t block_bytes_;
  int64_t memory_bytes_;
  std::byte* memory_;
};

}  // namespace tf
