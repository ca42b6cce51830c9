// Batches of all envs, along a tree that spaces/tree.py makes: turns slab rows into arrays and writes arrays to rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "space_tree.hpp"
#include "python.hpp"

namespace muster {

// Memory that holds rows of leaves. A leaf at `offset` in the slab lies at start + (offset - first) here.
struct RowMemory {
  char* start;
  size_t first;
  PyObject* owner;
};

class BatchNode {
 public:
  // low, high: the lowest and the highest allowed value of each element of a row; empty where all values are allowed.
  BatchNode(const LeafRows& rows, size_t offset, bool lent, std::vector<int64_t> low, std::vector<int64_t> high)
      : offset_(offset),
        bytes_(rows.row_bytes * size_t(PyArray_DIM(rows.array, 0))),
        type_num_(rows.type_num),
        shape_(PyArray_DIMS(rows.array), PyArray_DIMS(rows.array) + PyArray_NDIM(rows.array)),
        lent_(lent),
        low_(std::move(low)),
        high_(std::move(high)) {}
  BatchNode(Branch kind, PyObject* keys, std::vector<BatchNode> children)
      : kind_(kind == Branch::kDict ? Kind::kDict : Kind::kTuple),
        keys_(Ref::borrow(keys)),
        children_(std::move(children)) {}

  bool is_leaf() const { return kind_ == Kind::kLeaf; }
  size_t offset() const { return offset_; }
  int type_num() const { return type_num_; }
  const Shape& shape() const { return shape_; }

  // Whether a batch has exactly the expected types and shapes, and allowed values. Python casts others, or raises.
  bool fits(PyObject* batch) const {
    if (kind_ == Kind::kLeaf) return leaf_fits(batch);
    if (kind_ == Kind::kDict ? !PyDict_CheckExact(batch) : !PyTuple_CheckExact(batch)) return false;
    const Py_ssize_t size = kind_ == Kind::kDict ? PyDict_GET_SIZE(batch) : PyTuple_GET_SIZE(batch);
    if (size != Py_ssize_t(children_.size())) return false;
    for (size_t i = 0; i < children_.size(); ++i) {
      PyObject* part = child(batch, i);
      if (!part || !children_[i].fits(part)) return false;
    }
    return true;
  }

  // Copies a batch that fits.
  void write(PyObject* batch, char* slab) const {
    if (kind_ == Kind::kLeaf)
      std::memcpy(slab + offset_, PyArray_DATA(reinterpret_cast<PyArrayObject*>(batch)), bytes_);
    for (size_t i = 0; i < children_.size(); ++i) children_[i].write(child(batch, i), slab);
  }

  // Returns the rows of all envs, each leaf as an array of its own: a copy of the slab's rows, or a view of them. Where
  // `lent` is not null, the arrays of leaves that are lent are views of `lent`.
  Ref batch(const RowMemory& slab, bool copies, const RowMemory* lent = nullptr) const {
    if (kind_ == Kind::kLeaf) {
      const bool in_lent = lent && lent_;
      return copies && !in_lent ? copy(slab.start) : view(in_lent ? *lent : slab);
    }
    Ref batch = checked(kind_ == Kind::kDict ? PyDict_New() : PyTuple_New(Py_ssize_t(children_.size())));
    for (size_t i = 0; i < children_.size(); ++i) {
      Ref part = children_[i].batch(slab, copies, lent);
      if (kind_ == Kind::kDict)
        check(PyDict_SetItem(batch.get(), PyTuple_GET_ITEM(keys_.get(), Py_ssize_t(i)), part.get()));
      else
        PyTuple_SET_ITEM(batch.get(), Py_ssize_t(i), part.release());
    }
    return batch;
  }

 private:
  Ref view(const RowMemory& memory) const {
    Ref array = checked(PyArray_SimpleNewFromData(int(shape_.size()), const_cast<npy_intp*>(shape_.data()), type_num_,
                                                  memory.start + (offset_ - memory.first)));
    check(PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), Py_NewRef(memory.owner)));
    return array;
  }

  // Returns a leaf's rows in an array that owns its memory.
  Ref copy(const char* slab) const {
    Ref array = checked(PyArray_SimpleNew(int(shape_.size()), const_cast<npy_intp*>(shape_.data()), type_num_));
    std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.get())), slab + offset_, bytes_);
    return array;
  }

  enum class Kind { kLeaf, kDict, kTuple };

  bool leaf_fits(PyObject* batch) const {
    if (!PyArray_CheckExact(batch)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(batch);
    if (!same_layout(array, type_num_, shape_)) return false;
    if (low_.empty()) return true;
    const auto* number = static_cast<const int64_t*>(PyArray_DATA(array));
    const size_t count = size_t(PyArray_SIZE(array));
    for (size_t i = 0, k = 0; i < count; ++i, k = k + 1 == low_.size() ? 0 : k + 1)
      if (number[i] < low_[k] || number[i] > high_[k]) return false;
    return true;
  }

  // Returns a borrowed reference, or null where a dict lacks the key.
  PyObject* child(PyObject* batch, size_t i) const {
    if (kind_ == Kind::kTuple) return PyTuple_GET_ITEM(batch, Py_ssize_t(i));
    PyObject* part = PyDict_GetItemWithError(batch, PyTuple_GET_ITEM(keys_.get(), Py_ssize_t(i)));
    if (!part && PyErr_Occurred()) throw PythonError{};
    return part;
  }

  Kind kind_ = Kind::kLeaf;
  size_t offset_ = 0;
  size_t bytes_ = 0;  // of all rows
  int type_num_ = 0;
  Shape shape_;  // with the leading N
  bool lent_ = false;
  std::vector<int64_t> low_, high_;
  Ref keys_;
  std::vector<BatchNode> children_;
};

}  // namespace muster
