// Two threads in each worker that run however long an env holds the GIL. One ends the worker, and the processes that
// the worker has started, once the caller is gone; the doctor's trials have only this thread. The other passes on what
// the worker writes to stderr, and keeps the last of it readable for the caller; it may block where nobody reads the
// caller's stderr, and the first thread must not.
#pragma once

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "descendants.hpp"

namespace muster {

// An env that closes fds it does not own cuts its worker off. The worker then ends with this exit code.
constexpr int kExitFdsClosed = 87;
// A worker that can have no thread for this file's work ends with this one.
constexpr int kExitNoThreads = 88;

// The thread by this name, of those in /proc, takes the signal for which faulthandler writes the stacks of all threads:
// a system call of the env's own, such as poll(), would end with EINTR where the env's thread took it.
constexpr char kWatchdogName[] = "muster-watchdog";
inline int stack_signal() { return SIGRTMIN + 7; }  // not SIGUSR1: envs may use that

struct WatchdogFds {
  int caller;       // pidfd; readable once the caller is gone
  int stderr_pipe;  // what the worker writes to stderr
  int stderr_to;    // where that is passed on to
  int tail;         // a file that keeps the last of that, for the caller to quote
  int stacks;       // a file that faulthandler writes the stacks to that the caller asks for
};

constexpr off_t kTailBytes = 1 << 20;

// Gives these threads a table of fds of their own: an env that closes fds that it does not own cannot reach this table,
// and all other fds are closed in it. Where a container forbids that, the fds stay shared with the env.
inline void own_fds(const WatchdogFds& fds) {
  if (unshare(CLONE_FILES) != 0) return;
  int kept[] = {fds.caller, fds.stderr_pipe, fds.stderr_to, fds.tail, fds.stacks};
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
    // The caller makes its copy of this fd non-blocking, and the two copies share that setting.
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

// Ends this process, and all processes that it has started. A child does the work, since it can stop this process
// meanwhile: otherwise this process's threads might start more after the last search. The child does not come from
// fork(), which waits for locks that other threads may hold.
inline void end_with_all() {
  const pid_t self = getpid();
  const long child = syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    setpgid(0, 0);  // so that this child outlives the worker's group
    kill(self, SIGSTOP);
  }
  if (child <= 0) {
    kill_started(self, getsid(0), false);
    kill(-self, SIGKILL);
    kill(self, SIGKILL);
    _exit(0);
  }
  pause();
}

inline void* watch_caller(void* raw) {
  const WatchdogFds& fds = *static_cast<WatchdogFds*>(raw);
  own_fds(fds);
  pthread_t relay;
  // The relay is started here, so that it shares this thread's fds. Without it the worker's stderr would fill up and
  // block.
  if (pthread_create(&relay, nullptr, relay_stderr, raw) != 0) _exit(kExitNoThreads);
  sigset_t stack;
  sigemptyset(&stack);
  sigaddset(&stack, stack_signal());
  pthread_sigmask(SIG_UNBLOCK, &stack, nullptr);
  prctl(PR_SET_NAME, kWatchdogName);
  for (;;) {
    pollfd polled = {fds.caller, POLLIN, 0};
    if (poll(&polled, 1, -1) < 0) continue;
    if (polled.revents & POLLNVAL) {
      kill_started(getpid(), getsid(0), false);
      _exit(kExitFdsClosed);
    }
    end_with_all();
  }
}

// Starts the threads. They never end before the process does, so the memory that they receive is never freed. Returns
// an errno value, 0 on success.
inline int start_watchdog(const WatchdogFds& given) {
  auto* fds = static_cast<WatchdogFds*>(std::malloc(sizeof(WatchdogFds)));
  *fds = given;
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
