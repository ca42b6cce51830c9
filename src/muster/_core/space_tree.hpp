// Writes observations to slab rows and reads actions from slab rows, along a tree that spaces/tree.py makes once. A
// node moves into the object that it is passed to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "python.hpp"
#include "slab.hpp"

namespace muster {

using Shape = std::vector<npy_intp>;

// The dtype, the shape and the size of a leaf's rows, read from the leaf's array [N, *shape] in the slab.
struct LeafRows {
  LeafRows(PyObject* rows)
      : array(reinterpret_cast<PyArrayObject*>(rows)),
        type_num(PyArray_TYPE(array)),
        shape(PyArray_DIMS(array) + 1, PyArray_DIMS(array) + PyArray_NDIM(array)),
        row_bytes(std::accumulate(shape.begin(), shape.end(), size_t(PyArray_ITEMSIZE(array)), std::multiplies<>())) {}

  PyArrayObject* array;
  int type_num;
  Shape shape;  // of one row
  size_t row_bytes;
};

// The rows of leaves. arrays: a list of theirs.
inline std::vector<SlabRows> rows_of(const SlabLayout& slab, PyObject* arrays) {
  std::vector<SlabRows> rows;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(arrays); ++k) {
    const LeafRows leaf(PyList_GET_ITEM(arrays, k));
    rows.push_back({size_t(PyArray_BYTES(leaf.array) - slab.base), leaf.row_bytes});
  }
  return rows;
}

enum class Branch { kDict, kTuple, kStack };  // kStack: of observations, one member for each agent of a group

inline bool same_layout(PyArrayObject* array, int type_num, const Shape& shape) {
  return PyArray_TYPE(array) == type_num && PyArray_ISCARRAY_RO(array) && PyArray_NDIM(array) == int(shape.size()) &&
         std::equal(shape.begin(), shape.end(), PyArray_DIMS(array));
}

// ---- observations: Python -> slab

// Which of the values of Discrete spaces, in the order of the space's leaves, are ints of Python's: a bit for each of
// the first 32.
struct Ints {
  uint32_t bits = 0;
  unsigned count = 0;

  void add(PyObject* value) {
    if (count < 32) bits |= uint32_t(PyLong_CheckExact(value)) << count++;
  }
};

// The place that one env's observation is written to. final: whether that is the env's final rows.  lent_shift: the
// bytes from block 0 to the block that leaves that are lent are written to, see lending.hpp.
struct ObsPlace {
  char* slab;
  size_t env;
  bool final;
  size_t lent_shift;
  Ints* ints;
};

class ObsNode {
 public:
  ObsNode() : kind_(Kind::kObject) {}
  // The rows of a stack's member are as far apart as the rows of the whole stack.
  ObsNode(bool is_integer, PyObject* store, const LeafRows& rows, size_t offset, size_t final_offset, bool lent)
      : kind_(is_integer ? Kind::kInteger : Kind::kArray),
        slow_(Ref::borrow(store)),
        offset_(offset),
        final_offset_(final_offset),
        row_bytes_(rows.row_bytes),
        stride_(size_t(PyArray_STRIDE(rows.array, 0))),
        lent_(lent),
        type_num_(rows.type_num),
        shape_(rows.shape) {}
  ObsNode(Branch kind, PyObject* keys, std::vector<ObsNode> children, PyObject* mismatch)
      : kind_(kind == Branch::kDict ? Kind::kDict : kind == Branch::kStack ? Kind::kStack : Kind::kTuple),
        slow_(Ref::borrow(mismatch)),
        keys_(Ref::borrow(keys)),
        children_(std::move(children)) {}

  // Writes an observation. Values without a fixed layout are appended to `objects`.
  void write(PyObject* value, const ObsPlace& place, PyObject* objects) const {
    switch (kind_) {
      case Kind::kArray: return write_array(value, row(place));
      case Kind::kInteger: place.ints->add(value), write_integer(value, row(place)); return;
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
        PyArray_ScalarAsCtype(value, &number);
      }
      std::memcpy(to, &number, sizeof number);
      return;
    }
    write_slowly(value, to);
  }

  // Calls spaces/tree.py, which casts the value or raises an error with the path, what was expected and what came.
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
      if (Py_ssize_t(i) >= PySequence_Fast_GET_SIZE(value)) return complain(value);  // code that a child ran cut it
      Ref held = Ref::borrow(PySequence_Fast_GET_ITEM(value, Py_ssize_t(i)));
      // A stack's absent members (None, agents that are not present) are rows of zeros.
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

  // Calls the node's Python side, which raises an error that names what is missing or too much.
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
  Shape shape_;
  Ref keys_;
  std::vector<ObsNode> children_;
};

// ---- actions: slab -> Python

class ActionNode {
 public:
  ActionNode() : kind_(Kind::kObject) {}
  // Rows without a shape become NumPy scalars, as iterating over an array returns them: Gymnasium's vector envs pass
  // these to their envs. scalars: a tuple of the scalars from the value `first` on, made once; may be empty.
  ActionNode(const LeafRows& rows, size_t offset, int64_t first, PyObject* scalars)
      : kind_(rows.shape.empty() ? Kind::kScalar : Kind::kArray),
        offset_(offset),
        row_bytes_(rows.row_bytes),
        type_num_(rows.type_num),
        shape_(rows.shape),
        first_(first),
        scalars_(Ref::borrow(scalars)) {}
  ActionNode(Branch kind, PyObject* keys, std::vector<ActionNode> children)
      : kind_(kind == Branch::kDict ? Kind::kDict : Kind::kTuple),
        keys_(Ref::borrow(keys)),
        children_(std::move(children)) {}

  // Returns the action for env `env`: an object of its own, never a view, which the next send would change.
  // objects: an iterator over the objects that came through the mail, in the tree's order.
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
  Shape shape_;
  int64_t first_ = 0;
  Ref scalars_;
  Ref keys_;
  std::vector<ActionNode> children_;
};

}  // namespace muster
