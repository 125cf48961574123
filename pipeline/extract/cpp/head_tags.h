// The meta tags of the head of a page that may declare a mark of rights, as `head_tags_in_python` of
// pipeline/rights/marks.py finds them.
#pragma once

#include <algorithm>

#include "python.h"

// A reader of the bytes of a page up to a limit, which behaves as searches with an end in Python do.
class HeadReader {
public:
    HeadReader(Bytes page, size_t most, size_t most_of_tag)
        : page_(page), head_(page.substr(0, most)), most_of_tag_(most_of_tag) {}

    // Calls `on_meta(attributes)` for each meta tag, for at most `tags` tags, comments and raw texts.
    template <class OnMeta>
    void each_meta(Py_ssize_t tags, OnMeta on_meta) const {
        size_t place = 0;
        while (tags > 0) {
            place = head_.find('<', place);
            if (place == Bytes::npos) return;
            const Bytes rest = head_.substr(++place);
            if (has_name(rest, "/head") || has_name(rest, "body")) return;
            if (begins(rest, "meta") && rest.size() > 4 && (is_blank(rest[4]) || rest[4] == '/')) {
                const size_t start = place + 5;
                place = tag_end(start);
                on_meta(page_.substr(start, std::min(place, page_.size()) - start));
            } else if (begins(rest, "!--")) {
                place = head_.find("-->", place + 1);
            } else if (has_name(rest, "script") || has_name(rest, "style") || has_name(rest, "title")) {
                const size_t size = (rest[0] | 32) == 's' && (rest[1] | 32) == 'c' ? 6 : 5;
                place = after_end_tag(place + size, rest.substr(0, size));
            } else {
                continue;
            }
            if (place == Bytes::npos) return;  // a comment or script without an end
            tags--;
        }
    }

private:
    static bool is_blank(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }
    static char lower(char byte) { return byte >= 'A' && byte <= 'Z' ? static_cast<char>(byte + 32) : byte; }
    static bool begins(Bytes text, Bytes name) {
        if (text.size() < name.size()) return false;
        for (size_t at = 0; at < name.size(); at++)
            if (lower(text[at]) != lower(name[at])) return false;
        return true;
    }
    static bool has_name(Bytes text, Bytes name) {
        if (!begins(text, name)) return false;
        if (text.size() == name.size()) return true;
        const char next = lower(text[name.size()]);
        return !((next >= 'a' && next <= 'z') || (next >= '0' && next <= '9') || next == '_');
    }

    // The place after the name of the end tag of a raw text.
    size_t after_end_tag(size_t place, Bytes name) const {
        while ((place = head_.find("</", place)) != Bytes::npos) {
            place += 2;
            if (begins(head_.substr(place), name)) return place + name.size();
        }
        return Bytes::npos;
    }

    // The place after the bracket that ends the tag whose attributes begin at `start`.
    size_t tag_end(size_t start) const {
        const Bytes tag = page_.substr(start, most_of_tag_);
        const size_t end = tag.find('>');
        if (end == Bytes::npos) return start + most_of_tag_;
        const char before = page_[start + end - 1];
        const Bytes plain = tag.substr(0, end);
        const bool is_even = std::count(plain.begin(), plain.end(), '"') % 2 == 0 &&
                             std::count(plain.begin(), plain.end(), '\'') % 2 == 0;
        if (before == '"' || before == '\'' || before == '/' || is_even) return start + end + 1;
        for (size_t at = 0; at < tag.size(); at++) {
            if (tag[at] == '>') return start + at + 1;
            if (tag[at] == '"' || tag[at] == '\'') at = tag.find(tag[at], at + 1);
            if (at == Bytes::npos) break;
        }
        return start + end + 1;
    }

    Bytes page_, head_;
    size_t most_of_tag_;
};

inline bool has_one(const std::string& text, PyObject* words) {
    for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(words); number++) {
        PyObject* word = PyTuple_GET_ITEM(words, number);
        if (text.find(PyBytes_AS_STRING(word), 0, static_cast<size_t>(PyBytes_GET_SIZE(word))) != std::string::npos)
            return true;
    }
    return false;
}

inline bool are_bytes(PyObject* words) {
    for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(words); number++)
        if (!PyBytes_Check(PyTuple_GET_ITEM(words, number))) {
            PyErr_SetString(PyExc_TypeError, "head_tags: expected tuples of bytes.");
            return false;
        }
    return true;
}

inline PyObject* head_tags(PyObject*, PyObject* args) {
    PyObject *page, *marks, *names;
    Py_ssize_t most, most_of_tag, tags;
    if (!PyArg_ParseTuple(args, "S(nnn)O!O!", &page, &most, &most_of_tag, &tags, &PyTuple_Type, &marks, &PyTuple_Type,
                          &names))
        return nullptr;
    if (!are_bytes(marks) || !are_bytes(names)) return nullptr;
    return guarded([&]() -> PyObject* {
        Ref found(PyList_New(0));
        if (!found) return nullptr;
        const Bytes source(PyBytes_AS_STRING(page), static_cast<size_t>(PyBytes_GET_SIZE(page)));
        bool has_failed = false;
        HeadReader(source, static_cast<size_t>(most), static_cast<size_t>(most_of_tag)).each_meta(tags, [&](Bytes tag) {
            std::string lower(tag);
            for (char& byte : lower)
                if (byte >= 'A' && byte <= 'Z') byte = static_cast<char>(byte + 32);
            if (!has_one(lower, marks) || !has_one(lower, names)) return;
            Ref copy(PyBytes_FromStringAndSize(tag.data(), static_cast<Py_ssize_t>(tag.size())));
            has_failed = has_failed || !copy || PyList_Append(found.get(), copy.get()) < 0;
        });
        return has_failed ? nullptr : found.release();
    });
}
