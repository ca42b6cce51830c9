// The stepping and autoreset loop: the only one, for every backend.
#pragma once

#include <array>
#include <vector>

#include "doorbell.hpp"
#include "infos.hpp"
#include "returned.hpp"
#include "space_tree.hpp"
#include "slab.hpp"

namespace muster {

enum class Autoreset { kNextStep = 0, kSameStep = 1, kDisabled = 2 };

// Steps the envs of one worker: reads actions from the slab, calls Python's env.step, writes the rows in place.
//
// `env_host` is the Python object that owns the stepper. Its methods are called only in rare cases:
// on_error(env, exception) -> mail bytes, put_mail(env, objects, final_objects) -> mail bytes, own(objects) -> copies,
// take_actions(env) -> iterator, on_new_schema() -> end of the layouts in the mail; and where it `seeds_episodes`, for
// each reset, next_seed(env) -> int.
class Stepper {
 public:
  Stepper(const SlabLayout& slab, uint32_t host, uint32_t first_env, PyObject* envs, ObsNode obs, ActionNode action,
          Autoreset autoreset, Returned returned, bool actions_by_mail, bool seeds_episodes, PyObject* env_host,
          WaitBudget budget)
      : slab_(slab),
        host_(host),
        own_(slab_.hosts[host]),
        first_env_(first_env),
        envs_(Ref::borrow(envs)),
        obs_(std::move(obs)),
        action_(std::move(action)),
        autoreset_(autoreset),
        returned_(std::move(returned)),
        actions_by_mail_(actions_by_mail),
        seeds_episodes_(seeds_episodes),
        env_host_(env_host),
        awake_wait_(budget),
        infos_(slab_.info_bytes),
        hints_(size_t(PyList_GET_SIZE(envs))),
        next_seeds_(size_t(PyList_GET_SIZE(envs))),
        messages_read_(own_.messages.load()),
        step_name_(checked(PyUnicode_InternFromString("step"))),
        reset_name_(checked(PyUnicode_InternFromString("reset"))),
        reset_keywords_(checked(Py_BuildValue("(ss)", "seed", "options"))),
        seed_keyword_(checked(Py_BuildValue("(s)", "seed"))),
        objects_(checked(PyList_New(0))),
        final_objects_(checked(PyList_New(0))) {}

  uint32_t num_envs() const { return uint32_t(PyList_GET_SIZE(envs_.get())); }

  // Steps the envs that the caller asks for, until the caller has sent a message.
  void run() {
    for (;;) {
      const uint32_t seen = own_.rung.load(std::memory_order_acquire);
      if (own_.messages.load(std::memory_order_acquire) != messages_read_) {
        ++messages_read_;
        return;
      }
      step_requested();
      if (own_.rung.load(std::memory_order_acquire) != seen) continue;
      const uint64_t start = ticks();
      {
        GilReleased released;
        wait_for_ring(slab_.bell(), host_, seen, awake_wait_);
      }
      bump(own_.ticks_waiting, ticks() - start);
      check(PyErr_CheckSignals());
    }
  }

  // Steps all envs that have a request to step. in_caller: a Ctrl-C in one env is the caller's own, so the envs after
  // that one are not stepped but fail with the same Ctrl-C.
  void step_requested(bool in_caller = false) {
    interrupt_ = Ref();
    // The caller wrote the records last: all are fetched from its core at once, not one by one before each step.
    for (uint32_t i = 0; i < num_envs(); ++i) __builtin_prefetch(&slab_.records[first_env_ + i], 1);
    for (uint32_t i = 0; i < num_envs(); ++i) {
      EnvRecord& record = slab_.records[first_env_ + i];
      if (record.is_requested() && record.command != Command::kReset) {
        if (in_caller && interrupt_)
          refuse(i, interrupt_.get());
        else
          serve(i, [&] { return step(i, record), true; });
      }
    }
    interrupt_ = Ref();
  }

  bool has_requests() const {
    for (uint32_t i = 0; i < num_envs(); ++i)
      if (slab_.records[first_env_ + i].is_requested()) return true;
    return false;
  }

