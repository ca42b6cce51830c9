// Infos out of the slab: for each key the values of the chosen envs, and which of them gave one.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "python.hpp"

namespace muster {

// columns: a list of (key, key of the mask, view [num_envs, *shape] of the slab, C-contiguous from the second axis on).
// ids: the rows to take, int64 [n], or None for all.  given: bool [n]; rows without are zero.
// Returns {key: [n, *shape], key of the mask: bool [n]} in memory of its own.
inline Ref gather_columns(PyObject* columns, PyObject* ids, PyObject* given) {
  auto* mask = reinterpret_cast<PyArrayObject*>(given);
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
