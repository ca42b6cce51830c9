// Past the wrappers around Gymnasium envs that only check or count their steps, see muster/envs/shortcuts.py.
#pragma once

#include <vector>

#include "python.hpp"

namespace muster {

class Shortcuts {
 public:
  explicit Shortcuts(size_t num_envs)
      : ways_(num_envs),
        env_name_(checked(PyUnicode_InternFromString("env"))),
        elapsed_name_(checked(PyUnicode_InternFromString("_elapsed_steps"))),
        most_name_(checked(PyUnicode_InternFromString("_max_episode_steps"))),
        one_(checked(PyLong_FromLong(1))) {}

  struct Way {
    Ref env;         // whose `step` is to be called
    Ref time_limit;  // that has to count it, or null
  };

  // The way to env i, which is `env` itself where there is no shorter one. host.shortcut(i) is asked after the steps in
  // which wrappers check: None, or (((wrapper, what it wraps), ...), env, time limit or None).
  Way way(uint32_t i, PyObject* env, PyObject* host) {
    Known& known = ways_[i];
    if (known.first_steps < kFirstSteps) {
      ++known.first_steps;
      return {Ref::borrow(env), Ref()};
    }
    if (!known.shortcut) known.shortcut = checked(PyObject_CallMethod(host, "shortcut", "I", i));
    PyObject* shortcut = known.shortcut.get();
    if (shortcut == Py_None || !still_leads(shortcut)) return {Ref::borrow(env), Ref()};
    PyObject* time_limit = PyTuple_GET_ITEM(shortcut, 2);
    return {Ref::borrow(PyTuple_GET_ITEM(shortcut, 1)), Ref::borrow(time_limit == Py_None ? nullptr : time_limit)};
  }

  // What TimeLimit.step does beside stepping: counts, and tells whether the episode is to be truncated.
  bool count_step(const Ref& time_limit) const {
    const Ref elapsed = checked(PyObject_GetAttr(time_limit.get(), elapsed_name_.get()));
    const Ref now = checked(PyNumber_Add(elapsed.get(), one_.get()));
    check(PyObject_SetAttr(time_limit.get(), elapsed_name_.get(), now.get()));
    const Ref most = checked(PyObject_GetAttr(time_limit.get(), most_name_.get()));
    const int reached = PyObject_RichCompareBool(now.get(), most.get(), Py_GE);
    check(reached);
    return reached;
  }

  // Env i is another one now.
  void replace(uint32_t i) { ways_[i] = Known{}; }

  // Something may have been done to the envs.
  void look_again() {
    for (Known& known : ways_) known.shortcut = Ref();
  }

 private:
  static constexpr uint8_t kFirstSteps = 2;

  struct Known {
    uint8_t first_steps = 0;
    Ref shortcut;
  };

  // Whether every wrapper still wraps what it did.
  bool still_leads(PyObject* shortcut) const {
    PyObject* links = PyTuple_GET_ITEM(shortcut, 0);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(links); ++k) {
      PyObject* link = PyTuple_GET_ITEM(links, k);
      const Ref wrapped = checked(PyObject_GetAttr(PyTuple_GET_ITEM(link, 0), env_name_.get()));
      if (wrapped.get() != PyTuple_GET_ITEM(link, 1)) return false;
    }
    return true;
  }

  std::vector<Known> ways_;
  Ref env_name_;
  Ref elapsed_name_;
  Ref most_name_;
  Ref one_;
};

}  // namespace muster
