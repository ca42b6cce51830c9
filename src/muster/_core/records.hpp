// The records of the shared block, as the caller and the workers see them: plain structs at offsets that
// transport/slab.py computes. Python gets the names, offsets and sizes from module.cpp.
#pragma once

#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace muster {

inline constexpr size_t kCacheLine = 64;

enum class Command : uint8_t { kStep = 1, kReset = 2, kStepProvided = 3 };
enum class Status : uint8_t { kOk = 0, kRaised = 1, kLost = 2 };
enum class Doing : uint32_t { kNothing = 0, kStepping = 1, kResetting = 2, kTalking = 3, kBuilding = 4 };

// All that an env reports about one step, on one cache line. Its two counters hand over all bytes of the env, of which
// the rest of the record is a part: the worker's while they differ, else the caller's; transport/slab.py has the list.
// Who takes the bytes over (acquire) sees all that the other side wrote before it handed them over (release).
struct alignas(kCacheLine) EnvRecord {
  std::atomic<uint32_t> requested;
  std::atomic<uint32_t> finished;
  Command command;
  Status status;
  bool terminated;
  bool truncated;
  bool needs_reset;       // the last row ended an episode and no reset followed
  bool has_final;         // same_step: the final rows belong to this step
  bool episode_over;      // the counts below are of a finished episode
  uint32_t info_schema;   // 0: no info
  uint32_t final_schema;  // same_step: schema of the final step's info
  uint32_t mail_bytes;    // pickled objects in this env's part of the mail
  uint32_t restarts;
  double reward;
  double episode_return;
  int64_t episode_length;
  uint32_t obs_block;   // the block of observation rows to which this env's lent leaves are written
  uint32_t final_ints;  // same_step: which values of Discrete spaces in the final rows were ints, see `Ints`

  // For the caller.
  void request() { requested.store(requested.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
  bool is_finished() const {
    return finished.load(std::memory_order_acquire) == requested.load(std::memory_order_relaxed);
  }

  // For the worker.
  bool is_requested() const {
    return requested.load(std::memory_order_acquire) != finished.load(std::memory_order_relaxed);
  }
  void finish() { finished.store(requested.load(std::memory_order_relaxed), std::memory_order_release); }
  void count(double step_reward, bool is_terminated, bool is_truncated) {
    if (episode_over) episode_return = 0, episode_length = 0;
    reward = step_reward;
    episode_return += reward;
    episode_length += 1;
    terminated = is_terminated;
    truncated = is_truncated;
    needs_reset = episode_over = terminated || truncated;
  }
};
static_assert(sizeof(EnvRecord) == kCacheLine);

// NumPy's name of a field's type; null for a type that is not listed here.
template <class Field>
inline constexpr const char* kFormat =
    std::is_same_v<Field, bool> ? "?" : std::is_same_v<Field, double> ? "f8" : std::is_same_v<Field, int64_t> ? "i8"
    : sizeof(Field) == 4 ? "u4" : sizeof(Field) == 1 ? "u1" : nullptr;

// Where the seeds of an env's episodes come from, where each has its own: the caller writes the one that all of them are
// made from, the worker counts them. A part of the env's bytes.
struct EpisodeRecord {
  uint64_t seed;
  uint64_t begun;  // episodes since that seed was written, the current one included
};

// The counters and states by which the caller and one host communicate. Each cache line has one writer, except that the
// worker writes `asleep`; and ringing, finishing and diagnosis have a line each.
struct alignas(kCacheLine) HostRecord {
  std::atomic<uint32_t> rung;    // futex word; the caller adds 1
  std::atomic<uint32_t> asleep;  // the worker is, or is about to be, in futex_wait
  std::atomic<uint32_t> messages;  // control messages the caller has sent
  std::atomic<uint32_t> asked;     // env steps the caller has asked for

  alignas(kCacheLine) std::atomic<uint32_t> finished;  // env steps finished; the worker writes this line
  std::atomic<uint32_t> cpu;  // 1 + the core on which the worker last began to wait; 0: not known
  // Of a host that steps its envs at the same time: turns of its loop, code of envs that runs on though nobody waits for
  // it, the sum over all envs of their time in their own code, and the time for which one has kept the loop from others.
  std::atomic<uint32_t> beats;
  std::atomic<uint32_t> left_behind;
  std::atomic<uint64_t> ticks_of_envs;
  std::atomic<uint64_t> ticks_blocked;

  alignas(kCacheLine) std::atomic<Doing> doing;
  std::atomic<uint32_t> doing_env;
  std::atomic<uint64_t> since;  // ticks()
  std::atomic<uint64_t> env_steps;
  std::atomic<uint64_t> resets;
  std::atomic<uint64_t> ticks_in_env;
  std::atomic<uint64_t> ticks_copying;
  std::atomic<uint64_t> ticks_waiting;
  std::atomic<uint32_t> layouts_end;  // where the layouts of infos in the mail end; what lies before is never changed

  // For the worker.  `doing` last: who sees it sees since when, too.
  void begin(Doing what, uint32_t env, uint64_t now) {
    doing_env.store(env, std::memory_order_relaxed);
    since.store(now, std::memory_order_relaxed);
    doing.store(what, std::memory_order_release);
  }
};
static_assert(sizeof(HostRecord) == 3 * kCacheLine);

struct alignas(kCacheLine) CallerRecord {
  std::atomic<uint32_t> armed;   // futex word: 1 while the caller sleeps, or is about to
  std::atomic<uint32_t> target;  // the sum of all hosts' `finished` that the caller waits for
  std::atomic<uint32_t> cpu;     // 1 + the core on which the caller last rang; 0: not known
  std::atomic<uint32_t> awaits_all;  // 1: the caller waits as a whole for all that it asked for last
  std::atomic<uint32_t> notified;    // 1: the next answer is to be notified by a write to an eventfd, too
};

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// A clock that takes no call to the kernel, in units of its own.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return uint64_t(now_ns());
#endif
}

// A counter with one writer needs no read-modify-write instruction.
template <class T>
inline void bump(std::atomic<T>& counter, T by) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

}  // namespace muster
