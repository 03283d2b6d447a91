// The parts of the extension module; each adds its own names to it.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu_features.h"

namespace tf {

// ValueError when there is no such instruction set or the processor lacks it.
Isa parse_isa(std::string_view name);

void bind_gemm(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_kv_cache(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_thread_team(nanobind::module_& module);

}  // namespace tf
