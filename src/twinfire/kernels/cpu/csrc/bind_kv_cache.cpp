#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind_arrays.h"
#include "bindings.h"
#include "kv_cache.h"

namespace tf {

namespace nb = nanobind;

namespace {

// The bytes of any object that lends them, for as long as this lives. Made and ended with the GIL;
// BufferError when the object does not lend them as `flags` asks, TypeError when it has none.
class Buffer {
 public:
  Buffer(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags)) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return size_t(view_.len); }

 private:
  Py_buffer view_;
};

std::shared_ptr<KvCache> make_cache(int num_layers, int num_kv_heads, int head_dim,
                                    std::string_view format, int64_t num_blocks) {
  require(num_layers > 0 && num_kv_heads > 0 && num_blocks > 0, "an empty KV cache");
  require(head_dim > 0 && head_dim % 16 == 0, "head_dim must be a multiple of 16");
  require(format == "bf16" || format == "int8", "KV is bf16 or int8");
  return std::make_shared<KvCache>(
      KvShape{num_layers, num_kv_heads, head_dim,
              format == "int8" ? KvFormat::int8 : KvFormat::bf16, num_blocks});
}

void check_ids(const KvCache& cache, const std::vector<int64_t>& ids) {
  for (int64_t id : ids)
    if (id < 0 || id >= cache.shape().num_blocks)
      throw nb::value_error(
          ("block ids must lie in [0, " + std::to_string(cache.shape().num_blocks) + ")").c_str());
}

// Where the blocks lie on a wire that other caches' parts of a block may share.
struct WirePlaces {
  size_t offset;  // of the first
  size_t stride;  // from one to the next
};

WirePlaces wire_places(const KvCache& cache, int64_t offset, std::optional<int64_t> stride) {
  const int64_t own = cache.bytes_per_block();
  require(offset >= 0 && stride.value_or(own) - offset >= own,
          "a block does not fit its place on the wire");
  return {size_t(offset), size_t(stride.value_or(own))};
}

void check_size(const std::vector<int64_t>& ids, WirePlaces places, const Buffer& wire) {
  const size_t expected = ids.size() * places.stride;
  if (wire.size() != expected)
    throw nb::value_error((std::to_string(wire.size()) + " bytes for " +
                           std::to_string(ids.size()) + " blocks; they take " +
                           std::to_string(expected))
                              .c_str());
}

void export_blocks(const KvCache& cache, const std::vector<int64_t>& ids, nb::object into,
                   int64_t offset, std::optional<int64_t> stride) {
  check_ids(cache, ids);
  const WirePlaces places = wire_places(cache, offset, stride);
  const Buffer wire(into, PyBUF_WRITABLE);
  check_size(ids, places, wire);
  const nb::gil_scoped_release released;
  for (size_t i = 0; i < ids.size(); ++i)
    cache.export_block(ids[i], {wire.data() + places.offset + i * places.stride,
                                size_t(cache.bytes_per_block())});
}

void import_blocks(KvCache& cache, const std::vector<int64_t>& ids, nb::object content,
                   int64_t offset, std::optional<int64_t> stride) {
  check_ids(cache, ids);
  const WirePlaces places = wire_places(cache, offset, stride);
  const Buffer wire(content, PyBUF_SIMPLE);
  check_size(ids, places, wire);
  const nb::gil_scoped_release released;
  for (size_t i = 0; i < ids.size(); ++i)
    cache.import_block(ids[i], {wire.data() + places.offset + i * places.stride,
                                size_t(cache.bytes_per_block())});
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  nb::class_<KvCache>(module, "KvCache")
      .def(nb::new_(&make_cache), nb::arg("num_layers"), nb::arg("num_kv_heads"),
           nb::arg("head_dim"), nb::arg("format"), nb::arg("num_blocks"))
      .def_prop_ro("memory_bytes", &KvCache::memory_bytes)
      .def_prop_ro("bytes_per_block", &KvCache::bytes_per_block)
      .def("copy_blocks",
           [](KvCache& cache, ConstMatrix<int32_t> pairs) {
             require(pairs.shape(1) == 2, "pairs are [n, 2]");
             const int32_t* ids = pairs.data();
             check_ids(cache, {ids, ids + 2 * pairs.shape(0)});
             for (size_t i = 0; i < pairs.shape(0); ++i)
               cache.copy_block(ids[2 * i], ids[2 * i + 1]);
           },
           nb::arg("pairs"))
      .def("populate",
           [](KvCache& cache, int64_t first, int64_t count) {
             check_ids(cache, {first, first + count - 1});
             require(count > 0, "no block");
             nb::gil_scoped_release release;
             cache.populate(first, count);
           },
           nb::arg("first"), nb::arg("count"))
      .def("export_blocks", &export_blocks, nb::arg("block_ids"), nb::arg("into"),
           nb::arg("offset") = 0, nb::arg("stride") = nb::none())
      .def("import_blocks", &import_blocks, nb::arg("block_ids"), nb::arg("content"),
           nb::arg("offset") = 0, nb::arg("stride") = nb::none());
}

}  // namespace tf
