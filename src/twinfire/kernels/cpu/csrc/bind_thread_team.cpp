#include <nanobind/stl/shared_ptr.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "bindings.h"
#include "thread_team.h"

namespace tf {

namespace nb = nanobind;

namespace {

// Tiles that only count themselves: what is left is the cost of a phase.
class Counter : public TileRunner {
 public:
  void run_tile(int, int, int) override { num_run_.fetch_add(1, std::memory_order_relaxed); }
  int64_t num_run() const { return num_run_.load(); }

 private:
  std::atomic<int64_t> num_run_{0};
};

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

std::shared_ptr<ThreadTeam> make_team(int num_threads, int spin_us) {
  if (num_threads < 1) throw nb::value_error("a team has at least one thread");
  return std::make_shared<ThreadTeam>(num_threads, std::chrono::microseconds(spin_us));
}

}  // namespace

void bind_thread_team(nb::module_& module) {
  nb::class_<ThreadTeam>(module, "ThreadTeam")
      .def(nb::new_(&make_team), nb::arg("num_threads"), nb::arg("spin_us") = 50)
      .def_prop_ro("num_threads", &ThreadTeam::num_threads)
      .def("measure_phases",
           [](ThreadTeam& team, int num_phases, int tiles_per_phase) {
             if (num_phases < 1 || num_phases > ThreadTeam::kMaxPhases || tiles_per_phase < 1 ||
                 tiles_per_phase > ThreadTeam::kMaxTiles)
               throw nb::value_error("too few or too many phases or tiles");
             const auto [us, tiles] = measure_phases(team, num_phases, tiles_per_phase);
             return nb::make_tuple(us, tiles);
           },
           nb::arg("num_phases"), nb::arg("tiles_per_phase"));
}

}  // namespace tf
