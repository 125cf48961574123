// The words of the dialects other than datatrove's: pieces as they are, pieces without punctuation, runs of word
// characters, and Unicode words. `pipeline.quality.text` and `unicode_words` define them.
#pragma once

#include <string>

#include "tokens.h"

enum PieceFlag : uint8_t { LETTER_FLAG = 1, DOLMA_SYMBOL_FLAG = 2, ALNUM_FIRST_FLAG = 4 };
enum RawFlag : uint8_t { ASCII_LETTER_FLAG = 1, CAPITALS_FLAG = 2 };
enum NormalFlag : uint8_t { JAVASCRIPT_FLAG = 1, LOREM_FLAG = 2 };

inline bool is_ascii_letter(uint32_t code) { return (code | 32) >= 'a' && (code | 32) <= 'z'; }
inline bool is_ascii_alnum(uint32_t code) { return is_ascii_letter(code) || (code >= '0' && code <= '9'); }
inline uint32_t ascii_lower(uint32_t code) { return code >= 'A' && code <= 'Z' ? code + 32 : code; }

class Pieces {
public:
    // `normal_piece` and `unicode_words` are those functions, for pieces that need more than tables.
    Pieces(PyObject* properties, PyObject* normal_piece, PyObject* unicode_words)
        : properties_(properties), normal_piece_(normal_piece), unicode_words_(unicode_words) {
        Py_INCREF(normal_piece), Py_INCREF(unicode_words);
    }
    ~Pieces() { Py_DECREF(normal_piece_), Py_DECREF(unicode_words_); }
    Pieces(const Pieces&) = delete;
    Pieces& operator=(const Pieces&) = delete;

    // `read_pieces`; the codes of the lower-case forms are appended to `lowered`.
    Columns plain(PyObject* text, std::vector<uint64_t>& lowered) {
        return read(text, [&](const auto& view, Py_ssize_t from, Py_ssize_t to, Columns& out) {
            uint32_t any = 0, any_foreign = 0;
            bool symbol = false;
            for (Py_ssize_t at = from; at < to; ++at) {
                const uint32_t code = view.chars[at], kind = properties_.of(code);
                any |= kind, any_foreign |= code < 128 ? 0 : kind;
                symbol |= code == '#' || code == 0x2026;
            }
            const uint8_t first = properties_.of(view.chars[from]) & ALNUM ? ALNUM_FIRST_FLAG : 0;
            const uint8_t flags = (any & ALPHA ? LETTER_FLAG : 0) | (symbol ? DOLMA_SYMBOL_FLAG : 0) | first;
            const uint64_t code = code_of(view.chars + from, view.chars + to);
            out.add({to - from, code, flags});
            lowered.push_back(!(any & LOWERED) ? code : lower_code(view, from, to, any_foreign & LOWERED));
        });
    }

    // `read_normal_pieces`; the numbers of numeric characters are appended to `numeric`.
    Columns normal(PyObject* text, std::vector<int64_t>& numeric) {
        std::u32string word;
        return read(text, [&](const auto& view, Py_ssize_t from, Py_ssize_t to, Columns& out) {
            normal_piece(view, from, to, word);
            if (word.empty()) return;
            static const std::u32string script = U"javascript", placeholder = U"lorem";
            const bool lorem = word.size() >= 5 && !word.compare(word.size() - 5, 5, placeholder);
            const uint8_t flags = (word == script ? JAVASCRIPT_FLAG : 0) | (lorem ? LOREM_FLAG : 0);
            out.add({static_cast<int64_t>(word.size()), code_of(word.data(), word.data() + word.size()), flags});
            int64_t numbers = 0;
            for (const char32_t code : word) numbers += (properties_.of(code) & NUMERIC) != 0;
            numeric.push_back(numbers);
        });
    }

