// What envs return that is not just what the stepping loop expects: results, infos, rewards and flags of other types.
#pragma once

#include <cmath>

#include "python.hpp"

namespace muster {

// What a step of an env has returned.
struct StepReturns {
  Ref tuple, info;
  double reward;
  bool terminated, truncated;

  PyObject* obs() const { return PyTuple_GET_ITEM(tuple.get(), 0); }
  bool over() const { return terminated || truncated; }
};

struct Returned {
  // result: null where the env has raised.
  StepReturns step(Ref result) const {
    if (!result) throw PythonError{};
    result = as_tuple(std::move(result), 5, "step must return (obs, reward, terminated, truncated, info)");
    auto item = [&](Py_ssize_t k) { return PyTuple_GET_ITEM(result.get(), k); };
    Ref info = Ref::borrow(item(4));
    const bool is_float = PyFloat_Check(item(1)) && !check_finite;
    const double reward = is_float ? PyFloat_AS_DOUBLE(item(1)) : this->reward(item(1), info);
    const bool terminated = item(2) == Py_True || (item(2) != Py_False && flag(item(2), "terminated"));
    const bool truncated = item(3) == Py_True || (item(3) != Py_False && flag(item(3), "truncated"));
    return {std::move(result), std::move(info), reward, terminated, truncated};
  }

  static Ref as_tuple(Ref result, Py_ssize_t size, const char* expected) {
    if (PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == size) return result;
    return made_tuple(std::move(result), size, expected);
  }

  // Returns a list as a tuple. Raises TypeError for what is no sequence of this size.
  static Ref made_tuple(Ref result, Py_ssize_t size, const char* expected) {
    if (PyList_Check(result.get())) result = checked(PyList_AsTuple(result.get()));
    if (PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == size) return result;
    const bool as_in_gym = PyTuple_Check(result.get()) ? PyTuple_GET_SIZE(result.get()) == 4 && size == 5 : size == 2;
    const char* hint = as_in_gym ? "; an env written for Gym before 0.26 needs a wrapper, such as shimmy's "
                                   "GymV21CompatibilityV0"
                                 : "";
    PyErr_Format(PyExc_TypeError, "%s, got %.300R%s", expected, result.get(), hint);
    throw PythonError{};
  }

  // Returns the items of a mapping that is not just a dict, such as a MappingProxyType.
  static Ref as_dict(PyObject* info) {
    if (!PyMapping_Check(info) || !PyObject_HasAttrString(info, "items")) {
      PyErr_Format(PyExc_TypeError, "info must be a dict, got %U", type_name(info).get());
      throw PythonError{};
    }
    const Ref items = checked(PyMapping_Items(info));  // a class made from dict may have its own
    Ref dict = checked(PyDict_New());
    check(PyDict_MergeFromSeq2(dict.get(), items.get(), 1));
    return dict;
  }

  // Returns the one number that `value` stands for. info: gets a reward of several numbers, if there is a key for it.
  double reward(PyObject* value, Ref& info) const {
    if (PyFloat_Check(value)) return finite_reward(PyFloat_AS_DOUBLE(value), value);
    const bool scalar = PyLong_Check(value) || PyArray_IsScalar(value, Number) || PyArray_IsScalar(value, Bool) ||
                        (PyArray_Check(value) && PyArray_NDIM(reinterpret_cast<PyArrayObject*>(value)) == 0);
    const bool is_array = !scalar && is_like_array(value) && !is_zero_dim(value);
    const bool several = is_array || PyList_Check(value) || PyTuple_Check(value);
    const bool is_sent = several && reward_key.get() != Py_None;
    const bool has_float = !PyArray_Check(value) && PyNumber_Check(value) && PyType_GetSlot(Py_TYPE(value), Py_nb_float);
    if (scalar || (has_float && !is_sent)) {
      const double number = PyFloat_AsDouble(value);
      if (number != -1.0 || !PyErr_Occurred()) return finite_reward(number, value);
      if (!several) throw PythonError{};
      PyErr_Clear();  // a tensor of several numbers
    }
    if (lenient && value == Py_None) return finite_reward(std::nan(""), value);
    if (lenient && PyUnicode_Check(value)) {
      const Ref number = checked(PyNumber_Float(value));
      return finite_reward(PyFloat_AS_DOUBLE(number.get()), value);
    }
    if (is_sent) {
      const Ref numbers = checked(PyArray_FromAny(value, PyArray_DescrFromType(NPY_DOUBLE), 0, 0,
                                                  NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST, nullptr));
      info = PyDict_CheckExact(info.get()) ? checked(PyDict_Copy(info.get())) : as_dict(info.get());
      check(PyObject_SetItem(info.get(), reward_key.get(), numbers.get()));
      return std::nan("");
    }
    PyErr_Format(several ? PyExc_ValueError : PyExc_TypeError, "the reward must be one number, got %U: %.300R%s",
                 type_name(value).get(), value,
                 several ? ". Return a float: weigh several objectives in a wrapper, and give several agents "
                           "PettingZoo's API"
                         : "");
    throw PythonError{};
  }

  // Returns the bool that `value` stands for. name: for errors.
  bool flag(PyObject* value, const char* name) const {
    if (lenient || PyArray_IsScalar(value, Bool) || PyLong_Check(value) || PyArray_IsScalar(value, Integer) ||
        is_zero_dim(value)) {
      const int truth = PyObject_IsTrue(value);
      check(truth);
      return truth;
    }
    PyErr_Format(PyExc_TypeError, "%s must be a bool, got %U: %.300R", name, type_name(value).get(), value);
    throw PythonError{};
  }

  bool check_finite;
  // Whether rewards and flags may be what other libraries' vector envs make numbers and bools of.
  bool lenient;
  // None, or the key under which the infos have a reward of several numbers, as float64 array; the reward is NaN then.
  Ref reward_key;

 private:
  double finite_reward(double number, PyObject* value) const {
    if (check_finite && !std::isfinite(number)) {
      PyErr_Format(PyExc_ValueError, "the reward is %R (check_finite=True)", value);
      throw PythonError{};
    }
    return number;
  }

  // Whether `value` is an array without dimensions, of NumPy or of another library, such as a tensor.
  static bool is_zero_dim(PyObject* value) {
    if (!is_like_array(value)) return false;
    const Ref count(PyObject_GetAttrString(value, "ndim"));
    if (!count) PyErr_Clear();
    return count && PyLong_Check(count.get()) && PyObject_Not(count.get()) == 1;
  }
};

}  // namespace muster
