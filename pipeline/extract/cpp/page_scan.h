// What the limits of page_limits.py and nesting.py count in the text of a page before it is parsed.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>
#include <vector>

#include "python.h"

// The sums that `_with_few_attributes` of page_limits.py compares with its limit.
struct AttributeWork {
    long long long_tags = 0;
    long long html = 0, body = 0;
};

inline bool is_space(Py_UCS4 point) { return Py_UNICODE_ISSPACE(point); }
inline bool is_html_space(Py_UCS4 point) {
    return point == ' ' || point == '\n' || point == '\t' || point == '\r' || point == '\f';
}
inline bool is_ascii_letter(Py_UCS4 point) { return (point | 32) >= 'a' && (point | 32) <= 'z' && point < 128; }
inline bool ends_name(Py_UCS4 point) { return is_html_space(point) || point == '/' || point == '>'; }

// The place of the next `<` from a place on; the size of the text without one.
inline Py_ssize_t next_tag(const Text& text, Py_ssize_t place) {
    if (text.kind == PyUnicode_1BYTE_KIND) {
        const char* start = static_cast<const char*>(text.data);
        const void* found =
            place < text.size ? std::memchr(start + place, '<', static_cast<size_t>(text.size - place)) : nullptr;
        return found == nullptr ? text.size : static_cast<const char*>(found) - start;
    }
    while (place < text.size && text[place] != '<') place++;
    return place;
}

// A reader of the patterns of page_limits.py, which never backtrack, at places of a text.
class TagReader {
public:
    explicit TagReader(const Text& text) : text_(text) {}

    // `_PLAIN_TAG`: whether a tag whose name begins at `place` is written as most are.
    bool is_plain(Py_ssize_t place) const {
        if (has_root_name(place) || !is_ascii_letter(at(place))) return false;
        place++;
        while ((at(place) >= 'a' && at(place) <= 'z') || (at(place) >= '0' && at(place) <= '9')) place++;
        for (int number = 0; number < 50 && at(place) == ' '; number++) {
            Py_ssize_t name = place + 1;
            while ((at(name) >= 'a' && at(name) <= 'z') || at(name) == '-') name++;
            if (name == place + 1 || at(name) != '=' || at(name + 1) != '"') break;
            const Py_ssize_t quote = find('"', name + 2);
            if (quote < 0) break;
            place = quote + 1;
        }
        if (at(place) == ' ') place++;
        if (at(place) == '/') place++;
        return at(place) == '>';
    }

    // Reads the attributes of a tag whose name begins at `place`; returns the place after it.
    Py_ssize_t read(Py_ssize_t place, long long& attributes) const {
        while (place < text_.size && !ends_name(text_[place])) place++;
        for (attributes = 0; place < text_.size && text_[place] != '>';) {
            if (ends_name(text_[place])) {
                place++;
                continue;
            }
            attributes++;
            place++;
            while (place < text_.size && !ends_name(text_[place]) && text_[place] != '=') place++;
            place = after_value(place);
        }
        return place;
    }

private:
    Py_UCS4 at(Py_ssize_t place) const { return place < text_.size ? text_[place] : 0; }

    Py_ssize_t find(Py_UCS4 point, Py_ssize_t place) const {
        while (place < text_.size && text_[place] != point) place++;
        return place < text_.size ? place : -1;
    }

    // `(?![hH]tml|[bB]ody)` stands before names of plain tags.
    bool has_root_name(Py_ssize_t place) const {
        const auto rest = [&](const char* letters) {
            return at(place + 1) == static_cast<Py_UCS4>(letters[0]) &&
                   at(place + 2) == static_cast<Py_UCS4>(letters[1]) &&
                   at(place + 3) == static_cast<Py_UCS4>(letters[2]);
        };
        const Py_UCS4 first = at(place) | 32;
        return (first == 'h' && rest("tml")) || (first == 'b' && rest("ody"));
    }

    // `_VALUE`: an equals sign and a value, or nothing, such as for a quote that is never closed.
    Py_ssize_t after_value(Py_ssize_t place) const {
        const Py_ssize_t start = place;
        while (place < text_.size && is_html_space(text_[place])) place++;
        if (at(place) != '=') return start;
        place++;
        while (place < text_.size && is_html_space(text_[place])) place++;
        if (at(place) == '"' || at(place) == '\'') {
            const Py_ssize_t quote = find(at(place), place + 1);
            return quote < 0 ? start : quote + 1;
        }
        while (place < text_.size && !is_html_space(text_[place]) && text_[place] != '>') place++;
        return place;
    }

