// Texts of Python, and the properties of characters, which Python's own functions decide.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

// Thrown where a Python exception is set; the functions that Python calls catch it.
struct PythonError {};

// A reference that is given up at the end of its scope.
class Owned {
public:
    explicit Owned(PyObject* object) : object_(object) {
        if (!object) throw PythonError();
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_DECREF(object_); }
    PyObject* get() const { return object_; }

private:
    PyObject* object_;
};

// Bits of a character's properties, as `pipeline.text.native_words.properties_of` returns them.
enum Property : uint32_t {
    SPACE = 1u << 0,          // whitespace
    BREAK = 1u << 1,          // ends a line
    ALPHA = 1u << 2,          // a letter
    ALNUM = 1u << 3,          // a letter or a number
    NUMERIC = 1u << 4,        // a number
    SENTENCE_END = 1u << 5,   // one of SENTENCE_ENDS
    SYMBOL = 1u << 6,         // one of PUNCTUATION or SENTENCE_ENDS
    PUNCTUATION = 1u << 7,    // of a category P*
    UNSPACED = 1u << 8,       // of a script without spaces between words
    HEAD = 1u << 9,           // a token of its own at the start of a piece
    TAIL = 1u << 10,          // the same at the end of a piece
    STOP = 1u << 11,          // a point after it is a token of its own
    LOWER = 1u << 12,         // the tokenizer takes it for lower case
    UPPER = 1u << 13,         // the same for upper case
    MEASURE_END = 1u << 14,   // ends a unit such as `kg`
    UPPERCASE = 1u << 15,     // in upper case
    OTHER_CASE = 1u << 16,    // in lower or title case
    LOWERED = 1u << 17,       // its lower case differs from it
    DECOMPOSED = 1u << 18,    // its decomposition (NFD) differs from it, or it may move in one
    JOINED = 1u << 19,        // not ASCII, and joined to its like by UAX #29
};

// A table from code points to properties, filled by calls of a Python function when a character is first seen.
class Properties {
public:
    explicit Properties(PyObject* function) : function_(function) { Py_INCREF(function); }
    Properties(const Properties&) = delete;
    Properties& operator=(const Properties&) = delete;
    ~Properties() { Py_DECREF(function_); }

    uint32_t of(uint32_t code) {
        const auto& page = pages_[code >> 8];
        const uint32_t known = page ? page[code & 255] : 0;
        return known ? known : learn(code);
    }

private:
    static constexpr uint32_t KNOWN = 1u << 31;

    uint32_t learn(uint32_t code) {
        Owned result(PyObject_CallFunction(function_, "k", static_cast<unsigned long>(code)));
        const unsigned long bits = PyLong_AsUnsignedLong(result.get());
        if (PyErr_Occurred()) throw PythonError();
        auto& page = pages_[code >> 8];
        if (!page) page.reset(new uint32_t[256]());
        return page[code & 255] = static_cast<uint32_t>(bits) | KNOWN;
    }

    PyObject* function_;
    std::unique_ptr<uint32_t[]> pages_[0x1100];
};

// An odd random number, drawn once for each process, by which hash tables choose slots. Pages are written by strangers:
// with a number that they know, a page could have words that all belong in one slot, and take minutes.
inline uint64_t drawn_odd() {
    static const uint64_t odd = [] {
        std::random_device device;
        return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
    }();
    return odd;
}

// A hash of texts that no page can foresee.
struct DrawnHash {
    size_t operator()(const std::u32string& text) const {
        const uint64_t odd = drawn_odd();
        uint64_t hash = text.size();
        for (const char32_t code : text) hash = (hash ^ code) * odd, hash ^= hash >> 32;
        return static_cast<size_t>(hash);
    }
};

// The characters of a str of one storage size. The str outlives it.
template <class Char>
struct Text {
    PyObject* object;
    const Char* chars;
    Py_ssize_t size;
};

// Calls `function` with the Text of a str.
template <class Function>
void with_text(PyObject* text, Function function) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(text) < 0) throw PythonError();
#endif
    const Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    switch (PyUnicode_KIND(text)) {
        case PyUnicode_1BYTE_KIND: return function(Text<Py_UCS1>{text, PyUnicode_1BYTE_DATA(text), size});
        case PyUnicode_2BYTE_KIND: return function(Text<Py_UCS2>{text, PyUnicode_2BYTE_DATA(text), size});
        default: return function(Text<Py_UCS4>{text, PyUnicode_4BYTE_DATA(text), size});
    }
}

// Calls on_piece(start, end) for each maximal run of characters that are not whitespace, and on_line(), after its
// pieces, for each line as `splitlines` splits them.
template <class Char, class OnPiece, class OnLine>
void each_piece(const Text<Char>& text, Properties& properties, OnPiece on_piece, OnLine on_line) {
    Py_ssize_t line = 0;
    for (Py_ssize_t at = 0; at < text.size;) {
        const uint32_t kind = properties.of(text.chars[at]);
        if (kind & SPACE) {
            const bool crlf = text.chars[at] == '\r' && at + 1 < text.size && text.chars[at + 1] == '\n';
            at += crlf ? 2 : 1;
            if (kind & BREAK) on_line(), line = at;
            continue;
        }
        const Py_ssize_t start = at;
        while (++at < text.size && !(properties.of(text.chars[at]) & SPACE)) {}
        on_piece(start, at);
    }
    if (line < text.size) on_line();
}

template <class Item>
PyObject* as_bytes(const std::vector<Item>& items) {
    const auto* data = reinterpret_cast<const char*>(items.data());
    return PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(items.size() * sizeof(Item)));
}

// Runs a function that returns a new reference; a C++ exception becomes a Python one.
template <class Function>
PyObject* guarded(Function function) {
    try {
        return function();
    } catch (const PythonError&) {
        return nullptr;
    } catch (const std::exception&) {  // std::bad_alloc, or std::length_error of a vector
        return PyErr_NoMemory();
    }
}
