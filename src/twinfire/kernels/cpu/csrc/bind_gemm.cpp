// Packed matrices, activation rows and products for Python: packing at load time, and the eager
// form of the product that tests and benchmarks call.

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bind_arrays.h"
#include "bindings.h"
#include "format_names.h"
#include "gemm.h"
#include "packing.h"
#include "thread_team.h"

namespace tf {

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SourcePart = std::pair<std::string_view, ConstVector<uint8_t>>;

Isa isa_or_best(const std::optional<std::string_view>& name) {
  return name ? parse_isa(*name) : best_isa();
}

PackedMatrix matrix_shape(std::string_view format, int n, int k, bool gated, bool has_bias) {
  require(n > 0 && k > 0, "a matrix has at least one row and one column");
  require(!gated || n % 2 == 0, "a gated matrix has as many gate as up rows");
  return {parse<WeightFormat>(kWeightFormats, format), n, k, gated, has_bias, nullptr};
}

constexpr size_t kHugePageBytes = size_t(2) << 20;

// Zeroed, at the start of a page, in huge pages where the system has them.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> allocate_bytes(size_t num_bytes) {
  struct Mapping {
    void* at;
    size_t size;
  };
  // Aligned, so that all of it but its end is in huge pages.
  const bool is_large = num_bytes >= kHugePageBytes;
  const size_t size = std::max<size_t>(num_bytes, 1) + (is_large ? kHugePageBytes : 0);
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(at, size, MADV_HUGEPAGE);
#endif
  nb::capsule owner(new Mapping{at, size}, [](void* p) noexcept {
    auto* mapping = static_cast<Mapping*>(p);
    munmap(mapping->at, mapping->size);
    delete mapping;
  });
  auto* first = static_cast<uint8_t*>(at);
  if (is_large) first += -reinterpret_cast<uintptr_t>(at) % kHugePageBytes;
  return {first, {num_bytes}, owner};
}

void check_parts(const PackedMatrix& matrix, const std::vector<SourcePart>& parts,
                 PackingSource& source) {
  int64_t rows = 0;
  for (const auto& [name, bytes] : parts) {
    const auto format = parse<SourceFormat>(kSourceFormats, name);
    require(!is_block_format(format) || matrix.k % kGroupSize == 0,
            "rows of a block format are whole blocks");
    const size_t row_bytes = source_row_bytes(format, matrix.k);
    require(bytes.size() % row_bytes == 0, "a part is not whole rows");
    const size_t num_rows = bytes.size() / row_bytes;
    source.parts.push_back(
        {format, reinterpret_cast<const std::byte*>(bytes.data()), int(num_rows)});
    rows += int64_t(num_rows);
  }
  require(rows == matrix.n, "the parts do not have the matrix's number of rows");
}

void pack_panels(const PackedMatrix& matrix, Bytes panels, const std::vector<SourcePart>& parts,
                 std::optional<ConstVector<float>> bias, int first, int last,
                 std::optional<std::string_view> isa) {
  PackingSource source{{}, bias ? bias->data() : nullptr};
  check_parts(matrix, parts, source);
  require(panels.size() == matrix.num_bytes(), "the panels do not have the matrix's size");
  require(matrix.has_bias == bias.has_value(), "a bias is given just where the matrix has one");
  require(!bias || bias->size() == size_t(matrix.n), "the bias has one value per row");
  require(0 <= first && first <= last && last <= matrix.num_panels(), "no such panels");
  const PackingKernels& kernels = TF_FOR_ISA(isa_or_best(isa), kPackingKernels);
  auto* out = reinterpret_cast<std::byte*>(panels.data());
  const nb::gil_scoped_release released;
  kernels.pack(matrix, source, out, first, last);
}

void row_to_f32(const PackedMatrix& matrix, int row, Floats out,
                std::optional<std::string_view> isa) {
  require(0 <= row && row < matrix.n, "no such row");
  require(out.size() == size_t(matrix.k), "the output has one value per column");
  TF_FOR_ISA(isa_or_best(isa), kPackingKernels).row_to_f32(matrix, row, out.data());
}

void write_activation_rows(ConstMatrix<float> x, std::string_view format_name, Matrix<uint8_t> out,
                           std::optional<std::string_view> isa) {
  const auto format = parse<RowFormat>(kRowFormats, format_name);
  const int k = int(x.shape(1));
  require(out.shape(0) == x.shape(0), "as many rows go out as come in");
  require(out.shape(1) >= activation_row_bytes(format, k), "the output's rows are too short");
  const GemmKernels& kernels = TF_FOR_ISA(isa_or_best(isa), kGemmKernels);
  for (size_t row = 0; row < x.shape(0); ++row)
    kernels.write_row(x.data() + row * size_t(k), k, format, out.data() + row * out.shape(1));
}

size_t least_out_row_bytes(const PackedMatrix& matrix, Epilogue epilogue) {
  const size_t columns = size_t(matrix.out_columns());
  switch (epilogue) {
    case Epilogue::store_f32:
    case Epilogue::add_f32:
    case Epilogue::silu_mul_f32: return 4 * columns;
    case Epilogue::store_bf16:
    case Epilogue::silu_mul_bf16: return 2 * columns;
    case Epilogue::silu_mul_int8_groups:
      return activation_row_bytes(RowFormat::int8_groups, int(columns));
  }
  return 0;
}

