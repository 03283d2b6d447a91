#include "rows.h"

#include "quantise_rows.h"
#include "row_norm.h"
#include "simd.h"

namespace tf::TF_ISA {

namespace {

// Visits [0, n) in vectors; the last may be partial.
template <typename Visit>
void for_each_vector(int n, Visit visit) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(i, kLanes);
  if (i < n) visit(i, n - i);
}

F32 load_some(const float* p, int count) {
  return count == kLanes ? load(p) : load_first(p, count);
}

void store_some(float* p, F32 x, int count) {
  if (count == kLanes)
    store(p, x);
  else
    store_first(p, x, count);
}

void rms_norm(const RmsNormArgs& args, int first, int end, float* scratch) {
  const int width = args.width;
  for (int row = first; row < end; ++row) {
    float* residual = args.residual + int64_t(row) * width;
    if (args.added) {
      const float* added = args.added + int64_t(row) * width;
      for_each_vector(width, [&](int i, int count) {
        store_some(residual + i,
                   add(load_some(residual + i, count), load_some(added + i, count)), count);
      });
    }
    const F32 inverse = set1(inverse_rms(residual, width, args.eps));
    for_each_vector(width, [&](int i, int count) {
      const F32 normed = mul(load_some(residual + i, count), inverse);
      store_some(scratch + i, mul(normed, load_some(args.weight + i, count)), count);
    });
    write_activation_row(scratch, width, args.format, args.out + size_t(row) * args.out_row_bytes);
  }
}

void silu_mul(const SiluMulArgs& args, int first, int end, float* scratch) {
  const int width = args.width;
  for (int row = first; row < end; ++row) {
    const float *gate = args.gate_up + int64_t(row) * 2 * width, *up = gate + width;
    for_each_vector(width, [&](int i, int count) {
      const F32 x = load_some(gate + i, count);
      const F32 sigmoid = div(x, add(set1(1.0f), exp(sub(zero(), x))));
      store_some(scratch + i, mul(sigmoid, load_some(up + i, count)), count);
    });
    write_activation_row(scratch, width, args.format, args.out + size_t(row) * args.out_row_bytes);
  }
}

void convert_rows(const ConvertRowsArgs& args, int first, int end) {
  for (int row = first; row < end; ++row)
    write_activation_row(args.rows + int64_t(row) * args.width, args.width, args.format,
                         args.out + size_t(row) * args.out_row_bytes);
}

template <typename Load>
void widen_row(const uint16_t* table_row, int width, float* out, Load load_half) {
  for_each_vector(width, [&](int i, int count) {
    if (count == kLanes) {
      store(out + i, load_half(table_row + i));
    } else {
      uint16_t tail[kLanes] = {};
      std::memcpy(tail, table_row + i, sizeof(uint16_t) * size_t(count));
      store_first(out + i, load_half(tail), count);
    }
  });
}

void embed(const EmbedArgs& args, int first, int end) {
  for (int row = first; row < end; ++row) {
    const int64_t offset = int64_t(args.ids[row]) * args.width;
    float* out = args.out + int64_t(row) * args.width;
    const auto* halves = static_cast<const uint16_t*>(args.table) + offset;
    switch (args.format) {
      case TableFormat::f32:
        std::memcpy(out, static_cast<const float*>(args.table) + offset,
                    sizeof(float) * size_t(args.width));
        break;
      case TableFormat::f16:
        widen_row(halves, args.width, out, [](const uint16_t* p) { return load_f16(p); });
        break;
      case TableFormat::bf16:
        widen_row(halves, args.width, out, [](const uint16_t* p) { return load_bf16(p); });
        break;
    }
  }
}

}  // namespace

const RowKernels kRowKernels = {rms_norm, silu_mul, convert_rows, embed};

}  // namespace tf::TF_ISA
