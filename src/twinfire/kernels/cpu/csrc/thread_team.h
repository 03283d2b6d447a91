// Threads that live as long as a model and run its steps together.
//
// A run is a list of phases, a phase a number of independent tiles. Threads claim tiles one by one;
// a phase ends when its tiles are done, not when all threads have arrived. So a thread that the
// system has taken off its core between two tiles holds nobody up: the others go on without it and
// it joins again at the phase that is current when it comes back. Nor does a thread that leaves: some
// of a team may be borrowers, who take part only while they would find a core idle otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "idle_cores.h"
#include "wait_word.h"

namespace tf {

// What computes tiles. Must not throw.
class TileRunner {
 public:
  virtual void run_tile(int phase, int tile, int thread) = 0;

 protected:
  ~TileRunner() = default;
};

class ThreadTeam {
 public:
  static constexpr int kMaxPhases = 8192;
  static constexpr int kMaxTiles = (1 << 18) - 1;

  // `num_threads` counts the thread that calls `run`; those beyond `num_own_threads` are borrowers.
  // How long a waiting thread spins before it sleeps trades the time to wake it against the time
  // that other processes get.
  explicit ThreadTeam(int num_threads,
                      std::chrono::nanoseconds spin = std::chrono::microseconds(50))
      : ThreadTeam(num_threads, spin, num_threads, "") {}
  ThreadTeam(int num_threads, std::chrono::nanoseconds spin, int num_own_threads,
             const std::string& load_file);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return int(workers_.size()) + 1; }
  int num_own_threads() const { return num_own_threads_; }

  // Runs all tiles of phase 0, then all of phase 1, and so on; no phase may be empty. Not
  // reentrant, and one caller at a time.
  void run(std::span<const int> tiles_of_phase, TileRunner& runner);

 private:
  struct alignas(64) Phase {
    // run tag, number of tiles, next tile; see `pack`.
    std::atomic<uint64_t> claims{0};
    std::atomic<int32_t> num_unfinished{0};
  };

  void wait_for_runs(int thread);
  void borrow_for_runs(int thread);
  // False when a borrower left before the end.
  bool work(uint32_t first_serial, int num_phases, int thread);
  bool is_borrower(int thread) const { return thread >= num_own_threads_; }
  bool must_leave(int thread) const;
  // The next tile of a phase, -1 when none is left, -2 when that run is over.
  int claim(Phase& phase, uint32_t first_serial);

  std::chrono::nanoseconds spin_;
  int num_own_threads_;
  IdleCores idle_cores_;
  std::unique_ptr<Phase[]> phases_;
  TileRunner* runner_ = nullptr;
  std::atomic<int> num_phases_{0};
  std::atomic<uint32_t> first_serial_{0};
  // Serial numbers of phases never stop counting, so that one word orders all runs.
  WaitWord num_completed_;
  WaitWord newest_run_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace tf
