// Whether objects that were looked at are still what they were, told without running any of their code.
#pragma once

#include <vector>

#include "python.hpp"

namespace muster {

// Holds while each of some attributes of instances is the very object that it was, and neither the instances' classes nor
// the number of their own attributes has changed: a method that is replaced in a class gives that a new version, one that
// hides it in an instance is an attribute more.
class Unchanged {
 public:
  Unchanged() = default;
  Unchanged(Unchanged&&) = default;
  Unchanged& operator=(Unchanged&&) = default;

  // looked_at: a tuple of (instance, name of an attribute, its value); without a name and a value, both None, it is the
  // instance alone that is looked at.
  explicit Unchanged(PyObject* looked_at) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(looked_at); ++k) {
      PyObject* one = PyTuple_GET_ITEM(looked_at, k);
      if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 3 ||
          !(PyUnicode_Check(PyTuple_GET_ITEM(one, 1)) || PyTuple_GET_ITEM(one, 1) == Py_None)) {
        PyErr_Format(PyExc_TypeError, "expected (instance, name, value), got %R", one);
        throw PythonError{};
      }
      PyObject* object = PyTuple_GET_ITEM(one, 0);
      // Classes get their version by a look-up.
      checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__init__"));
      const Ref attributes = checked(PyObject_GenericGetDict(object, nullptr));
      looks_.push_back({Ref::borrow(object), Ref::borrow(PyTuple_GET_ITEM(one, 1)),
                        Ref::borrow(PyTuple_GET_ITEM(one, 2)), Py_TYPE(object)->tp_version_tag,
                        PyDict_GET_SIZE(attributes.get())});
    }
  }

  bool holds() const {
    PyObject* object = nullptr;
    Ref attributes;
    for (const Look& look : looks_) {
      if (object != look.object.get()) {
        object = look.object.get();
        // 0: this class has no version any more.
        if (!look.class_version || Py_TYPE(object)->tp_version_tag != look.class_version) return false;
        attributes = checked(PyObject_GenericGetDict(object, nullptr));
        if (PyDict_GET_SIZE(attributes.get()) != look.num_attributes) return false;
      }
      if (look.name.get() == Py_None) continue;
      if (PyDict_GetItemWithError(attributes.get(), look.name.get()) != look.value.get()) {
        if (PyErr_Occurred()) throw PythonError{};
        return false;
      }
    }
    return true;
  }

  // For the garbage collector.
  int visit(visitproc visit, void* arg) const {
    for (const Look& look : looks_) {
      Py_VISIT(look.object.get());
      Py_VISIT(look.value.get());
    }
    return 0;
  }

  void clear() { std::exchange(looks_, {}); }

 private:
  struct Look {
    Ref object, name, value;
    unsigned int class_version;
    Py_ssize_t num_attributes;
  };
  std::vector<Look> looks_;
};

}  // namespace muster
