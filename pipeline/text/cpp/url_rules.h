// The lists and words that an address has, as `pipeline.urls.rules.PythonMatcher` finds them.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "blake2s.h"
#include "characters.h"

class UrlRules {
public:
    struct Hits {
        uint64_t mask = 0;
        long long banned = 0, soft = 0, subwords = 0;
    };

    UrlRules(PyObject* keys, PyObject* masks, PyObject* starts, int shift, Py_ssize_t longest)
        : keys_(keys), masks_(masks), starts_(starts), shift_(shift), longest_(static_cast<size_t>(longest)) {
        const size_t ranges = shift > 0 && shift < 64 ? size_t(1) << (64 - shift) : 0;
        const size_t count = keys_.size / 8;
        const auto* start = static_cast<const uint32_t*>(starts_.data);
        bool fits = ranges && masks_.size == keys_.size && starts_.size == 4 * (ranges + 1) && start[ranges] == count;
        for (size_t at = 0; fits && at < ranges; ++at) fits = start[at] <= start[at + 1];
        if (!fits || longest < 0) {
            PyErr_SetString(PyExc_ValueError, "URL rules: expected arrays of one table, got others. Pass a UrlTable.");
            throw PythonError();
        }
    }

    void add(PyObject* words, int flag) {
        read(words, [&](std::string_view word) {
            Word& entry = words_[std::string(word)];
            entry.flags |= flag;
            longest_word_ = std::max(longest_word_, word.size());
        });
    }

    void add_subwords(PyObject* words) {
        read(words, [&](std::string_view word) {
            if (word.size() < 2) {
                PyErr_SetString(PyExc_ValueError, "URL rules: expected sequences of 2 bytes or more. Pass longer ones.");
                throw PythonError();
            }
            if (by_pair_.empty()) by_pair_.resize(1 << 16);
            by_pair_[pair_at(word.data())].push_back(subwords_.size());
            subwords_.push_back({std::string(word), 0});
        });
    }

    Hits match(std::string_view host, std::string_view path) {
        ++calls_;
        Hits hits;
        const std::string address = std::string(host).append(path);
        if (keys_.size) {
            domains(host, hits);
            prefixes(site_of(host), path, hits);
        }
        if (words_.empty() && subwords_.empty()) return hits;
        std::string joined;
        for (size_t at = 0; at < address.size(); ++at) {
            const size_t start = at;
            while (at < address.size() && is_word(address[at])) ++at;
            if (at == start) continue;
            const std::string_view word(address.data() + start, at - start);
            if (!subwords_.empty()) joined.append(word);
            if (word.size() > longest_word_) continue;
            const auto entry = words_.find(std::string(word));
            if (entry == words_.end() || entry->second.call == calls_) continue;
            entry->second.call = calls_;
            hits.banned += entry->second.flags & 1;
            hits.soft += entry->second.flags >> 1;
        }
        for (size_t at = 0; !subwords_.empty() && at + 1 < joined.size(); ++at)
            for (const size_t number : by_pair_[pair_at(joined.data() + at)]) {
                Subword& part = subwords_[number];
                if (part.call == calls_ || joined.compare(at, part.text.size(), part.text) != 0) continue;
                part.call = calls_;
                ++hits.subwords;
            }
        return hits;
    }

private:
    // A view of the bytes of an array, kept as long as the rules.
    struct Kept {
        explicit Kept(PyObject* object) {
            if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0) throw PythonError();
            data = buffer.buf;
            size = static_cast<size_t>(buffer.len);
        }
        ~Kept() { PyBuffer_Release(&buffer); }
        Kept(const Kept&) = delete;
        Kept& operator=(const Kept&) = delete;
        Py_buffer buffer;
        const void* data;
        size_t size;
    };
    struct Word {
        int flags = 0;
        uint64_t call = 0;  // the last call that counted it
    };
    struct Subword {
        std::string text;
        uint64_t call;
    };
    static constexpr size_t MAX_DOMAIN_BYTES = 253;

    template <class Add>
    static void read(PyObject* words, Add add) {
        Owned fast(PySequence_Fast(words, "URL rules: expected a list, got another type. Pass a list of bytes."));
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            char* data;
            Py_ssize_t size;
            if (PyBytes_AsStringAndSize(PySequence_Fast_GET_ITEM(fast.get(), at), &data, &size) < 0) throw PythonError();
            add(std::string_view(data, static_cast<size_t>(size)));
        }
    }

    static bool is_word(char byte) {
        const auto code = static_cast<unsigned char>(byte);
        return code >= 0x80 || (code >= '0' && code <= '9') || (code >= 'a' && code <= 'z');
    }

    static bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

    static size_t pair_at(const char* at) {
        return size_t(static_cast<unsigned char>(at[0])) << 8 | static_cast<unsigned char>(at[1]);
    }

    uint64_t mask_of(const char* data, size_t length) const {
        const uint64_t key = blake2s::key(reinterpret_cast<const uint8_t*>(data), length);
        const auto* keys = static_cast<const uint64_t*>(keys_.data);
        const auto* starts = static_cast<const uint32_t*>(starts_.data) + (key >> shift_);
        const auto* place = std::lower_bound(keys + starts[0], keys + starts[1], key);
        return place != keys + starts[1] && *place == key ? static_cast<const uint64_t*>(masks_.data)[place - keys] : 0;
    }

    // The host and its parent domains; an IP address has no parents.
    void domains(std::string_view host, Hits& hits) const {
        const size_t dot = host.rfind('.');
        const std::string_view last = host.substr(dot == host.npos ? 0 : dot + 1);
        const bool is_number = !last.empty() && std::all_of(last.begin(), last.end(), is_digit);
        if (is_number || (!host.empty() && host[0] == '[')) {
            if (host.size() <= MAX_DOMAIN_BYTES) hits.mask |= mask_of(host.data(), host.size());
            return;
        }
        size_t end = host.size();
        while (end > 0) {
            const size_t at = host.substr(0, end).rfind('.');
            const size_t start = at == host.npos ? 0 : at + 1;
            if (host.size() - start > MAX_DOMAIN_BYTES) return;
            hits.mask |= mask_of(host.data() + start, host.size() - start);
            end = at == host.npos ? 0 : at;
        }
    }

    // The prefixes of host and path that end before `/`, `?` or `&`, or at the end.
    void prefixes(std::string_view site, std::string_view path, Hits& hits) const {
        if (longest_ <= site.size()) return;
        const std::string address = std::string(site).append(path.substr(0, std::min(path.size(), longest_ + 1)));
        const size_t length = site.size() + path.size();
        for (size_t end = site.size() + 1; end <= std::min(length, longest_); ++end)
            if (end == length || address[end] == '/' || address[end] == '?' || address[end] == '&')
                hits.mask |= mask_of(address.data(), end);
    }

    // The host without `www.`, `www2.` and the like, if a domain of two labels or more remains.
    static std::string_view site_of(std::string_view host) {
        while (host.substr(0, 3) == "www") {
            size_t at = 3;
            while (at < host.size() && at < 5 && is_digit(host[at])) ++at;
            if (at >= host.size() || host[at] != '.') break;
            const std::string_view rest = host.substr(at + 1);
            const size_t dot = rest.find('.');
            if (dot == rest.npos || dot == 0) break;
            host = rest;
        }
        return host;
    }

    const Kept keys_, masks_, starts_;
    const int shift_;
    const size_t longest_;
    uint64_t calls_ = 0;
    std::unordered_map<std::string, Word> words_;
    size_t longest_word_ = 0;
    std::vector<Subword> subwords_;
    std::vector<std::vector<size_t>> by_pair_;
};
