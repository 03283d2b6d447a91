// Query, key and value heads of fused rows [query heads | key heads | value heads], float32.
#pragma once

#include <cstdint>

namespace tf {

struct HeadShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;  // a multiple of 16

  int queries_per_kv_head() const { return num_heads / num_kv_heads; }
  int query_width() const { return num_heads * head_dim; }
  int kv_width() const { return num_kv_heads * head_dim; }
  int fused_width() const { return query_width() + 2 * kv_width(); }
};

// Fused rows as a matrix wrote them, and what is done to a query or key head before it is used:
// its own RMSNorm, then the turn by its position.
struct HeadRows {
  HeadShape shape;
  const float* rows;          // [tokens][fused_width]
  const float* query_norm;    // [head_dim], or null: no norm
  const float* key_norm;      // [head_dim], or null
  float norm_eps;
  const float* rope_factors;  // [tokens][head_dim]: cosines, then sines; null: no turn
};

}  // namespace tf
