// Builds one row of a multi-agent env: the observation, reward and flags of each agent, in the agent's fixed place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "agent_dicts.hpp"
#include "python.hpp"

namespace muster {

// Returns a copy of an observation that the env cannot change any more. Arrays are copied, also within dicts, tuples
// and lists; an object that NumPy can convert, such as a tensor, becomes an array. All other values stay the same
// objects.
inline Ref copied(PyObject* obs) {
  if (PyArray_Check(obs)) return checked(PyArray_NewCopy(reinterpret_cast<PyArrayObject*>(obs), NPY_KEEPORDER));
  if (PyDict_Check(obs)) {
    Ref dict = checked(PyDict_New()), snapshot = checked(PyDict_Copy(obs));  // copying may run code that edits `obs`
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(snapshot.get(), &at, &key, &value);)
      check(PyDict_SetItem(dict.get(), key, copied(value).get()));
    return dict;
  }
  if (!PyTuple_Check(obs) && !PyList_Check(obs)) {
    if (!is_like_array(obs)) return Ref::borrow(obs);
    // Without NPY_ARRAY_ENSURECOPY, which some `__array__` methods do not support: the call of `copied` copies instead.
    PyObject* array = PyArray_FromAny(obs, nullptr, 0, 0, 0, nullptr);
    if (array) return copied(checked(array).get());
    PyErr_Clear();  // the code that stores the observation will report why
    return Ref::borrow(obs);
  }
  Ref parts = checked(PySequence_List(obs));
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(parts.get()); ++k)
    check(PyList_SetItem(parts.get(), k, copied(PyList_GET_ITEM(parts.get(), k)).release()));
  if (PyList_Check(obs)) return parts;
  if (PyTuple_CheckExact(obs) || !PyObject_HasAttrString(obs, "_make")) return checked(PyList_AsTuple(parts.get()));
  return checked(PyObject_CallMethod(obs, "_make", "O", parts.get()));  // a named tuple
}

// Makes `kept` a copy of `obs`. Reuses the memory of `kept` where it fits and nothing else refers to it.
inline void keep(Ref& kept, PyObject* obs) {
  if (kept && Py_REFCNT(kept.get()) == 1 && PyArray_CheckExact(kept.get()) && PyArray_CheckExact(obs)) {
    auto* to = reinterpret_cast<PyArrayObject*>(kept.get());
    auto* from = reinterpret_cast<PyArrayObject*>(obs);
    if (PyArray_SAMESHAPE(to, from) && PyArray_EquivArrTypes(to, from)) return check(PyArray_CopyInto(to, from));
  }
  kept = copied(obs);
}

class AgentRow {
 public:
  enum Flag { kAlive, kActing, kTerminated, kTruncated, kNumFlags };

  // The flags' names in infos, in the order of Flag.
  static constexpr const char* kFlagNames[kNumFlags] = {"alive", "acting", "agent_terminated", "agent_truncated"};

  // slots: a dict from each agent to (column, group, member, keys, ...). column: the agent's index among all agents.
  // group, member: the index of its group, and the agent's index in that.  keys: the entries of its observation, a
  // dict, that belong to its observation space; None where the whole observation does.
  // sizes: the number of members of each group.  rewards: float32 [agents].  flags: bool [Flag, agents].
  AgentRow(PyObject* slots, const std::vector<Py_ssize_t>& sizes, PyObject* rewards, PyObject* flags)
      : slots_(Ref::borrow(slots)),
        sizes_(sizes),
        rewards_(Ref::borrow(rewards)),
        flags_(Ref::borrow(flags)),
        count_(size_t(PyArray_SIZE(array(rewards_)))),
        last_shown_(count_),
        acting_(count_, 0),
        unended_(count_, 0) {}

  void start_episode() {
    std::fill(acting_.begin(), acting_.end(), 0);
    std::fill(unended_.begin(), unended_.end(), 0);
    some_truncated_ = false;
    for (Ref& shown : last_shown_) shown = Ref();
  }

  // Clears the row: no agent is present yet.
  void start() {
    std::memset(PyArray_DATA(array(rewards_)), 0, count_ * sizeof(float));
    std::memset(PyArray_DATA(array(flags_)), 0, kNumFlags * count_);
    Ref places = checked(PyList_New(Py_ssize_t(sizes_.size())));
    for (size_t g = 0; g < sizes_.size(); ++g) {
      Ref members = checked(PyList_New(sizes_[g]));
      for (Py_ssize_t m = 0; m < sizes_[g]; ++m) PyList_SET_ITEM(members.get(), m, Py_NewRef(Py_None));
      PyList_SET_ITEM(places.get(), Py_ssize_t(g), members.release());
    }
    places_ = std::move(places);
  }

