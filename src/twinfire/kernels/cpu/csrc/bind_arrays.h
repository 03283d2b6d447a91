// numpy arrays at the boundary to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <initializer_list>

namespace tf {

template <typename T>
using ConstVector = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig,
                                      nanobind::device::cpu>;
template <typename T>
using ConstMatrix = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig,
                                      nanobind::device::cpu>;
template <typename T>
using Vector = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Matrix = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::c_contig>;

// Zeroed.
template <typename T>
Array<T> new_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t extent : shape) size *= extent;
  T* data = new T[std::max<size_t>(size, 1)]();
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Array<T>(data, shape, owner);
}

inline void require(bool condition, const char* message) {
  if (!condition) throw nanobind::value_error(message);
}

}  // namespace tf
