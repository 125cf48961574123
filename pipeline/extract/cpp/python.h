// Objects of Python, and the texts of Python that the loops read.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using Bytes = std::string_view;
using Points = std::u32string;

// An owned reference, so that every way out of a function releases it.
class Ref {
public:
    explicit Ref(PyObject* object = nullptr) : object_(object) {}
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    ~Ref() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    PyObject* release() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }

private:
    PyObject* object_;
};

// Runs the body of a function of the module; a lack of memory becomes Python's exception.
template <typename Body>
inline PyObject* guarded(Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    } catch (const std::length_error&) {
        return PyErr_NoMemory();
    }
}

template <typename Value>
inline PyObject* as_bytearray(const std::vector<Value>& values) {
    return PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                         static_cast<Py_ssize_t>(values.size() * sizeof(Value)));
}

inline PyObject* decoded(const char* start, Py_ssize_t size) {
    return PyUnicode_DecodeUTF8(start, size, "surrogatepass");
}

template <typename Value>
inline void destroy(PyObject* capsule) {
    delete static_cast<Value*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

// A str that can be read at every place without a call.
struct Text {
    explicit Text(PyObject* text)
        : kind(PyUnicode_KIND(text)), data(PyUnicode_DATA(text)), size(PyUnicode_GET_LENGTH(text)) {}
    Py_UCS4 operator[](Py_ssize_t place) const { return PyUnicode_READ(kind, data, place); }
    int kind;
    const void* data;
    Py_ssize_t size;
};

inline bool are_texts(PyObject* texts) {
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(texts); number++)
        if (!PyUnicode_Check(PyList_GET_ITEM(texts, number))) {
            PyErr_SetString(PyExc_TypeError, "expected a list of str.");
            return false;
        }
    return true;
}