    const Text& text_;
};

// Whether the five characters from a place on, in lower case, are the first ones of a root element.
inline bool begins(const Text& text, Py_ssize_t place, Py_ssize_t end, const char* root) {
    if (end - place < 5) return false;
    for (Py_ssize_t offset = 0; offset < 5; offset++)
        if (Py_UNICODE_TOLOWER(text[place + offset]) != static_cast<Py_UCS4>(root[offset])) return false;
    return true;
}

// A long tag, and the square of its number of attributes.
struct LongTag {
    Py_ssize_t start, end;
    long long work;
};

// The largest sum over tags that share no character, of tags in the order of their starts.
inline long long most_work(const std::vector<LongTag>& tags) {
    std::vector<long long> most(tags.size() + 1, 0);
    for (size_t at = tags.size(); at-- > 0;) {
        const auto next = std::lower_bound(tags.begin() + static_cast<ptrdiff_t>(at), tags.end(), tags[at].end,
                                           [](const LongTag& tag, Py_ssize_t end) { return tag.start < end; });
        most[at] = std::max(most[at + 1], tags[at].work + most[static_cast<size_t>(next - tags.begin())]);
    }
    return most[0];
}

inline AttributeWork attribute_work(const Text& text, Py_ssize_t long_tag, Py_ssize_t read_factor) {
    AttributeWork work;
    const TagReader reader(text);
    std::vector<LongTag> tags;
    const Py_ssize_t most_read = read_factor * text.size;
    Py_ssize_t size = 0;
    for (Py_ssize_t place = next_tag(text, 0); place + 1 < text.size; place = next_tag(text, place + 1)) {
        if (!is_ascii_letter(text[place + 1]) || reader.is_plain(place + 1)) continue;
        long long attributes;
        const Py_ssize_t end = reader.read(place + 1, attributes);
        if ((size += end - place) > most_read) {
            work.long_tags = std::numeric_limits<long long>::max();
            return work;
        }
        if (end - place > long_tag) tags.push_back({place, end, attributes * attributes});
        if (begins(text, place, end, "<html")) work.html += attributes;
        if (begins(text, place, end, "<body")) work.body += attributes;
    }
    work.long_tags = most_work(tags);
    return work;
}

inline PyObject* count_attributes(PyObject*, PyObject* args) {
    PyObject* page;
    Py_ssize_t long_tag, read_factor;
    if (!PyArg_ParseTuple(args, "Unn", &page, &long_tag, &read_factor)) return nullptr;
    return guarded([&]() -> PyObject* {
        const AttributeWork work = attribute_work(Text(page), long_tag, read_factor);
        return Py_BuildValue("(LLL)", work.long_tags, work.html, work.body);
    });
}

// The letter that a pattern without regard to case takes a character for.
inline Py_UCS4 folded(Py_UCS4 point) {
    if (point == 0x17F) return 's';
    return point == 0x131 ? 'i' : Py_UNICODE_TOLOWER(point);
}

// `_FORMATTING_START` of nesting.py: the number of start tags of formatting elements.
inline PyObject* count_formatting(PyObject*, PyObject* page) {
    if (!PyUnicode_Check(page)) return PyErr_Format(PyExc_TypeError, "count_formatting: expected a str.");
    constexpr std::string_view NAMES[] = {"b", "big",   "code",   "em",     "font", "i",
                                          "s", "small", "strike", "strong", "tt",   "u"};
    const Text text(page);
    long long count = 0;
    char name[7];
    for (Py_ssize_t place = next_tag(text, 0); place < text.size; place = next_tag(text, place + 1)) {
        size_t size = 0;
        Py_ssize_t end = place + 1;
        for (; end < text.size && size < sizeof name && !ends_name(text[end]); end++) {
            const Py_UCS4 letter = folded(text[end]);
            name[size++] = letter < 128 ? static_cast<char>(letter) : '?';
        }
        if (end == text.size || !ends_name(text[end])) continue;
        count += std::find(std::begin(NAMES), std::end(NAMES), std::string_view(name, size)) != std::end(NAMES);
    }
    return PyLong_FromLongLong(count);
}