  // Answers the caller's reset command for one env. Returns the KeyboardInterrupt that the env raised, or None.
  Ref reset_env(uint32_t i, PyObject* seed, PyObject* options, bool passes_options) {
    EnvRecord& record = slab_.records[first_env_ + i];
    interrupt_ = Ref();
    clear_objects();  // of a replay that has led elsewhere
    serve(i, [&] {
      record.has_final = 0;
      store_reset(call_reset(i, seed, options, passes_options), i, record);
      return true;
    });
    Ref interrupt = std::exchange(interrupt_, Ref());
    return interrupt ? std::move(interrupt) : Ref::borrow(Py_None);
  }

  // Replaces env i, which has been built again. `seed` is for its first reset, unless that has one of its own.
  void replace_env(uint32_t i, PyObject* env, PyObject* seed) {
    check(PyList_SetItem(envs_.get(), i, Py_NewRef(env)));
    next_seeds_[i] = Ref::borrow(seed);
    hints_[i] = {};
  }

  // Answers a request for env i without touching its rows.
  void acknowledge(uint32_t i) {
    EnvRecord& record = slab_.records[first_env_ + i];
    serve(i, [&] { return record.info_schema = InfoTable::kEmpty, record.has_final = 0, true; });
  }

  // Answers a request for env i with an exception.
  void refuse(uint32_t i, PyObject* exception) {
    serve(i, [&]() -> bool {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
      throw PythonError{};
    });
  }

  // Resets env i, and steps it through `actions`, which are the rows of `steps` actions; writes its last row, which
  // `publish` answers with. Ends early where an episode does. rows: the arrays of the leaves of actions.
  void replay(uint32_t i, PyObject* options, size_t steps, PyObject* actions, PyObject* rows) {
    EnvRecord& record = slab_.records[first_env_ + i];
    const std::vector<SlabRows> leaves = rows_of(slab_, rows);
    const char* action = PyBytes_AS_STRING(actions);
    InEnv in_env_code;
    record.has_final = 0;
    clear_objects();
    store_reset(call_reset(i, Py_None, options, options != Py_None), i, record);
    for (size_t at = 0; at < steps && !record.episode_over; ++at) {
      for (const SlabRows& leaf : leaves) {
        std::memcpy(slab_.row(leaf, first_env_ + i), action, leaf.row_bytes);
        action += leaf.row_bytes;
      }
      const StepReturns returns = returned_.step(call_step(i, action_.read(slab_.base, first_env_ + i, nullptr)));
      clear_objects();
      if (at + 1 < steps)
        record.count(returns.reward, returns.terminated, returns.truncated);
      else
        store_row(returns, i, record, false);
    }
    own_.doing.store(Doing::kNothing, std::memory_order_relaxed);
    in_env_code.ends();
  }

  void publish(uint32_t i) { serve(i, [] { return true; }); }

  // Steps env i by the action in its row, whatever the caller asks for.
  void step_env(uint32_t i) {
    clear_objects();  // of the replay before
    serve(i, [&] { return step(i, slab_.records[first_env_ + i]), true; });
  }

  Ref describe_schemas() const { return infos_.describe(); }

  // ---- the halves of a step and a reset, between which Python calls the envs, several at the same time; in one thread

  // Waits until the caller has rung since `seen`, for `timeout_ns` at most; from any thread. Returns the rings so far.
  uint32_t await_ring(uint32_t seen, int64_t timeout_ns) {
    const GilReleased released;
    own_.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (own_.rung.load(std::memory_order_acquire) == seen) futex_wait(own_.rung, seen, timeout_ns);
    own_.asleep.store(0, std::memory_order_relaxed);
    return own_.rung.load(std::memory_order_acquire);
  }

  // Whether the caller has sent a message; each is reported once.
  bool takes_message() {
    if (own_.messages.load(std::memory_order_acquire) == messages_read_) return false;
    return ++messages_read_, true;
  }

  // The envs that are to be stepped; each request is reported once.
  Ref take_requested() {
    taken_.resize(num_envs());
    Ref taken = checked(PyList_New(0));
    for (uint32_t i = 0; i < num_envs(); ++i) {
      EnvRecord& record = slab_.records[first_env_ + i];
      const uint32_t request = record.requested.load(std::memory_order_acquire);
      if (!record.is_requested() || record.command == Command::kReset || taken_[i] == request) continue;
      taken_[i] = request;
      check(PyList_Append(taken.get(), checked(PyLong_FromUnsignedLong(i)).get()));
    }
    return taken;
  }

  // Returns the arguments for the env's step, or None where its reset is due. Raises where the action cannot be read.
  Ref begin_step(uint32_t i) {
    EnvRecord& record = slab_.records[first_env_ + i];
    record.has_final = 0;
    if (resets_first(record)) return Ref::borrow(Py_None);
    return checked(PyTuple_Pack(1, read_action(i, record).get()));
  }

