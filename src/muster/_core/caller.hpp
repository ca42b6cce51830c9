// The caller's end of the one road of a step: write, send, wait, collect.
//
//   the caller                       shared memory                   a worker
//     write    actions ────────────▶ slab: actions
//     send     requested + 1 ──────▶ records ─── ring ─────────────▶ Stepper.run
//                                    slab: actions ────────────────▶ env.step(action)
//                                    slab: obs, infos; records ◀──── rows
//     wait     ◀─────────────────────── ring ◀─── finished + 1
//     collect  ◀── batch ─────────── slab: obs, infos; records
//
// Who owns which bytes when: transport/slab.py.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batches.hpp"
#include "doorbell.hpp"
#include "infos.hpp"
#include "lending.hpp"
#include "python.hpp"
#include "recovery.hpp"
#include "slab.hpp"
#include "stepper.hpp"

namespace muster {

// Increases in each forked child, so that a Caller can detect that it is a copy in a child of the process that made it.
inline std::atomic<uint32_t> g_forks{0};

class Caller {
 public:
  // Bits that report what a step has produced in addition to plain numbers: infos, envs that failed, final rows.
  enum Unusual { kInfos = 1, kNotOk = 2, kFinals = 4 };

  // The longest wait in the core before Python checks for signals and dead workers: a death is noticed that soon.
  static constexpr int64_t kSliceNs = 20'000'000;

  // memory: the Python object that keeps the slab mapped.  first_envs: the first env of each host, and num_envs at the
  // end.  obs, action: null where Python has to make the batches of observations, or to split those of actions.
  // lent: the arrays of leaves that are lent.  must_reset: the user has to reset envs whose episode has ended.
  // steps_unreset: envs may be stepped before their first reset.
  Caller(const SlabLayout& slab, PyObject* memory, std::vector<uint32_t> first_envs, BatchNode* obs, BatchNode* action,
         PyObject* lent, bool must_reset, bool steps_unreset, WaitBudget budget)
      : slab_(slab),
        memory_(Ref::borrow(memory)),
        lending_(slab_, memory),
        lent_rows_(rows_of(slab_, lent)),
        must_reset_(must_reset),
        awake_wait_(budget),
        forks_(g_forks.load()),
        first_envs_(std::move(first_envs)) {
    if (obs) obs_ = std::move(*obs);
    if (action) action_ = std::move(*action);
    host_of_.resize(slab_.num_envs);
    for (uint32_t w = 0; w < slab_.num_hosts; ++w)
      for (uint32_t i = first_envs_[w]; i < first_envs_[w + 1]; ++i) host_of_[i] = w;
    pending_.assign(slab_.num_envs, 0);
    started_.assign(slab_.num_envs, steps_unreset);
    delivered_ = slab_.bell().total_finished();
  }

  void set_local(Stepper* local, PyObject* owner) {
    local_ = local;
    local_owner_ = Ref::borrow(owner);
  }

  bool closed = false;   // set by Python's close
  Ref on_closed;  // set by Python's close: what raises then, in other words than these here
  // Whether an exception that is no MusterError has ended a verb since something was sent, such as that of a signal
  // handler, and envs owed answers then; and whether one has that is no Exception, such as Ctrl-C.
  bool interrupted = false, hurries = false;

  uint32_t num_pending() const { return num_pending_; }
  bool is_pending(uint32_t env) const { return pending_[env]; }
  bool in_fork() const { return forks_ != g_forks.load(std::memory_order_relaxed); }

  bool is_calling() const { return calling_; }

  // Called by Python as a call begins, and once it is no longer pending.
  void set_calling(bool calling) {
    calling_ = calling;
    if (calling) interrupted = hurries = false;
  }

  void require_open() const {
    if (closed && on_closed) checked(PyObject_CallNoArgs(on_closed.get()));
    if (closed) raise("ClosedError", kClosed);
    if (in_fork())
      raise("ClosedError",
            "this vector env belongs to the process that this one was forked from; make another one here");
  }

  // Begins a verb of the vector env, from its first line to its return. Raises unless this thread is the only one within
  // such calls, in the process that made the vector env. A verb may call others.
  void enter() {
    require_open();
    const unsigned long thread = PyThread_get_thread_ident();
    unsigned long none = 0;
    if (!inside_.compare_exchange_strong(none, thread) && none != thread)
      raise("PendingError", "another thread is inside a call of this vector env; use one at a time, or a lock");
    ++depth_;
  }

