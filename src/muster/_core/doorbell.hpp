// Waiting and waking between processes: a bounded burst of pauses and yields, then a futex.
//
// Both directions follow one pattern. The waiter announces that it will sleep, fences, looks once more, and sleeps on
// the announced word; the waker publishes, fences, and looks at the announcement. With both fences at least one side
// sees the other, so no wake-up is lost. docs/doorbell.pml is the same protocol as a model for spin.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "layout.hpp"

namespace muster {

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return uint64_t(now_ns());
#endif
}

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the words lie in memory that several processes share.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, timeout_ns < 0 ? nullptr : &timeout, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// How long to stay awake before sleeping. Pausing is cheapest while every process has a core of its own; once cores are
// shared it steals the core that the awaited process needs, and yielding wins.
struct Patience {
  int pauses;
  int yields;
  int yields_apart;  // more of them, while they take nothing from the process awaited
};

// `in_the_way`: whether a yield number i would take something from the process awaited.
template <class Done, class InTheWay>
inline bool wait_awake(const Patience& patience, Done done, InTheWay in_the_way) {
  for (int i = 0; i < patience.pauses; ++i) {
    if (done()) return true;
    pause_core();
  }
  for (int i = 0; i < patience.yields + patience.yields_apart && !in_the_way(i); ++i) {
    if (done()) return true;
    sched_yield();
  }
  return done();
}

// ---- caller -> worker

inline void ring(WorkerLine& line) {
  // Release: the records and actions written before are visible to whoever sees the new count.
  line.rung.store(line.rung.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (line.asleep.load(std::memory_order_relaxed)) futex_wake(line.rung);
}

inline void wait_for_ring(WorkerLine& line, const CallerLine& caller, uint32_t seen, const Patience& patience) {
  auto rung = [&] { return line.rung.load(std::memory_order_acquire) != seen; };
  // On the core of a caller that has more to do than to ring again, it is best to sleep at once: whoever waits for its
  // turn there meanwhile is owed time, and keeps the core from the caller when that is woken the next time.
  auto in_the_way = [&](int i) {
    if (caller.core.load(std::memory_order_relaxed) != uint32_t(sched_getcpu())) return false;
    if (caller.lingers.load(std::memory_order_relaxed)) return true;
    return i >= patience.yields && !caller.armed.load(std::memory_order_relaxed);
  };
  while (!wait_awake(patience, rung, in_the_way)) {
    line.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!rung()) futex_wait(line.rung, seen, -1);
    line.asleep.store(0, std::memory_order_relaxed);
    if (rung()) return;
  }
}

// ---- workers -> caller

inline uint32_t total_finished(const WorkerLine* lines, uint32_t num_workers) {
  uint32_t total = 0;
  for (uint32_t w = 0; w < num_workers; ++w) total += lines[w].finished.load(std::memory_order_acquire);
  return total;
}

// Counters wrap; compare them as distances.
inline bool reached(uint32_t total, uint32_t target) { return int32_t(total - target) >= 0; }

inline void announce_finished(WorkerLine& line, CallerLine& caller, const WorkerLine* lines, uint32_t num_workers) {
  line.finished.store(line.finished.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!caller.armed.load(std::memory_order_acquire)) return;
  if (!reached(total_finished(lines, num_workers), caller.target.load(std::memory_order_relaxed))) return;
  if (caller.armed.exchange(0, std::memory_order_relaxed)) futex_wake(caller.armed);
}

// Sleeps until `target` steps are finished, for `slice_ns` at most. True if they are.
inline bool wait_for_finished(CallerLine& caller, const WorkerLine* lines, uint32_t num_workers, uint32_t target,
                              const Patience& patience, int64_t slice_ns) {
  auto done = [&] { return reached(total_finished(lines, num_workers), target); };
  if (wait_awake(patience, done, [](int) { return false; })) return true;
  caller.target.store(target, std::memory_order_relaxed);
  caller.armed.store(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done()) futex_wait(caller.armed, 1, slice_ns);
  caller.armed.store(0, std::memory_order_relaxed);
  return done();
}

}  // namespace muster
