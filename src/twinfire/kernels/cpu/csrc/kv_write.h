// Keys and values of new tokens, normed and turned, into their slots.
#pragma once

#include <algorithm>

#include "attention.h"
#include "head_turn.h"
#include "kv_cache.h"
#include "quantise_rows.h"
#include "simd.h"

namespace tf::TF_ISA {

constexpr int kMaxHeadDim = 1024;

template <typename Element>
void scatter_key(const Element* key, int offset, int head_dim, std::byte* plane) {
  auto* keys = reinterpret_cast<Element*>(plane) + offset * 2;
  for (int i = 0; i < head_dim; i += 2)
    std::memcpy(keys + i * kBlockTokens, key + i, 2 * sizeof(Element));
}

template <typename Element>
void scatter_value(const Element* value, int offset, int head_dim, std::byte* plane) {
  auto* values = reinterpret_cast<Element*>(plane) + offset / 2 * head_dim * 2 + offset % 2;
  for (int i = 0; i < head_dim; ++i) values[2 * i] = value[i];
}

// One token's key and value of one head.
inline void store_kv(const HeadRows& heads, const KvLayer& kv, int row, int32_t slot, int kv_head) {
  const HeadShape& shape = heads.shape;
  const int head_dim = shape.head_dim, offset = slot % kBlockTokens;
  const float* key = heads.rows + int64_t(row) * shape.fused_width() + shape.query_width() +
                     kv_head * head_dim;
  const float* value = key + shape.kv_width();
  const float* factors =
      heads.rope_factors ? heads.rope_factors + int64_t(row) * head_dim : nullptr;
  alignas(64) float turned[kMaxHeadDim];
  turn_head(key, heads.key_norm, heads.norm_eps, factors, head_dim, turned);

  std::byte* keys = kv.head(slot / kBlockTokens, kv_head);
  std::byte* values = keys + kv.plane_bytes();
  if (kv.format == KvFormat::bf16) {
    alignas(64) uint16_t narrow[kMaxHeadDim];
    for (int i = 0; i < head_dim; i += kLanes) store_bf16(narrow + i, load(turned + i));
    scatter_key(narrow, offset, head_dim, keys);
    for (int i = 0; i < head_dim; i += kLanes) store_bf16(narrow + i, load(value + i));
    scatter_value(narrow, offset, head_dim, values);
  } else {
    auto* scales = reinterpret_cast<float*>(values + kv.plane_bytes()) + offset;
    alignas(64) int8_t bytes[kMaxHeadDim];
    quantise_span(turned, head_dim, scales, bytes);
    scatter_key(bytes, offset, head_dim, keys);
    quantise_span(value, head_dim, scales + kBlockTokens, bytes);
    scatter_value(bytes, offset, head_dim, values);
  }
}

// Values past the last token of a block that this step begins, which may hold whatever another
// sequence left: their weight is zero, which only a finite value survives.
inline void clear_rest_of_block(const KvLayer& kv, int32_t last_slot, int kv_head) {
  const int begin = last_slot % kBlockTokens + 1, head_dim = kv.head_dim;
  std::byte* values = kv.head(last_slot / kBlockTokens, kv_head) + kv.plane_bytes();
  const auto clear = [&]<typename Element>(Element* elements) {
    for (int offset = begin; offset < kBlockTokens; ++offset)
      for (int i = 0; i < head_dim; ++i)
        elements[(offset / 2 * head_dim + i) * 2 + offset % 2] = 0;
  };
  if (kv.format == KvFormat::bf16) {
    clear(reinterpret_cast<uint16_t*>(values));
  } else {
    clear(reinterpret_cast<int8_t*>(values));
    auto* value_scales = reinterpret_cast<float*>(values + kv.plane_bytes()) + kBlockTokens;
    std::fill(value_scales + begin, value_scales + kBlockTokens, 0.0f);
  }
}

// Rows [first, end) of one sequence, whose last row of this step is `last_row`.
inline void store_kv_rows(const HeadRows& heads, const KvLayer& kv, const int32_t* slots,
                          int first, int end, int last_row, int num_sequence_rows, int kv_head) {
  for (int row = first; row < end; ++row) store_kv(heads, kv, row, slots[row], kv_head);
  const bool ends_here = end == last_row + 1;
  if (ends_here && slots[last_row] % kBlockTokens < num_sequence_rows)
    clear_rest_of_block(kv, slots[last_row], kv_head);
}

}  // namespace tf::TF_ISA
