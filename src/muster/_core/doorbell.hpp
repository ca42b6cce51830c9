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

#include <algorithm>
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
  int yields_apart;  // more of them, while they take nothing from the process awaited; 0: cores are not the process's own
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

// The lines of one slab.
struct Bell {
  CallerLine& caller;
  WorkerLine* lines;
  uint32_t num_lines;

  uint32_t total_finished() const {
    uint32_t total = 0;
    for (uint32_t w = 0; w < num_lines; ++w) total += lines[w].finished.load(std::memory_order_acquire);
    return total;
  }

  // Counters wrap; compare them as distances.
  bool reached(uint32_t target) const { return int32_t(total_finished() - target) >= 0; }

  bool has_target() const { return reached(caller.target.load(std::memory_order_relaxed)); }

  uint32_t callers_seat() const { return 1 + caller.core.load(std::memory_order_relaxed); }

  // Whether this worker waits awake on the caller's core. It then wakes the caller for all workers: from another core a
  // wake-up is an interrupt.
  bool stands_by(const WorkerLine& line) const {
    return line.seat.load(std::memory_order_relaxed) == callers_seat() && !line.asleep.load(std::memory_order_relaxed) &&
           line.finished.load(std::memory_order_relaxed) == line.asked.load(std::memory_order_relaxed);
  }

  void wake_caller_if_done() const {
    if (!caller.armed.load(std::memory_order_acquire) || !has_target()) return;
    if (caller.armed.exchange(0, std::memory_order_relaxed)) futex_wake(caller.armed);
  }
};

// ---- caller -> workers

