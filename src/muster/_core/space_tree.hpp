// Observations into slab rows and slab rows into actions, along a tree that spaces/tree.py describes once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "python.hpp"

namespace muster {

inline Py_ssize_t as_size(PyObject* number) {
  const Py_ssize_t value = PyLong_AsSsize_t(number);
  if (value == -1 && PyErr_Occurred()) throw PythonError{};
  return value;
}

// Of a list, or none for None.
inline std::vector<int64_t> numbers(PyObject* list) {
  std::vector<int64_t> values;
  if (list == Py_None) return values;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) values.push_back(as_size(PyList_GET_ITEM(list, i)));
  return values;
}

// Reads the fields of a description ("kind", field, ...) in order.
class Fields {
 public:
  explicit Fields(PyObject* description) : tuple_(description) {
    if (!PyTuple_Check(description)) {
      PyErr_SetString(PyExc_TypeError, "a node's description must be a tuple");
      throw PythonError{};
    }
  }
  PyObject* next() {
    if (at_ >= PyTuple_GET_SIZE(tuple_)) {
      PyErr_SetString(PyExc_ValueError, "a node's description is too short");
      throw PythonError{};
    }
    return PyTuple_GET_ITEM(tuple_, at_++);
  }
  Py_ssize_t size() { return as_size(next()); }
  bool more() const { return at_ < PyTuple_GET_SIZE(tuple_); }
  std::string text() {
    const char* chars = PyUnicode_AsUTF8(next());
    if (!chars) throw PythonError{};
    return chars;
  }
  std::vector<npy_intp> shape() {
    PyObject* dims = next();
    std::vector<npy_intp> shape;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims); ++i) shape.push_back(as_size(PyTuple_GET_ITEM(dims, i)));
    return shape;
  }

 private:
  PyObject* tuple_;
  Py_ssize_t at_ = 0;
};

inline bool same_layout(PyArrayObject* array, int type_num, const std::vector<npy_intp>& shape) {
  return PyArray_TYPE(array) == type_num && PyArray_ISCARRAY_RO(array) && PyArray_NDIM(array) == int(shape.size()) &&
         std::equal(shape.begin(), shape.end(), PyArray_DIMS(array));
}

// ---- observations: Python -> slab

// Where one env's observation is written to. final: to its final rows.  lent_shift: from where leaves that are lent have
// their rows otherwise, see lending.hpp.
struct ObsPlace {
  char* slab;
  size_t env;
  bool final;
  size_t lent_shift;
};

