// Float rows that one program keeps for a later step of another: a target's features for its draft
// head, or the head's own output for its next draft.
#pragma once

#include <cstddef>
#include <vector>

namespace tf {

class KeptRows {
 public:
  explicit KeptRows(int width) : width_(width) {}

  int width() const { return width_; }
  int num_rows() const { return num_rows_; }
  // Rows there were before keep what they hold, since a step may read them before it writes.
  void resize(int num_rows) {
    const size_t size = size_t(num_rows) * size_t(width_);
    if (size > values_.size()) {
      values_.reserve(size);
      values_.resize(size);
    }
    num_rows_ = num_rows;
  }
  float* row(int index) { return values_.data() + size_t(index) * size_t(width_); }

 private:
  int width_;
  int num_rows_ = 0;
  std::vector<float> values_;
};

}  // namespace tf
