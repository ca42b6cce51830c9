// Recovery: envs that raised, or whose worker died, are asked again instead of being delivered. backends/recovery.py
// decides which rows they then answer with.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "slab.hpp"

namespace muster {

// A copy of every env's last delivered rows, and the answers of envs that cannot answer themselves.
class Recovery {
 public:
  // leaves: the rows to keep.  first_envs, pending: the Caller's own vectors, which have to outlive this object.
  Recovery(const SlabLayout& slab, const std::vector<SlabRows>& leaves, const std::vector<uint32_t>& first_envs,
           const std::vector<uint8_t>& pending)
      : slab_(slab), first_envs_(first_envs), pending_(pending), records_(slab.num_envs * kKeptBytes), episodes_(slab.num_envs) {
    for (const SlabRows& rows : leaves)
      if (rows.row_bytes) leaves_.push_back({rows, std::vector<char>(rows.row_bytes * slab.num_envs)});
  }

  // Keeps the rows and the record of `env` as they are now, before the env is sent to.
  void keep(uint32_t env) {
    episodes_[env] = slab_.episodes[env];
    std::memcpy(kept_record(env), part_to_keep(env), kKeptBytes);
    for (KeptRows& rows : leaves_) std::memcpy(rows.row(env), slab_.row(rows, env), rows.row_bytes);
  }

  // Restores the rows and the record of `env` as they were when the env was last sent to.
  void restore(uint32_t env) {
    uint32_t& restarts = slab_.records[env].restarts;
    const uint32_t restarts_now = restarts;
    std::memcpy(part_to_keep(env), kept_record(env), kKeptBytes);
    slab_.episodes[env] = episodes_[env];
    restarts = restarts_now;
    for (KeptRows& rows : leaves_) std::memcpy(slab_.row(rows, env), rows.row(env), rows.row_bytes);
  }

  // Pending envs that have answered with a failure.
  std::vector<uint32_t> failed() const {
    std::vector<uint32_t> envs;
    for (uint32_t i = 0; i < slab_.num_envs; ++i)
      if (pending_[i] && slab_.records[i].is_finished() && slab_.records[i].status != Status::kOk) envs.push_back(i);
    return envs;
  }

  // Answers for the envs of a dead worker, which cannot do so any more: waiting for them then ends. Rows that the
  // worker had finished are lost, too: the infos' layouts and the mail behind them have died with it. Returns the
  // pending envs.
  std::vector<uint32_t> lose_host(uint32_t host) {
    HostRecord& lost = slab_.hosts[host];
    std::vector<uint32_t> envs;
    uint32_t answers = 0;
    for (uint32_t i = first_envs_[host]; i < first_envs_[host + 1]; ++i) {
      EnvRecord& record = slab_.records[i];
      const uint32_t requested = record.requested.load(std::memory_order_relaxed);
      answers += requested;
      if (!pending_[i]) continue;
      record.status = Status::kLost;
      record.mail_bytes = 0;
      record.finish();
      envs.push_back(i);
    }
    // Counted again: the worker may have died between finishing a row and counting it.
    lost.finished.store(answers, std::memory_order_release);
    lost.doing.store(Doing::kNothing);
    lost.asleep.store(0);
    lost.asked.store(answers);
    lost.cpu.store(0);
    return envs;
  }

 private:
  struct KeptRows : SlabRows {
    std::vector<char> bytes;

    char* row(uint32_t env) { return bytes.data() + env * row_bytes; }
  };

  // Of a record all but the counters is kept. These say whose the record is, and a worker that steps its other envs may
  // look at them at any time.
  static constexpr size_t kKeptFrom = offsetof(EnvRecord, command);
  static constexpr size_t kKeptBytes = sizeof(EnvRecord) - kKeptFrom;

  char* part_to_keep(uint32_t env) { return reinterpret_cast<char*>(&slab_.records[env]) + kKeptFrom; }
  char* kept_record(uint32_t env) { return records_.data() + env * kKeptBytes; }

  const SlabLayout& slab_;
  const std::vector<uint32_t>& first_envs_;
  const std::vector<uint8_t>& pending_;
  std::vector<char> records_;
  std::vector<EpisodeRecord> episodes_;
  std::vector<KeptRows> leaves_;
};

}  // namespace muster
