// The shared block as both sides see it: plain structs at offsets that transport/slab.py computes. Python has the names,
// offsets and sizes from module.cpp.
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
enum class Doing : uint32_t { kNothing = 0, kStepping = 1, kResetting = 2, kTalking = 3 };

// All that an env says about one step, on one cache line. The caller writes it before it rings the worker, the worker
// from then until `finished` equals `requested`; so neither ever sees a half-written record.
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
  uint32_t obs_block;  // of the slab's blocks of observation rows, the one that this env's lent rows go to
};
static_assert(sizeof(EnvRecord) == kCacheLine);

// What NumPy calls a field's type; null for one that it has not been told of.
template <class Field>
inline constexpr const char* kFormat =
    std::is_same_v<Field, bool> ? "?" : std::is_same_v<Field, double> ? "f8" : std::is_same_v<Field, int64_t> ? "i8"
    : sizeof(Field) == 4 ? "u4" : sizeof(Field) == 1 ? "u1" : nullptr;

// What the caller and a host say to each other. Each cache line has one writer, and none is shared by ringing, finishing
// and diagnosis.
struct alignas(kCacheLine) HostRecord {
  std::atomic<uint32_t> rung;    // futex word; the caller adds 1
  std::atomic<uint32_t> asleep;  // the worker is, or is about to be, in futex_wait
  std::atomic<uint32_t> messages;  // control messages the caller has sent
  std::atomic<uint32_t> asked;     // env steps the caller has asked for

  alignas(kCacheLine) std::atomic<uint32_t> finished;  // env steps finished; also the worker's to write
  std::atomic<uint32_t> cpu;  // 1 + the core on which the worker last began to wait; 0: not known

  alignas(kCacheLine) std::atomic<Doing> doing;
  std::atomic<uint32_t> doing_env;
  std::atomic<uint64_t> since;  // ticks()
  std::atomic<uint64_t> env_steps;
  std::atomic<uint64_t> resets;
  std::atomic<uint64_t> ticks_in_env;
  std::atomic<uint64_t> ticks_copying;
  std::atomic<uint64_t> ticks_waiting;
};
static_assert(sizeof(HostRecord) == 3 * kCacheLine);

struct alignas(kCacheLine) CallerRecord {
  std::atomic<uint32_t> armed;   // futex word: 1 while the caller sleeps, or is about to
  std::atomic<uint32_t> target;  // sum of `finished` over the workers that it waits for
  std::atomic<uint32_t> core;    // on which it last rang
  std::atomic<uint32_t> awaits_all;  // 1: what it asked for last, it waits for as a whole
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
