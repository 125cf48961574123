// Tokens of a text: `pipeline.text.spacy_tokens` for the pieces that most texts consist of. Any other piece is passed to
// the tokenizer in Python, whose answer is cached.
#pragma once

#include <algorithm>
#include <bitset>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "characters.h"

constexpr uint64_t BASE = 0x9E3779B97F4A7C15u;  // the base of `token_codes`
constexpr uint64_t PAIR = 0xD6E8FEB86659FD93u;  // odd, so that the order of two codes matters

enum TokenFlag : uint8_t { WORD_FLAG = 1, ALPHABETIC_FLAG = 2, ENDS_SENTENCE_FLAG = 4, MARK_FLAG = 8 };

enum class Dialect { ENGLISH, NEUTRAL, UNSPACED };

struct Token {
    int64_t length;
    uint64_t code;
    uint8_t flags;
};

// The columns of the tokens of a text.
struct Columns {
    std::vector<int64_t> lines;    // number of pieces of each line
    std::vector<int64_t> counts;   // number of tokens of each piece
    std::vector<int64_t> lengths;  // of each token [code points]
    std::vector<uint64_t> codes;
    std::vector<uint8_t> flags;

    void add(const Token& token) {
        lengths.push_back(token.length);
        codes.push_back(token.code);
        flags.push_back(token.flags);
    }
    void cut(size_t size) { lengths.resize(size), codes.resize(size), flags.resize(size); }
};

template <class Char>
uint64_t code_of(const Char* from, const Char* to) {
    uint64_t code = 0;
    while (to > from) code = code * BASE + *--to;
    return code;
}

// The forms that the English rules must not split: form -> its tokens. Short keys, which are compared in full.
using Forms = std::unordered_map<std::u32string, std::vector<Token>>;

// A cache of what Python answers for pieces, by the piece; cleared when it exceeds a number of characters and values.
template <class Value>
class Answers {
public:
    const Value* find(const std::u32string& piece) const {
        const auto hit = values_.find(piece);
        return hit == values_.end() ? nullptr : &hit->second;
    }
    void add(std::u32string piece, Value value, size_t weight) {
        if (weight + piece.size() > CAPACITY / 16) return;
        if ((used_ += weight + piece.size() + OVERHEAD) > CAPACITY) values_.clear(), used_ = weight + piece.size();
        values_.insert_or_assign(std::move(piece), std::move(value));
    }
    size_t size() const { return values_.size(); }

private:
    static constexpr size_t CAPACITY = 1u << 22, OVERHEAD = 16;
    std::unordered_map<std::u32string, Value, DrawnHash> values_;
    size_t used_ = 0;
};

class Tokenizer {
public:
    // `split` is the tokenizer in Python. `forms` is a dictionary from each known form to its tokens; `joinable` is a
    // dictionary whose keys are the sequences of tokens that it joins.
    Tokenizer(Dialect dialect, PyObject* properties, PyObject* split, PyObject* forms, PyObject* joinable)
        : properties_(properties), dialect_(dialect), split_(split) {
        PyObject *key, *value;
        for (Py_ssize_t at = 0; PyDict_Next(forms, &at, &key, &value);) {
            const std::u32string form = points(key);
            forms_[form] = tokens_of(value);
            filter_[filter_bit(code_of(form.data(), form.data() + form.size()))] = true;
            longest_ = std::max(longest_, PyUnicode_GET_LENGTH(key));
        }
        for (Py_ssize_t at = 0; PyDict_Next(joinable, &at, &key, &value);) {
            const auto parts = tokens_of(key);
            if (parts.size() > 1) pairs_.insert(pair_code(parts[0].code, parts[1].code));
        }
        Py_INCREF(split);
    }
    ~Tokenizer() { Py_DECREF(split_); }
    Tokenizer(const Tokenizer&) = delete;
    Tokenizer& operator=(const Tokenizer&) = delete;

    Columns words(PyObject* text) {
        Columns out;
        with_text(text, [&](const auto& view) {
            int64_t pieces = 0;
            each_piece(
                view, properties_, [&](Py_ssize_t from, Py_ssize_t to) { ++pieces, piece(view, from, to, out); },
                [&] { out.lines.push_back(pieces), pieces = 0; });
        });
        return out;
    }
    size_t cached() const { return answers_.size(); }

private:
    struct Span {
        Py_ssize_t low, high;
    };

    static size_t filter_bit(uint64_t code) { return (code * PAIR) >> 48; }
    static uint64_t pair_code(uint64_t first, uint64_t second) { return first * PAIR + second; }

    static std::u32string points(PyObject* text) {
        if (!PyUnicode_Check(text)) {
            PyErr_SetString(PyExc_TypeError, "tokenizer: expected str, got another type. Return a sequence of str.");
            throw PythonError();
        }
        std::u32string out;
        with_text(text, [&](const auto& view) { out.assign(view.chars, view.chars + view.size); });
        return out;
    }

