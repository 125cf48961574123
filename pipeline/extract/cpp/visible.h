// The text between the tags of a page, as `text_between_tags` of pipeline/language.py returns it.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "page_scan.h"
#include "python.h"

// `_HIDDEN` of pipeline/language.py: elements whose content is left out.
constexpr std::string_view HIDDEN[] = {"head",  "noscript", "script",   "select", "style",
                                       "svg",   "template", "textarea", "title"};
constexpr size_t HIDDEN_LETTERS = 8;  // of the longest name

// A reader of one page, which writes its characters as they are stored: one, two or four bytes each.
template <typename Unit>
class VisibleText {
public:
    VisibleText(const Unit* page, Py_ssize_t size) : page_(page), size_(size) {}

    // The text, with one space for each run of white space and tags, and none at its ends.
    std::vector<Unit> read() {
        out_.reserve(static_cast<size_t>(size_) / 4);
        Py_ssize_t place = 0;
        while (place < size_) {
            const Py_ssize_t tag = find('<', place);
            add(place, tag);
            if (tag == size_) break;
            const Py_ssize_t after = after_tag(tag);
            if (after == tag) {
                append('<');
                place = tag + 1;
            } else {
                is_apart_ = true;
                place = after;
            }
        }
        return std::move(out_);
    }

private:
    Py_UCS4 at(Py_ssize_t place) const { return place < size_ ? static_cast<Py_UCS4>(page_[place]) : 0; }

    Py_ssize_t find(char point, Py_ssize_t place) const {
        if constexpr (sizeof(Unit) == 1) {
            const void* found =
                place < size_ ? std::memchr(page_ + place, point, static_cast<size_t>(size_ - place)) : nullptr;
            return found == nullptr ? size_ : static_cast<const Unit*>(found) - page_;
        }
        while (place < size_ && page_[place] != static_cast<Unit>(point)) place++;
        return place < size_ ? place : size_;
    }

    void append(Unit point) {
        if (is_apart_ && !out_.empty()) out_.push_back(' ');
        is_apart_ = false;
        out_.push_back(point);
    }

    void add(Py_ssize_t place, Py_ssize_t end) {
        for (; place < end; place++) {
            if (is_space(static_cast<Py_UCS4>(page_[place])))
                is_apart_ = true;
            else
                append(page_[place]);
        }
    }

    static bool is_in_name(Py_UCS4 point) {
        return is_ascii_letter(point) || (point >= '0' && point <= '9') || point == '-';
    }

    // The place after the bracket that ends a tag.
    Py_ssize_t after_bracket(Py_ssize_t place) const {
        const Py_ssize_t end = find('>', place);
        return end == size_ ? size_ : end + 1;
    }

    // The place after the tag, comment or hidden element that begins at a bracket; the bracket's, if none begins there.
    Py_ssize_t after_tag(Py_ssize_t tag) const {
        const Py_UCS4 first = at(tag + 1);
        if (first == '!' && at(tag + 2) == '-' && at(tag + 3) == '-') return after_comment(tag + 4);
        if (first == '!' || first == '?') return after_bracket(tag + 2);
        if (first == '/') return is_ascii_letter(at(tag + 2)) ? after_bracket(tag + 3) : tag;
        if (!is_ascii_letter(first)) return tag;
        const std::string name = name_at(tag + 1);
        for (const std::string_view hidden : HIDDEN)
            if (name == hidden) return after_element(tag + 1 + static_cast<Py_ssize_t>(name.size()), name);
        return after_bracket(tag + 2);
    }

    Py_ssize_t after_comment(Py_ssize_t place) const {
        for (place = find('-', place); place < size_; place = find('-', place + 1))
            if (at(place + 1) == '-' && at(place + 2) == '>') return place + 3;
        return size_;
    }

    // A name in lower case; longer ones than those of hidden elements are cut.
    std::string name_at(Py_ssize_t place) const {
        std::string name;
        while (is_in_name(at(place)) && name.size() <= HIDDEN_LETTERS)
            name += static_cast<char>(is_ascii_letter(at(place)) ? at(place) | 32 : at(place)), place++;
        return name;
    }

    Py_ssize_t after_element(Py_ssize_t place, const std::string& name) const {
        for (place = find('<', place); place < size_; place = find('<', place + 1))
            if (at(place + 1) == '/' && name_at(place + 2) == name)
                return after_bracket(place + 2 + static_cast<Py_ssize_t>(name.size()));
        return size_;
    }

    const Unit* page_;
    Py_ssize_t size_;
    std::vector<Unit> out_;
    bool is_apart_ = false;
};

template <typename Unit>
inline PyObject* visible_text_of(const Text& page) {
    const std::vector<Unit> text = VisibleText<Unit>(static_cast<const Unit*>(page.data), page.size).read();
    return PyUnicode_FromKindAndData(page.kind, text.data(), static_cast<Py_ssize_t>(text.size()));
}

inline PyObject* text_between_tags(PyObject*, PyObject* page) {
    if (!PyUnicode_Check(page)) return PyErr_Format(PyExc_TypeError, "text_between_tags: expected a str.");
    return guarded([&]() -> PyObject* {
        const Text text(page);
        if (text.kind == PyUnicode_1BYTE_KIND) return visible_text_of<Py_UCS1>(text);
        if (text.kind == PyUnicode_2BYTE_KIND) return visible_text_of<Py_UCS2>(text);
        return visible_text_of<Py_UCS4>(text);
    });
}
