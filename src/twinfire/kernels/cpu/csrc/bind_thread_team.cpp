#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "bind_arrays.h"
#include "bindings.h"
#include "memory_sweep.h"
#include "thread_team.h"

namespace tf {

namespace nb = nanobind;

namespace {

void check_run(int num_phases, int tiles_per_phase) {
  if (num_phases < 1 || num_phases > ThreadTeam::kMaxPhases || tiles_per_phase < 1 ||
      tiles_per_phase > ThreadTeam::kMaxTiles)
    throw nb::value_error("too few or too many phases or tiles");
}

// Tiles that only count themselves: what is left is the cost of a phase.
class Counter : public TileRunner {
 public:
  void run_tile(int, int, int) override { num_run_.fetch_add(1, std::memory_order_relaxed); }
  int64_t num_run() const { return num_run_.load(); }

 private:
  std::atomic<int64_t> num_run_{0};
};

// Tiles that take a while, and count who runs them.
class SlowTiles : public TileRunner {
 public:
  SlowTiles(int num_threads, std::chrono::nanoseconds tile)
      : tile_(tile), num_run_(size_t(num_threads)) {}
  void run_tile(int, int, int thread) override {
    const auto end = std::chrono::steady_clock::now() + tile_;
    while (std::chrono::steady_clock::now() < end) pause_core();
    num_run_[size_t(thread)].fetch_add(1, std::memory_order_relaxed);
  }
  std::vector<int> num_run() const { return {num_run_.begin(), num_run_.end()}; }

 private:
  std::chrono::nanoseconds tile_;
  std::vector<std::atomic<int>> num_run_;
};

std::vector<int> count_tiles(ThreadTeam& team, int num_phases, int tiles_per_phase, int tile_us) {
  check_run(num_phases, tiles_per_phase);
  SlowTiles tiles(team.num_threads(), std::chrono::microseconds(tile_us));
  const nb::gil_scoped_release released;
  team.run(std::vector<int>(size_t(num_phases), tiles_per_phase), tiles);
  return tiles.num_run();
}

// (microseconds per phase, tiles run) of one run with nothing to compute.
std::pair<double, int64_t> measure_phases(ThreadTeam& team, int num_phases, int tiles_per_phase) {
  const std::vector<int> tiles(size_t(num_phases), tiles_per_phase);
  Counter counter;
  const auto start = std::chrono::steady_clock::now();
  {
    const nb::gil_scoped_release released;
    team.run(tiles, counter);
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return {took.count() / num_phases, counter.num_run()};
}

// Tiles that read memory.
class Sweep : public TileRunner {
 public:
  static constexpr size_t kTileBytes = 256 * 1024;

  Sweep(const std::byte* bytes, size_t num_bytes)
      : kernels_(TF_FOR_ISA(best_isa(), kSweepKernels)), bytes_(bytes), num_bytes_(num_bytes) {}
  int num_tiles() const { return int((num_bytes_ + kTileBytes - 1) / kTileBytes); }
  void run_tile(int, int tile, int) override {
    const size_t first = size_t(tile) * kTileBytes;
    // Stored so that the reads count for something.
    last_.store(kernels_.read(bytes_ + first, std::min(kTileBytes, num_bytes_ - first)),
                std::memory_order_relaxed);
  }

 private:
  const SweepKernels& kernels_;
  const std::byte* bytes_;
  size_t num_bytes_;
  std::atomic<float> last_{0.0f};
};

double measure_read(ThreadTeam& team, ConstVector<uint8_t> content) {
  require(content.size() > 0 && content.size() % 256 == 0,
          "the size must be a multiple of 256 bytes");
  const nb::gil_scoped_release released;
  Sweep sweep(reinterpret_cast<const std::byte*>(content.data()), content.size());
  const auto start = std::chrono::steady_clock::now();
  team.run(std::array{sweep.num_tiles()}, sweep);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::shared_ptr<ThreadTeam> make_team(int num_threads, int spin_us,
                                      std::optional<int> num_own_threads,
                                      const std::string& load_file) {
  const int num_own = num_own_threads.value_or(num_threads);
  if (num_own < 1 || num_own > num_threads)
    throw nb::value_error("a team has at least one thread of its own, and no more than in all");
  return std::make_shared<ThreadTeam>(num_threads, std::chrono::microseconds(spin_us), num_own,
                                      load_file);
}

}  // namespace

void bind_thread_team(nb::module_& module) {
  nb::class_<ThreadTeam>(module, "ThreadTeam")
      .def(nb::new_(&make_team), nb::arg("num_threads"), nb::arg("spin_us") = 50,
           nb::arg("num_own_threads") = nb::none(), nb::arg("load_file") = "/proc/loadavg")
      .def_prop_ro("num_threads", &ThreadTeam::num_threads)
      .def_prop_ro("num_own_threads", &ThreadTeam::num_own_threads)
      .def("count_tiles", &count_tiles, nb::arg("num_phases"), nb::arg("tiles_per_phase"),
           nb::arg("tile_us"))
      .def("measure_phases",
           [](ThreadTeam& team, int num_phases, int tiles_per_phase) {
             check_run(num_phases, tiles_per_phase);
             const auto [us, tiles] = measure_phases(team, num_phases, tiles_per_phase);
             return nb::make_tuple(us, tiles);
           },
           nb::arg("num_phases"), nb::arg("tiles_per_phase"))
      .def("measure_read", &measure_read, nb::arg("content"));
}

}  // namespace tf
