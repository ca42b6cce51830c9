// Waiting and waking between processes: pauses and yields within a budget, then a futex.
//
// Both directions follow one pattern. The waiter announces that it will sleep, fences, looks once more, and sleeps on
// the announced word; the waker publishes, fences, and looks at the announcement. With both fences at least one side
// sees the other, so no wake-up is lost. docs/doorbell.pml is the same protocol as a model for spin.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

#include "records.hpp"

namespace muster {

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
struct WaitBudget {
  int pauses;
  int yields;
  bool spreads;  // workers take care that no two of them share a core
};

// The longest time awake before a sleep. A yield while nothing else wants the core takes half a microsecond. A yield
// while another process steps on that core costs as little and lasts until that process yields; so WaitBudget counts
// yields.
inline constexpr int64_t kAwakeNs = 10'000'000;

// A yield that lasts longer than this gave a time slice to something that never yields: another program, a learner's
// thread, a spinning pool of threads. An env's step may last as long; then it hardly matters how the wait is done.
inline constexpr int64_t kLostSliceNs = 1'200'000;

// The wait awake before a sleep, and the decision whether it is worth its time. After a yield that has cost a slice,
// waits sleep at once for a while: a short while where slices are lost now and then, twice as long each time where
// every try loses one.
class AwakeWait {
 public:
  explicit AwakeWait(const WaitBudget& budget) : budget_(budget) {}

  const WaitBudget& budget() const { return budget_; }

  // True once in `period` calls.
  bool is_turn(uint32_t period) { return ++turn_ % period == 0; }

  template <class Done>
  bool wait(int64_t until_ns, Done done) {
    for (int i = 0; i < budget_.pauses; ++i) {
      if (done()) return true;
      pause_core();
    }
    if (done()) return true;
    int64_t before = now_ns();
    if (before < rests_until_) return false;
    const bool has_core = budget_.pauses > 0;
    const long given_way = has_core ? times_given_way() : 0;
    for (int i = 0; i < budget_.yields && !done() && before < until_ns; ++i) {
      for (int k = 0; has_core && k < kPausesPerYield && !done(); ++k) pause_core();
      sched_yield();
      const int64_t now = now_ns();
      // If nothing else has run on this core since the wait began, the host of this virtual machine took the core.
      if (now - before > kLostSliceNs && !(given_way > 0 && times_given_way() == given_way)) {
        lost_a_slice(now);
        return done();
      }
      before = now;
    }
    ++kept_;
    return done();
  }

 private:
  // A process with a core of its own hardly ever has to yield: once after 64 pauses, about 1.2 us (x86), is enough.
  static constexpr int kPausesPerYield = 64;
  static constexpr int64_t kShortestRestNs = 5'000'000, kLongestRestNs = 1'280'000'000;
  static constexpr uint32_t kChance = 8;  // next to what never yields, fewer waits than this pass without a loss

  // The number of times that this thread lost its core to another one while it was ready to run. 0 or less where the
  // kernel does not report it.
  static long times_given_way() {
    rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? -1 : usage.ru_nivcsw;
  }

  void lost_a_slice(int64_t now) {
    rest_ns_ = kept_ < kChance ? std::min(2 * rest_ns_, kLongestRestNs) : kShortestRestNs;
    rests_until_ = now + rest_ns_;
    kept_ = 0;
  }

  WaitBudget budget_;
  int64_t rest_ns_ = kShortestRestNs / 2;
  int64_t rests_until_ = 0;
  uint32_t kept_ = 0;  // waits since a slice was lost
  uint32_t turn_ = 0;
};

// The hosts of one slab, and the caller.
struct Bell {
  CallerRecord& caller;
  HostRecord* hosts;
  uint32_t num_hosts;
  int notify_fd;

  uint32_t total_finished() const {
    uint32_t total = 0;
    for (uint32_t w = 0; w < num_hosts; ++w) total += hosts[w].finished.load(std::memory_order_acquire);
    return total;
  }

  // Counters wrap; compare them as distances.
  bool reached(uint32_t target) const { return int32_t(total_finished() - target) >= 0; }

  // Whether host `w` has answered all that it was asked for.
  bool has_answered(uint32_t w) const {
    return hosts[w].finished.load(std::memory_order_acquire) == hosts[w].asked.load(std::memory_order_relaxed);
  }

  // Whether all hosts but `own` have. Begins behind `own` and stops at the first that has not: the looks of all hosts in
  // one step together grow hardly faster than their number.
  bool others_answered(uint32_t own) const {
    for (uint32_t w = own + 1; w < num_hosts; ++w)
      if (!has_answered(w)) return false;
    for (uint32_t w = 0; w < own; ++w)
      if (!has_answered(w)) return false;
    return true;
  }

  uint32_t callers_cpu() const { return caller.cpu.load(std::memory_order_relaxed); }

  void notify_caller() const {
    const uint64_t one = 1;
    if (caller.notified.load(std::memory_order_relaxed) && caller.notified.exchange(0, std::memory_order_relaxed))
      [[maybe_unused]] const ssize_t written = write(notify_fd, &one, sizeof one);
  }