    // `read_raw_words`: runs of word characters, and runs of others.
    Columns raw(PyObject* text) {
        return read(text, [&](const auto& view, Py_ssize_t from, Py_ssize_t to, Columns& out) {
            while (from < to) {
                Py_ssize_t end = from;
                const bool inside = is_word(view.chars[from]);
                uint32_t any = 0;
                uint8_t letter = 0;
                for (; end < to && is_word(view.chars[end]) == inside; ++end) {
                    any |= properties_.of(view.chars[end]);
                    if (is_ascii_letter(view.chars[end])) letter = ASCII_LETTER_FLAG;
                }
                const uint8_t capitals = any & UPPERCASE && !(any & OTHER_CASE) ? CAPITALS_FLAG : 0;
                const uint8_t flags = letter | capitals;
                out.add({end - from, code_of(view.chars + from, view.chars + end), flags});
                from = end;
            }
        });
    }

    // `read_unicode_words`: words by UAX #29 that start with a letter or digit.
    Columns unicode(PyObject* text) {
        return read(text, [&](const auto& view, Py_ssize_t from, Py_ssize_t to, Columns& out) {
            bool ascii = true;
            for (Py_ssize_t at = from; at < to; ++at) ascii &= view.chars[at] < 128;
            const size_t before = out.flags.size();
            if (ascii) {
                ascii_words(view.chars + from, view.chars + to, out);
            } else if (!joined_words(view.chars + from, view.chars + to, out)) {
                out.cut(before);
                ask_words(view, from, to, out);
            }
        });
    }

    // Whether two lines of at least `least` characters are equal, with single spaces between their pieces. The answer
    // may be true for different lines, and is never false for equal ones.
    bool may_repeat(PyObject* text, int64_t least) {
        std::vector<uint64_t> lines;
        with_text(text, [&](const auto& view) {
            uint64_t code = 0;
            int64_t size = 0;
            each_piece(
                view, properties_,
                [&](Py_ssize_t from, Py_ssize_t to) {
                    if (size) code = code * BASE + ' ', ++size;
                    for (Py_ssize_t at = from; at < to; ++at) code = code * BASE + view.chars[at];
                    size += to - from;
                },
                [&] {
                    if (size >= least) lines.push_back(code);
                    code = 0, size = 0;
                });
        });
        std::sort(lines.begin(), lines.end());
        return std::adjacent_find(lines.begin(), lines.end()) != lines.end();
    }

private:
    template <class OnPiece>
    Columns read(PyObject* text, OnPiece on_piece) {
        Columns out;
        with_text(text, [&](const auto& view) {
            each_piece(
                view, properties_,
                [&](Py_ssize_t from, Py_ssize_t to) {
                    const size_t before = out.flags.size();
                    on_piece(view, from, to, out);
                    out.counts.push_back(static_cast<int64_t>(out.flags.size() - before));
                },
                [] {});
        });
        return out;
    }

    bool is_word(uint32_t code) { return code == '_' || properties_.of(code) & ALNUM; }

    template <class Char>
    uint64_t lower_code(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, bool foreign) {
        uint64_t code = 0;
        if (!foreign) {
            while (to > from) code = code * BASE + ascii_lower(text.chars[--to]);
            return code;
        }
        // Python decides: the lower case of a sigma depends on its place in the word.
        Owned piece(PyUnicode_Substring(text.object, from, to));
        Owned lower(PyObject_CallMethod(piece.get(), "lower", nullptr));
        with_text(lower.get(), [&](const auto& view) { code = code_of(view.chars, view.chars + view.size); });
        return code;
    }

    template <class Char>
    void normal_piece(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, std::u32string& word) {
        word.clear();
        for (Py_ssize_t at = from; at < to; ++at) {
            const uint32_t code = text.chars[at];
            if (code >= 128 && properties_.of(code) & (DECOMPOSED | LOWERED)) return ask_normal(text, from, to, word);
            if (code >= 128 || is_ascii_alnum(code) || code < 33 || code == 127) word += ascii_lower(code);
        }
    }