    std::vector<Token> tokens_of(PyObject* sequence) {
        Owned fast(PySequence_Fast(sequence, "tokenizer: expected a sequence, got another type. Return a sequence of str."));
        std::vector<Token> out;
        // Each step asks again for the size: properties() may run Python code.
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            const std::u32string token = points(PySequence_Fast_GET_ITEM(fast.get(), at));
            out.push_back(token_of(token.data(), token.data() + token.size()));
        }
        return out;
    }

    template <class Char>
    Token token_of(const Char* from, const Char* to) {
        uint32_t all = ~0u, any = 0;
        for (const Char* at = from; at < to; ++at) {
            const uint32_t kind = properties_.of(*at);
            all &= kind, any |= kind;
        }
        return {to - from, code_of(from, to), flags(to - from, all, any)};
    }

    // The flags of `token_flags`; a token of no characters has none of the properties.
    static uint8_t flags(Py_ssize_t size, uint32_t all, uint32_t any) {
        if (size && all & ALPHA) return WORD_FLAG | ALPHABETIC_FLAG;
        if (size == 1 && all & SENTENCE_END) return ENDS_SENTENCE_FLAG;
        const uint8_t word = all & SYMBOL ? 0 : WORD_FLAG;
        if (any & ALPHA) return word | ALPHABETIC_FLAG;
        return word | (all & PUNCTUATION ? MARK_FLAG : 0);
    }

    template <class Char>
    void piece(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, Columns& out) {
        const size_t before = out.flags.size();
        if (!easy(text, from, to, out)) {
            out.cut(before);
            ask(text, from, to, out);
        }
        out.counts.push_back(static_cast<int64_t>(out.flags.size() - before));
    }

    // Appends the tokens of a piece, or returns False if only the tokenizer in Python knows them.
    template <class Char>
    bool easy(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, Columns& out) {
        const Char *start = text.chars + from, *end = text.chars + to;
        const bool english = dialect_ == Dialect::ENGLISH;
        if (english) {
            if (const auto* tokens = form(text, from, to)) {
                for (const Token& token : *tokens) out.add(token);
                return true;
            }
        }
        uint32_t all = ~0u, any = 0;
        uint64_t code = 0, power = 1;
        for (const Char* at = start; at < end; ++at, power *= BASE) {
            const uint32_t kind = properties_.of(*at);
            all &= kind, any |= kind;
            code += *at * power;
        }
        if (all & ALPHA && (english || !(any & UNSPACED))) {
            out.add({to - from, code, WORD_FLAG | ALPHABETIC_FLAG});
            return true;
        }
        if (!english && any & UNSPACED) return dialect_ == Dialect::NEUTRAL && runs(text, from, to, out);
        const size_t before = out.flags.size();
        return peel(text, from, to, out) && !(english && joins(out, before));
    }

    // Splits where characters of scripts without spaces begin or end; each of these is a token.
    template <class Char>
    bool runs(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, Columns& out) {
        while (from < to) {
            Py_ssize_t end = from;
            while (end < to && !(properties_.of(text.chars[end]) & UNSPACED)) ++end;
            if (end > from && !peel(text, from, end, out)) return false;
            for (; end < to && properties_.of(text.chars[end]) & UNSPACED; ++end)
                out.add(token_of(text.chars + end, text.chars + end + 1));
            from = end;
        }
        return true;
    }

    bool joins(const Columns& out, size_t from) const {
        for (size_t at = from + 1; at < out.codes.size(); ++at)
            if (pairs_.count(pair_code(out.codes[at - 1], out.codes[at]))) return true;
        return false;
    }

    template <class Char>
    const std::vector<Token>* form(const Text<Char>& text, Py_ssize_t low, Py_ssize_t high) const {
        if (high - low > longest_ || high <= low) return nullptr;
        if (!filter_[filter_bit(code_of(text.chars + low, text.chars + high))]) return nullptr;
        const auto hit = forms_.find(std::u32string(text.chars + low, text.chars + high));
        return hit == forms_.end() ? nullptr : &hit->second;
    }

    // `_peel`: takes punctuation from both ends. Returns False if the piece is left to Python.
    template <class Char>
    bool peel(const Text<Char>& text, Py_ssize_t low, Py_ssize_t high, Columns& out) {
        std::vector<Span> tails;
        const std::vector<Token>* known = nullptr;
        while (low < high) {
            const bool small = high - low <= longest_ + 2;
            if (small && (known = form(text, low, high))) break;
            Py_ssize_t head = head_of(text, low, high), tail = 0;
            if (!(head && small && form(text, low + head, high))) {
                if (low + head < high && (tail = tail_of(text, low + head, high)) < 0) return false;
                if (tail && small && form(text, low, high - tail)) head = 0;
            }
            if (!head && !tail) break;
            if (head) out.add(token_of(text.chars + low, text.chars + low + head));
            if (tail) tails.push_back({high - tail, high});
            low += head, high -= tail;
        }
        if (known) {
            for (const Token& token : *known) out.add(token);
        } else if (low < high && !core(text, low, high, out)) {
            return false;
        }
        for (auto tail = tails.rbegin(); tail != tails.rend(); ++tail)
            out.add(token_of(text.chars + tail->low, text.chars + tail->high));
        return true;
    }

    // `_head`: the length of the token to take from the start; 0 if there is none.
    template <class Char>
    Py_ssize_t head_of(const Text<Char>& text, Py_ssize_t low, Py_ssize_t high) {
        const Char *at = text.chars + low, *end = text.chars + high;
        if (properties_.of(*at) & HEAD) return 1;
        if (*at == '.' && at + 1 < end && at[1] == '.') {
            while (at < end && *at == '.') ++at;
            return at - (text.chars + low);
        }
        if (*at == '+') return at + 1 < end && is_digit(at[1]) ? 0 : 1;
        if (*at == 'U') return at + 2 < end && at[1] == 'S' && at[2] == '$' ? 3 : 0;
        if (*at == 'C' || *at == 'A') return at + 1 < end && at[1] == '$' ? 2 : 0;
        return 0;
    }

    // `_tail`: the length of the token to take from the end; 0 if there is none, -1 if Python has to say.
    template <class Char>
    Py_ssize_t tail_of(const Text<Char>& text, Py_ssize_t low, Py_ssize_t high) {
        const Char* end = text.chars + high;
        const Py_ssize_t size = high - low;
        const uint32_t last = end[-1], before = size > 1 ? end[-2] : 0;
        const uint32_t kind = properties_.of(last);
        if (kind & TAIL) return last == 0x2026 && size > 1 && before == 0x2026 ? 2 : 1;
        if (last == '.') {
            if (size < 2) return 0;
            if (before == '.') {
                Py_ssize_t points = 2;
                while (points < size && end[-points - 1] == '.') ++points;
                return points;
            }
            const uint32_t earlier_kind = properties_.of(before);
            if (earlier_kind & (STOP | LOWER)) return 1;
            if (!(earlier_kind & UPPER) || size < 3) return 0;
            return end[-3] == 0xB0 || properties_.of(end[-3]) & UPPER ? 1 : 0;
        }
        if ((last == 's' || last == 'S') && size > 1 && (before == '\'' || before == 0x2019)) return 2;
        if (kind & MEASURE_END) {
            for (Py_ssize_t back = 2; back <= std::min<Py_ssize_t>(size, 5); ++back)
                if (is_digit(end[-back])) return -1;
        }
        return 0;
    }

    // `_cut` of a string that is a single token; False for other strings.
    template <class Char>
    bool core(const Text<Char>& text, Py_ssize_t low, Py_ssize_t high, Columns& out) {
        const Char *start = text.chars + low, *end = text.chars + high;
        uint32_t all = ~0u;
        for (const Char* at = start; at < end; ++at) all &= properties_.of(*at);
        if (!(all & ALNUM) && !is_amount(start, end)) return false;
        out.add(token_of(start, end));
        return true;
    }

    static bool is_digit(uint32_t code) { return code >= '0' && code <= '9'; }

    // `_AMOUNT`: digits, with single points and commas between them.
    template <class Char>
    static bool is_amount(const Char* at, const Char* end) {
        bool digit = false;
        for (; at < end; ++at) {
            if (is_digit(*at)) {
                digit = true;
            } else if ((*at == '.' || *at == ',') && digit) {
                digit = false;
            } else {
                return false;
            }
        }
        return digit;
    }

    template <class Char>
    void ask(const Text<Char>& text, Py_ssize_t from, Py_ssize_t to, Columns& out) {
        std::u32string key(text.chars + from, text.chars + to);
        if (const auto* known = answers_.find(key)) {
            for (const Token& token : *known) out.add(token);
            return;
        }
        Owned piece(PyUnicode_Substring(text.object, from, to));
        Owned answer(PyObject_CallFunctionObjArgs(split_, piece.get(), nullptr));
        auto tokens = tokens_of(answer.get());
        for (const Token& token : tokens) out.add(token);
        const size_t weight = tokens.size() * (sizeof(Token) / sizeof(char32_t));
        answers_.add(std::move(key), std::move(tokens), weight);
    }

    Properties properties_;
    Dialect dialect_;
    PyObject* split_;
    Forms forms_;
    std::bitset<1 << 16> filter_;  // false for most pieces that are no form, so that few are looked up
    Py_ssize_t longest_ = 0;
    std::unordered_set<uint64_t> pairs_;
    Answers<std::vector<Token>> answers_;
};
