#include <cmath>
#include <cstring>

#include "rows.h"

namespace tf {

void take_rows(const TakeRowsArgs& args, int first, int end) {
  for (int row = first; row < end; ++row)
    std::memcpy(args.out + size_t(row) * args.row_bytes,
                args.rows + size_t(args.indices[row]) * args.row_bytes, args.row_bytes);
}

void rope_factors(const RopeFactorsArgs& args, int first, int end) {
  const int half = args.head_dim / 2;
  for (int row = first; row < end; ++row) {
    float* cosines = args.factors + int64_t(row) * args.head_dim;
    for (int i = 0; i < half; ++i) {
      const double angle = float(args.positions[row]) * args.inv_freq[i];
      cosines[i] = float(std::cos(angle) * double(args.attention_factor));
      cosines[half + i] = float(std::sin(angle) * double(args.attention_factor));
    }
  }
}

}  // namespace tf
