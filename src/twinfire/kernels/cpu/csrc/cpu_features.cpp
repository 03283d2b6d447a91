#include "cpu_features.h"

namespace tf {

bool is_supported(Isa isa) {
#if defined(TF_HAS_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  }
  return false;
#else
  return isa == Isa::portable;
#endif
}

Isa best_isa() {
  if (is_supported(Isa::avx512)) return Isa::avx512;
  return is_supported(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

}  // namespace tf