  // Takes what the env's step has returned. Returns None, or in same_step at the end of an episode, where the reset is
  // due before the env has answered, the objects of the final step.
  Ref finish_step(uint32_t i, PyObject* result) {
    EnvRecord& record = slab_.records[first_env_ + i];
    Ref final_objects = Ref::borrow(Py_None);
    serve(i, [&] {
      bump<uint64_t>(own_.env_steps, 1);
      if (!store_step(Ref::borrow(result), i, record)) return true;
      final_objects = std::exchange(final_objects_, checked(PyList_New(0)));
      return false;
    });
    return final_objects;
  }

  // Takes what the env's reset has returned. final_objects: what finish_step has returned.
  void finish_reset(uint32_t i, PyObject* result, PyObject* final_objects) {
    EnvRecord& record = slab_.records[first_env_ + i];
    serve(i, [&] {
      if (final_objects == Py_None) return record.has_final = 0, store_reset(Ref::borrow(result), i, record), true;
      final_objects_ = Ref::borrow(final_objects);
      return store_reset_of_step(Ref::borrow(result), i, record), true;
    });
  }

  // Notes that `count` envs are in their own code from now on, of which env i has been in it for longest.
  void overlaps(uint32_t count, Doing doing, uint32_t i, uint64_t since) {
    spend();
    num_in_code_ = count;
    shows(doing, i, since);
  }

  // Says that the host is in env i, as it keeps the others.
  void shows(Doing doing, uint32_t i, uint64_t since) { own_.begin(doing, first_env_ + i, since); }

  // Returns the seed for the next reset of an env that was built again, once; else None.
  Ref take_seed(uint32_t i) {
    Ref seed = std::move(next_seeds_[i]);
    return seed ? std::move(seed) : Ref::borrow(Py_None);
  }

  // Notes a turn of the loop that steps the envs. blocked: ticks for which one of them has kept it.
  void beat(uint64_t blocked, uint32_t left_behind) {
    spend();
    bump<uint32_t>(own_.beats, 1);
    bump(own_.ticks_blocked, blocked);
    own_.left_behind.store(left_behind, std::memory_order_relaxed);
  }

  // Returns (env_host, i) where this thread steps or resets env i, else None.
  static Ref running() {
    if (!running_.env_host) return Ref::borrow(Py_None);
    return checked(Py_BuildValue("(OI)", running_.env_host, running_.env));
  }

 private:
  struct Running {
    PyObject* env_host;  // null: no env
    uint32_t env;
  };

  // A reference of its own: the envs may be closed, and dropped, in the middle of a step of the calling process, by
  // another thread or by a signal handler.
  Ref env(uint32_t i) const {
    if (i >= num_envs()) raise("ClosedError", kClosed);
    return Ref::borrow(PyList_GET_ITEM(envs_.get(), i));
  }

  // Runs `work` for env i, and publishes the record unless that returns false.
  template <class Work>
  void serve(uint32_t i, Work work) {
    EnvRecord& record = slab_.records[first_env_ + i];
    const uint64_t start = ticks();
    const uint64_t in_env_before = own_.ticks_in_env.load(std::memory_order_relaxed);
    record.mail_bytes = 0;
    record.status = Status::kOk;
    InEnv in_env_code;
    try {
      if (!work()) return in_env_code.ends();
      if (PyList_GET_SIZE(objects_.get()) || PyList_GET_SIZE(final_objects_.get())) put_mail(i, record);
      if (infos_.size() != schemas_announced_) {
        const Ref end = checked(PyObject_CallMethod(env_host_, "on_new_schema", nullptr));
        own_.layouts_end.store(uint32_of(end), std::memory_order_release);
        schemas_announced_ = infos_.size();
      }
    } catch (const PythonError&) {
      report(i, record);
    }
    if (taken_.empty()) {
      const uint64_t in_env = own_.ticks_in_env.load(std::memory_order_relaxed) - in_env_before;
      bump(own_.ticks_copying, ticks() - start - in_env);
      own_.doing.store(Doing::kNothing, std::memory_order_relaxed);
    }
    record.finish();
    announce_finished(slab_.bell(), host_);
    in_env_code.ends();
  }

