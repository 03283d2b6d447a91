#include <nanobind/stl/string_view.h>

#include <string>

#include "bind_arrays.h"
#include "bindings.h"
#include "sampling.h"

namespace tf {

namespace nb = nanobind;

namespace {

using Logits = ConstMatrix<float>;
const SamplingKernels& kernels_for(std::string_view isa) {
  const Isa parsed = parse_isa(isa);
  return TF_FOR_ISA(parsed, kSamplingKernels);
}

void check(const Logits& logits) {
  if (logits.shape(1) == 0) throw nb::value_error("an empty vocabulary");
}

Array<int64_t> argmax(std::string_view isa, Logits logits) {
  check(logits);
  const SamplingKernels& kernels = kernels_for(isa);
  const size_t rows = logits.shape(0), vocab = logits.shape(1);
  Array<int64_t> ids = new_array<int64_t>({rows});
  const nb::gil_scoped_release released;
  for (size_t row = 0; row < rows; ++row)
    ids.data()[row] = kernels.argmax(logits.data() + row * vocab, int64_t(vocab));
  return ids;
}

nb::tuple top_k(std::string_view isa, Logits logits, int64_t k) {
  check(logits);
  const SamplingKernels& kernels = kernels_for(isa);
  const size_t rows = logits.shape(0), vocab = logits.shape(1);
  if (k < 1 || k > int64_t(vocab))
    throw nb::value_error(
        ("k is " + std::to_string(k) + "; it must lie in [1, " + std::to_string(vocab) + "]")
            .c_str());
  Array<float> values = new_array<float>({rows, size_t(k)});
  Array<int64_t> ids = new_array<int64_t>({rows, size_t(k)});
  {
    const nb::gil_scoped_release released;
    for (size_t row = 0; row < rows; ++row)
      kernels.top_k(logits.data() + row * vocab, int64_t(vocab), k,
                    values.data() + row * size_t(k), ids.data() + row * size_t(k));
  }
  return nb::make_tuple(values, ids);
}

Array<float> logsumexp(std::string_view isa, Logits logits) {
  check(logits);
  const SamplingKernels& kernels = kernels_for(isa);
  const size_t rows = logits.shape(0), vocab = logits.shape(1);
  Array<float> sums = new_array<float>({rows});
  const nb::gil_scoped_release released;
  for (size_t row = 0; row < rows; ++row)
    sums.data()[row] = kernels.logsumexp(logits.data() + row * vocab, int64_t(vocab));
  return sums;
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("argmax", &argmax, nb::arg("isa"), nb::arg("logits"));
  module.def("top_k", &top_k, nb::arg("isa"), nb::arg("logits"), nb::arg("k"));
  module.def("logsumexp", &logsumexp, nb::arg("isa"), nb::arg("logits"));
}

}  // namespace tf