// Release: the records and actions written before are visible to whoever sees the new count.
inline void count_ring(WorkerLine& line) {
  line.rung.store(line.rung.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// After count_ring and a fence.
inline void wake_worker(WorkerLine& line) {
  if (line.asleep.load(std::memory_order_relaxed)) futex_wake(line.rung);
}

inline void ring(WorkerLine& line) {
  count_ring(line);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_worker(line);
}

inline void ring_all(const Bell& bell) {
  for (uint32_t w = 0; w < bell.num_lines; ++w) count_ring(bell.lines[w]);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Whoever sleeps on the caller's own core comes last: it may take that core at once.
  for (const bool own_core : {false, true})
    for (uint32_t w = 0; w < bell.num_lines; ++w)
      if ((bell.lines[w].seat.load(std::memory_order_relaxed) == bell.callers_seat()) == own_core)
        wake_worker(bell.lines[w]);
}

// A worker's wait for the next ring. docs/adr/0003-doorbell.md has the measurements behind each rule.
class WaitForRing {
 public:
  // pass_ns: how long a round of steps takes.
  WaitForRing(const Bell& bell, uint32_t index, uint32_t seen, const Patience& patience, int64_t pass_ns)
      : bell_(bell), line_(bell.lines[index]), index_(index), seen_(seen), patience_(patience), pass_ns_(pass_ns) {}

  void wait() {
    if (patience_.yields_apart) take_seat();
    while (!wait_awake(patience_, [&] { return rung(); }, [&](int i) { return in_the_way(i); })) {
      line_.asleep.store(1, std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      bell_.wake_caller_if_done();
      if (!rung()) futex_wait(line_.rung, seen_, -1);
      line_.asleep.store(0, std::memory_order_relaxed);
      if (rung()) return;
    }
  }

 private:
  bool rung() const { return line_.rung.load(std::memory_order_acquire) != seen_; }

  // On the caller's core this worker yields while the caller needs others' answers. After that the core is the caller's;
  // one that has more to do than to ring again gets it at once, since whoever waits for its turn meanwhile is owed time,
  // and keeps the core when the caller is woken the next time.
  bool in_the_way(int i) {
    if (bell_.stands_by(line_)) bell_.wake_caller_if_done();
    if (bell_.caller.core.load(std::memory_order_relaxed) != uint32_t(sched_getcpu())) return false;
    if (patience_.yields_apart && !bell_.has_target()) return false;
    return bell_.caller.lingers.load(std::memory_order_relaxed) || i >= patience_.yields;
  }

  // Two workers on one core would step one after the other. The kernel leaves them there for long: it looks at cores
  // that idle for less than half a millisecond as busy. The one with the higher index moves over; so does one beside
  // the caller where every process has a core.
  void take_seat() {
    const uint32_t seat = 1 + uint32_t(sched_getcpu());
    if (seat != line_.seat.load(std::memory_order_relaxed)) change_seat(seat);
    if (leaves_core_to_policy()) {
      if (seat == bell_.callers_seat()) move_over(false);
      return;
    }
    if (patience_.pauses && seat == bell_.callers_seat()) return move_over();
    for (uint32_t w = 0; w < index_; ++w)
      if (bell_.lines[w].seat.load(std::memory_order_relaxed) == seat) return move_over();
  }

  // A caller that sleeps while it waits finds its core cold: its policy then takes a quarter longer, more than it takes to
  // make short rounds one after the other on the cores that are left. Without a worker on its core it stays awake.
  bool leaves_core_to_policy() const {
    return !patience_.pauses && bell_.caller.lingers.load(std::memory_order_relaxed) >= kSettled &&
           pass_ns_ < kShortNs;
  }

  // To a core without a worker, and if possible without the caller; `alone` false: to any without the caller.
  void move_over(bool alone = true) {
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    free = allowed;
    for (uint32_t w = 0; alone && w < bell_.num_lines; ++w)
      if (const uint32_t seat = bell_.lines[w].seat.load(std::memory_order_relaxed)) CPU_CLR(seat - 1, &free);
    cpu_set_t without_caller = free;
    CPU_CLR(bell_.caller.core.load(std::memory_order_relaxed), &without_caller);
    if (CPU_COUNT(&without_caller) || !alone) free = without_caller;
    if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
    // Moving may take ms. Whoever has confined this worker meanwhile, from outside, is obeyed.
    cpu_set_t now;
    if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &free)) sched_setaffinity(0, sizeof allowed, &allowed);
    change_seat(1 + uint32_t(sched_getcpu()));
  }

  // Who finished before it could see the change may have left the caller to this worker; both fence before they look.
  void change_seat(uint32_t seat) {
    line_.seat.store(seat, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bell_.wake_caller_if_done();
  }

  static constexpr uint32_t kSettled = 4;  // one slow turn among quick ones is no policy
  static constexpr int64_t kShortNs = 100'000;

  Bell bell_;
  WorkerLine& line_;
  uint32_t index_;
  uint32_t seen_;
  Patience patience_;
  int64_t pass_ns_;
};

// ---- workers -> caller

inline void announce_finished(const Bell& bell, WorkerLine& line) {
  const uint32_t finished = line.finished.load(std::memory_order_relaxed) + 1;
  line.finished.store(finished, std::memory_order_release);
  // Only a worker's last answer can complete a whole. To look for more after each would cost as much as a microsecond's
  // step: the fence waits for cache lines that the caller has read, and the others' counts are on their cores.
  if (bell.caller.awaits_all.load(std::memory_order_relaxed) && finished != line.asked.load(std::memory_order_relaxed))
    return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!bell.caller.armed.load(std::memory_order_acquire) || !bell.has_target()) return;
  for (uint32_t w = 0; w < bell.num_lines; ++w)
    if (&bell.lines[w] != &line && bell.stands_by(bell.lines[w])) return;
  bell.wake_caller_if_done();
}

inline constexpr int64_t kAwakeNs = 1'000'000;

// Sleeps until `target` steps are finished, for `slice_ns` at most. True if they are.
inline bool wait_for_finished(const Bell& bell, uint32_t target, const Patience& patience, int64_t slice_ns) {
  auto done = [&] { return bell.reached(target); };
  const int64_t awake_until = now_ns() + std::min(slice_ns, kAwakeNs);
  // Awake on a worker's core, the caller would keep it from stepping. A core that others want, too, is theirs for
  // milliseconds after each yield.
  auto in_the_way = [&](int i) {
    if (now_ns() >= awake_until) return true;
    if (i < patience.yields) return false;
    for (uint32_t w = 0; w < bell.num_lines; ++w)
      if (bell.lines[w].seat.load(std::memory_order_relaxed) == bell.callers_seat()) return true;
    return false;
  };
  if (wait_awake(patience, done, in_the_way)) return true;
  CallerLine& caller = bell.caller;
  caller.target.store(target, std::memory_order_relaxed);
  caller.armed.store(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done()) futex_wait(caller.armed, 1, slice_ns);
  // Slept on although all is there: whoever stands by is stopped, dead or kept from its core.
  if (caller.armed.exchange(0, std::memory_order_relaxed) && done())
    for (uint32_t w = 0; w < bell.num_lines; ++w) bell.lines[w].seat.store(0, std::memory_order_relaxed);
  return done();
}

}  // namespace muster
