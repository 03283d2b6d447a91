#include <nanobind/stl/string_view.h>

#include <string>

#include "bind_arrays.h"
#include "bindings.h"
#include "sampling.h"

namespace tf {

namespace nb = nanobind;

namespace {

using Logits = ConstMatrix<float>;
using Row = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AllowedBits = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

void keep_allowed(std::string_view isa, Row logits, AllowedBits allowed) {
  const size_t vocab = logits.shape(0);
  if (allowed.shape(0) * 32 < vocab)
    throw nb::value_error(("allowed has " + std::to_string(allowed.shape(0)) +
                           " words; a vocabulary of " + std::to_string(vocab) + " needs " +
                           std::to_string((vocab + 31) / 32))
                              .c_str());
  const nb::gil_scoped_release released;
  kernels_for(isa).keep_allowed(logits.data(), int64_t(vocab), allowed.data());
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("argmax", &argmax, nb::arg("isa"), nb::arg("logits"));
  module.def("top_k", &top_k, nb::arg("isa"), nb::arg("logits"), nb::arg("k"));
  module.def("logsumexp", &logsumexp, nb::arg("isa"), nb::arg("logits"));
  module.def("keep_allowed", &keep_allowed, nb::arg("isa"), nb::arg("logits").noconvert(),
             nb::arg("allowed"));
}

}  // namespace tf
