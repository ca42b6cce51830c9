// The dicts by agent that PettingZoo's parallel envs return, and the errors about their keys.
#pragma once

#include <optional>

#include "python.hpp"

namespace muster {

template <class... Parts>
[[noreturn]] void raise_mismatch(const char* format, Parts... parts) {
  Ref errors = checked(PyImport_ImportModule("muster.errors"));
  Ref cls = checked(PyObject_GetAttrString(errors.get(), "SpecMismatch"));
  PyErr_Format(cls.get(), format, parts...);
  throw PythonError{};
}

// A dict by agent. Counts the entries that are read: only where it has more than these, its keys are looked at.
class AgentDict {
 public:
  // call, name: for errors, what returned the dict, and which of its dicts it is.
  AgentDict(PyObject* mapping, const char* call, const char* name)
      : call_(call), name_(name), dict_(dict_of(mapping, name)) {}

  PyObject* get() const { return dict_.get(); }

  // Returns the agent's entry, or null where it has none.
  Ref read(PyObject* agent) {
    PyObject* entry = PyDict_GetItemWithError(dict_.get(), agent);
    if (!entry && PyErr_Occurred()) throw PythonError{};
    entries_read_ += entry != nullptr;
    return Ref::borrow(entry);
  }

  // Returns what the dict itself makes up for an agent that has no entry, as a defaultdict does, or null.
  Ref make_up(PyObject* agent) const {
    if (PyDict_CheckExact(dict_.get())) return Ref();
    PyObject* entry = PyObject_GetItem(dict_.get(), agent);
    if (!entry && !PyErr_ExceptionMatches(PyExc_KeyError)) throw PythonError{};
    if (!entry) PyErr_Clear();
    return Ref(entry);
  }

  // Whether `entry`, the agent's own, is true. Where there is none, "__all__" may say it.
  bool is_true(PyObject* agent, const Ref& entry) {
    if (entry) return truth(entry.get());
    const Ref made_up = make_up(agent);
    return made_up ? truth(made_up.get()) : is_true_of_all();
  }

  bool is_true_of_all() {
    if (!of_all_) {
      PyObject* entry = PyDict_GetItemString(dict_.get(), kAll);
      of_all_ = entry && truth(entry);
    }
    return *of_all_;
  }

  // Raises SpecMismatch for a key that is none of `agents`, a dict.
  void check_keys(PyObject* agents) const {
    if (PyDict_GET_SIZE(dict_.get()) == entries_read_) return;
    const Ref names = keys(dict_.get());
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(names.get()); ++k) {
      PyObject* name = PyList_GET_ITEM(names.get(), k);
      const int is_agent = PyDict_Contains(agents, name);
      check(is_agent);
      if (is_agent || is_all(name)) continue;
      raise_mismatch(
          "%s's %s name %.200R, which is none of the env's possible_agents: expected keys among %.300R, got %.300R. "
          "Give each agent's entry the agent's own name",
          call_, name_, name, keys(agents).get(), names.get());
    }
  }

  // Raises SpecMismatch for a reward of an agent that is in neither of the lists, unless it is 0: it would be lost.
  void check_owners(PyObject* before, PyObject* after) const {
    if (PyDict_GET_SIZE(dict_.get()) == entries_read_) return;
    const Ref items = checked(PyDict_Items(dict_.get()));  // a comparison may run code that edits the dict
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(items.get()); ++k) {
      PyObject* item = PyList_GET_ITEM(items.get(), k);
      PyObject *agent = PyTuple_GET_ITEM(item, 0), *reward = PyTuple_GET_ITEM(item, 1);
      int is_there = PySequence_Contains(before, agent);
      if (!is_there) is_there = PySequence_Contains(after, agent);
      check(is_there);
      if (is_there || is_all(agent) || !truth(reward)) continue;
      raise_mismatch(
          "%s's %s give %.100R to %.200R, which is not there, as it has ended before or has not begun: expected rewards "
          "for agents among %.300R, or 0. Keep an agent in env.agents until its last reward",
          call_, name_, reward, agent, before);
    }
  }

  // Raises SpecMismatch: `agent`, which did what `deed` says, has no entry, as all `agents` should have.
  [[noreturn]] void raise_missing(PyObject* agent, const char* deed, PyObject* agents) const {
    raise_mismatch(
        "%s's %s have no entry for %.200R, which %s: expected the keys %.300R, got %.300R. Leave an agent that pauses "
        "out of all dicts",
        call_, name_, agent, deed, agents, keys(dict_.get()).get());
  }

  // Raises SpecMismatch: none of the agents that are present, a list, has an entry.
  [[noreturn]] void raise_none_present(PyObject* present) const {
    raise_mismatch(
        "%s's %s have no entry for any agent that is to act: expected keys among those of env.agents, %.300R, got "
        "%.300R",
        call_, name_, present, keys(dict_.get()).get());
  }

 private:
  static constexpr const char* kAll = "__all__";

  static bool is_all(PyObject* name) {
    return PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, kAll) == 0;
  }

  static Ref dict_of(PyObject* mapping, const char* name) {
    if (PyDict_Check(mapping)) return Ref::borrow(mapping);
    Ref dict = checked(PyDict_New());
    if (!PyObject_HasAttrString(mapping, "keys")) {
      PyErr_Format(PyExc_TypeError, "expected a dict of %s by agent, got %.300R", name, mapping);
      throw PythonError{};
    }
    check(PyDict_Update(dict.get(), mapping));
    return dict;
  }

  static Ref keys(PyObject* dict) { return checked(PyDict_Keys(dict)); }

  static bool truth(PyObject* entry) {
    if (entry == Py_False) return false;
    const int is_true = PyObject_IsTrue(entry);
    check(is_true);
    return is_true;
  }

  const char* call_;
  const char* name_;
  Ref dict_;
  Py_ssize_t entries_read_ = 0;
  std::optional<bool> of_all_;
};

