// The CPython and NumPy C API, and owned references. The stepping loop uses them directly: nanobind's casters would
// cost more than an env's step.
#pragma once

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION  // that of NumPy 1.26, the oldest that Muster runs on
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include <pthread.h>
#include <unistd.h>

#include <atomic>
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

// An exception class of muster.errors.
inline Ref error_class(const char* type) {
  const Ref errors = checked(PyImport_ImportModule("muster.errors"));
  return checked(PyObject_GetAttrString(errors.get(), type));
}

[[noreturn]] inline void raise(const char* type, const std::string& message) {
  PyErr_SetString(error_class(type).get(), message.c_str());
  throw PythonError{};
}

inline constexpr const char* kClosed = "this vector env is closed; make another one";

// The name of an object's class, for an error's sentence.
inline Ref type_name(PyObject* object) { return checked(PyType_GetName(Py_TYPE(object))); }

// Whether NumPy can convert an object that is none of its own scalars, such as a tensor.
inline bool is_like_array(PyObject* value) {
  return !PyArray_IsAnyScalar(value) && PyObject_HasAttrString(value, "__array__");
}

// Once the interpreter ends, a thread that asks for the GIL is ended by an unwinding that no frame of nanobind's
// survives (before Python 3.14). So all threads but the one that ends it then stop here, for ever. This one: 0 before.
inline std::atomic<unsigned long> g_ending_thread{0};

inline void stop_if_ending() {
  const unsigned long ending = g_ending_thread.load(std::memory_order_relaxed);
  if (ending && ending != PyThread_get_thread_ident())
    for (;;) pause();
}

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    stop_if_ending();
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// A call of an env's code. The end of the interpreter waits for those that other threads are in.
class InEnv {
 public:
  InEnv() { ++num_; }
  ~InEnv() {
    --num_;
    if (!is_whole_) stop_if_ending();  // unwinds, and has no GIL
  }
  InEnv(const InEnv&) = delete;
  InEnv& operator=(const InEnv&) = delete;

  void ends() {
    is_whole_ = true;
    if (!g_ending_thread.load(std::memory_order_relaxed)) return;
    --num_;
    { const GilReleased released; }
    ++num_;
  }

  static void in_forked_child() { num_ = 0; }

  // Stops other threads in their next call of this library, and waits for those that are in an env, 0.5 s at most.
  static void end_threads() {
    g_ending_thread = PyThread_get_thread_ident();
    for (int i = 0; i < 50 && (i == 0 || num_ > 0); ++i) {
      const GilReleased released;
      usleep(10'000);
    }
  }

 private:
  bool is_whole_ = false;
  inline static int num_ = 0;  // under the GIL
};

}  // namespace muster
