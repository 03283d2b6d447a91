#include "gemm_formats.h"
#include "quantise_rows.h"

namespace tf::TF_ISA {

static void run(const GemmArgs& args, int tile) {
  switch (args.matrix->format) {
    case WeightFormat::bf16: return run_bf16(args, tile);
    case WeightFormat::int8: return run_int8(args, tile);
    case WeightFormat::q8_0: return run_q8_0(args, tile);
    case WeightFormat::q4_0: return run_q4_0(args, tile);
    case WeightFormat::q4_1: return run_q4_1(args, tile);
  }
}

const GemmKernels kGemmKernels = {&run, &write_activation_row};

}  // namespace tf::TF_ISA
