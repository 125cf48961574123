// The words of a text as shingles have them (`normal_words`), and their keys.
#pragma once

#include <string>

#include "blake2s.h"
#include "characters.h"

// What each character contributes to normal words. A Python function returns it when a character is first seen: a str of
// at most 3 characters, where whitespace ends a word; or None if it depends on the characters around it.
class Normal {
public:
    // `expand` is that function; `words` returns the normal words of a piece, as `normal_words` does. `zero` is True if
    // every number counts as 0.
    Normal(PyObject* properties, PyObject* expand, PyObject* words, bool zero)
        : properties_(properties), expand_(expand), words_(words), zero_(zero), keys_(SLOTS) {
        Py_INCREF(expand), Py_INCREF(words);
    }
    ~Normal() { Py_DECREF(expand_), Py_DECREF(words_); }
    Normal(const Normal&) = delete;
    Normal& operator=(const Normal&) = delete;

    // Returns the key of each word, in text order.
    std::vector<uint64_t> keys(PyObject* text) {
        std::vector<uint64_t> out;
        std::string bytes;
        each_word(text, [&](const std::u32string& word) {
            bytes.clear();
            for (const char32_t code : word) encode(code, bytes);
            out.push_back(key(bytes));
        });
        return out;
    }

    // Returns the code points of all words, without separators.
    std::vector<uint64_t> points(PyObject* text) {
        std::vector<uint64_t> out;
        each_word(text, [&](const std::u32string& word) { out.insert(out.end(), word.begin(), word.end()); });
        return out;
    }

private:
    enum Kind : uint8_t { UNSEEN, PLAIN, DIGIT, ENDS_WORD, DEPENDS };
    static constexpr uint32_t LAST = 0x30000;  // characters from here on are passed to Python, so that the table is small
    static constexpr size_t SLOTS = 1u << 16, SHORT = 31;

    struct Expansion {
        uint32_t codes[3];
        uint8_t size;
        Kind kind;
        bool joins_digits;
    };
    struct Entry {
        char bytes[SHORT];
        uint8_t size;
        uint64_t key;
    };

    static void encode(uint32_t code, std::string& out) {
        if (code < 0x80) {
            out += static_cast<char>(code);
        } else if (code < 0x800) {
            out += static_cast<char>(0xC0 | code >> 6);
            out += static_cast<char>(0x80 | (code & 63));
        } else if (code < 0x10000) {
            out += static_cast<char>(0xE0 | code >> 12);
            out += static_cast<char>(0x80 | (code >> 6 & 63));
            out += static_cast<char>(0x80 | (code & 63));
        } else {
            out += static_cast<char>(0xF0 | code >> 18);
            out += static_cast<char>(0x80 | (code >> 12 & 63));
            out += static_cast<char>(0x80 | (code >> 6 & 63));
            out += static_cast<char>(0x80 | (code & 63));
        }
    }

    // The key of a word; those of short words are cached, each in the one slot that its bytes choose.
    uint64_t key(const std::string& word) {
        const auto* data = reinterpret_cast<const uint8_t*>(word.data());
        if (word.size() > SHORT) return blake2s::key(data, word.size());
        uint64_t hash = word.size();
        for (const char byte : word) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001B3u;
        Entry& entry = keys_[(hash * 0x9E3779B97F4A7C15u) >> 48];
        if (entry.size != word.size() || std::memcmp(entry.bytes, word.data(), word.size())) {
            std::memcpy(entry.bytes, word.data(), word.size());
            entry.size = static_cast<uint8_t>(word.size());
            entry.key = blake2s::key(data, word.size());
        }
        return entry.key;
    }

    const Expansion& expansion(uint32_t code) {
        static constexpr Expansion beyond{{}, 0, DEPENDS, false};
        if (code >= LAST) return beyond;
        const auto& page = pages_[code >> 8];
        return page && page[code & 255].kind ? page[code & 255] : learn(code);
    }

