#include "idle_cores.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tf {

namespace {

constexpr int kUnknown = 1 << 20;

}  // namespace

IdleCores::IdleCores(int num_cores, const std::string& load_file)
    : num_cores_(num_cores), file_(open(load_file.c_str(), O_RDONLY | O_CLOEXEC)) {}

IdleCores::~IdleCores() {
  if (file_ >= 0) close(file_);
}

int IdleCores::num_missing() const {
  // Three averages, then runnable threads / all threads.
  char text[128];
  const ssize_t size = pread(file_, text, sizeof text - 1, 0);
  text[std::max<ssize_t>(size, 0)] = '\0';
  int num_runnable = 0;
  const int num_read = std::sscanf(text, "%*s %*s %*s %d/", &num_runnable);
  // Whoever asks runs; a system that counts nobody does not count.
  if (num_read != 1 || num_runnable < 1) return kUnknown;
  return std::max(0, num_runnable - num_cores_);
}

}  // namespace tf