// What a step's dicts say of one agent. is_reported: whether they say anything; it pauses, or is gone, otherwise.
// obs, reward: null where there is none.  goes_on: whether it is present for the next step, and has not ended.
struct AgentStep {
  Ref obs, reward;
  bool terminated, truncated, goes_on, is_reported;
};

// The dicts that a step returns.
class StepDicts {
 public:
  StepDicts(PyObject* of_observations, PyObject* of_rewards, PyObject* of_terminations, PyObject* of_truncations)
      : observations(of_observations, "step", "observations"),
        rewards_(of_rewards, "step", "rewards"),
        terminations_(of_terminations, "step", "terminations"),
        truncations_(of_truncations, "step", "truncations") {}

  // stays: whether the agent is present for the next step.  acted: whether it was to act in this one.  all_leave:
  // whether no agent is present for the next one. Remembers the first agent of which something is left out, for `check`.
  AgentStep read(PyObject* agent, bool stays, bool acted, bool all_leave) {
    Ref obs = observations.read(agent), reward = rewards_.read(agent);
    const Ref termination = terminations_.read(agent), truncation = truncations_.read(agent);
    bool terminated = terminations_.is_true(agent, termination), truncated = truncations_.is_true(agent, truncation);
    if (!stays && !terminated && !truncated) {
      terminated = terminations_.is_true_of_all();
      truncated = truncations_.is_true_of_all();
    }
    const bool ended = terminated || truncated, goes_on = stays && !ended;
    if (!obs || !reward || !stays) {
      const bool is_named = obs || reward || termination || truncation || ended;
      if (all_leave && acted && !ended) note(agent, Fault::kNoEnd);
      if (!reward && acted && is_named && !(reward = rewards_.make_up(agent))) note(agent, Fault::kNoReward);
      if (!obs && reward && goes_on && !(obs = observations.make_up(agent))) note(agent, Fault::kNoObservation);
    }
    const bool is_reported = obs || reward || ended;
    return {std::move(obs), std::move(reward), terminated, truncated, goes_on, is_reported};
  }

  // Raises SpecMismatch for keys that are no agents, for rewards of agents that are not there, and for an agent of
  // which something was left out.
  // agents: a dict of all.  before, after: lists of those that were and are present.
  void check(PyObject* agents, PyObject* before, PyObject* after) {
    for (AgentDict* dict : {&observations, &rewards_, &terminations_, &truncations_}) dict->check_keys(agents);
    rewards_.check_owners(before, after);
    PyObject* agent = culprit_.get();
    switch (fault_) {
      case Fault::kNone: return;
      case Fault::kNoReward: rewards_.raise_missing(agent, "acted", before);
      case Fault::kNoObservation: observations.raise_missing(agent, "has a reward and goes on", after);
      case Fault::kNoEnd:
        raise_mismatch(
            "%.200R has left env.agents, but has not ended: expected True in step's terminations or truncations, got "
            "%.300R and %.300R",
            agent, terminations_.get(), truncations_.get());
    }
  }

  AgentDict observations;

 private:
  enum class Fault { kNone, kNoEnd, kNoReward, kNoObservation };

  void note(PyObject* agent, Fault fault) {
    if (fault_ == Fault::kNone) fault_ = fault, culprit_ = Ref::borrow(agent);
  }

  AgentDict rewards_, terminations_, truncations_;
  Fault fault_ = Fault::kNone;
  Ref culprit_;
};

}  // namespace muster