  // Ends it, also where an exception does, which is set.
  void leave() {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(muster_error_.get())) {
      hurries |= !PyErr_ExceptionMatches(PyExc_Exception);
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      interrupted |= trace && (num_pending_ || calling_);  // without a traceback it was called wrongly, and did nothing
      PyErr_Restore(type, value, trace);
    }
    if (--depth_ == 0) inside_.store(0);
  }

  // Writes the actions of all envs (env_ids None) or of some to the slab. False, with nothing written, where Python has
  // to write: it casts the actions, or reports what is wrong. Raises where one of the envs cannot be sent to now.
  bool write(PyObject* actions, PyObject* env_ids) {
    require_open();
    require_sendable(env_ids);
    if (env_ids != Py_None || !action_ || !action_->fits(actions)) return false;
    action_->write(actions, slab_.base);
    return true;
  }

  // Notes how to read the infos of a step of all envs if their layouts are these. schemas: bytes, uint32 for each env.
  // columns, provided: see gather_columns.
  void expect_infos(PyObject* schemas, PyObject* columns, PyObject* provided) {
    schemas_expected_ = Ref::borrow(schemas);
    columns_expected_ = Ref::borrow(columns);
    provided_expected_ = Ref::borrow(provided);
  }

  void forget_infos() { columns_expected_ = Ref(); }

  // Sends to all envs (env_ids None) or to some. objects: the actions lie in the mail, one for each env, not the slab.
  // as_whole: the caller will wait for all these envs together.  copies: observations are returned as the caller's own;
  // with both flags and all envs, big leaves are lent instead of copied.
  void send(PyObject* env_ids, bool objects, bool as_whole, bool copies) {
    const Command command = objects ? Command::kStepProvided : Command::kStep;
    require_open();
    require_sendable(env_ids);
    interrupted = hurries = false;
    if (env_ids == Py_None)
      return send_all(command, as_whole, as_whole && copies && lends() ? lending_.free_block() : 0);
    const auto [ids, count] = ids_of(env_ids);
    std::vector<uint8_t> rings(slab_.num_hosts, 0);
    bring_home();
    announce_awaits_all(false);  // before the requests: a worker that is awake sees them at once
    for (size_t k = 0; k < count; ++k) {
      request(uint32_t(ids[k]), command);
      rings[host_of_[ids[k]]] = 1;
    }
    for (uint32_t w = 0; w < slab_.num_hosts; ++w)
      if (rings[w]) ring(slab_.hosts[w]);
  }

  // Marks envs as being reset; the seeds and options go to their workers as a message.
  void request_resets(PyObject* env_ids) {
    require_open();
    const auto [ids, count] = ids_of(env_ids);
    interrupted = hurries = false;
    bring_home();
    slab_.caller->awaits_all.store(0, std::memory_order_relaxed);
    for (size_t k = 0; k < count; ++k) {
      request(uint32_t(ids[k]), Command::kReset);
      started_[ids[k]] = 1;
    }
  }

