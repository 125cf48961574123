// A set of words and beginnings of words, and whether a text may have one of them, as `pipeline.text.term_words`
// splits texts.
#pragma once

#include <algorithm>
#include <unordered_set>

#include "tokens.h"

// Whether a character is between words: ASCII signs, those of `PUNCTUATION`, and surrogates, which become a question mark in UTF-8.
inline bool separates(uint32_t code) {
    if (code < 0x80) return !((code >= '0' && code <= '9') || ((code | 32) >= 'a' && (code | 32) <= 'z'));
    if (code < 0xC0) return true;
    if (code < 0x2000) return false;
    return code <= 0x206F || (code >= 0x2E00 && code <= 0x2E7F) || (code >= 0x3000 && code <= 0x303F) ||
           (code >= 0xD800 && code <= 0xDFFF) || (code >= 0xFE00 && code <= 0xFE0F) ||
           (code >= 0xFF00 && code <= 0xFF0F) || (code >= 0xFF1A && code <= 0xFF20);
}

// Whether a character is a word: those of `SYMBOL`.
inline bool is_symbol(uint32_t code) {
    if (code < 0x2190) return false;
    return code <= 0x245F || (code >= 0x2500 && code <= 0x2BFF) || (code >= 0x1F000 && code <= 0x1F12F) ||
           (code >= 0x1F18A && code <= 0x1FAFF);
}

// Whether a word that began before this character extends over it.
inline bool continues(uint32_t code) { return !separates(code) && !is_symbol(code); }

class WordSet {
public:
    WordSet(PyObject* words, PyObject* prefixes, PyObject* pairs) {
        read(words, [&](const auto& view) { codes_.insert(code_of(view.chars, view.chars + view.size)); });
        read(prefixes, [&](const auto& view) {
            prefixes_.insert(code_of(view.chars, view.chars + view.size));
            least_ = std::min(least_, view.size);
            most_ = std::max(most_, view.size);
        });
        read(pairs, [&](const auto& view) {
            const auto* end = view.chars + view.size;
            const auto* gap = std::find(view.chars, end, ' ');
            pairs_.insert(pair_of(code_of(view.chars, gap), code_of(std::min(gap + 1, end), end)));
        });
    }

    // Returns False only if the text has none of the words, no word with such a beginning, and no two such words in a row.
    // A word is known by its code alone.
    bool may_have(PyObject* text) const {
        bool hit = false;
        with_text(text, [&](const auto& view) {
            uint64_t last = 0;
            for (Py_ssize_t at = 0; at < view.size && !hit;) {
                if (separates(view.chars[at])) {
                    ++at;
                    continue;
                }
                uint64_t code = 0, power = 1;
                const Py_ssize_t start = at;
                const bool alone = is_symbol(view.chars[at]);
                do {
                    code += view.chars[at] * power;
                    hit = begins(at + 1 - start) && prefixes_.count(code);
                    power *= BASE;
                } while (++at < view.size && !alone && !hit && continues(view.chars[at]));
                hit = hit || codes_.count(code) || pairs_.count(pair_of(last, code));
                last = code;
            }
        });
        return hit;
    }

private:
    template <class Add>
    static void read(PyObject* words, Add add) {
        Owned fast(PySequence_Fast(words, "word set: expected a list, got another type. Pass a list of str."));
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            PyObject* word = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!PyUnicode_Check(word)) {
                PyErr_SetString(PyExc_TypeError, "word set: expected str, got another type. Pass a list of str.");
                throw PythonError();
            }
            with_text(word, add);
        }
    }

    static uint64_t pair_of(uint64_t first, uint64_t second) { return first * 0x9E3779B97F4A7C15ULL + second; }

    // Whether one of the beginnings has this length.
    bool begins(Py_ssize_t size) const { return size >= least_ && size <= most_; }

    std::unordered_set<uint64_t> codes_, prefixes_, pairs_;
    Py_ssize_t least_ = PY_SSIZE_T_MAX, most_ = 0;
};
