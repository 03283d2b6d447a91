// The kernels of the single formats, for gemm.cpp to choose from.
#pragma once

#include "gemm.h"

namespace tf::TF_ISA {

void run_bf16(const GemmArgs& args, int tile);
void run_int8(const GemmArgs& args, int tile);
void run_q8_0(const GemmArgs& args, int tile);
void run_q4_0(const GemmArgs& args, int tile);
void run_q4_1(const GemmArgs& args, int tile);

}  // namespace tf::TF_ISA