    // The function returns (str or None, whether the character is a digit, whether it joins the digits around it).
    const Expansion& learn(uint32_t code) {
        Owned answer(PyObject_CallFunction(expand_, "k", static_cast<unsigned long>(code)));
        PyObject* text = nullptr;
        int digit = 0, joins = 0;
        if (!PyArg_ParseTuple(answer.get(), "Opp", &text, &digit, &joins)) throw PythonError();
        Expansion out{{}, 0, DEPENDS, joins != 0};
        if (PyUnicode_Check(text) && PyUnicode_GET_LENGTH(text) <= 3) {
            out.size = static_cast<uint8_t>(PyUnicode_GET_LENGTH(text));
            with_text(text, [&](const auto& view) { std::copy(view.chars, view.chars + view.size, out.codes); });
            const bool ends = out.size && properties_.of(out.codes[0]) & SPACE;
            out.kind = ends ? ENDS_WORD : digit ? DIGIT : PLAIN;
        }
        auto& page = pages_[code >> 8];
        if (!page) page.reset(new Expansion[256]());
        return page[code & 255] = out;
    }

    template <class OnWord>
    void each_word(PyObject* text, OnWord on_word) {
        std::u32string word;
        with_text(text, [&](const auto& view) {
            std::vector<std::u32string> words;  // of one piece, which is passed on when all of it is known
            each_piece(
                view, properties_,
                [&](Py_ssize_t from, Py_ssize_t to) {
                    size_t count = 0;
                    if (!split(view, from, to, words, count)) ask(view, from, to, words, count);
                    for (size_t at = 0; at < count; ++at) on_word(words[at]);
                },
                [] {});
        });
    }

    // Splits a piece into `words`[0] to `words`[count - 1], or returns False if only Python knows them.
    template <class Char>
    bool split(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, std::vector<std::u32string>& words, size_t& count) {
        count = 0;
        bool inside = false;
        for (Py_ssize_t at = from; at < to; ++at) {
            const Expansion& step = expansion(text.chars[at]);
            if (step.kind == DEPENDS) return false;
            if (step.kind == ENDS_WORD) {
                inside = false;
                continue;
            }
            if (!inside && (step.size || (zero_ && step.kind == DIGIT))) {
                if (count == words.size()) words.emplace_back();
                words[count++].clear();
                inside = true;
            }
            if (zero_ && step.kind == DIGIT) {
                words[count - 1] += U'0';
                at = end_of_number(text, at, to) - 1;
            } else if (step.size == 1) {
                words[count - 1] += static_cast<char32_t>(step.codes[0]);
            } else if (inside) {
                words[count - 1].append(step.codes, step.codes + step.size);
            }
        }
        return true;
    }

    // Returns the end of a number: digits, and a separator with more digits after it. DEPENDS has no digits.
    template <class Char>
    Py_ssize_t end_of_number(const Text<Char>& text, Py_ssize_t at, Py_ssize_t to) {
        const auto skip = [&](Py_ssize_t place) {
            while (place < to && expansion(text.chars[place]).kind == DIGIT) ++place;
            return place;
        };
        const Py_ssize_t end = skip(at);
        if (end >= to || !expansion(text.chars[end]).joins_digits) return end;
        const Py_ssize_t more = skip(end + 1);
        return more > end + 1 ? more : end;
    }

    template <class Char>
    void ask(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, std::vector<std::u32string>& words, size_t& count) {
        Owned piece(PyUnicode_Substring(text.object, from, to));
        Owned answer(PyObject_CallFunctionObjArgs(words_, piece.get(), nullptr));
        Owned fast(PySequence_Fast(answer.get(), "words: expected a sequence, got another type. Return a list of str."));
        const auto size = PySequence_Fast_GET_SIZE(fast.get());
        count = 0;
        for (Py_ssize_t at = 0; at < size; ++at) {
            PyObject* word = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!PyUnicode_Check(word)) {
                PyErr_SetString(PyExc_TypeError, "words: expected str, got another type. Return a list of str.");
                throw PythonError();
            }
            if (count == words.size()) words.emplace_back();
            with_text(word, [&](const auto& view) { words[count].assign(view.chars, view.chars + view.size); });
            ++count;
        }
    }

    Properties properties_;
    PyObject *expand_, *words_;
    bool zero_;
    std::vector<Entry> keys_;
    std::unique_ptr<Expansion[]> pages_[LAST >> 8];
};
