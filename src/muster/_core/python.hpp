// The CPython and NumPy C API, and owned references. The stepping loop uses them directly: nanobind's casters would
// cost more than an env's step.
#pragma once

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION  // that of NumPy 1.26, the oldest that Muster runs on
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include <string>
#include <utility>

#include "stable_abi.hpp"

namespace muster {

// An owned reference. Null means that a Python exception is set.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrow(PyObject* object) { return Ref(Py_XNewRef(object)); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Thrown in C++ when a Python exception is set, so that Python raises it.
struct PythonError {};

inline Ref checked(PyObject* owned) {
  if (!owned) throw PythonError{};
  return Ref(owned);
}

inline void check(int result) {
  if (result < 0) throw PythonError{};
}

// Raises an exception of muster.errors.
[[noreturn]] inline void raise(const char* type, const std::string& message) {
  Ref errors = checked(PyImport_ImportModule("muster.errors"));
  Ref cls = checked(PyObject_GetAttrString(errors.get(), type));
  PyErr_SetString(cls.get(), message.c_str());
  throw PythonError{};
}

inline constexpr const char* kClosed = "this vector env is closed; make another one";

// The name of an object's class, for an error's sentence.
inline Ref type_name(PyObject* object) { return checked(PyType_GetName(Py_TYPE(object))); }

// Whether NumPy can convert an object that is none of its own scalars, such as a tensor.
inline bool is_like_array(PyObject* value) {
  return !PyArray_IsAnyScalar(value) && PyObject_HasAttrString(value, "__array__");
}

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { PyEval_RestoreThread(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace muster
