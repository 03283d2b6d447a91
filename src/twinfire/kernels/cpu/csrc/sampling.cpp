#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace tf::TF_ISA {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Largest of row[0, n), NaN left out: `max` gives its second operand when the first is none.
float largest_of(const float* row, int64_t n) {
  F32 best[4] = {set1(kNegativeInfinity), set1(kNegativeInfinity), set1(kNegativeInfinity),
                 set1(kNegativeInfinity)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) best[j] = max(load(row + i + j * kLanes), best[j]);
  for (; i + kLanes <= n; i += kLanes) best[0] = max(load(row + i), best[0]);
  float result = largest(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < n; ++i) result = row[i] > result ? row[i] : result;
  return result;
}

int64_t argmax(const float* row, int64_t vocab) {
  constexpr int64_t kSpan = 1024;
  float best = kNegativeInfinity;
  int64_t best_start = 0;
  for (int64_t start = 0; start < vocab; start += kSpan) {
    const float span_best = largest_of(row + start, std::min(kSpan, vocab - start));
    if (span_best > best) {
      best = span_best;
      best_start = start;
    }
  }
  const float* place = std::find(row + best_start, row + vocab, best);
  return place == row + vocab ? 0 : place - row;
}

struct Candidate {
  float order;  // the value, NaN as minus infinity
  int64_t id;

  bool operator<(const Candidate& other) const {
    return order != other.order ? order > other.order : id < other.id;
  }
};

void top_k(const float* row, int64_t vocab, int64_t k, float* values, int64_t* ids) {
  // The k-th largest of the spans' maxima is no more than the k-th largest value, so whatever lies
  // below it is out.
  constexpr int64_t kSpan = 64;
  std::vector<float> maxima;
  maxima.reserve(size_t(vocab / kSpan + 1));
  for (int64_t start = 0; start < vocab; start += kSpan)
    maxima.push_back(largest_of(row + start, std::min(kSpan, vocab - start)));
  float least = kNegativeInfinity;
  if (k <= int64_t(maxima.size())) {
    std::vector<float> ordered = maxima;
    std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(),
                     std::greater<float>());
    least = ordered[size_t(k - 1)];
  }
  std::vector<Candidate> candidates;
  for (size_t span = 0; span < maxima.size(); ++span) {
    if (maxima[span] < least) continue;
    const int64_t start = int64_t(span) * kSpan, end = std::min(start + kSpan, vocab);
    for (int64_t id = start; id < end; ++id) {
      const float order = std::isnan(row[id]) ? kNegativeInfinity : row[id];
      if (order >= least) candidates.push_back({order, id});
    }
  }
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end());
  std::sort(candidates.begin(), candidates.begin() + k);
  for (int64_t i = 0; i < k; ++i) {
    ids[i] = candidates[size_t(i)].id;
    values[i] = row[ids[i]];
  }
}

float logsumexp(const float* row, int64_t vocab) {
  const float highest = largest_of(row, vocab);
  if (std::isinf(highest)) return highest;
  const F32 shift = set1(highest);
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= vocab; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j)
      sums[j] = add(sums[j], exp(sub(load(row + i + j * kLanes), shift)));
  for (; i < vocab; i += kLanes) {
    float tail[kLanes];
    std::fill_n(tail, kLanes, kNegativeInfinity);
    std::copy(row + i, row + std::min<int64_t>(i + kLanes, vocab), tail);
    sums[0] = add(sums[0], exp(sub(load(tail), shift)));
  }
  const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return highest + std::log(total);
}

// Grammars allow few tokens or nearly all, so most words are all zeros or all ones.
void keep_allowed(float* row, int64_t vocab, const uint32_t* allowed) {
  constexpr int64_t kWord = 32;
  for (int64_t start = 0; start < vocab; start += kWord) {
    const uint32_t bits = allowed[start / kWord];
    const int64_t count = std::min(kWord, vocab - start);
    if (bits == ~uint32_t(0)) continue;
    if (bits == 0) {
      std::fill_n(row + start, count, kNegativeInfinity);
      continue;
    }
    for (int64_t i = 0; i < count; ++i)
      if (!(bits >> i & 1)) row[start + i] = kNegativeInfinity;
  }
}

}  // namespace

const SamplingKernels kSamplingKernels = {argmax, top_k, logsumexp, keep_allowed};

}  // namespace tf::TF_ISA
