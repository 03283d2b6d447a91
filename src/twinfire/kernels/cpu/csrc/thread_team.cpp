#include "thread_team.h"

#include <algorithm>
#include <cassert>
#include <csignal>

namespace tf {

namespace {

constexpr int kTileBits = 18;
constexpr uint64_t kTileMask = (1u << kTileBits) - 1;
constexpr int kTagShift = 2 * kTileBits;

// How long a borrower may keep a core from somebody else, beside the tile that it is at.
constexpr std::chrono::milliseconds kLookEvery(1);
// How long a core may be idle before a borrower that found none takes it.
constexpr std::chrono::milliseconds kLongestPause(16);

uint64_t tag_of(uint32_t first_serial) { return uint64_t(first_serial) << kTagShift >> kTagShift; }

uint64_t pack(uint32_t first_serial, int num_tiles) {
  return (tag_of(first_serial) << kTagShift) | (uint64_t(num_tiles) << kTileBits);
}

bool has_reached(uint32_t serial, uint32_t target) { return int32_t(serial - target) >= 0; }

// Signals belong to the interpreter's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

ThreadTeam::ThreadTeam(int num_threads, std::chrono::nanoseconds spin, int num_own_threads,
                       const std::string& load_file)
    : spin_(spin),
      num_own_threads_(num_own_threads),
      idle_cores_(num_threads, load_file),
      phases_(new Phase[kMaxPhases]) {
  const SignalsBlocked blocked;
  for (int thread = 1; thread < num_threads; ++thread)
    workers_.emplace_back([this, thread] {
      is_borrower(thread) ? borrow_for_runs(thread) : wait_for_runs(thread);
    });
}

ThreadTeam::~ThreadTeam() {
  stopping_.store(true);
  newest_run_.publish(newest_run_.load() + 1);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::run(std::span<const int> tiles_of_phase, TileRunner& runner) {
  const int num_phases = int(tiles_of_phase.size());
  assert(num_phases <= kMaxPhases);
  if (num_phases == 0) return;
  const uint32_t first_serial = num_completed_.load();
  runner_ = &runner;
  first_serial_.store(first_serial, std::memory_order_relaxed);
  num_phases_.store(num_phases, std::memory_order_relaxed);
  for (int phase = 0; phase < num_phases; ++phase) {
    const int num_tiles = tiles_of_phase[phase];
    assert(0 < num_tiles && num_tiles <= kMaxTiles);
    phases_[phase].num_unfinished.store(num_tiles, std::memory_order_relaxed);
    phases_[phase].claims.store(pack(first_serial, num_tiles), std::memory_order_release);
  }
  newest_run_.publish(newest_run_.load() + 1);
  work(first_serial, num_phases, 0);
}

void ThreadTeam::wait_for_runs(int thread) {
  uint32_t seen = 0;
  for (;;) {
    newest_run_.wait([seen](uint32_t newest) { return newest != seen; }, spin_);
    // In this order: whoever has seen the number that a stop publishes sees the stop.
    seen = newest_run_.load();
    if (stopping_.load()) return;
    // These may be the next run's by now, complete or not: `claim` lets nobody work on a phase that
    // is not set up for the run he believes in, and the next run announces itself again.
    work(first_serial_.load(std::memory_order_relaxed),
         num_phases_.load(std::memory_order_relaxed), thread);
  }
}

void ThreadTeam::borrow_for_runs(int thread) {
  std::chrono::milliseconds pause = kLookEvery;
  uint32_t seen = 0;
  for (;;) {
    // Spinning would be on somebody else's core.
    newest_run_.wait([seen](uint32_t newest) { return newest != seen; },
                     std::chrono::nanoseconds(0));
    while (!stopping_.load() && must_leave(thread)) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    pause = kLookEvery;
    const uint32_t newest = newest_run_.load();
    if (stopping_.load()) return;
    const bool is_over = work(first_serial_.load(std::memory_order_relaxed),
                              num_phases_.load(std::memory_order_relaxed), thread);
    seen = is_over ? newest : newest - 1;
  }
}

bool ThreadTeam::work(uint32_t first_serial, int num_phases, int thread) {
  using Clock = std::chrono::steady_clock;
  const bool borrows = is_borrower(thread);
  Clock::time_point looked = borrows ? Clock::now() : Clock::time_point{};
  for (int phase = 0; phase < num_phases; ++phase) {
    const uint32_t completed = first_serial + uint32_t(phase) + 1;
    for (;;) {
      if (borrows && Clock::now() - looked > kLookEvery) {
        if (must_leave(thread)) return false;
        looked = Clock::now();
      }
      const int tile = claim(phases_[phase], first_serial);
      if (tile == -2) return true;
      if (tile == -1) break;
      runner_->run_tile(phase, tile, thread);
      if (phases_[phase].num_unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1)
        num_completed_.publish(completed);
    }
    num_completed_.wait([completed](uint32_t now) { return has_reached(now, completed); }, spin_);
  }
  return true;
}

bool ThreadTeam::must_leave(int thread) const {
  // The last of a team first, and half of those that are too many: other teams see the same number.
  return num_threads() - 1 - thread < (idle_cores_.num_missing() + 1) / 2;
}

int ThreadTeam::claim(Phase& phase, uint32_t first_serial) {
  uint64_t seen = phase.claims.load(std::memory_order_acquire);
  for (;;) {
    if (seen >> kTagShift != tag_of(first_serial)) return -2;
    const uint64_t next = seen & kTileMask, num_tiles = (seen >> kTileBits) & kTileMask;
    if (next == num_tiles) return -1;
    if (phase.claims.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel))
      return int(next);
  }
}

}  // namespace tf
