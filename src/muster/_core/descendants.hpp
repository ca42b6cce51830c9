// Finds and kills the processes that a process has started: its children, their children, and their orphans.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "records.hpp"

namespace muster {

// Each worker has this, its pid and a '=' in its environment. The processes that it starts inherit that mark, and keep
// it when they become orphans.
constexpr char kMark[] = "MUSTER_WORKER_";

// Facts from /proc/<pid>/stat. The defaults are those of a process that is gone.
struct ProcessStat {
  long parent = 0;
  bool ends = true;  // the process is a zombie, about to be one, or gone
};

// Reads /proc/<pid>/stat. Like all functions below, allocates nothing: the worker may have died while it held malloc's
// lock.
inline ProcessStat stat_of(long pid) {
  char path[32], stat[512];
  std::snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t length = read(fd, stat, sizeof stat - 1);
  close(fd);
  if (length <= 0) return {};
  stat[length] = 0;
  // pid (name) state ppid pgrp session tty tpgid flags; the name may hold anything, a ')' too.
  char* at = std::strrchr(stat, ')');
  if (!at) return {};
  const char state = at[2];
  at += 3;
  const long parent = std::strtol(at, &at, 10);
  for (int skipped = 0; skipped < 4; ++skipped) std::strtol(at, &at, 10);
  constexpr unsigned long kExiting = 4;
  const bool exiting = std::strtoul(at, &at, 10) & kExiting;
  for (int skipped = 0; skipped < 10; ++skipped) std::strtol(at, &at, 10);
  // While other threads run, a zombie means only that the main thread has ended.
  const long threads = std::strtol(at, &at, 10);
  return {parent, state == 'X' || (threads <= 1 && (state == 'Z' || exiting))};
}

// Whether `pid` has the mark of the worker `root`.
inline bool is_marked(long pid, long root) {
  constexpr size_t kChunk = 4096;
  char path[32], mark[40], block[kChunk + sizeof mark];
  std::snprintf(path, sizeof path, "/proc/%ld/environ", pid);
  const size_t size = size_t(std::snprintf(mark, sizeof mark, "%s%ld=", kMark, root));
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  bool found = false;
  size_t kept = 0;  // bytes of the chunk before, which may end within the mark
  for (ssize_t length; !found && (length = read(fd, block + kept, kChunk)) > 0;) {
    const size_t filled = kept + size_t(length);
    found = memmem(block, filled, mark, size) != nullptr;
    kept = std::min(filled, size - 1);
    std::memmove(block, block + filled - kept, kept);
  }
  close(fd);
  return found;
}

struct Pids {
  long pids[512];
  size_t count = 0;

  bool has(long pid) const { return std::find(pids, pids + count, pid) != pids + count; }
  bool full() const { return count == std::size(pids); }
};

struct Search {
  long root;
  long session;
  bool by_mark_alone;  // another process has root's pid by now
  Pids above;          // the calling process and its ancestors; one of these adopts orphans
};

// Whether root, or a process that root has started, has started `pid`, a process in the session.
inline bool finds(const Search& search, long pid) {
  if (!search.by_mark_alone && (search.session == search.root || getpgid(pid_t(pid)) == search.root)) return true;
  for (;;) {
    const long parent = stat_of(pid).parent;
    if (!search.by_mark_alone && parent == search.root) return true;
    // The mark is read only where the process may be an orphan: reading the environment of a process that hangs in the
    // kernel may never return.
    if (parent <= 1 || search.above.has(parent)) return is_marked(pid, search.root);
    pid = parent;
  }
}

// Stops the processes that root has started and adds them to `stopped`, as far as there is room. False if none was new.
inline bool stop_started(const Search& search, Pids& stopped) {
  struct Entry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[1];
  };
  const int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (proc < 0) return false;
  const size_t before = stopped.count;
  alignas(Entry) char entries[4096];
  for (long length; (length = syscall(SYS_getdents64, proc, entries, sizeof entries)) > 0;) {
    for (long at = 0; at < length;) {
      const auto* entry = reinterpret_cast<const Entry*>(entries + at);
      at += entry->length;
      const long pid = std::strtol(entry->name, nullptr, 10);
      if (!pid || pid == search.root || getsid(pid_t(pid)) != search.session || search.above.has(pid)) continue;
      if (stopped.full() || stopped.has(pid) || stat_of(pid).ends || !finds(search, pid)) continue;
      // The signal fails for another user's process. That is not added: waiting for its end would be useless.
      if (kill(pid_t(pid), SIGSTOP) == 0) stopped.pids[stopped.count++] = pid;
    }
  }
  close(proc);
  return stopped.count != before;
}

// Kills the processes that `root` has started and that have not left `session`; if root leads the session, all
// processes in it. Root itself may be the calling process, stopped, a zombie, or, with `is_reaped`, gone: the kernel
// gives root's pid to another process only once nothing is left in root's group. All processes are stopped before the
// first is killed: otherwise a process could fork and be killed, and its child would have no parent that leads back to
// root. Goes on until nothing is left, for a second at most: a process that hangs in the kernel stays.
inline void kill_started(long root, long session, bool is_reaped) {
  const int64_t deadline = now_ns() + int64_t{1'000'000'000};
  Search search = {root, session, is_reaped && (kill(pid_t(root), 0) == 0 || errno == EPERM), {}};
  for (long pid = getpid(); pid > 0 && !search.above.full(); pid = stat_of(pid).parent) {
    search.above.pids[search.above.count++] = pid;
  }
  Pids stopped;
  do {
    stopped.count = 0;
    while (stop_started(search, stopped) && now_ns() < deadline) usleep(1000);
    // Mostly children first: once the parents of a stopped process group are gone, the kernel lets the group continue.
    for (size_t k = stopped.count; k-- > 0;) kill(pid_t(stopped.pids[k]), SIGKILL);
  } while (stopped.count && now_ns() < deadline);
}

}  // namespace muster