  // Called by host `own`; with `awaits_all` only once that has answered all.
  void wake_caller_if_done(uint32_t own) const {
    if (!caller.armed.load(std::memory_order_acquire)) return;
    const bool awaits_all = caller.awaits_all.load(std::memory_order_relaxed);
    if (!(awaits_all ? others_answered(own) : reached(caller.target.load(std::memory_order_relaxed)))) return;
    if (caller.armed.exchange(0, std::memory_order_relaxed)) futex_wake(caller.armed);
  }
};

// ---- caller -> workers

// Release: the records and actions written before are visible to a worker that sees the new count.
inline void count_ring(HostRecord& host) {
  host.rung.store(host.rung.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// Wakes a worker that sleeps; called after count_ring and a fence.
inline void wake_worker(HostRecord& host) {
  if (host.asleep.load(std::memory_order_relaxed)) futex_wake(host.rung);
}

inline void ring(HostRecord& host) {
  count_ring(host);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_worker(host);
}

inline void ring_all(const Bell& bell) {
  for (uint32_t w = 0; w < bell.num_hosts; ++w) count_ring(bell.hosts[w]);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Workers that sleep on the caller's own core come last: once awake, they may take that core at once.
  for (const bool own_core : {false, true})
    for (uint32_t w = 0; w < bell.num_hosts; ++w)
      if ((bell.hosts[w].cpu.load(std::memory_order_relaxed) == bell.callers_cpu()) == own_core)
        wake_worker(bell.hosts[w]);
}

// Moves this worker to a free core if it shares one. Two workers on one core would step one after the other, and the
// kernel leaves them there for long: it regards cores that idle for less than half a millisecond as busy. The worker
// with the higher index moves; so does a worker on the caller's core where every process has a core. Of many workers
// each looks at the others only now and then, or when it is on another core than before: they write their cores to lines
// that change with each step.
inline void take_cpu(const Bell& bell, uint32_t index, AwakeWait& awake) {
  const WaitBudget& budget = awake.budget();
  auto& own = bell.hosts[index].cpu;
  const uint32_t cpu = 1 + uint32_t(sched_getcpu());
  const bool has_moved = cpu != own.load(std::memory_order_relaxed);
  if (has_moved) own.store(cpu, std::memory_order_relaxed);
  if (!awake.is_turn(1 + bell.num_hosts / 8) && !has_moved) return;
  bool is_taken = budget.pauses && cpu == bell.callers_cpu();
  for (uint32_t w = 0; w < index; ++w) is_taken |= bell.hosts[w].cpu.load(std::memory_order_relaxed) == cpu;
  if (!is_taken) return;
  // To a core without a worker, and if possible without the caller.
  cpu_set_t allowed, free;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  free = allowed;
  for (uint32_t w = 0; w < bell.num_hosts; ++w)
    if (const uint32_t taken = bell.hosts[w].cpu.load(std::memory_order_relaxed)) CPU_CLR(taken - 1, &free);
  cpu_set_t without_caller = free;
  if (const uint32_t taken = bell.callers_cpu()) CPU_CLR(taken - 1, &without_caller);
  if (CPU_COUNT(&without_caller)) free = without_caller;
  if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
  // Moving may take milliseconds. If another program has set this worker's affinity meanwhile, that setting stays.
  cpu_set_t now;
  if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &free)) sched_setaffinity(0, sizeof allowed, &allowed);
  own.store(1 + uint32_t(sched_getcpu()), std::memory_order_relaxed);
}

// A worker's wait for a ring other than `seen`. docs/adr/0003-doorbell.md has the measurements behind each rule.
inline void wait_for_ring(const Bell& bell, uint32_t index, uint32_t seen, AwakeWait& awake) {
  HostRecord& host = bell.hosts[index];
  auto rung = [&] { return host.rung.load(std::memory_order_acquire) != seen; };
  if (awake.budget().spreads) take_cpu(bell, index, awake);
  while (!awake.wait(now_ns() + kAwakeNs, rung)) {
    host.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!rung()) futex_wait(host.rung, seen, -1);
    host.asleep.store(0, std::memory_order_relaxed);
    if (rung()) return;
  }
}

// ---- workers -> caller

inline void announce_finished(const Bell& bell, uint32_t index) {
  HostRecord& host = bell.hosts[index];
  const uint32_t finished = host.finished.load(std::memory_order_relaxed) + 1;
  host.finished.store(finished, std::memory_order_release);
  // Only a worker's last answer can complete the whole. A check after each answer would cost as much as a step of a
  // microsecond: the fence waits for cache lines that the caller has read, and the other workers' counts are on their
  // cores.
  if (bell.caller.awaits_all.load(std::memory_order_relaxed) && finished != host.asked.load(std::memory_order_relaxed))
    return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bell.wake_caller_if_done(index);
  bell.notify_caller();
}

// Waits until `target` steps are finished, for `slice_ns` at most; sleeps at once if `awake` is null. True if they are.
// Where all that was asked for is awaited, looks at each host only until it has answered: a wait may look many times.
inline bool wait_for_finished(const Bell& bell, uint32_t target, AwakeWait* awake, int64_t slice_ns) {
  const bool awaits_all = bell.caller.awaits_all.load(std::memory_order_relaxed);
  uint32_t answered = 0;
  auto done = [&] {
    if (!awaits_all) return bell.reached(target);
    while (answered < bell.num_hosts && bell.has_answered(answered)) ++answered;
    return answered == bell.num_hosts;
  };
  const int64_t start = now_ns();
  if (awake && awake->wait(start + std::min(slice_ns, kAwakeNs), done)) return true;
  CallerRecord& caller = bell.caller;
  caller.target.store(target, std::memory_order_relaxed);
  caller.armed.store(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done()) futex_wait(caller.armed, 1, std::max(int64_t{0}, start + slice_ns - now_ns()));
  caller.armed.store(0, std::memory_order_relaxed);
  return done();
}

}  // namespace muster
