// Sums of the weights of hashed character n-grams, sentence by sentence, as `pipeline.toxicity.model` defines them.
#pragma once

#include <vector>

#include "characters.h"

class NgramSums {
public:
    // `weights` are the bytes of signed 8-bit numbers, `labels` for each bucket; the number of buckets is a power of 2.
    NgramSums(PyObject* properties, PyObject* weights, int labels, int max_n)
        : properties_(properties), weights_(weights), labels_(labels), max_n_(max_n) {
        if (!PyBytes_Check(weights) || labels < 1 || max_n < 1 || PyBytes_GET_SIZE(weights) / 2 < labels) {
            PyErr_SetString(PyExc_ValueError, "n-gram sums: expected weights of two buckets or more, got fewer. Pass bytes.");
            throw PythonError();
        }
        size_t buckets = static_cast<size_t>(PyBytes_GET_SIZE(weights)) / labels;
        for (; buckets > 1; buckets >>= 1) ++bits_;
        Py_INCREF(weights_);
    }
    ~NgramSums() { Py_DECREF(weights_); }
    NgramSums(const NgramSums&) = delete;
    NgramSums& operator=(const NgramSums&) = delete;

    // Appends the number of n-grams of a casefolded sentence to `counts`, and a sum for each label to `sums`.
    void add(PyObject* sentence, uint64_t seed, std::vector<int64_t>& counts, std::vector<int64_t>& sums) {
        with_text(sentence, [&](const auto& view) { normalize(view); });
        const auto* weights = reinterpret_cast<const int8_t*>(PyBytes_AS_STRING(weights_));
        const size_t base = sums.size(), size = points_.size();
        sums.resize(base + labels_, 0);
        int64_t count = 0;
        for (size_t start = 0; start < size; ++start) {
            uint64_t code = seed;
            const size_t end = std::min(size, start + max_n_);
            for (size_t at = start; at < end; ++at) {
                code = code * 0x9E3779B97F4A7C15ULL + points_[at];
                const int8_t* row = weights + (mixed(code) >> (64 - bits_)) * labels_;
                for (int label = 0; label < labels_; ++label) sums[base + label] += row[label];
            }
            count += static_cast<int64_t>(end - start);
        }
        counts.push_back(count);
    }

private:
    static uint64_t mixed(uint64_t code) {
        code = (code ^ (code >> 30)) * 0xBF58476D1CE4E5B9ULL;
        code = (code ^ (code >> 27)) * 0x94D049BB133111EBULL;
        return code ^ (code >> 31);
    }

    template <class View>
    void normalize(const View& view) {
        points_.assign(1, ' ');
        bool gap = false;
        for (Py_ssize_t at = 0; at < view.size;) {
            const Py_ssize_t address = address_end(view, at);
            if (address > at) {
                gap = true, at = address;
                continue;
            }
            uint32_t code = view.chars[at++];
            if (!is_alnum(code)) {
                gap = true;
                continue;
            }
            if (gap && points_.size() > 1) points_.push_back(' ');
            gap = false;
            const bool is_digit = code >= '0' && code <= '9';
            if (is_digit) code = '0';
            const size_t size = points_.size();
            if (!is_digit && size > 1 && points_[size - 1] == code && points_[size - 2] == code) continue;
            points_.push_back(code);
        }
        points_.push_back(' ');
    }

    bool is_alnum(uint32_t code) { return properties_.of(code) & ALNUM; }

    // Returns the end of the URL or name of a user that begins here, or `at` if none does.
    template <class View>
    Py_ssize_t address_end(const View& view, Py_ssize_t at) {
        const auto* chars = view.chars;
        if (chars[at] == '@') {
            if (at > 0 && (chars[at - 1] == '_' || is_alnum(chars[at - 1]))) return at;
            Py_ssize_t end = at + 1;
            while (end < view.size && end <= at + 50 && (chars[end] == '_' || is_alnum(chars[end]))) ++end;
            return end > at + 1 ? end : at;
        }
        if (chars[at] != 'h') return at;
        static const char* const starts[] = {"http://", "https://"};
        for (const char* start : starts) {
            Py_ssize_t end = at;
            while (*start && end < view.size && chars[end] == static_cast<unsigned char>(*start)) ++end, ++start;
            if (*start) continue;
            const Py_ssize_t path = end;
            while (end < view.size && end < path + 2000 && !(properties_.of(chars[end]) & SPACE)) ++end;
            if (end > path) return end;
        }
        return at;
    }

    Properties properties_;
    PyObject* weights_;
    int labels_, max_n_, bits_ = 0;
    std::vector<uint32_t> points_;
};
