// Which instruction sets the kernels were compiled for and which of them this processor has.
#pragma once

#include <array>
#include <string_view>

namespace tf {

// From the least to the greatest; each runs wherever a greater one does.
enum class Isa { portable, avx2, avx512 };

constexpr std::array<std::string_view, 3> kIsaNames = {"portable", "avx2", "avx512"};

#if defined(__x86_64__)
#define TF_HAS_X86_KERNELS 1
#endif

// Whether kernels for it exist and the processor and the operating system can run them.
bool is_supported(Isa isa);

// The greatest supported one.
Isa best_isa();

// The one of three objects, one per instruction set's namespace, that belongs to `isa`:
//   TF_FOR_ISA(isa, kGemmKernels) is tf::portable::kGemmKernels or its sibling.
#if defined(TF_HAS_X86_KERNELS)
#define TF_FOR_ISA(isa, name)                      \
  ((isa) == ::tf::Isa::avx512 ? ::tf::avx512::name \
   : (isa) == ::tf::Isa::avx2 ? ::tf::avx2::name   \
                              : ::tf::portable::name)
#else
#define TF_FOR_ISA(isa, name) ((void)(isa), ::tf::portable::name)
#endif

}  // namespace tf
