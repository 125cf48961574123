// The terms of a set that a casefolded text has: words and phrases as `pipeline.text.term_words` splits texts, and
// sequences of characters anywhere in it.
#pragma once

#include <algorithm>
#include <bitset>
#include <unordered_map>

#include "word_set.h"

class TermSet {
public:
    // `phrases` has a list of words for each term, `anywhere` the sequences.
    TermSet(PyObject* phrases, PyObject* anywhere) {
        Owned terms(PySequence_Fast(phrases, "term set: expected a list, got another type. Pass lists of str."));
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(terms.get()); ++at) {
            const auto words = texts_of(PySequence_Fast_GET_ITEM(terms.get(), at));
            if (words.empty()) {
                PyErr_SetString(PyExc_ValueError, "term set: expected a word in each term, got none. Leave it out.");
                throw PythonError();
            }
            const uint64_t code = code_of(words.back().data(), words.back().data() + words.back().size());
            by_last_[code].push_back(phrases_.size());
            is_last_.set(filter_bit(code));
            longest_ = std::max(longest_, words.size());
            phrases_.push_back(words);
        }
        for (const auto& sequence : texts_of(anywhere)) {
            if (sequence.empty()) {
                PyErr_SetString(PyExc_ValueError, "term set: expected a character in each sequence, got none.");
                throw PythonError();
            }
            by_first_[sequence[0]].push_back(anywhere_.size());
            is_first_.set(sequence[0] & FILTER);
            anywhere_.push_back(sequence);
        }
    }

    // The numbers of the terms that a text has, in order; those of sequences follow those of phrases.
    std::vector<int64_t> find(PyObject* text) const {
        std::vector<int64_t> found;
        std::vector<bool> has(phrases_.size() + anywhere_.size());
        with_text(text, [&](const auto& view) {
            if (!phrases_.empty()) find_phrases(view, has);
            if (!anywhere_.empty()) find_anywhere(view, has);
        });
        for (size_t term = 0; term < has.size(); ++term)
            if (has[term]) found.push_back(static_cast<int64_t>(term));
        return found;
    }

private:
    static constexpr size_t FILTER = (1 << 14) - 1;
    static size_t filter_bit(uint64_t code) { return (code >> 40) & FILTER; }

    static std::vector<std::u32string> texts_of(PyObject* list) {
        Owned fast(PySequence_Fast(list, "term set: expected a list, got another type. Pass lists of str."));
        std::vector<std::u32string> texts;
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            PyObject* text = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!PyUnicode_Check(text)) {
                PyErr_SetString(PyExc_TypeError, "term set: expected str, got another type. Pass lists of str.");
                throw PythonError();
            }
            with_text(text, [&](const auto& view) { texts.emplace_back(view.chars, view.chars + view.size); });
        }
        return texts;
    }

    template <class Char>
    void find_phrases(const Text<Char>& view, std::vector<bool>& has) const {
        std::vector<std::pair<Py_ssize_t, Py_ssize_t>> last(longest_);  // the last words; a word is at its number modulo
        size_t number = 0;
        for (Py_ssize_t at = 0; at < view.size;) {
            if (separates(view.chars[at])) {
                ++at;
                continue;
            }
            uint64_t code = 0, power = 1;
            const Py_ssize_t start = at;
            const bool alone = is_symbol(view.chars[at]);
            do {
                code += view.chars[at] * power;
                power *= BASE;
            } while (++at < view.size && !alone && continues(view.chars[at]));
            last[number++ % longest_] = {start, at};
            if (!is_last_[filter_bit(code)]) continue;
            const auto hit = by_last_.find(code);
            if (hit == by_last_.end()) continue;
            for (const size_t term : hit->second)
                if (!has[term]) has[term] = ends_with(view, last, number, phrases_[term]);
        }
    }

    template <class Char, class Last>
    static bool ends_with(const Text<Char>& view, const Last& last, size_t number, const std::vector<std::u32string>& words) {
        if (words.size() > number) return false;
        for (size_t back = 1; back <= words.size(); ++back) {
            const auto [start, end] = last[(number - back) % last.size()];
            const auto& word = words[words.size() - back];
            if (!std::equal(view.chars + start, view.chars + end, word.begin(), word.end(), same<Char>)) return false;
        }
        return true;
    }

    template <class Char>
    void find_anywhere(const Text<Char>& view, std::vector<bool>& has) const {
        for (Py_ssize_t at = 0; at < view.size; ++at) {
            if (!is_first_[view.chars[at] & FILTER]) continue;
            const auto hit = by_first_.find(view.chars[at]);
            if (hit == by_first_.end()) continue;
            for (const size_t term : hit->second) {
                const auto& sequence = anywhere_[term];
                if (!has[phrases_.size() + term] && static_cast<size_t>(view.size - at) >= sequence.size())
                    has[phrases_.size() + term] =
                        std::equal(sequence.begin(), sequence.end(), view.chars + at, same_as<Char>);
            }
        }
    }

    template <class Char>
    static bool same(Char of_text, char32_t of_term) { return of_text == of_term; }
    template <class Char>
    static bool same_as(char32_t of_term, Char of_text) { return of_text == of_term; }

    std::vector<std::vector<std::u32string>> phrases_;
    std::vector<std::u32string> anywhere_;
    std::unordered_map<uint64_t, std::vector<size_t>> by_last_;
    std::unordered_map<char32_t, std::vector<size_t>> by_first_;
    std::bitset<FILTER + 1> is_last_, is_first_;
    size_t longest_ = 1;
};
