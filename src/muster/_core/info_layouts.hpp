// The layouts of info dicts: which key has which column of the slab's row. A layout is made once, with the first info
// that has it.
#pragma once

#include <vector>

#include "python.hpp"

namespace muster {

struct InfoColumn {
  enum class Kind { kFloat, kInt, kBool, kScalar, kArray, kDict, kObject };

  Ref key;
  Kind kind = Kind::kObject;
  int type_num = NPY_NOTYPE;
  Ref scalar_type;  // kScalar: the Python type of its values
  std::vector<npy_intp> shape;
  size_t offset = 0;
  size_t bytes = 0;
  std::vector<InfoColumn> children;
  bool takes_numbers = false;  // kObject: made for a number, or an array of numbers, that has no place in the row
};

using InfoColumns = std::vector<InfoColumn>;

inline bool is_plain(int type_num) { return PyTypeNum_ISNUMBER(type_num) || PyTypeNum_ISBOOL(type_num); }

inline bool is_plain(PyArrayObject* array) { return is_plain(PyArray_TYPE(array)) && PyArray_ISNOTSWAPPED(array); }

// Returns the dtype of a NumPy number; null for all else. Values of classes made from NumPy's keep these as objects.
inline Ref dtype_of_scalar(PyObject* value) {
  if (!PyArray_IsScalar(value, Number) && !PyArray_IsScalar(value, Bool)) return Ref();
  PyArray_Descr* descr = PyArray_DescrFromScalar(value);
  Ref dtype = checked(reinterpret_cast<PyObject*>(descr));
  return is_plain(descr->type_num) && descr->typeobj == Py_TYPE(value) ? std::move(dtype) : Ref();
}

// Whether `value` is a number, or an array of numbers.
inline bool is_number(PyObject* value) {
  if (PyFloat_CheckExact(value) || PyBool_Check(value) || PyLong_CheckExact(value)) return true;
  if (PyArray_CheckExact(value)) return is_plain(reinterpret_cast<PyArrayObject*>(value));
  return bool(dtype_of_scalar(value));
}

// Adds the columns of `info`, at `end` and behind it in a row of `row_bytes`. False where a key is no string, or a dict
// too deep.  depth: how many levels of dicts may follow; a dict that holds itself has no end.
inline bool add_columns(PyObject* info, InfoColumns& columns, size_t& end, size_t row_bytes, int depth) {
  if (!depth) return false;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(info, &position, &key, &value)) {
    if (!PyUnicode_CheckExact(key)) return false;
    InfoColumn column;
    column.key = Ref::borrow(key);
    if (PyFloat_CheckExact(value)) {
      column.kind = InfoColumn::Kind::kFloat, column.type_num = NPY_DOUBLE, column.bytes = sizeof(double);
    } else if (PyBool_Check(value)) {
      column.kind = InfoColumn::Kind::kBool, column.type_num = NPY_BOOL, column.bytes = 1;
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      PyLong_AsLongLongAndOverflow(value, &overflow);
      if (!overflow) column.kind = InfoColumn::Kind::kInt, column.type_num = NPY_INT64, column.bytes = sizeof(int64_t);
    } else if (const Ref dtype = dtype_of_scalar(value)) {
      auto* descr = reinterpret_cast<PyArray_Descr*>(dtype.get());
      column.kind = InfoColumn::Kind::kScalar, column.type_num = descr->type_num;
      column.scalar_type = Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(value)));
      column.bytes = size_t(PyDataType_ELSIZE(descr));
    } else if (PyArray_CheckExact(value)) {
      auto* array = reinterpret_cast<PyArrayObject*>(value);
      if (is_plain(array)) {
        column.kind = InfoColumn::Kind::kArray, column.type_num = PyArray_TYPE(array);
        column.shape.assign(PyArray_DIMS(array), PyArray_DIMS(array) + PyArray_NDIM(array));
        column.bytes = size_t(PyArray_NBYTES(array));
      }
    } else if (PyDict_CheckExact(value)) {
      column.kind = InfoColumn::Kind::kDict;
      if (!add_columns(value, column.children, end, row_bytes, depth - 1)) return false;
    }
    column.takes_numbers = is_number(value);
    column.offset = end;
    const size_t padded = (column.bytes + 15) & ~size_t(15);
    if (end + padded > row_bytes)
      column.kind = InfoColumn::Kind::kObject, column.bytes = 0;
    else
      end += padded;
    columns.push_back(std::move(column));
  }
  return true;
}

// Returns ((key, kind, dtype number, shape, offset, children), ...); transport/infos.py reads it in the caller.
inline Ref describe_layout(const InfoColumns& columns) {
  Ref all = checked(PyTuple_New(Py_ssize_t(columns.size())));
  for (size_t i = 0; i < columns.size(); ++i) {
    const InfoColumn& column = columns[i];
    Ref shape = checked(PyTuple_New(Py_ssize_t(column.shape.size())));
    for (size_t d = 0; d < column.shape.size(); ++d)
      PyTuple_SET_ITEM(shape.get(), Py_ssize_t(d), PyLong_FromSsize_t(column.shape[d]));
    Ref children = describe_layout(column.children);
    PyObject* one = Py_BuildValue("(OiiOnO)", column.key.get(), int(column.kind), column.type_num,
                                  shape.get(), Py_ssize_t(column.offset), children.get());
    PyTuple_SET_ITEM(all.get(), Py_ssize_t(i), checked(one).release());
  }
  return all;
}

}  // namespace muster