  // Returns {agent: action} for `agents`, a list. by_group: for each group a sequence of its members' actions.
  Ref choose(PyObject* by_group, PyObject* agents) const {
    Ref chosen = checked(PyDict_New());
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(agents); ++k) {
      Ref agent = Ref::borrow(PyList_GET_ITEM(agents, k));
      PyObject* slot = slot_of(agent.get());
      PyObject* members = PyList_GET_ITEM(by_group, PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 1)));
      Ref action = checked(PySequence_GetItem(members, PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 2))));
      check(PyDict_SetItem(chosen.get(), agent.get(), action.get()));
    }
    return chosen;
  }

  // Stores one agent that is present. obs: None stands for zeros.  acts: whether its action counts in the next step.
  void put(PyObject* agent, PyObject* obs, PyObject* reward, bool terminated, bool truncated, bool acts) {
    put_into(slot_of(agent), agent, obs, reward, terminated, truncated, acts);
  }

  // Stores agents that all have the same `terminated` and `truncated`. agents, observations, rewards: lists.
  void put_alike(PyObject* agents, PyObject* observations, PyObject* rewards, bool terminated, bool truncated) {
    const Py_ssize_t count = PyList_GET_SIZE(agents);
    if (PyList_GET_SIZE(observations) != count || PyList_GET_SIZE(rewards) != count) {
      PyErr_Format(PyExc_ValueError, "%zd agents, but %zd observations and %zd rewards", count,
                   PyList_GET_SIZE(observations), PyList_GET_SIZE(rewards));
      throw PythonError{};
    }
    auto item = [](PyObject* list, Py_ssize_t k) { return checked(PySequence_GetItem(list, k)); };  // `put` may cut it
    for (Py_ssize_t k = 0; k < count; ++k)
      put(item(agents, k).get(), item(observations, k).get(), item(rewards, k).get(), terminated, truncated,
          !terminated && !truncated);
  }

  // Stores the agents of a reset. agents: a list of those that are present.  The other arguments: mappings by agent. An
  // agent that neither of them names pauses. Raises SpecMismatch for keys that are no agents, for an agent that has
  // infos alone, and where no agent has an observation.
  void put_first(PyObject* agents, PyObject* of_observations, PyObject* of_infos) {
    AgentDict observations(of_observations, "reset", "observations"), infos(of_infos, "reset", "infos");
    Ref unseen;
    bool sees_any = false;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(agents); ++k) {
      Ref agent = Ref::borrow(PyList_GET_ITEM(agents, k));
      PyObject* slot = slot_of(agent.get());
      const Ref obs = observations.read(agent.get());
      acting_[column_of(slot)] = bool(obs);
      sees_any |= bool(obs);
      if (obs)
        show(slot, agent.get(), obs.get(), nullptr, false, false, true);
      else if (!unseen && infos.read(agent.get()))
        unseen = std::move(agent);
    }
    observations.check_keys(slots_.get());
    if (unseen) observations.raise_missing(unseen.get(), "has infos", agents);
    if (!sees_any && (PyList_GET_SIZE(agents) || PyDict_GET_SIZE(observations.get())))
      observations.raise_none_present(agents);
  }

  // Stores the agents of one step. before, after: lists of the agents that were present for it, and that are present
  // for the next one.  The other arguments: mappings by agent. An agent that ends without an observation keeps its last
  // one; one that no mapping names pauses, as does one that leaves without an end while others stay. Raises SpecMismatch
  // for keys that are no agents, for an agent of which the mappings leave out something else, and where no agent that
  // goes on has an observation. Returns the number of agents that go on.
  size_t put_all(PyObject* before, PyObject* after, PyObject* observations, PyObject* rewards, PyObject* terminations,
                 PyObject* truncations) {
    StepDicts dicts(observations, rewards, terminations, truncations);
    const int same = PyObject_RichCompareBool(before, after, Py_EQ);
    check(same);
    const bool all_leave = !PyList_GET_SIZE(after);
    size_t going_on = 0, seeing = 0;
    auto put_one = [&](PyObject* agent, bool stays) {
      PyObject* slot = slot_of(agent);
      const size_t column = column_of(slot);
      const AgentStep step = dicts.read(agent, stays, acting_[column], all_leave);
      acting_[column] = step.goes_on && step.obs;
      going_on += step.goes_on;
      seeing += acting_[column];
      if (!step.is_reported) return;
      const bool had_ended = !stays && !unended_[column];
      show(slot, agent, step.obs.get(), step.reward.get(), step.terminated, step.truncated, acting_[column]);
      if (had_ended) unended_[column] = false;
    };
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(before); ++k) {
      Ref agent = Ref::borrow(PyList_GET_ITEM(before, k));
      put_one(agent.get(), same || contains(after, agent.get()));
    }
    for (Py_ssize_t k = 0; !same && k < PyList_GET_SIZE(after); ++k) {
      Ref agent = Ref::borrow(PyList_GET_ITEM(after, k));
      if (!contains(before, agent.get())) put_one(agent.get(), true);
    }
    dicts.check(slots_.get(), before, after);
    if (going_on && !seeing) dicts.observations.raise_none_present(after);
    return going_on;
  }

  // Returns the observations of the groups, a list of lists, and gives up this row's reference to them.
  Ref take_places() { return std::move(places_); }

  // Returns the agents that have been present, and have not ended.
  Ref unended() const {
    Ref agents = checked(PyList_New(0));
    PyObject *agent, *slot;
    for (Py_ssize_t at = 0; PyDict_Next(slots_.get(), &at, &agent, &slot);)
      if (unended_[column_of(slot)]) check(PyList_Append(agents.get(), agent));
    return agents;
  }

  // Returns (sum of the rewards, terminated, truncated) for the whole env. over: whether its episode has ended, which
  // truncates the agents that have not ended.
  Ref end_of_step(bool over) {
    double sum = 0;
    const auto* reward = static_cast<const float*>(PyArray_DATA(array(rewards_)));
    for (size_t i = 0; i < count_; ++i) {
      sum += double(reward[i]);
      if (over && std::exchange(unended_[i], 0)) flag(kTruncated, i) = some_truncated_ = true;
    }
    const bool terminated = over && !some_truncated_;
    return checked(Py_BuildValue("(dOO)", sum, terminated ? Py_True : Py_False,
                                 over && !terminated ? Py_True : Py_False));
  }

 private:
  static PyArrayObject* array(const Ref& ref) { return reinterpret_cast<PyArrayObject*>(ref.get()); }

  uint8_t& flag(Flag which, size_t column) {
    return static_cast<uint8_t*>(PyArray_DATA(array(flags_)))[which * count_ + column];
  }

  // Returns a borrowed reference. For an agent that is not in the dict, the dict itself raises its error.
  PyObject* slot_of(PyObject* agent) const {
    PyObject* slot = PyDict_GetItemWithError(slots_.get(), agent);
    if (!slot && !PyErr_Occurred()) Ref complaint = checked(PyObject_GetItem(slots_.get(), agent));
    if (!slot) throw PythonError{};
    return slot;
  }

  static size_t column_of(PyObject* slot) { return PyLong_AsSize_t(PyTuple_GET_ITEM(slot, 0)); }

  // Stores one agent as `put` does. obs: null stands for what it was shown last. Keeps what it is shown.
  void show(PyObject* slot, PyObject* agent, PyObject* obs, PyObject* reward, bool terminated, bool truncated,
            bool acts) {
    Ref& last_shown = last_shown_[column_of(slot)];
    put_into(slot, agent, obs ? obs : last_shown ? last_shown.get() : Py_None, reward, terminated, truncated, acts);
    // Copied: the env may write to its arrays again before a step that ends the agent without an observation.
    if (obs) keep(last_shown, obs);
  }

  void put_into(PyObject* slot, PyObject* agent, PyObject* obs, PyObject* reward, bool terminated, bool truncated,
                bool acts) {
    if (!places_) start();
    const size_t column = column_of(slot);
    PyObject* members = PyList_GET_ITEM(places_.get(), PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 1)));
    check(PyList_SetItem(members, PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 2)),
                         own(obs, PyTuple_GET_ITEM(slot, 3)).release()));
    if (reward) put_reward(agent, column, reward);
    flag(kAlive, column) = true;
    // Where agents take turns (PettingZoo's AEC), an agent may end and return within one step.
    flag(kActing, column) |= acts;
    flag(kTerminated, column) |= terminated;
    flag(kTruncated, column) |= truncated;
    unended_[column] = !terminated && !truncated;
    some_truncated_ |= truncated;
  }

  static bool contains(PyObject* agents, PyObject* agent) {
    const int found = PySequence_Contains(agents, agent);
    check(found);
    return found;
  }

  static Ref own(PyObject* obs, PyObject* keys) {
    if (keys == Py_None || obs == Py_None) return Ref::borrow(obs);
    Ref dict = checked(PyDict_New());
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keys); ++k) {
      PyObject* key = PyTuple_GET_ITEM(keys, k);
      check(PyDict_SetItem(dict.get(), key, checked(PyObject_GetItem(obs, key)).get()));
    }
    return dict;
  }

  void put_reward(PyObject* agent, size_t column, PyObject* reward) {
    char* to = PyArray_BYTES(array(rewards_)) + column * sizeof(float);
    auto* zero_dim = PyArray_Check(reward) ? reinterpret_cast<PyArrayObject*>(reward) : nullptr;
    if (PyFloat_Check(reward)) {
      const float number = float(PyFloat_AS_DOUBLE(reward));
      std::memcpy(to, &number, sizeof number);
    } else if (zero_dim && PyArray_NDIM(zero_dim) == 0 && PyArray_TYPE(zero_dim) == NPY_DOUBLE &&
               PyArray_ISCARRAY_RO(zero_dim)) {
      const float number = float(*static_cast<double*>(PyArray_DATA(zero_dim)));
      std::memcpy(to, &number, sizeof number);
    } else if (reward == Py_None || (PyArray_Check(reward) && PyArray_NDIM(zero_dim) != 0)) {
      // NumPy would write NaN for None.
      PyErr_Format(PyExc_TypeError, "the reward of %R is %.300R, expected a number", agent, reward);
      throw PythonError{};
    } else {
      check(PyArray_SETITEM(array(rewards_), to, reward));
    }
  }

  Ref slots_;
  std::vector<Py_ssize_t> sizes_;
  Ref rewards_, flags_;
  size_t count_;
  std::vector<Ref> last_shown_;  // by column
  std::vector<uint8_t> acting_;  // by column: whether the last row showed the agent something to act on
  std::vector<uint8_t> unended_;  // by column: whether the agent has been present, and has not ended since
  bool some_truncated_ = false;
  Ref places_;
};

