// Where things lie in the slab. transport/slab.py decides; both sides read it from the same description.
#pragma once

#include "doorbell.hpp"
#include "records.hpp"
#include "space_tree.hpp"

namespace muster {

struct Slab {
  char* base;
  uint32_t num_envs;
  uint32_t num_lines;  // workers, and the caller's own share if it steps one
  CallerLine* caller;
  WorkerLine* lines;
  EnvRecord* records;
  size_t info_offset;
  size_t info_bytes;  // of one info; each env has two: the step's and the final one
  size_t obs_offset;
  size_t obs_block_bytes;
  size_t obs_lent_bytes;  // of the leaves that are lent; they come first in a block
  uint32_t num_obs_blocks;  // block 0 is the slab's own, see lending.hpp

  // (address, num_envs, num_lines, caller_offset, lines_offset, records_offset, info_offset, info_bytes,
  // obs_offset, obs_block_bytes, obs_lent_bytes, num_obs_blocks)
  explicit Slab(PyObject* description) {
    Fields fields(description);
    base = reinterpret_cast<char*>(fields.size());
    num_envs = uint32_t(fields.size());
    num_lines = uint32_t(fields.size());
    caller = reinterpret_cast<CallerLine*>(base + fields.size());
    lines = reinterpret_cast<WorkerLine*>(base + fields.size());
    records = reinterpret_cast<EnvRecord*>(base + fields.size());
    info_offset = size_t(fields.size());
    info_bytes = size_t(fields.size());
    obs_offset = size_t(fields.size());
    obs_block_bytes = size_t(fields.size());
    obs_lent_bytes = size_t(fields.size());
    num_obs_blocks = uint32_t(fields.size());
  }

  Bell bell() const { return {*caller, lines, num_lines}; }
  size_t obs_block_shift(uint32_t block) const { return block * obs_block_bytes; }
  char* info_row(size_t env, bool final) const { return base + info_offset + (2 * env + final) * info_bytes; }
};

}  // namespace muster
