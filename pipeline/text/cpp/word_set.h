// A set of words, and whether a text may have one of them, as `pipeline.toxicity.words_of` splits texts.
#pragma once

#include <unordered_set>

#include "tokens.h"

class WordSet {
public:
    explicit WordSet(PyObject* words) {
        Owned fast(PySequence_Fast(words, "word set: expected a list, got another type. Pass a list of str."));
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            PyObject* word = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!PyUnicode_Check(word)) {
                PyErr_SetString(PyExc_TypeError, "word set: expected str, got another type. Pass a list of str.");
                throw PythonError();
            }
            with_text(word, [&](const auto& view) { codes_.insert(code_of(view.chars, view.chars + view.size)); });
        }
    }

    // Returns False only if the text has none of the words. A word is known by its code alone.
    bool may_have(PyObject* text) const {
        bool hit = false;
        with_text(text, [&](const auto& view) {
            for (Py_ssize_t at = 0; at < view.size && !hit; ++at) {
                uint64_t code = 0, power = 1;
                const Py_ssize_t start = at;
                for (; at < view.size && !separates(view.chars[at]); ++at, power *= BASE) code += view.chars[at] * power;
                hit = at > start && codes_.count(code);
            }
        });
        return hit;
    }

private:
    // ASCII signs, `_PUNCTUATION`, and surrogates, which become a question mark in UTF-8.
    static bool separates(uint32_t code) {
        if (code < 0x80) return !((code >= '0' && code <= '9') || ((code | 32) >= 'a' && (code | 32) <= 'z'));
        if (code < 0xC0) return true;
        if (code < 0x2000) return false;
        return code <= 0x206F || (code >= 0x2E00 && code <= 0x2E7F) || (code >= 0x3000 && code <= 0x303F) ||
               (code >= 0xD800 && code <= 0xDFFF) || (code >= 0xFF00 && code <= 0xFF0F) ||
               (code >= 0xFF1A && code <= 0xFF20);
    }

    std::unordered_set<uint64_t> codes_;
};