  void announce_message(uint32_t host) {
    HostRecord& to = slab_.hosts[host];
    to.messages.store(to.messages.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    ring(to);
  }

  // Has the next answer notified, too, or not. Whoever looks for answers after this call misses none.
  void notify(bool on) {
    slab_.caller->notified.store(on, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  // Waits for at most slice_ns until min_envs pending envs are ready. True if they are.
  bool wait(uint32_t min_envs, int64_t slice_ns) {
    require_open();
    if (min_envs > num_pending_) raise("UsageError", "a signal handler has taken the results that this call waits for");
    // A worker that does not see this at once may finish one more env silently; the end of the slice helps then.
    if (min_envs < num_pending_) slab_.caller->awaits_all.store(0, std::memory_order_relaxed);
    const uint32_t target = delivered_ + min_envs;
    auto done = [&] { return slab_.bell().reached(target); };
    if (done()) return true;
    if (local_ && local_->has_requests()) {
      local_->step_requested(true);
      if (done()) return true;
    }
    bool ready;
    {
      GilReleased released;
      ready = wait_for_finished(slab_.bell(), target, waits_long_ ? nullptr : &awake_wait_, slice_ns);
    }
    waits_long_ = !ready;  // a wait that took a whole slice may take many
    if (!ready) check(PyErr_CheckSignals());
    return ready;
  }

  // Returns (env_ids, obs, rewards, terminated, truncated, infos, unusual) for the envs that are ready: n rows in the
  // order of env ids. obs and infos are None where Python has to read them. copies: observations are returned as the
  // caller's own.  columns: infos are returned as columns.
  Ref collect(bool copies, bool columns) {
    require_open();
    ready_.clear();
    for (uint32_t i = 0; i < slab_.num_envs; ++i)
      if (pending_[i] && finished(i) && !(recovery_ && slab_.records[i].status != Status::kOk)) ready_.push_back(i);
    npy_intp count = npy_intp(ready_.size());
    Ref ids = checked(PyArray_SimpleNew(1, &count, NPY_INT64));
    auto* id = static_cast<int64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(ids.get())));
    Scalars scalars(count);
    for (npy_intp k = 0; k < count; ++k) {
      id[k] = ready_[k];
      deliver(ready_[k], k, scalars);
    }
    Ref obs = Ref::borrow(Py_None);
    if (obs_ && count == slab_.num_envs && !(scalars.unusual & kNotOk))
      obs = whole_obs(copies);
    else
      for (const uint32_t env : ready_) bring_home(env);
    Ref infos = whole_infos(scalars.unusual, columns && count == slab_.num_envs);
    const Ref unusual = checked(PyLong_FromLong(scalars.unusual));
    return checked(PyTuple_Pack(7, ids.get(), obs.get(), scalars.rewards.get(), scalars.terminated.get(),
                                scalars.truncated.get(), infos.get(), unusual.get()));
  }

  // Copies the lent leaves of envs that have answered to block 0, where all calls but `step` look for their rows.
  void bring_home() {
    for (uint32_t i = 0; i < slab_.num_envs; ++i)
      if (finished(i)) bring_home(i);
  }

  // ---- replay: what each env was given since its episode began

  // Keeps the actions of every env's current episode from now on. arrays: the leaves' arrays.
  void keep_actions(PyObject* arrays) {
    action_rows_ = rows_of(slab_, arrays);
    logs_.resize(slab_.num_envs);
  }

  // Returns the rows of these actions, one after the other.
  Ref actions_of(uint32_t env) const {
    static const std::deque<char> none;
    const Log& log = logs_.at(env);
    const std::deque<char>& rows = log.episode == slab_.episodes[env].begun ? log.rows : none;
    Ref bytes = checked(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(rows.size())));
    std::copy(rows.begin(), rows.end(), PyBytes_AS_STRING(bytes.get()));
    return bytes;
  }

  // Notes that an env was given these actions, rows of them, since its episode began.
  void set_actions(uint32_t env, PyObject* rows) {
    const char* first = PyBytes_AS_STRING(rows);
    logs_.at(env) = {slab_.episodes[env].begun, {first, first + PyBytes_GET_SIZE(rows)}};
  }

  // ---- recovery: envs that raised, or whose worker died, are asked again instead of being delivered

  // Keeps a copy of every env's last delivered rows from now on. arrays: the leaves' arrays, which hold the rows. The
  // next four may be called only then.
  void keep_rows(PyObject* arrays) { recovery_.emplace(slab_, rows_of(slab_, arrays), first_envs_, pending_); }

  std::vector<uint32_t> failed() const { return recovery_.value().failed(); }
  void restore(uint32_t env) { recovery_.value().restore(env); }
  std::vector<uint32_t> lose_host(uint32_t host) { return recovery_.value().lose_host(host); }

  // Asks a pending env that has failed for another answer, which comes once its worker has restarted it.
  void ask_again(uint32_t env) {
    EnvRecord& record = slab_.records[env];
    ++delivered_;  // the failure was an answer, too
    record.status = Status::kOk;
    record.command = Command::kReset;
    forget_actions(env);
    count_request(env);
  }

  bool finished(uint32_t env) const { return slab_.records[env].is_finished(); }
  uint32_t host_of(uint32_t env) const { return host_of_.at(env); }

 private:
  struct Log {
    uint64_t episode = 0;  // EpisodeRecord::begun; 0: none
    std::deque<char> rows;  // grows without a copy, and by no more than it needs
  };