class ObsNode {
 public:
  explicit ObsNode(PyObject* description) {
    Fields fields(description);
    const std::string kind = fields.text();
    if (kind == "object") {
      kind_ = Kind::kObject;
      return;
    }
    slow_ = Ref::borrow(fields.next());
    if (kind == "array" || kind == "integer") {
      kind_ = kind == "array" ? Kind::kArray : Kind::kInteger;
      offset_ = fields.size();
      final_offset_ = fields.size();
      row_bytes_ = fields.size();
      type_num_ = int(fields.size());
      shape_ = fields.shape();
      // A member of a stack: its rows lie apart by as much as the whole stack takes.
      stride_ = size_t(fields.size());
      lent_ = fields.size();
      return;
    }
    kind_ = kind == "dict" ? Kind::kDict : kind == "stack" ? Kind::kStack : Kind::kTuple;
    keys_ = Ref::borrow(fields.next());
    PyObject* children = fields.next();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); ++i) children_.emplace_back(PyTuple_GET_ITEM(children, i));
  }

  // What has no fixed layout is appended to `objects`.
  void write(PyObject* value, const ObsPlace& place, PyObject* objects) const {
    switch (kind_) {
      case Kind::kArray: return write_array(value, row(place));
      case Kind::kInteger: return write_integer(value, row(place));
      case Kind::kDict: return write_dict(value, place, objects);
      case Kind::kTuple:
      case Kind::kStack: return write_tuple(value, place, objects);
      case Kind::kObject: return check(PyList_Append(objects, value));
    }
  }

  // Whether all floats in the env's rows are finite.
  bool finite(const ObsPlace& place) const {
    for (const ObsNode& child : children_)
      if (!child.finite(place)) return false;
    if (kind_ != Kind::kArray) return true;
    const char* at = row(place);
    auto all = [&]<class T>(const T* numbers, auto is_finite) {
      return std::all_of(numbers, numbers + row_bytes_ / sizeof(T), is_finite);
    };
    auto is_finite = [](auto number) { return std::isfinite(number); };
    switch (type_num_) {
      case NPY_HALF:
        return all(reinterpret_cast<const uint16_t*>(at), [](uint16_t bits) { return (bits & 0x7c00) != 0x7c00; });
      case NPY_FLOAT: return all(reinterpret_cast<const float*>(at), is_finite);
      case NPY_DOUBLE: return all(reinterpret_cast<const double*>(at), is_finite);
      case NPY_LONGDOUBLE: return all(reinterpret_cast<const long double*>(at), is_finite);
      default: return true;
    }
  }

 private:
  enum class Kind { kArray, kInteger, kDict, kTuple, kStack, kObject };

  char* row(const ObsPlace& place) const {
    const size_t first = place.final ? final_offset_ : offset_ + (lent_ ? place.lent_shift : 0);
    return place.slab + first + place.env * stride_;
  }

  void write_array(PyObject* value, char* to) const {
    if (PyArray_Check(value)) {
      auto* array = reinterpret_cast<PyArrayObject*>(value);
      if (same_layout(array, type_num_, shape_)) {
        std::memcpy(to, PyArray_DATA(array), row_bytes_);
        return;
      }
    } else if (type_num_ == NPY_DOUBLE && shape_.empty() && PyFloat_Check(value)) {
      const double number = PyFloat_AS_DOUBLE(value);
      std::memcpy(to, &number, sizeof number);
      return;
    }
    write_slowly(value, to);
  }

  void write_integer(PyObject* value, char* to) const {
    if (type_num_ == NPY_INT64 && (PyLong_CheckExact(value) || PyArray_IsScalar(value, Int64))) {
      int64_t number;
      if (PyLong_CheckExact(value)) {
        int overflow = 0;
        number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) return write_slowly(value, to);
      } else {
        number = PyArrayScalar_VAL(value, Int64);
      }
      std::memcpy(to, &number, sizeof number);
      return;
    }
    write_slowly(value, to);
  }

  // Casts, and the errors that name path, expected and got, are Python's: spaces/tree.py.
  void write_slowly(PyObject* value, char* to) const {
    Ref row_view = checked(
        PyArray_SimpleNewFromData(int(shape_.size()), const_cast<npy_intp*>(shape_.data()), type_num_, to));
    checked(PyObject_CallFunctionObjArgs(slow_.get(), value, row_view.get(), nullptr));
  }

  void write_dict(PyObject* value, const ObsPlace& place, PyObject* objects) const {
    if (!PyDict_Check(value) || PyDict_GET_SIZE(value) != PyTuple_GET_SIZE(keys_.get())) return complain(value);
    for (size_t i = 0; i < children_.size(); ++i) {
      PyObject* item = PyDict_GetItemWithError(value, PyTuple_GET_ITEM(keys_.get(), Py_ssize_t(i)));
      if (!item) {
        if (PyErr_Occurred()) throw PythonError{};
        return complain(value);
      }
      // The child's slow path runs Python code, which might drop the dict's own reference.
      Ref held = Ref::borrow(item);
      children_[i].write(held.get(), place, objects);
    }
  }

  void write_tuple(PyObject* value, const ObsPlace& place, PyObject* objects) const {
    if (!(PyTuple_Check(value) || PyList_Check(value)) ||
        PySequence_Fast_GET_SIZE(value) != Py_ssize_t(children_.size()))
      return complain(value);
    for (size_t i = 0; i < children_.size(); ++i) {
      Ref held = Ref::borrow(PySequence_Fast_GET_ITEM(value, Py_ssize_t(i)));
      // A stack's absent members (agents that are not there) are rows of zeros.
      if (kind_ == Kind::kStack && held.get() == Py_None)
        children_[i].clear(place);
      else
        children_[i].write(held.get(), place, objects);
    }
  }

  void clear(const ObsPlace& place) const {
    for (const ObsNode& child : children_) child.clear(place);
    if (kind_ == Kind::kArray || kind_ == Kind::kInteger) std::memset(row(place), 0, row_bytes_);
  }

  // Calls the node's Python side, which raises and says what is missing or too much.
  void complain(PyObject* value) const {
    checked(PyObject_CallFunctionObjArgs(slow_.get(), value, nullptr));
    PyErr_SetString(PyExc_RuntimeError, "an observation was refused without a reason");
    throw PythonError{};
  }

  Kind kind_;
  Ref slow_;
  size_t offset_ = 0;
  size_t final_offset_ = 0;
  size_t row_bytes_ = 0;
  size_t stride_ = 0;
  bool lent_ = false;
  int type_num_ = 0;
  std::vector<npy_intp> shape_;
  Ref keys_;
  std::vector<ObsNode> children_;
};

