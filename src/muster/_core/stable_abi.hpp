// CPython's fast macros, as functions of the stable ABI: in the wheel that serves 3.12 and later, objects are opaque.
#pragma once

#include <Python.h>

#ifdef Py_LIMITED_API

inline Py_ssize_t PyTuple_GET_SIZE(PyObject* tuple) { return PyTuple_Size(tuple); }
inline PyObject* PyTuple_GET_ITEM(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
inline void PyTuple_SET_ITEM(PyObject* tuple, Py_ssize_t i, PyObject* item) { PyTuple_SetItem(tuple, i, item); }

inline Py_ssize_t PyList_GET_SIZE(PyObject* list) { return PyList_Size(list); }
inline PyObject* PyList_GET_ITEM(PyObject* list, Py_ssize_t i) { return PyList_GetItem(list, i); }
inline void PyList_SET_ITEM(PyObject* list, Py_ssize_t i, PyObject* item) { PyList_SetItem(list, i, item); }

inline Py_ssize_t PyDict_GET_SIZE(PyObject* dict) { return PyDict_Size(dict); }
inline double PyFloat_AS_DOUBLE(PyObject* number) { return PyFloat_AsDouble(number); }
inline const char* PyBytes_AS_STRING(PyObject* bytes) { return PyBytes_AsString(bytes); }

#endif
