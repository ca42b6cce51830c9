// Two workers and a caller, as threads that hand rows to each other by the core's own records, doorbell and recovery.
// Built with ThreadSanitizer, which reports every byte that one thread touches while it is another's.
//
// The worker's loop is that of Stepper::run, the caller's that of Caller and backends/recovery.py, without Python: under
// the GIL no two threads could be at it at once. What travels by system calls in the library (messages, mail) is plain
// memory here; messages have a lock, as the kernel has.
//
// Every row tells its env and its step, so that a row that is wrong is noticed even where no race is.
//
// READS_EARLY: the caller reads a row that it has just handed over. Then a report has to come.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "recovery.hpp"

using namespace muster;

namespace {

constexpr uint32_t kEnvs = 6, kHosts = 2, kEnvsPerHost = kEnvs / kHosts;
constexpr uint32_t kFirst = 2, kMaxLayouts = 64;  // as in InfoTable
constexpr uint64_t kActionBytes = 16, kObsBytes = 256, kInfoBytes = 128;

[[noreturn]] void fail(const char* what, uint32_t env) {
  std::printf("wrong %s of env %u\n", what, env);
  std::exit(2);
}

struct Slab {
  CallerRecord caller{};
  HostRecord hosts[kHosts]{};
  EnvRecord records[kEnvs]{};
  EpisodeRecord episodes[kEnvs]{};
  uint32_t layouts[kHosts][kMaxLayouts]{};  // the mail's box for them
  alignas(kCacheLine) char rows[kEnvs * (kActionBytes + 2 * kObsBytes + kInfoBytes)]{};
};

Slab slab;
const SlabRows kActions{0, kActionBytes}, kObs{kEnvs * kActionBytes, kObsBytes},
    kFinal{kEnvs*(kActionBytes + kObsBytes), kObsBytes}, kInfo{kEnvs*(kActionBytes + 2 * kObsBytes), kInfoBytes};
SlabLayout layout;
std::mutex messages_lock;
std::deque<uint32_t> messages[kHosts];  // envs to restart
std::atomic<bool> over{false};

uint64_t* numbers(const SlabRows& rows, uint32_t env) { return reinterpret_cast<uint64_t*>(layout.row(rows, env)); }

void fill(const SlabRows& rows, uint32_t env, uint64_t value) {
  for (size_t k = 0; k < rows.row_bytes / 8; ++k) numbers(rows, env)[k] = value + k;
}

void expect(const SlabRows& rows, uint32_t env, uint64_t value, const char* what) {
  for (size_t k = 0; k < rows.row_bytes / 8; ++k)
    if (numbers(rows, env)[k] != value + k) fail(what, env);
}

uint64_t told(uint32_t env, uint64_t step) { return env * 1'000'000'000ull + step; }
bool fails(uint32_t env, uint64_t step) { return env % 2 && step % 3 == 0; }
uint32_t layout_of(uint32_t env, uint64_t step) { return uint32_t(step / 50 + env) % kMaxLayouts; }

struct Worker {
  uint32_t host;
  HostRecord& own = slab.hosts[host];
  AwakeWait awake{{100, 100, false}};
  uint32_t messages_read = 0;
  uint32_t num_layouts = 0;

  void run() {
    while (!over) {
      const uint32_t seen = own.rung.load(std::memory_order_acquire);
      if (own.messages.load(std::memory_order_acquire) != messages_read) {
        ++messages_read;
        restart();
      }
      for (uint32_t i = host * kEnvsPerHost; i < (host + 1) * kEnvsPerHost; ++i)
        if (slab.records[i].is_requested() && slab.records[i].command != Command::kReset) step(i);
      if (own.rung.load(std::memory_order_acquire) == seen) wait_for_ring(layout.bell(), host, seen, awake);
    }
  }

  void step(uint32_t env) {
    EnvRecord& record = slab.records[env];
    const uint64_t now = numbers(kActions, env)[0];
    own.begin(Doing::kStepping, env, ticks());
    fill(kObs, env, told(env, now));
    if (fails(env, now)) return answer(record, Status::kRaised);  // with half a row written
    fill(kFinal, env, told(env, now) + 7);
    fill(kInfo, env, told(env, now) + 9);
    record.info_schema = kFirst + number_of(layout_of(env, now));
    record.reward = double(now);
    record.episode_length = int64_t(now);
    answer(record, Status::kOk);
  }

  uint32_t number_of(uint32_t wanted) {
    for (uint32_t i = 0; i < num_layouts; ++i)
      if (slab.layouts[host][i] == wanted) return i;
    slab.layouts[host][num_layouts] = wanted;
    own.layouts_end.store(++num_layouts, std::memory_order_release);
    return num_layouts - 1;
  }

  void restart() {
    std::lock_guard lock(messages_lock);
    EnvRecord& record = slab.records[messages[host].front()];
    messages[host].pop_front();
    record.info_schema = 0;
    answer(record, Status::kOk);
  }

  void answer(EnvRecord& record, Status status) {
    record.status = status;
    record.finish();
    own.doing.store(Doing::kNothing, std::memory_order_relaxed);
    announce_finished(layout.bell(), host);
  }
};

struct Caller {
  std::vector<uint32_t> first_envs{0, kEnvsPerHost, kEnvs};
  std::vector<uint8_t> pending = std::vector<uint8_t>(kEnvs);
  Recovery recovery{layout, {kObs}, first_envs, pending};
  AwakeWait awake{{100, 100, false}};
  uint64_t steps[kEnvs]{}, shown[kEnvs]{};  // steps sent so far, and the step that the observation is of
  bool restarted[kEnvs]{};
  uint32_t delivered = 0, layouts_read[kHosts]{};
  uint64_t rows = 0, restarts = 0;

  void run(int64_t until_ns) {
    for (uint32_t env = 0; env < kEnvs; ++env) send(env);
    while (now_ns() < until_ns) {
      while (!wait_for_finished(layout.bell(), delivered + 1, &awake, 20'000'000)) {
      }
      for (const uint32_t env : recovery.failed()) ask_again(env);
      for (uint32_t env = 0; env < kEnvs; ++env)
        if (pending[env] && slab.records[env].is_finished() && slab.records[env].status == Status::kOk) {
          read(env);
          send(env);
        }
    }
  }

  void request(uint32_t env) {
    HostRecord& host = slab.hosts[env / kEnvsPerHost];
    bump<uint32_t>(host.asked, 1);
    slab.records[env].request();
  }

  void send(uint32_t env) {
    fill(kActions, env, ++steps[env]);
    recovery.keep(env);
    slab.records[env].command = Command::kStep;
    request(env);
    pending[env] = 1;
    ring(slab.hosts[env / kEnvsPerHost]);
#ifdef READS_EARLY
    if (numbers(kObs, env)[0] == ~uint64_t{0}) fail("observation", env);
#endif
  }

  void ask_again(uint32_t env) {
    recovery.restore(env);
    ++slab.records[env].restarts;
    restarted[env] = true;
    ++delivered, ++restarts;
    slab.records[env].status = Status::kOk;
    slab.records[env].command = Command::kReset;
    request(env);
    HostRecord& host = slab.hosts[env / kEnvsPerHost];
    {
      std::lock_guard lock(messages_lock);
      messages[env / kEnvsPerHost].push_back(env);
    }
    host.messages.store(host.messages.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    ring(host);
  }

  void read(uint32_t env) {
    const EnvRecord& record = slab.records[env];
    const uint64_t now = steps[env];
    if (restarted[env] != fails(env, now)) fail("restart", env);
    if (!restarted[env]) {
      shown[env] = now;
      if (record.reward != double(now) || record.episode_length != int64_t(now)) fail("record", env);
      expect(kFinal, env, told(env, now) + 7, "final observation");
      expect(kInfo, env, told(env, now) + 9, "info");
      const uint32_t host = env / kEnvsPerHost, number = record.info_schema - kFirst;
      if (number >= layouts_read[host]) layouts_read[host] = slab.hosts[host].layouts_end.load(std::memory_order_acquire);
      for (uint32_t i = 0; i < layouts_read[host]; ++i)
        if (i == number && slab.layouts[host][i] != layout_of(env, now)) fail("layout", env);
    }
    if (shown[env]) expect(kObs, env, told(env, shown[env]), "observation");
    restarted[env] = false;
    pending[env] = 0;
    ++delivered, ++rows;
  }
};

// What errors and stats() read while workers step.
uint64_t watch() {
  uint64_t long_steps = 0;
  while (!over) {
    for (HostRecord& host : slab.hosts) {
      const bool steps = host.doing.load(std::memory_order_acquire) == Doing::kStepping;
      const uint64_t since = host.since.load(std::memory_order_relaxed);
      long_steps += steps && int64_t(ticks() - since) > int64_t{1} << 40;
    }
    std::this_thread::yield();
  }
  return long_steps;
}

}  // namespace

int main(int, char** arguments) {
  layout = {.base = slab.rows, .num_envs = kEnvs, .num_hosts = kHosts, .caller = &slab.caller, .hosts = slab.hosts,
            .records = slab.records, .episodes = slab.episodes};
  uint64_t long_steps = 0;
  std::vector<std::thread> threads;
  for (uint32_t host = 0; host < kHosts; ++host) threads.emplace_back([host] { Worker{host}.run(); });
  threads.emplace_back([&] { long_steps = watch(); });
  Caller caller;
  caller.run(now_ns() + std::atoll(arguments[1]) * 1'000'000'000);
  over = true;
  ring_all(layout.bell());
  for (std::thread& thread : threads) thread.join();
  if (long_steps) fail("time", 0);
  std::printf("%lu rows right, %lu restarts\n", caller.rows, caller.restarts);
}