  struct Scalars {
    explicit Scalars(npy_intp count)
        : rewards(checked(PyArray_SimpleNew(1, &count, NPY_DOUBLE))),
          terminated(checked(PyArray_SimpleNew(1, &count, NPY_BOOL))),
          truncated(checked(PyArray_SimpleNew(1, &count, NPY_BOOL))),
          reward(static_cast<double*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(rewards.get())))),
          ended(static_cast<uint8_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(terminated.get())))),
          cut(static_cast<uint8_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(truncated.get())))) {}

    Ref rewards, terminated, truncated;
    double* reward;
    uint8_t* ended;
    uint8_t* cut;
    int unusual = 0;
  };

  // The numbers and the size of an int64 array. Python has checked already that the ids are distinct and in range.
  static std::pair<const int64_t*, size_t> ids_of(PyObject* env_ids) {
    auto* array = reinterpret_cast<PyArrayObject*>(env_ids);
    return {static_cast<const int64_t*>(PyArray_DATA(array)), size_t(PyArray_SIZE(array))};
  }

  void require_sendable(PyObject* env_ids) {
    if (env_ids == Py_None) {
      require_idle();
      return require_started();
    }
    const auto [ids, count] = ids_of(env_ids);
    for (size_t k = 0; k < count; ++k) require_ready(uint32_t(ids[k]));
  }

  void require_idle() const {
    if (calling_) raise("PendingError", "a call is pending; take it with call_wait()");
    if (num_pending_)
      raise("PendingError", std::to_string(num_pending_) +
                                " envs still owe an answer to an earlier call; take it with step_wait() or recv()");
  }

  void require_started() {
    if (all_started_) return;
    for (uint32_t i = 0; i < slab_.num_envs; ++i) require_ready(i);
    all_started_ = !must_reset_;
  }

  void require_ready(uint32_t env) const {
    const std::string name = "env " + std::to_string(env);
    if (pending_[env]) raise("PendingError", name + " still owes an answer to an earlier call; take it with recv()");
    if (!started_[env]) raise("UsageError", name + " has not been reset; call reset() first");
    if (must_reset_ && slab_.records[env].needs_reset)
      raise("UsageError", name + " has ended its episode and autoreset_mode is \"disabled\"; call "
                                 "reset(options={\"reset_mask\": terminated | truncated}) before stepping it");
  }

  // Publishes the facts by which workers decide when to announce their answers and which core to use.
  void announce_awaits_all(bool awaits_all) {
    slab_.caller->awaits_all.store(awaits_all, std::memory_order_relaxed);
    slab_.caller->cpu.store(1 + uint32_t(sched_getcpu()), std::memory_order_relaxed);
  }

  // Whether big leaves may be lent. Not where envs are reset one by one: the rows of the other envs then have to be
  // those of their last step, and the owner of a lent array may have changed them. Nor with recovery, which keeps block
  // 0's rows.
  bool lends() const { return slab_.num_obs_blocks > 1 && !must_reset_ && !recovery_; }

  // Copies one env's lent leaves to block 0. An env that has failed keeps the rows that it delivered before.
  void bring_home(uint32_t env) {
    EnvRecord& record = slab_.records[env];
    if (!record.obs_block) return;
    const uint32_t block = record.status == Status::kOk ? record.obs_block : block_before_;
    for (const SlabRows& rows : lent_rows_) {
      char* home = slab_.row(rows, env);
      if (block) std::memcpy(home, home + slab_.obs_block_shift(block), rows.row_bytes);
    }
    record.obs_block = 0;
  }

  void request(uint32_t env, Command command) {
    EnvRecord& record = slab_.records[env];
    if (recovery_) recovery_->keep(env);
    if (!logs_.empty()) command == Command::kStep ? log(env) : forget_actions(env);
    record.command = command;
    count_request(env);
    pending_[env] = 1;
    ++num_pending_;
  }

  // Also where the request turns out to be a reset: the next one finds another episode then.
  void log(uint32_t env) {
    Log& log = logs_[env];
    const uint64_t episode = slab_.episodes[env].begun;
    if (std::exchange(log.episode, episode) != episode) log.rows.clear();
    for (const SlabRows& rows : action_rows_) {
      const char* row = slab_.row(rows, env);
      log.rows.insert(log.rows.end(), row, row + rows.row_bytes);
    }
  }

  // Its episode begins anew, or its last row is not its own.
  void forget_actions(uint32_t env) {
    if (!logs_.empty()) logs_[env] = {};
  }

  // Last of all: a worker that is awake for another env sees the request at once.
  void count_request(uint32_t env) {
    bump<uint32_t>(slab_.hosts[host_of_[env]].asked, 1);
    slab_.records[env].request();
  }

  void send_all(Command command, bool awaits_all, uint32_t obs_block = 0) {
    announce_awaits_all(awaits_all);
    block_before_ = slab_.records[0].obs_block;
    for (uint32_t i = 0; i < slab_.num_envs; ++i) {
      if (!obs_block) bring_home(i);
      slab_.records[i].obs_block = obs_block;
      request(i, command);
    }
    ring_all(slab_.bell());
  }

  void deliver(uint32_t env, npy_intp at, Scalars& scalars) {
    const EnvRecord& record = slab_.records[env];
    scalars.reward[at] = record.reward;
    scalars.ended[at] = record.terminated;
    scalars.cut[at] = record.truncated;
    if (record.info_schema != InfoTable::kEmpty) scalars.unusual |= kInfos;
    if (record.has_final) scalars.unusual |= kFinals;
    if (record.status != Status::kOk) scalars.unusual |= kNotOk;
    pending_[env] = 0;
    --num_pending_;
    ++delivered_;
  }

  Ref whole_infos(int unusual, bool columns) const {
    if (!unusual) return checked(PyDict_New());
    if (unusual != kInfos || !columns || !columns_expected_) return Ref::borrow(Py_None);
    const char* expected = PyBytes_AS_STRING(schemas_expected_.get());
    for (uint32_t i = 0; i < slab_.num_envs; ++i)
      if (std::memcmp(expected + i * sizeof(uint32_t), &slab_.records[i].info_schema, sizeof(uint32_t)))
        return Ref::borrow(Py_None);
    return gather_columns(columns_expected_.get(), Py_None, provided_expected_.get());
  }

  // Returns the observations of all envs. Lends the block that all envs were sent with; if they were not all sent with
  // the same block, brings their rows home instead.
  Ref whole_obs(bool copies) {
    uint32_t block = copies ? slab_.records[0].obs_block : 0;
    for (uint32_t i = 0; i < slab_.num_envs; ++i)
      if (slab_.records[i].obs_block != block) block = 0;
    if (!block) bring_home();
    const size_t first = slab_.obs_offset, shift = slab_.obs_block_shift(block);
    if (block && obs_->is_leaf())
      return lending_.lend(block, slab_.base + obs_->offset() + shift, obs_->type_num(), obs_->shape());
    const RowMemory rows{slab_.base, 0, memory_.get()};
    if (!block) return obs_->batch(rows, copies);
    Ref owner = lending_.lend(block, slab_.base + first + shift, NPY_UINT8, {npy_intp(slab_.obs_lent_bytes)});
    const RowMemory lent{slab_.base + first + shift, first, owner.get()};
    return obs_->batch(rows, true, &lent);
  }

  SlabLayout slab_;
  Ref memory_;
  Ref muster_error_ = error_class("MusterError");
  Lending lending_;
  std::vector<SlabRows> lent_rows_;
  uint32_t block_before_ = 0;  // the block of the rows before the last step of all envs
  std::optional<BatchNode> obs_;
  std::optional<BatchNode> action_;
  Ref schemas_expected_, columns_expected_, provided_expected_;
  bool must_reset_;
  AwakeWait awake_wait_;
  bool waits_long_ = false;
  uint32_t forks_;
  std::vector<uint32_t> first_envs_;
  std::vector<uint32_t> host_of_;
  std::vector<uint8_t> pending_;
  std::vector<uint32_t> ready_;  // the envs that `collect` returns
  std::vector<uint8_t> started_;
  bool all_started_ = false;
  uint32_t num_pending_ = 0;
  uint32_t delivered_ = 0;
  bool calling_ = false;
  std::atomic<unsigned long> inside_{0};  // the thread that is within a verb
  uint32_t depth_ = 0;
  std::optional<Recovery> recovery_;  // where rows are kept
  std::vector<SlabRows> action_rows_;
  std::vector<Log> logs_;  // where actions are kept; else empty
  Stepper* local_ = nullptr;
  Ref local_owner_;
};

}  // namespace muster