// Splits the rewards and flags of all agents by group. rewards: [n, agents].  flags: [n, names, agents].  slots: a list
// of (group, first agent, end).  Returns ({group: rewards}, {name: {group: flags}}), views [n, agents of the group].
inline Ref split_agents(PyObject* rewards, PyObject* flags, PyObject* slots, PyObject* names) {
  auto by_group = [&](PyObject* all, npy_intp which) {
    auto* array = reinterpret_cast<PyArrayObject*>(all);
    const int last = PyArray_NDIM(array) - 1;
    npy_intp strides[] = {PyArray_STRIDE(array, 0), PyArray_STRIDE(array, last)};
    char* row = PyArray_BYTES(array) + (last == 2 ? which * PyArray_STRIDE(array, 1) : 0);
    Ref dict = checked(PyDict_New());
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(slots); ++g) {
      PyObject* slot = PyList_GET_ITEM(slots, g);
      const npy_intp first = PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 1));
      const npy_intp end = PyLong_AsSsize_t(PyTuple_GET_ITEM(slot, 2));
      npy_intp shape[] = {PyArray_DIM(array, 0), end - first};
      Py_INCREF(reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
      Ref view = checked(PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(array), 2, shape, strides,
                                              row + first * strides[1], PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE,
                                              nullptr));
      check(PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(view.get()), Py_NewRef(all)));
      check(PyDict_SetItem(dict.get(), PyTuple_GET_ITEM(slot, 0), view.get()));
    }
    return dict;
  };
  Ref rewards_by_group = by_group(rewards, 0);
  Ref infos = checked(PyDict_New());
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k)
    check(PyDict_SetItem(infos.get(), PyTuple_GET_ITEM(names, k), by_group(flags, k).get()));
  return checked(PyTuple_Pack(2, rewards_by_group.get(), infos.get()));
}

}  // namespace muster
