// Two threads in each worker that outlive any hold on the GIL. One ends the worker, and what the worker started, once the
// caller is gone. The other passes the worker's stderr on while keeping it readable for the caller; it may block where
// nobody reads that, which the first must not.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace muster {

// An env that closes fds it does not own cuts its worker off. The worker then ends with this exit code.
constexpr int kExitFdsClosed = 87;

struct Kin {
  long parent;
  long session;
};

// Of the living process `pid`; zeros for any other. Allocates nothing: the worker may have died holding malloc's lock.
inline Kin kin_of(long pid) {
  char path[32], stat[512];
  std::snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t length = read(fd, stat, sizeof stat - 1);
  close(fd);
  if (length <= 0) return {};
  stat[length] = 0;
  // pid (name) state ppid pgrp session; the name may hold anything, a ')' too.
  char* at = std::strrchr(stat, ')');
  if (!at || at[2] == 'Z' || at[2] == 'X') return {};
  at += 3;
  const long parent = std::strtol(at, &at, 10);
  std::strtol(at, &at, 10);
  return {parent, std::strtol(at, &at, 10)};
}

struct Kindred {
  long pids[512];
  size_t count = 0;

  bool has(long pid) const { return std::find(pids, pids + count, pid) != pids + count; }
};

// The descendants of `root` in `session`.
inline Kindred descendants(long root, long session) {
  struct Entry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[1];
  };
  Kindred found;
  const int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (proc < 0) return found;
  alignas(Entry) char entries[4096];
  for (long length; (length = syscall(SYS_getdents64, proc, entries, sizeof entries)) > 0;) {
    for (long at = 0; at < length;) {
      const auto* entry = reinterpret_cast<const Entry*>(entries + at);
      at += entry->length;
      const long pid = std::strtol(entry->name, nullptr, 10);
      Kin kin = pid ? kin_of(pid) : Kin{};
      if (kin.session != session || found.count == std::size(found.pids)) continue;
      while (kin.parent > 1 && kin.parent != root) kin = kin_of(kin.parent);
      if (kin.parent == root) found.pids[found.count++] = pid;
    }
  }
  close(proc);
  return found;
}

// Kills the descendants of the living process `root` that are in its session. All are stopped before the first is killed:
// what one of them forks meanwhile would else lose its place in the line with its parent.
inline void kill_started(long root) {
  const long session = kin_of(root).session;
  if (!session) return;
  Kindred stopped;
  for (int pass = 0; pass < 20; ++pass) {
    const Kindred found = descendants(root, session);
    bool any_new = false;
    for (size_t k = 0; k < found.count; ++k) {
      if (stopped.has(found.pids[k])) continue;
      any_new = true;
      kill(pid_t(found.pids[k]), SIGSTOP);
    }
    stopped = found;
    if (!any_new) break;
    usleep(1000);
  }
  // Children first, mostly: a group whose parents are gone is told to go on.
  for (size_t k = stopped.count; k-- > 0;) kill(pid_t(stopped.pids[k]), SIGKILL);
}

// Kills what this worker's envs have started: also those in its process group whose parents have gone. The worker leaves
// the group first; where it cannot, because the parent whose group it would join has gone, it dies with the others.
inline void kill_others() {
  kill_started(getpid());
  setpgid(0, getpgid(getppid()));
  kill(-getpid(), SIGKILL);
}

struct WatchdogFds {
  int caller;       // pidfd; readable once the caller is gone
  int stderr_pipe;  // what the worker writes to stderr
  int stderr_to;    // where it goes on to
  int tail;         // a file that keeps the last of it, for the caller to quote
};

constexpr off_t kTailBytes = 1 << 20;

// Puts the fds out of reach of an env that closes what it does not own, and everything else out of these threads' reach.
// Where a container forbids that, the fds stay shared with the env.
inline void own_fds(const WatchdogFds& fds) {
  if (unshare(CLONE_FILES) != 0) return;
  int kept[] = {fds.caller, fds.stderr_pipe, fds.stderr_to, fds.tail};
  std::sort(std::begin(kept), std::end(kept));
  unsigned first = 0;
  for (const int fd : kept) {
    if (unsigned(fd) > first) syscall(SYS_close_range, first, unsigned(fd) - 1, 0);
    first = std::max(first, unsigned(fd) + 1);
  }
  syscall(SYS_close_range, first, ~0u, 0);
}

inline void* relay_stderr(void* raw) {
  const WatchdogFds fds = *static_cast<WatchdogFds*>(raw);
  off_t tail_at = 0;
  for (;;) {
    // The caller makes its end of the pipe non-blocking, which both ends share.
    pollfd polled = {fds.stderr_pipe, POLLIN, 0};
    if (poll(&polled, 1, -1) < 0) continue;
    if (polled.revents & POLLNVAL) return nullptr;
    char chunk[4096];
    const ssize_t length = read(fds.stderr_pipe, chunk, sizeof chunk);
    if (length < 0) continue;
    if (length == 0) return nullptr;
    if (tail_at > kTailBytes) tail_at = ftruncate(fds.tail, 0);
    if (pwrite(fds.tail, chunk, size_t(length), tail_at) > 0) tail_at += length;
    for (ssize_t at = 0; at < length;) {
      const ssize_t written = write(fds.stderr_to, chunk + at, size_t(length - at));
      if (written <= 0) break;
      at += written;
    }
  }
}

inline void* watch_caller(void* raw) {
  const WatchdogFds& fds = *static_cast<WatchdogFds*>(raw);
  own_fds(fds);
  pthread_t relay;
  // Started here, so that it shares this thread's fds. Without it the worker's stderr would fill up and block.
  if (pthread_create(&relay, nullptr, relay_stderr, raw) != 0) _exit(1);
  for (;;) {
    pollfd polled = {fds.caller, POLLIN, 0};
    if (poll(&polled, 1, -1) < 0) continue;
    kill_others();
    if (polled.revents & POLLNVAL) _exit(kExitFdsClosed);
    kill(getpid(), SIGKILL);
  }
}

// The threads never end before the process does, nor is what they are given freed. Returns an errno value, 0 on success.
inline int start_watchdog(int caller_pidfd, int stderr_pipe, int stderr_to, int tail) {
  auto* fds = static_cast<WatchdogFds*>(std::malloc(sizeof(WatchdogFds)));
  *fds = {caller_pidfd, stderr_pipe, stderr_to, tail};
  // The env's own signal handling stays in the main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, watch_caller, fds);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!error) pthread_detach(thread);
  return error;
}

}  // namespace muster
