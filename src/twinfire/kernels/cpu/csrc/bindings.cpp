#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

namespace tf {

namespace nb = nanobind;

Isa parse_isa(std::string_view name) {
  for (size_t index = 0; index < kIsaNames.size(); ++index) {
    if (kIsaNames[index] != name) continue;
    const Isa isa = Isa(index);
    if (is_supported(isa)) return isa;
    break;
  }
  throw nb::value_error(("no kernels for instruction set " + std::string(name)).c_str());
}

static std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (size_t index = 0; index < kIsaNames.size(); ++index)
    if (is_supported(Isa(index))) names.emplace_back(kIsaNames[index]);
  return names;
}

NB_MODULE(_native, module) {
  module.attr("kernel_version") = TF_KERNEL_VERSION;
  module.def("isa", [] { return kIsaNames[size_t(best_isa())]; });
  module.def("supported_isas", &supported_isas);
  bind_thread_team(module);
  bind_kv_cache(module);
  bind_attention(module);
  bind_rows(module);
  bind_sampling(module);
  bind_gemm(module);
  bind_program(module);
}

}  // namespace tf
