// Info dicts as typed columns of the slab.
//
// Envs repeat the same few info layouts, so a worker keeps each layout once, as a schema, and a step stores only the
// schema's number and the values. What is neither a number nor an array of numbers goes to the mail, pickled.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "info_layouts.hpp"
#include "python.hpp"
#include "returned.hpp"

namespace muster {

class InfoTable {
 public:
  // kEmpty: there is no info.  kPickled: the whole dict is one object in the mail.  kFirst + i: the i-th layout.
  enum Schema : uint32_t { kEmpty, kPickled, kFirst };
  static constexpr size_t kMaxSchemas = 64;
  static constexpr int kDeepest = 32;

  explicit InfoTable(size_t row_bytes) : row_bytes_(row_bytes) {}

  size_t size() const { return schemas_.size(); }

  // Stores `info` in `row` and returns the number of its schema. hint: the number that this env's last info had.
  uint32_t write(PyObject* info, char* row, PyObject* objects, uint32_t hint) {
    if (!PyDict_CheckExact(info)) return write(Returned::as_dict(info).get(), row, objects, hint);
    if (PyDict_GET_SIZE(info) == 0) return kEmpty;
    const Py_ssize_t objects_before = PyList_GET_SIZE(objects);
    auto fits = [&](const Columns& columns) {
      if (store(columns, info, row, objects)) return true;
      check(PyList_SetSlice(objects, objects_before, PyList_GET_SIZE(objects), nullptr));
      return false;
    };
    if (hint >= kFirst && fits(*schemas_[hint - kFirst])) return hint;
    for (size_t i = 0; i < schemas_.size(); ++i)
      if (kFirst + i != hint && fits(*schemas_[i])) return uint32_t(kFirst + i);
    if (schemas_.size() < kMaxSchemas) {
      auto columns = std::make_unique<Columns>();
      size_t end = 0;
      if (add_columns(info, *columns, end, row_bytes_, kDeepest)) {
        schemas_.push_back(std::move(columns));
        if (fits(*schemas_.back())) return uint32_t(kFirst + schemas_.size() - 1);
      }
    }
    check(PyList_Append(objects, info));
    return kPickled;
  }

  // Returns the description of each schema.
  Ref describe() const {
    Ref all = checked(PyTuple_New(Py_ssize_t(schemas_.size())));
    for (size_t i = 0; i < schemas_.size(); ++i)
      PyTuple_SET_ITEM(all.get(), Py_ssize_t(i), describe_layout(*schemas_[i]).release());
    return all;
  }

 private:
  using Kind = InfoColumn::Kind;
  using Columns = InfoColumns;

  bool store(const Columns& columns, PyObject* info, char* row, PyObject* objects) const {
    if (size_t(PyDict_GET_SIZE(info)) != columns.size()) return false;
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (const InfoColumn& column : columns) {
      if (!PyDict_Next(info, &position, &key, &value)) return false;
      // Keys are literals in nearly every env, hence interned: the same object.
      if (key != column.key.get() &&
          !(PyUnicode_CheckExact(key) && PyUnicode_Compare(key, column.key.get()) == 0))
        return false;
      if (!store_value(column, value, row + column.offset, row, objects)) return false;
    }
    return true;
  }

  bool store_value(const InfoColumn& column, PyObject* value, char* to, char* row, PyObject* objects) const {
    switch (column.kind) {
      case Kind::kFloat: {
        if (!PyFloat_CheckExact(value)) return false;
        const double number = PyFloat_AS_DOUBLE(value);
        std::memcpy(to, &number, sizeof number);
        return true;
      }
      case Kind::kBool:
        if (!PyBool_Check(value)) return false;
        *to = value == Py_True;
        return true;
      case Kind::kInt: {
        if (!PyLong_CheckExact(value)) return false;
        int overflow = 0;
        const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        std::memcpy(to, &number, sizeof number);
        return overflow == 0;
      }
      case Kind::kScalar:
        if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != column.scalar_type.get()) return false;
        PyArray_ScalarAsCtype(value, to);
        return true;
      case Kind::kArray: {
        if (!PyArray_CheckExact(value)) return false;
        auto* array = reinterpret_cast<PyArrayObject*>(value);
        if (PyArray_TYPE(array) != column.type_num || !PyArray_ISNOTSWAPPED(array) ||
            PyArray_NDIM(array) != int(column.shape.size()) ||
            !std::equal(column.shape.begin(), column.shape.end(), PyArray_DIMS(array)))
          return false;
        if (PyArray_ISCARRAY_RO(array)) {
          std::memcpy(to, PyArray_DATA(array), column.bytes);
          return true;
        }
        Ref packed = checked(PyArray_FROM_OTF(value, column.type_num, NPY_ARRAY_CARRAY_RO));
        std::memcpy(to, PyArray_DATA(reinterpret_cast<PyArrayObject*>(packed.get())), column.bytes);
        return true;
      }
      case Kind::kDict: return PyDict_CheckExact(value) && store(column.children, value, row, objects);
      case Kind::kObject:
        // A number gets a column of its own: None at a reset must not make it an object in all later steps.
        if (!column.takes_numbers && schemas_.size() < kMaxSchemas / 2 && is_number(value)) return false;
        break;
    }
    check(PyList_Append(objects, value));
    return true;
  }

  size_t row_bytes_;
  std::vector<std::unique_ptr<Columns>> schemas_;
};

// Copies columns of infos out of the slab.
// columns: a list of (key, key of the mask, view [num_envs, *shape] of the slab, C-contiguous from the second axis on).
// ids: the rows to take, int64 [n], or None for all.  provided: bool [n]; rows where it is false are zero.
// Returns {key: [n, *shape], key of the mask: bool [n]} in memory of its own.
inline Ref gather_columns(PyObject* columns, PyObject* ids, PyObject* provided) {
  auto* mask = reinterpret_cast<PyArrayObject*>(provided);
  npy_intp count = PyArray_SIZE(mask);
  const auto* has = static_cast<const uint8_t*>(PyArray_DATA(mask));
  const auto* id =
      ids == Py_None ? nullptr : static_cast<const int64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(ids)));
  Ref infos = checked(PyDict_New());
  for (Py_ssize_t c = 0; c < PyList_GET_SIZE(columns); ++c) {
    PyObject* column = PyList_GET_ITEM(columns, c);
    auto* from = reinterpret_cast<PyArrayObject*>(PyTuple_GET_ITEM(column, 2));
    std::vector<npy_intp> shape(PyArray_DIMS(from), PyArray_DIMS(from) + PyArray_NDIM(from));
    size_t row_bytes = size_t(PyArray_ITEMSIZE(from));
    for (size_t d = 1; d < shape.size(); ++d) row_bytes *= size_t(shape[d]);
    shape[0] = count;
    Ref values = checked(PyArray_SimpleNew(int(shape.size()), shape.data(), PyArray_TYPE(from)));
    auto* to = static_cast<char*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(values.get())));
    for (npy_intp k = 0; k < count; ++k, to += row_bytes) {
      if (has[k])
        std::memcpy(to, PyArray_BYTES(from) + (id ? id[k] : k) * PyArray_STRIDE(from, 0), row_bytes);
      else
        std::memset(to, 0, row_bytes);
    }
    Ref flags = checked(PyArray_SimpleNew(1, &count, NPY_BOOL));
    std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(flags.get())), has, size_t(count));
    check(PyDict_SetItem(infos.get(), PyTuple_GET_ITEM(column, 0), values.get()));
    check(PyDict_SetItem(infos.get(), PyTuple_GET_ITEM(column, 1), flags.get()));
  }
  return infos;
}

}  // namespace muster
