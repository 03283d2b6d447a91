// The names that Python uses for formats and epilogues.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <string>
#include <string_view>

namespace tf {

// Each in the order of its enumeration.
constexpr std::array<std::string_view, 5> kWeightFormats = {"bf16", "int8", "q8_0", "q4_0", "q4_1"};
constexpr std::array<std::string_view, 6> kSourceFormats = {"f32",  "f16",  "bf16",
                                                            "q8_0", "q4_0", "q4_1"};
constexpr std::array<std::string_view, 4> kRowFormats = {"f32", "bf16", "int8", "int8_groups"};
constexpr std::array<std::string_view, 3> kTableFormats = {"f32", "f16", "bf16"};
constexpr std::array<std::string_view, 6> kEpilogues = {
    "store_bf16", "store_f32", "add_f32", "silu_mul_f32", "silu_mul_bf16", "silu_mul_int8_groups"};

// ValueError when no value has this name.
template <typename Enum, size_t kCount>
Enum parse(const std::array<std::string_view, kCount>& names, std::string_view name) {
  for (size_t index = 0; index < kCount; ++index)
    if (names[index] == name) return Enum(index);
  throw nanobind::value_error(("unknown name '" + std::string(name) + "'").c_str());
}

}  // namespace tf
