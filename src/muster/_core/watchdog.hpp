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
#include <time.h>
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

// Each worker has this, its pid and a '=' in its environment: what it starts inherits that, and keeps it as an orphan.
constexpr char kMark[] = "MUSTER_WORKER_";

struct Kin {
  long parent = 0;
  bool ends = true;  // it is a zombie, about to be one, or gone
};

// Like all that follows it allocates nothing: the worker may have died holding malloc's lock.
inline Kin kin_of(long pid) {
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
  return {parent, state == 'Z' || state == 'X' || (std::strtoul(at, &at, 10) & kExiting)};
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
  size_t kept = 0;  // of the chunk before, which may end within the mark
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
  Pids above;  // the calling process and its ancestors; one of these adopts orphans
};

// Whether root, or what it has started, has started `pid`, which is in the session.
inline bool finds(const Search& search, long pid) {
  if (search.session == search.root || getpgid(pid_t(pid)) == search.root) return true;
  for (;;) {
    const long parent = kin_of(pid).parent;
    if (parent == search.root) return true;
    // Only where it may be an orphan: reading the environment of what hangs in the kernel may take for ever.
    if (parent <= 1 || search.above.has(parent)) return is_marked(pid, search.root);
    pid = parent;
  }
}

// Stops what root has started and adds it to `stopped`, as far as there is room. False if nothing was new.
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
      if (stopped.full() || stopped.has(pid) || kin_of(pid).ends || !finds(search, pid)) continue;
      kill(pid_t(pid), SIGSTOP);
      stopped.pids[stopped.count++] = pid;
    }
  }
  close(proc);
  return stopped.count != before;
}

inline int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

// Kills what `root` has started, of what has not left `session`; if that is root's own, all that is in it. Root itself
// may be the calling process, stopped, or a zombie. All are stopped before the first is killed: what one of them forks
// meanwhile would else lose its place in the line with its parent. Goes on until nothing is left, for a second at most:
// what hangs in the kernel stays.
inline void kill_started(long root, long session) {
  const int64_t deadline = now_ms() + 1000;
  Search search = {root, session, {}};
  for (long pid = getpid(); pid > 0 && !search.above.full(); pid = kin_of(pid).parent) {
    search.above.pids[search.above.count++] = pid;
  }
  Pids stopped;
  do {
    stopped.count = 0;
    while (stop_started(search, stopped) && now_ms() < deadline) usleep(1000);
    // Children first, mostly: a group whose parents are gone is told to go on.
    for (size_t k = stopped.count; k-- > 0;) kill(pid_t(stopped.pids[k]), SIGKILL);
  } while (stopped.count && now_ms() < deadline);
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
    kill_started(getpid(), getsid(0));
    if (polled.revents & POLLNVAL) _exit(kExitFdsClosed);
    // In one go with what threads of the env have started since.
    kill(-getpid(), SIGKILL);
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