// ---- actions: slab -> Python

class ActionNode {
 public:
  explicit ActionNode(PyObject* description) {
    Fields fields(description);
    const std::string kind = fields.text();
    if (kind == "object") {
      kind_ = Kind::kObject;
    } else if (kind == "array" || kind == "scalar") {
      kind_ = kind == "array" ? Kind::kArray : Kind::kScalar;
      offset_ = fields.size();
      row_bytes_ = fields.size();
      type_num_ = int(fields.size());
      shape_ = fields.shape();
      if (kind_ == Kind::kScalar) {
        first_ = fields.size();
        scalars_ = Ref::borrow(fields.next());
      }
    } else {
      kind_ = kind == "dict" ? Kind::kDict : Kind::kTuple;
      keys_ = Ref::borrow(fields.next());
      PyObject* children = fields.next();
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); ++i) children_.emplace_back(PyTuple_GET_ITEM(children, i));
    }
  }

  // What env `env` is to be given: its own object, never a view that the next send would change under it.
  // `objects`: an iterator over what came through the mail, in the tree's order.
  Ref read(const char* slab, size_t env, PyObject* objects) const {
    switch (kind_) {
      case Kind::kScalar: return read_scalar(slab + offset_ + env * row_bytes_);
      case Kind::kArray: {
        Ref array = checked(PyArray_SimpleNew(int(shape_.size()), const_cast<npy_intp*>(shape_.data()), type_num_));
        std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.get())), slab + offset_ + env * row_bytes_,
                    row_bytes_);
        return array;
      }
      case Kind::kDict: {
        Ref dict = checked(PyDict_New());
        for (size_t i = 0; i < children_.size(); ++i)
          check(PyDict_SetItem(dict.get(), PyTuple_GET_ITEM(keys_.get(), Py_ssize_t(i)),
                               children_[i].read(slab, env, objects).get()));
        return dict;
      }
      case Kind::kTuple: {
        Ref tuple = checked(PyTuple_New(Py_ssize_t(children_.size())));
        for (size_t i = 0; i < children_.size(); ++i)
          PyTuple_SET_ITEM(tuple.get(), Py_ssize_t(i), children_[i].read(slab, env, objects).release());
        return tuple;
      }
      case Kind::kObject: break;
    }
    PyObject* next = PyIter_Next(objects);
    if (!next && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the action's objects did not arrive");
    return checked(next);
  }

 private:
  enum class Kind { kScalar, kArray, kDict, kTuple, kObject };

  Ref read_scalar(const char* from) const {
    if (row_bytes_ == sizeof(int64_t) && PyTuple_GET_SIZE(scalars_.get())) {
      int64_t number;
      std::memcpy(&number, from, sizeof number);
      const uint64_t index = uint64_t(number) - uint64_t(first_);
      if (index < uint64_t(PyTuple_GET_SIZE(scalars_.get())))
        return Ref::borrow(PyTuple_GET_ITEM(scalars_.get(), Py_ssize_t(index)));
    }
    PyArray_Descr* descr = PyArray_DescrFromType(type_num_);
    PyObject* scalar = PyArray_Scalar(const_cast<char*>(from), descr, nullptr);
    Py_DECREF(descr);
    return checked(scalar);
  }

  Kind kind_;
  size_t offset_ = 0;
  size_t row_bytes_ = 0;
  int type_num_ = 0;
  std::vector<npy_intp> shape_;
  int64_t first_ = 0;
  Ref scalars_;
  Ref keys_;
  std::vector<ActionNode> children_;
};

}  // namespace muster
