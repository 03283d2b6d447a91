// A counter that threads wait on: spinning for a moment, then asleep in the kernel.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tf {

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }

  // Wakes whoever waits. Costs no system call when nobody sleeps.
  void publish(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    if (num_sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
  }

  // Returns once `reached(value)`; sleeps after `spin` of waiting.
  template <class Reached>
  void wait(Reached reached, std::chrono::nanoseconds spin) {
    using Clock = std::chrono::steady_clock;
    constexpr int kPausesPerLook = 64;
    Clock::time_point deadline{};
    for (;;) {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (reached(load())) return;
        pause_core();
      }
      const Clock::time_point now = Clock::now();
      if (deadline == Clock::time_point{})
        deadline = now + spin;
      else if (now > deadline)
        break;
    }
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (uint32_t seen = value_.load(std::memory_order_seq_cst); !reached(seen);
         seen = value_.load(std::memory_order_seq_cst))
      sleep_while(seen);
    num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
#if defined(__linux__)
  void sleep_while(uint32_t seen) {
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep_while(uint32_t seen) { value_.wait(seen); }
  void wake_all() { value_.notify_all(); }
#endif

  std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> num_sleepers_{0};
};

}  // namespace tf
