// Row ops by themselves, for tests; a program calls the kernels directly.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <vector>

#include "bind_arrays.h"
#include "bindings.h"
#include "rows.h"

namespace tf {

namespace nb = nanobind;

namespace {

RowFormat parse_format(std::string_view name) {
  if (name == "f32") return RowFormat::f32;
  if (name == "bf16") return RowFormat::bf16;
  if (name == "int8") return RowFormat::int8;
  if (name == "int8_groups") return RowFormat::int8_groups;
  throw nb::value_error("no such row format");
}

const RowKernels& kernels_for(std::string_view isa) {
  const Isa parsed = parse_isa(isa);
  return TF_FOR_ISA(parsed, kRowKernels);
}

Array<uint8_t> new_rows(size_t num_rows, RowFormat format, int width) {
  return new_array<uint8_t>({num_rows, activation_row_bytes(format, width)});
}

std::byte* bytes_of(Array<uint8_t>& rows) { return reinterpret_cast<std::byte*>(rows.data()); }

Array<uint8_t> rms_norm(std::string_view isa, Matrix<float> residual,
                        std::optional<ConstMatrix<float>> added, ConstVector<float> weight,
                        float eps, std::string_view format_name) {
  const size_t num_rows = residual.shape(0), width = residual.shape(1);
  require(width > 0 && weight.shape(0) == width, "a weight for each column");
  require(!added || (added->shape(0) == num_rows && added->shape(1) == width),
          "rows to add of another shape");
  const RowFormat format = parse_format(format_name);
  Array<uint8_t> out = new_rows(num_rows, format, int(width));
  std::vector<float> scratch(width);
  kernels_for(isa).rms_norm({residual.data(), added ? added->data() : nullptr, weight.data(), eps,
                             int(num_rows), int(width), format, bytes_of(out), out.shape(1)},
                            0, int(num_rows), scratch.data());
  return out;
}

Array<uint8_t> silu_mul(std::string_view isa, ConstMatrix<float> gate_up,
                        std::string_view format_name) {
  const size_t num_rows = gate_up.shape(0), width = gate_up.shape(1) / 2;
  require(width > 0 && gate_up.shape(1) % 2 == 0, "as many gate as up columns");
  const RowFormat format = parse_format(format_name);
  Array<uint8_t> out = new_rows(num_rows, format, int(width));
  std::vector<float> scratch(width);
  kernels_for(isa).silu_mul({gate_up.data(), int(num_rows), int(width), format, bytes_of(out),
                             out.shape(1)},
                            0, int(num_rows), scratch.data());
  return out;
}

Array<uint8_t> convert_rows(std::string_view isa, ConstMatrix<float> rows,
                            std::string_view format_name) {
  const RowFormat format = parse_format(format_name);
  const int num_rows = int(rows.shape(0)), width = int(rows.shape(1));
  Array<uint8_t> out = new_rows(rows.shape(0), format, width);
  kernels_for(isa).convert_rows(
      {rows.data(), num_rows, width, format, bytes_of(out), out.shape(1)}, 0, num_rows);
  return out;
}

// `table` holds float32, or the bits of `format` in uint16.
template <typename Element>
Array<float> embed(std::string_view isa, ConstMatrix<Element> table, TableFormat format,
                   const ConstVector<int32_t>& ids) {
  for (size_t i = 0; i < ids.shape(0); ++i)
    require(ids.data()[i] >= 0 && size_t(ids.data()[i]) < table.shape(0), "an id past the table");
  Array<float> out = new_array<float>({ids.shape(0), table.shape(1)});
  kernels_for(isa).embed({table.data(), format, ids.data(), int(ids.shape(0)),
                          int(table.shape(1)), out.data()},
                         0, int(ids.shape(0)));
  return out;
}

Array<float> take(ConstMatrix<float> rows, ConstVector<int32_t> indices) {
  for (size_t i = 0; i < indices.shape(0); ++i)
    require(indices.data()[i] >= 0 && size_t(indices.data()[i]) < rows.shape(0),
            "an index past the rows");
  Array<float> out = new_array<float>({indices.shape(0), rows.shape(1)});
  take_rows({reinterpret_cast<const std::byte*>(rows.data()), indices.data(),
             int(indices.shape(0)), rows.shape(1) * sizeof(float),
             reinterpret_cast<std::byte*>(out.data())},
            0, int(indices.shape(0)));
  return out;
}

Array<float> factors_of(ConstVector<int32_t> positions, ConstVector<float> inv_freq,
                        float attention_factor) {
  const int num_rows = int(positions.shape(0)), head_dim = int(inv_freq.shape(0)) * 2;
  Array<float> out = new_array<float>({positions.shape(0), size_t(head_dim)});
  rope_factors({positions.data(), inv_freq.data(), attention_factor, num_rows, head_dim,
                out.data()},
               0, num_rows);
  return out;
}

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("rms_norm", &rms_norm, nb::arg("isa"), nb::arg("residual"), nb::arg("added").none(),
             nb::arg("weight"), nb::arg("eps"), nb::arg("format"));
  module.def("silu_mul", &silu_mul, nb::arg("isa"), nb::arg("gate_up"), nb::arg("format"));
  module.def("convert_rows", &convert_rows, nb::arg("isa"), nb::arg("rows"), nb::arg("format"));
  module.def("embed_f32",
             [](std::string_view isa, ConstMatrix<float> table, ConstVector<int32_t> ids) {
               return embed<float>(isa, table, TableFormat::f32, ids);
             },
             nb::arg("isa"), nb::arg("table"), nb::arg("ids"));
  module.def("embed_f16",
             [](std::string_view isa, ConstMatrix<uint16_t> table, ConstVector<int32_t> ids) {
               return embed<uint16_t>(isa, table, TableFormat::f16, ids);
             },
             nb::arg("isa"), nb::arg("table"), nb::arg("ids"));
  module.def("embed_bf16",
             [](std::string_view isa, ConstMatrix<uint16_t> table, ConstVector<int32_t> ids) {
               return embed<uint16_t>(isa, table, TableFormat::bf16, ids);
             },
             nb::arg("isa"), nb::arg("table"), nb::arg("ids"));
  module.def("take_rows", &take, nb::arg("rows"), nb::arg("indices"));
  module.def("rope_factors", &factors_of, nb::arg("positions"), nb::arg("inv_freq"),
             nb::arg("attention_factor"));
}

}  // namespace tf