    template <class Char>
    void ask_normal(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, std::u32string& word) {
        std::u32string key(text.chars + from, text.chars + to);
        if (const auto* known = normal_.find(key)) {
            word = *known;
            return;
        }
        Owned piece(PyUnicode_Substring(text.object, from, to));
        Owned answer(PyObject_CallFunctionObjArgs(normal_piece_, piece.get(), nullptr));
        word = points(answer.get());
        normal_.add(std::move(key), word, word.size());
    }

    static std::u32string points(PyObject* text) {
        if (!PyUnicode_Check(text)) {
            PyErr_SetString(PyExc_TypeError, "pieces: expected str, got another type. Return str.");
            throw PythonError();
        }
        std::u32string out;
        with_text(text, [&](const auto& view) { out.assign(view.chars, view.chars + view.size); });
        return out;
    }

    // `_ASCII_WORD`: letters, digits and underscores, and single signs between two letters or two digits.
    template <class Char>
    static void ascii_words(const Char* at, const Char* end, Columns& out) {
        const auto letter = [](uint32_t code) { return is_ascii_letter(code); };
        const auto digit = [](uint32_t code) { return code >= '0' && code <= '9'; };
        while (at < end) {
            const Char* start = at;
            for (; at < end; ++at) {
                if (is_ascii_alnum(*at) || *at == '_') continue;
                if (at == start || at + 1 == end) break;
                const bool both = *at == '.' || *at == '\'';
                if ((both || *at == ':') && letter(at[-1]) && letter(at[1])) continue;
                if ((both || *at == ',' || *at == ';') && digit(at[-1]) && digit(at[1])) continue;
                break;
            }
            if (at > start && *start != '_') out.add({at - start, code_of(start, at), 0});
            if (at == start) ++at;
        }
    }

    // Runs of characters that are joined to each other, between ASCII signs that join nothing. Returns False if the
    // piece has other characters.
    template <class Char>
    bool joined_words(const Char* at, const Char* end, Columns& out) {
        const auto joined = [&](uint32_t code) {
            return code < 128 ? is_ascii_alnum(code) : (properties_.of(code) & JOINED) != 0;
        };
        const Char* begin = at;
        while (at < end) {
            const Char* start = at;
            while (at < end && joined(*at)) ++at;
            if (at > start) {
                if (properties_.of(*start) & ALNUM) out.add({at - start, code_of(start, at), 0});
                continue;
            }
            if (*at >= 128 || *at == '_') return false;
            const bool may_join = *at == ':' || *at == '.' || *at == ',' || *at == ';' || *at == '\'' || *at == '"';
            if (may_join && at > begin && at + 1 < end && joined(at[-1]) && joined(at[1])) return false;
            ++at;
        }
        return true;
    }

    template <class Char>
    void ask_words(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, Columns& out) {
        std::u32string key(text.chars + from, text.chars + to);
        if (const auto* known = words_.find(key)) {
            for (const Token& token : *known) out.add(token);
            return;
        }
        Owned piece(PyUnicode_Substring(text.object, from, to));
        Owned answer(PyObject_CallFunctionObjArgs(unicode_words_, piece.get(), nullptr));
        Owned fast(PySequence_Fast(answer.get(), "pieces: expected a sequence, got another type. Return a list of str."));
        std::vector<Token> tokens;
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            const std::u32string word = points(PySequence_Fast_GET_ITEM(fast.get(), at));
            tokens.push_back({static_cast<int64_t>(word.size()), code_of(word.data(), word.data() + word.size()), 0});
        }
        for (const Token& token : tokens) out.add(token);
        const size_t weight = tokens.size() * (sizeof(Token) / sizeof(char32_t));
        words_.add(std::move(key), std::move(tokens), weight);
    }

    Properties properties_;
    PyObject *normal_piece_, *unicode_words_;
    Answers<std::u32string> normal_;
    Answers<std::vector<Token>> words_;
};
