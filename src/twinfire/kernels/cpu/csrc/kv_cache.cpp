#include "kv_cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "kv_wire.h"

namespace tf {

namespace {

constexpr int64_t kScaleBytes = kBlockTokens * sizeof(float);

}  // namespace

KvCache::KvCache(const KvShape& shape) : shape_(shape) {
  const int64_t plane_bytes = KvLayer{nullptr, 0, 0, shape.head_dim, shape.format}.plane_bytes();
  head_bytes_ = 2 * (plane_bytes + (shape.format == KvFormat::int8 ? kScaleBytes : 0));
  block_bytes_ = head_bytes_ * shape.num_kv_heads * shape.num_layers;
  memory_bytes_ = block_bytes_ * shape.num_blocks;
  void* memory = mmap(nullptr, size_t(memory_bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, size_t(memory_bytes_), MADV_HUGEPAGE);
  memory_ = static_cast<std::byte*>(memory);
}

KvCache::~KvCache() { munmap(memory_, size_t(memory_bytes_)); }

KvLayer KvCache::layer(int index) const {
  std::byte* base = memory_ + index * head_bytes_ * shape_.num_kv_heads;
  return {base, block_bytes_, head_bytes_, shape_.head_dim, shape_.format};
}

int64_t KvCache::bytes_per_block() const { return block_bytes_; }

void KvCache::copy_block(int64_t source, int64_t destination) {
  std::memcpy(memory_ + destination * block_bytes_, memory_ + source * block_bytes_,
              size_t(block_bytes_));
}

void KvCache::populate(int64_t first, int64_t count) {
#if defined(MADV_POPULATE_WRITE)
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t start = first * block_bytes_ / page_bytes * page_bytes;
  madvise(memory_ + start, size_t((first + count) * block_bytes_ - start), MADV_POPULATE_WRITE);
#endif
}

// Calls visit(elements in memory, is_value, elements on the wire, scales in memory, scales on the
// wire) for every plane of a block.
template <typename Byte, typename Visit>
static void for_each_plane(const KvCache& cache, int64_t block, Byte* wire, Visit visit) {
  const KvShape& shape = cache.shape();
  const int64_t plane_bytes = cache.layer(0).plane_bytes();
  const int64_t num_planes = int64_t(shape.num_layers) * 2 * shape.num_kv_heads;
  int64_t plane = 0;
  for (int layer = 0; layer < shape.num_layers; ++layer)
    for (int is_value = 0; is_value < 2; ++is_value)
      for (int head = 0; head < shape.num_kv_heads; ++head, ++plane) {
        std::byte* memory = cache.layer(layer).head(block, head);
        visit(memory + is_value * plane_bytes, is_value != 0, wire + plane * plane_bytes,
              memory + 2 * plane_bytes + is_value * kScaleBytes,
              wire + num_planes * plane_bytes + plane * kScaleBytes);
      }
}

void KvCache::export_block(int64_t block, std::span<std::byte> wire) const {
  const bool is_int8 = shape_.format == KvFormat::int8;
  const auto to_wire = is_int8 ? WirePlanes<uint8_t>::to_wire : WirePlanes<uint16_t>::to_wire;
  for_each_plane(*this, block, wire.data(),
                 [&](const std::byte* plane, bool is_value, std::byte* wire_plane,
                     const std::byte* scales, std::byte* wire_scales) {
                   to_wire(plane, is_value, size_t(shape_.head_dim), wire_plane);
                   if (is_int8) std::memcpy(wire_scales, scales, kScaleBytes);
                 });
}

void KvCache::import_block(int64_t block, std::span<const std::byte> wire) {
  const bool is_int8 = shape_.format == KvFormat::int8;
  const auto from_wire = is_int8 ? WirePlanes<uint8_t>::from_wire : WirePlanes<uint16_t>::from_wire;
  for_each_plane(*this, block, wire.data(),
                 [&](std::byte* plane, bool is_value, const std::byte* wire_plane,
                     std::byte* scales, const std::byte* wire_scales) {
                   from_wire(wire_plane, is_value, size_t(shape_.head_dim), plane);
                   if (is_int8) std::memcpy(scales, wire_scales, kScaleBytes);
                 });
}

}  // namespace tf
