// One plane (the keys or the values of a block and head) between memory's order and the wire's.
//
// Sixteen bytes at a time, which every 64-bit processor has registers for, so that one compilation
// serves all. Neither side need be aligned. Moves elements only; never looks at what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kv_cache.h"

namespace tf {

constexpr size_t kVectorBytes = 16;

template <typename T>
using Vector [[gnu::vector_size(kVectorBytes)]] = T;

template <typename T>
constexpr size_t kVectorLanes = kVectorBytes / sizeof(T);

template <typename T>
Vector<T> load_vector(const std::byte* from) {
  Vector<T> vector;
  std::memcpy(&vector, from, kVectorBytes);
  return vector;
}

template <typename T>
void store_vector(std::byte* to, Vector<T> vector) {
  std::memcpy(to, &vector, kVectorBytes);
}

// a[first], b[first], a[first + 1], b[first + 1] and so on.
template <typename T, size_t first, size_t... lane>
Vector<T> zip_from(Vector<T> a, Vector<T> b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (first + lane / 2 + lane % 2 * sizeof...(lane))...);
}
template <typename T>
Vector<T> zip_low(Vector<T> a, Vector<T> b) {
  return zip_from<T, 0>(a, b, std::make_index_sequence<kVectorLanes<T>>());
}
template <typename T>
Vector<T> zip_high(Vector<T> a, Vector<T> b) {
  return zip_from<T, kVectorLanes<T> / 2>(a, b, std::make_index_sequence<kVectorLanes<T>>());
}

// Lanes first, first + 2, first + 4 and so on of a followed by b.
template <typename T, size_t first, size_t... lane>
Vector<T> every_second(Vector<T> a, Vector<T> b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (first + 2 * lane)...);
}

// [num_rows][num_columns] of T to [num_columns][num_rows]; both are multiples of a vector's lanes.
template <typename T>
void transpose(const std::byte* from, size_t num_rows, size_t num_columns, std::byte* to) {
  constexpr size_t lanes = kVectorLanes<T>;
  const size_t from_stride = num_columns * sizeof(T), to_stride = num_rows * sizeof(T);
  for (size_t row = 0; row < num_rows; row += lanes)
    for (size_t column = 0; column < num_columns; column += lanes) {
      Vector<T> tile[lanes], next[lanes];
      for (size_t i = 0; i < lanes; ++i)
        tile[i] = load_vector<T>(from + (row + i) * from_stride + column * sizeof(T));
      // Zipping the first half with the second log2(lanes) times is a transposition.
      for (size_t stage = 1; stage < lanes; stage *= 2) {
        for (size_t i = 0; i < lanes / 2; ++i) {
          next[2 * i] = zip_low<T>(tile[i], tile[i + lanes / 2]);
          next[2 * i + 1] = zip_high<T>(tile[i], tile[i + lanes / 2]);
        }
        std::memcpy(tile, next, sizeof tile);
      }
      for (size_t i = 0; i < lanes; ++i)
        store_vector<T>(to + (column + i) * to_stride + row * sizeof(T), tile[i]);
    }
}

// [num_pairs][2][length] of Element to [num_pairs][length][2].
template <typename Element>
void pair_rows(const std::byte* from, size_t num_pairs, size_t length, std::byte* to) {
  const size_t row_bytes = length * sizeof(Element);
  for (size_t pair = 0; pair < num_pairs; ++pair, from += 2 * row_bytes, to += 2 * row_bytes)
    for (size_t at = 0; at < row_bytes; at += kVectorBytes) {
      const auto even = load_vector<Element>(from + at);
      const auto odd = load_vector<Element>(from + row_bytes + at);
      store_vector<Element>(to + 2 * at, zip_low<Element>(even, odd));
      store_vector<Element>(to + 2 * at + kVectorBytes, zip_high<Element>(even, odd));
    }
}

// The way back.
template <typename Element>
void part_rows(const std::byte* from, size_t num_pairs, size_t length, std::byte* to) {
  constexpr auto lanes = std::make_index_sequence<kVectorLanes<Element>>();
  const size_t row_bytes = length * sizeof(Element);
  for (size_t pair = 0; pair < num_pairs; ++pair, from += 2 * row_bytes, to += 2 * row_bytes)
    for (size_t at = 0; at < row_bytes; at += kVectorBytes) {
      const auto low = load_vector<Element>(from + 2 * at);
      const auto high = load_vector<Element>(from + 2 * at + kVectorBytes);
      store_vector<Element>(to + at, every_second<Element, 0>(low, high, lanes));
      store_vector<Element>(to + row_bytes + at, every_second<Element, 1>(low, high, lanes));
    }
}

// Planes of `Element`, uint16_t for bf16 or uint8_t. `head_dim` is a multiple of 16.
template <typename Element>
struct WirePlanes {
  // Two elements that follow each other in both orders of the keys.
  using Pair = std::conditional_t<sizeof(Element) == 2, uint32_t, uint16_t>;

  static void to_wire(const std::byte* plane, bool is_value, size_t head_dim, std::byte* wire) {
    if (is_value)
      part_rows<Element>(plane, kBlockTokens / 2, head_dim, wire);
    else
      transpose<Pair>(plane, head_dim / 2, kBlockTokens, wire);
  }
  static void from_wire(const std::byte* wire, bool is_value, size_t head_dim, std::byte* plane) {
    if (is_value)
      pair_rows<Element>(wire, kBlockTokens / 2, head_dim, plane);
    else
      transpose<Pair>(wire, kBlockTokens, head_dim / 2, plane);
  }
};

}  // namespace tf