  uint64_t begin(Doing doing, uint32_t i) {
    around_ = std::exchange(running_, {env_host_, i});
    const uint64_t now = ticks();
    own_.begin(doing, first_env_ + i, now);
    return now;
  }

  void end(uint64_t start) {
    bump(own_.ticks_in_env, ticks() - start);
    running_ = around_;
  }

  // Accounts for the time since the last call, for a host that steps its envs at the same time.
  void spend() {
    const uint64_t now = ticks(), spent = spent_until_ ? now - std::exchange(spent_until_, now) : 0;
    spent_until_ = now;
    bump(num_in_code_ ? own_.ticks_in_env : own_.ticks_waiting, spent);
    bump(own_.ticks_of_envs, spent * num_in_code_);
  }

  // next_step: the last step ended the episode.  same_step: the reset that belonged to the last step has failed.
  bool resets_first(const EnvRecord& record) const {
    return record.needs_reset && autoreset_ != Autoreset::kDisabled;
  }

  Ref read_action(uint32_t i, const EnvRecord& record) {
    const bool provided = record.command == Command::kStepProvided;
    Ref sent = actions_by_mail_ || provided ? checked(PyObject_CallMethod(env_host_, "take_actions", "I", i)) : Ref();
    return provided ? checked(PyIter_Next(sent.get())) : action_.read(slab_.base, first_env_ + i, sent.get());
  }

  void step(uint32_t i, EnvRecord& record) {
    record.has_final = 0;
    if (resets_first(record)) return store_reset(call_reset(i), i, record);
    Ref result = call_step(i, read_action(i, record));
    bump<uint64_t>(own_.env_steps, 1);
    if (store_step(std::move(result), i, record)) store_reset_of_step(call_reset(i), i, record);
  }

  // Returns null where the env raises.
  Ref call_step(uint32_t i, const Ref& action) {
    const Ref held = env(i);
    PyObject* args[] = {held.get(), action.get()};
    const uint64_t start = begin(Doing::kStepping, i);
    Ref result(PyObject_VectorcallMethod(step_name_.get(), args, 2, nullptr));
    end(start);
    return result;
  }

  // final: into the rows of the step that ended the episode (same_step).
  void store_row(const StepReturns& returns, uint32_t i, EnvRecord& record, bool final) {
    Ref& objects = final ? final_objects_ : objects_;
    record.final_ints = write_obs(returns.obs(), i, final, objects);
    uint32_t& schema = final ? record.final_schema : record.info_schema;
    schema = write_info(returns.info.get(), i, final ? kFinalInfo : kStepInfo, objects);
    record.count(returns.reward, returns.terminated, returns.truncated);
  }

  // Returns whether the env has to be reset before it has answered.
  bool store_step(Ref result, uint32_t i, EnvRecord& record) {
    const StepReturns returns = returned_.step(std::move(result));
    const bool reset_now = returns.over() && autoreset_ == Autoreset::kSameStep;
    store_row(returns, i, record, reset_now);
    // In its reset the env may reuse the objects that its step has just returned.
    if (reset_now && PyList_GET_SIZE(final_objects_.get())) {
      final_objects_ = checked(PyObject_CallMethod(env_host_, "own", "O", final_objects_.get()));
    }
    return reset_now;
  }

  void store_reset_of_step(Ref result, uint32_t i, EnvRecord& record) {
    store_reset_rows(std::move(result), i, record);
    record.has_final = 1;
    record.needs_reset = 0;
  }

  Ref call_reset(uint32_t i, PyObject* seed = nullptr, PyObject* options = Py_None, bool passes_options = true) {
    Ref next_seed = std::move(next_seeds_[i]);
    if (seeds_episodes_) next_seed = checked(PyObject_CallMethod(env_host_, "next_seed", "I", i));
    if (!seed) passes_options = false;
    if (next_seed && (seeds_episodes_ || !seed || seed == Py_None)) seed = next_seed.get();
    const Ref held = env(i);
    PyObject* args[] = {held.get(), seed, options};
    const uint64_t start = begin(Doing::kResetting, i);
    // Autoresets call reset() without arguments, as Gymnasium's do, but for the seed that an episode may have.
    PyObject* keywords = seed ? (passes_options ? reset_keywords_ : seed_keyword_).get() : nullptr;
    Ref result(PyObject_VectorcallMethod(reset_name_.get(), args, 1, keywords));
    end(start);
    return result;
  }