class TilesOfOne : public TileRunner {
 public:
  TilesOfOne(const GemmKernels& kernels, const GemmArgs& args, int num_threads)
      : kernels_(kernels), args_(args), num_threads_(num_threads) {}
  void run_tile(int, int tile, int) override {
    GemmArgs own = args_;
    own.next = gemm_weights_after(args_, tile, num_threads_);
    kernels_.run(own, tile);
  }

 private:
  const GemmKernels& kernels_;
  const GemmArgs& args_;
  const int num_threads_;
};

void gemm(const PackedMatrix& matrix, ConstMatrix<uint8_t> rows, std::string_view epilogue_name,
          Matrix<uint8_t> out, ThreadTeam* team, std::optional<std::string_view> isa) {
  const auto epilogue = parse<Epilogue>(kEpilogues, epilogue_name);
  require(rows.shape(1) >= activation_row_bytes(input_format(matrix.format), matrix.k),
          "the input's rows are too short");
  require(out.shape(0) == rows.shape(0), "as many rows go out as come in");
  require(out.shape(1) >= least_out_row_bytes(matrix, epilogue), "the output's rows are too short");
  require(matrix.gated == is_gated(epilogue), "a gated matrix ends in silu(gate) * up");
  const GemmArgs args{&matrix,
                      reinterpret_cast<const std::byte*>(rows.data()),
                      rows.shape(1),
                      int(rows.shape(0)),
                      epilogue,
                      out.data(),
                      out.shape(1)};
  const GemmKernels& kernels = TF_FOR_ISA(isa_or_best(isa), kGemmKernels);
  const int num_tiles = gemm_num_tiles(args);
  if (num_tiles == 0) return;
  const nb::gil_scoped_release released;
  TilesOfOne runner(kernels, args, team ? team->num_threads() : 1);
  if (team) return team->run(std::array{num_tiles}, runner);
  for (int tile = 0; tile < num_tiles; ++tile) runner.run_tile(0, tile, 0);
}

}  // namespace

void bind_gemm(nb::module_& module) {
  module.def("allocate_bytes", &allocate_bytes, nb::arg("num_bytes"));
  nb::class_<PackedMatrix>(module, "PackedMatrix")
      .def_static("num_bytes_of",
                  [](std::string_view format, int n, int k, bool gated, bool has_bias) {
                    return matrix_shape(format, n, k, gated, has_bias).num_bytes();
                  },
                  nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("gated") = false,
                  nb::arg("has_bias") = false)
      .def("__init__",
           [](PackedMatrix* self, std::string_view format, int n, int k, bool gated, bool has_bias,
              ConstVector<uint8_t> panels) {
             PackedMatrix matrix = matrix_shape(format, n, k, gated, has_bias);
             require(panels.size() == matrix.num_bytes(),
                     "the panels do not have the matrix's size");
             require(reinterpret_cast<uintptr_t>(panels.data()) % 64 == 0,
                     "panels start at a multiple of 64 bytes");
             matrix.panels = reinterpret_cast<const std::byte*>(panels.data());
             new (self) PackedMatrix(matrix);
           },
           nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("gated"), nb::arg("has_bias"),
           nb::arg("panels"), nb::keep_alive<1, 7>())
      .def_prop_ro("format",
                   [](const PackedMatrix& self) { return kWeightFormats[size_t(self.format)]; })
      .def_ro("n", &PackedMatrix::n)
      .def_ro("k", &PackedMatrix::k)
      .def_ro("gated", &PackedMatrix::gated)
      .def_ro("has_bias", &PackedMatrix::has_bias)
      .def_prop_ro("num_panels", &PackedMatrix::num_panels)
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("out_columns", &PackedMatrix::out_columns)
      .def_prop_ro("input_format", [](const PackedMatrix& self) {
        return kRowFormats[size_t(input_format(self.format))];
      });
  module.def("pack_panels", &pack_panels, nb::arg("matrix"), nb::arg("panels"), nb::arg("parts"),
             nb::arg("bias").none(), nb::arg("first_panel"), nb::arg("last_panel"),
             nb::arg("isa") = nb::none());
  module.def("row_to_f32", &row_to_f32, nb::arg("matrix"), nb::arg("row"), nb::arg("out"),
             nb::arg("isa") = nb::none());
  module.def("activation_row_bytes", [](std::string_view format, int k) {
    return activation_row_bytes(parse<RowFormat>(kRowFormats, format), k);
  }, nb::arg("format"), nb::arg("k"));
  module.def("write_activation_rows", &write_activation_rows, nb::arg("x"), nb::arg("format"),
             nb::arg("out"), nb::arg("isa") = nb::none());
  module.def("gemm", &gemm, nb::arg("matrix"), nb::arg("rows"), nb::arg("epilogue"),
             nb::arg("out"), nb::arg("team") = nb::none(), nb::arg("isa") = nb::none());
}

}  // namespace tf
