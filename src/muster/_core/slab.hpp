// The places of all things in the slab. transport/slab.py computes them and passes them by name.
#pragma once

#include "doorbell.hpp"
#include "records.hpp"

namespace muster {

// The rows of one leaf, env after env.
struct SlabRows {
  size_t offset;
  size_t row_bytes;
};

// The infos of one env: the step's, and that of the step that ended the episode (same_step).
enum InfoRow { kStepInfo, kFinalInfo, kNumInfoRows };

struct SlabLayout {
  char* base;
  bool is_shared;  // other processes map it, too
  uint32_t num_envs;
  uint32_t num_hosts;  // workers, and the caller itself if it steps envs
  CallerRecord* caller;
  HostRecord* hosts;
  EnvRecord* records;
  EpisodeRecord* episodes;
  size_t info_offset;
  size_t info_bytes;  // of one info; each env has kNumInfoRows
  size_t obs_offset;
  size_t obs_block_bytes;
  size_t obs_lent_bytes;  // of the leaves that are lent, in whole pages; they come first in a block
  uint32_t num_obs_blocks;  // block 0 is the slab's own, see lending.hpp
  int notify_fd;            // an eventfd, this process's; -1: none

  Bell bell() const { return {*caller, hosts, num_hosts, notify_fd}; }
  char* row(const SlabRows& rows, uint32_t env) const { return base + rows.offset + env * rows.row_bytes; }
  size_t obs_block_shift(uint32_t block) const { return block * obs_block_bytes; }
  char* info_row(size_t env, InfoRow which) const {
    return base + info_offset + (kNumInfoRows * env + which) * info_bytes;
  }
};

}  // namespace muster