  void store_reset(Ref result, uint32_t i, EnvRecord& record) {
    store_reset_rows(std::move(result), i, record);
    record.reward = 0;
    record.terminated = record.truncated = 0;
    record.needs_reset = 0;
    record.episode_over = 0;
    record.episode_return = 0;
    record.episode_length = 0;
  }

  void store_reset_rows(Ref result, uint32_t i, EnvRecord& record) {
    bump<uint64_t>(own_.resets, 1);
    if (!result) throw PythonError{};
    result = Returned::as_tuple(std::move(result), 2, "reset must return (obs, info)");
    write_obs(PyTuple_GET_ITEM(result.get(), 0), i, false, objects_);
    record.info_schema = write_info(PyTuple_GET_ITEM(result.get(), 1), i, kStepInfo, objects_);
  }

  // Returns the bits of `Ints`.
  uint32_t write_obs(PyObject* obs, uint32_t i, bool final, Ref& objects) {
    Ints ints;
    const uint32_t env = first_env_ + i;
    const ObsPlace place{slab_.base, env, final, slab_.obs_block_shift(slab_.records[env].obs_block), &ints};
    obs_.write(obs, place, objects.get());
    if (returned_.check_finite && !obs_.finite(place)) {
      PyErr_Format(PyExc_ValueError, "the observation holds NaN or infinity (check_finite=True): %.500R", obs);
      throw PythonError{};
    }
    return ints.bits;
  }

  uint32_t write_info(PyObject* info, uint32_t i, InfoRow which, const Ref& objects) {
    uint32_t& hint = hints_[i][which];
    const uint32_t schema = infos_.write(info, slab_.info_row(first_env_ + i, which), objects.get(), hint);
    if (schema >= InfoTable::kFirst) hint = schema;
    return schema;
  }

  void put_mail(uint32_t i, EnvRecord& record) {
    Ref objects = std::exchange(objects_, checked(PyList_New(0)));
    Ref final_objects = std::exchange(final_objects_, checked(PyList_New(0)));
    record.mail_bytes = uint32_of(
        checked(PyObject_CallMethod(env_host_, "put_mail", "IOO", i, objects.get(), final_objects.get())));
  }

  void report(uint32_t i, EnvRecord& record) {
    clear_objects();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Ref owned_type(type), exception(value), owned_traceback(traceback);
    if (PyErr_GivenExceptionMatches(value, PyExc_KeyboardInterrupt)) interrupt_ = Ref::borrow(value);
    record.mail_bytes =
        uint32_of(checked(PyObject_CallMethod(env_host_, "on_error", "IO", i, exception.get())));
    record.info_schema = record.final_schema = InfoTable::kEmpty;
    record.has_final = 0;
    record.status = Status::kRaised;
  }

  void clear_objects() {
    for (const Ref* objects : {&objects_, &final_objects_})
      check(PyList_SetSlice(objects->get(), 0, PyList_GET_SIZE(objects->get()), nullptr));
  }

  static uint32_t uint32_of(const Ref& number) {
    const unsigned long value = PyLong_AsUnsignedLong(number.get());
    if (PyErr_Occurred()) throw PythonError{};
    return uint32_t(value);
  }

  SlabLayout slab_;
  uint32_t host_;
  HostRecord& own_;
  uint32_t first_env_;
  Ref envs_;
  ObsNode obs_;
  ActionNode action_;
  Autoreset autoreset_;
  Returned returned_;
  bool actions_by_mail_;
  bool seeds_episodes_;
  PyObject* env_host_;  // borrowed: the env host owns this stepper
  AwakeWait awake_wait_;
  InfoTable infos_;
  std::vector<std::array<uint32_t, kNumInfoRows>> hints_;
  std::vector<Ref> next_seeds_;
  uint32_t messages_read_;
  size_t schemas_announced_ = 0;
  Ref step_name_;
  Ref reset_name_;
  Ref reset_keywords_;
  Ref seed_keyword_;
  Ref objects_;
  Ref final_objects_;
  std::vector<uint32_t> taken_;  // the last request of each env, of a host that steps its envs at the same time; else empty
  uint32_t num_in_code_ = 0;     // of those
  uint64_t spent_until_ = 0;
  Ref interrupt_;  // the Ctrl-C of an env, while envs are stepped or reset
  inline static thread_local Running running_{};
  Running around_{};  // while an env is stepped or reset: the env that was running before, where envs step other envs
};

}  // namespace muster
