// Past the wrappers around Gymnasium envs that only check or count their steps, see muster/envs/shortcuts.py.
#pragma once

#include <vector>

#include "python.hpp"
#include "unchanged.hpp"

namespace muster {

class Shortcuts {
 public:
  explicit Shortcuts(size_t num_envs)
      : known_(num_envs),
        elapsed_name_(checked(PyUnicode_InternFromString("_elapsed_steps"))),
        most_name_(checked(PyUnicode_InternFromString("_max_episode_steps"))),
        one_(checked(PyLong_FromLong(1))) {}

  struct Way {
    Ref env;         // whose `step` is to be called
    Ref time_limit;  // that has to count it, or null
  };

  // The way to env i, which is `env` itself where there is no shorter one. host.shortcut(i) is asked until it knows one,
  // for wrappers check the first steps, and again when a wrapper has changed: None, or (what has to stay as it is, env,
  // time limit or None).
  Way way(uint32_t i, PyObject* env, PyObject* host) {
    Known& known = known_[i];
    if (known.looks_left && !(known.env && known.unchanged.holds())) look(i, host);
    if (!known.env) return {Ref::borrow(env), Ref()};
    return {Ref::borrow(known.env.get()), Ref::borrow(known.time_limit.get())};
  }

  // What TimeLimit.step does with a result that it passes on: takes five things out of it, counts, and overrules
  // `truncated`.
  Ref count_step(const Ref& time_limit, const Ref& result) const {
    Ref items = taken_out(result);
    if (PyTuple_GET_SIZE(items.get()) != 5) {
      PyErr_Format(PyExc_ValueError, "step must return 5 values, got %zd: %.300R", PyTuple_GET_SIZE(items.get()),
                   result.get());
      throw PythonError{};
    }
    const Ref elapsed = checked(PyObject_GetAttr(time_limit.get(), elapsed_name_.get()));
    const Ref now = checked(PyNumber_InPlaceAdd(elapsed.get(), one_.get()));
    check(PyObject_SetAttr(time_limit.get(), elapsed_name_.get(), now.get()));
    const Ref most = checked(PyObject_GetAttr(time_limit.get(), most_name_.get()));
    const Ref reached = checked(PyObject_RichCompare(now.get(), most.get(), Py_GE));
    const int out_of_time = PyObject_IsTrue(reached.get());
    check(out_of_time);
    if (!out_of_time) return items;
    PyObject** given = &PyTuple_GET_ITEM(items.get(), 0);
    return checked(PyTuple_Pack(5, given[0], given[1], given[2], Py_True, given[4]));
  }

  // Env i is another one now.
  void forget(uint32_t i) { known_[i] = Known{}; }

  void forget_all() {
    for (Known& known : known_) known = Known{};
  }

 private:
  static constexpr uint8_t kMostLooks = 100;

  struct Known {
    uint8_t looks_left = kMostLooks;
    Unchanged unchanged;
    Ref env;  // null: there is no shortcut
    Ref time_limit;
  };

  // As Python takes five things out of it: of what is not a sequence, it asks for a sixth at the most.
  static Ref taken_out(const Ref& result) {
    if (PyTuple_Check(result.get()) || PyList_Check(result.get())) return checked(PySequence_Tuple(result.get()));
    const Ref iterator = checked(PyObject_GetIter(result.get()));
    const Ref items = checked(PyList_New(0));
    while (PyList_GET_SIZE(items.get()) < 6) {
      const Ref item = Ref(PyIter_Next(iterator.get()));
      if (PyErr_Occurred()) throw PythonError{};
      if (!item) break;
      check(PyList_Append(items.get(), item.get()));
    }
    return checked(PyList_AsTuple(items.get()));
  }

  // Keeps nothing of the last look, which may be of another env.
  void look(uint32_t i, PyObject* host) {
    Known& known = known_[i];
    const uint8_t looks_left = known.looks_left - 1;
    known = Known{};
    known.looks_left = looks_left;
    if (!looks_left) return;
    const Ref shortcut = checked(PyObject_CallMethod(host, "shortcut", "I", i));
    if (shortcut.get() == Py_None) return;
    PyObject* time_limit = PyTuple_GET_ITEM(shortcut.get(), 2);
    known.unchanged = Unchanged(PyTuple_GET_ITEM(shortcut.get(), 0));
    known.time_limit = Ref::borrow(time_limit == Py_None ? nullptr : time_limit);
    known.env = Ref::borrow(PyTuple_GET_ITEM(shortcut.get(), 1));
  }

  std::vector<Known> known_;
  Ref elapsed_name_;
  Ref most_name_;
  Ref one_;
};

}  // namespace muster
