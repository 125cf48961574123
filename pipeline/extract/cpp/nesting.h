// The scan of nesting.py: how deep the elements of a page are nested, and how often formatting would be reopened.
#pragma once

#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "page_scan.h"

// Thrown when Python has set an exception.
struct PythonError {};

// What `KINDS` of nesting.py says of a name.
enum Kind : long { FLAT = 1, FORMATTING = 2, RAW = 4 };

// A tag as it is written, without `<`.
struct Tag {
    size_t element;  // the number of its name
    bool starts, nests, formats, is_raw;
};

// The tags of a page by their text; names are in lower case, as Python makes it.
class TagNames {
public:
    TagNames(PyObject* page, const Text& text, PyObject* kinds) : page_(page), text_(text), kinds_(kinds) {}

    const Tag& of(Py_ssize_t begin, Py_ssize_t end) {
        const auto width = static_cast<size_t>(text_.kind);
        const char* data = static_cast<const char*>(text_.data);
        const std::string_view written(data + static_cast<size_t>(begin) * width,
                                       static_cast<size_t>(end - begin) * width);
        const auto found = tags_.find(written);
        return found != tags_.end() ? found->second : tags_.emplace(written, read(begin, end)).first->second;
    }

    // A name by its number.
    const std::string& name(size_t element) const { return *names_[element]; }

private:
    Tag read(Py_ssize_t begin, Py_ssize_t end) {
        const bool starts = text_[begin] != '/';
        Ref written(PyUnicode_Substring(page_, begin + !starts, end));
        if (!written) throw PythonError();
        Ref lower(PyObject_CallMethod(written.get(), "lower", nullptr));
        if (!lower) throw PythonError();
        PyObject* kind = PyDict_GetItemWithError(kinds_, lower.get());
        const long bits = kind == nullptr ? 0 : PyLong_AsLong(kind);
        if (PyErr_Occurred()) throw PythonError();
        Ref bytes(PyUnicode_AsEncodedString(lower.get(), "utf-8", "surrogatepass"));
        if (!bytes) throw PythonError();
        const std::string name(PyBytes_AS_STRING(bytes.get()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.get())));
        const auto [place, is_new] = elements_.emplace(name, names_.size());
        if (is_new) names_.push_back(&place->first);
        return {place->second, starts, !(bits & FLAT), (bits & FORMATTING) != 0, starts && (bits & RAW) != 0};
    }

    PyObject* page_;
    const Text& text_;
    PyObject* kinds_;
    // Trees, since a page could have names of one hash.
    std::map<std::string_view, Tag> tags_;
    std::map<std::string, size_t> elements_;
    std::vector<const std::string*> names_;
};

// `_Hiding` of nesting.py: the ranges of a page in which a parser may see no tags.
class Hiding {
public:
    Hiding(const Text& text, Py_ssize_t factor) : text_(text), reader_(text), left_(factor * text.size) {}

    // The begin of the last range around a place, -1 without one.
    Py_ssize_t around(Py_ssize_t place) {
        while (!open_.empty() && open_.back().second <= place) open_.pop_back();
        return open_.empty() ? -1 : open_.back().first;
    }

    // Adds the range that begins with a match [place, after) and ends at a place.
    void add(Py_ssize_t place, Py_ssize_t after, Py_ssize_t end) {
        if (end > after) open_.emplace_back(place, end);
    }

    Py_ssize_t after_mark(const std::string& mark, Py_ssize_t place, bool in_script = false) {
        Py_ssize_t& end = ends_.emplace(std::make_pair(mark, in_script), -1).first->second;
        if (end < place) end = find(mark, place);
        return end;
    }

    // The end of a script or the like. In a script, its end tag is text in some comments.
    Py_ssize_t after_raw(const std::string& name, Py_ssize_t place) {
        Py_ssize_t end = after_mark("</" + name, place);
        while (name == "script") {
            const Py_ssize_t comment = after_mark("<!--", place, true);
            if (comment >= end) break;
            place = after_mark("-->", comment + 4, true);
            end = after_mark("</script", place, true);
        }
        return end;
    }

    Py_ssize_t after_attributes(Py_ssize_t place) {
        if (left_ < 0) return text_.size;  // Tags in attributes of each other would be read again and again.
        if (place >= text_.size || text_[place] == '>') return place;
        long long attributes;
        const Py_ssize_t end = reader_.read(place, attributes);
        left_ -= end - place;
        return end;
    }

private:
    bool has(const std::string& mark, Py_ssize_t place) const {
        for (size_t offset = 0; offset < mark.size(); offset++) {
            Py_UCS4 point = text_[place + static_cast<Py_ssize_t>(offset)];
            if (point >= 'A' && point <= 'Z') point |= 32;
            if (point != static_cast<unsigned char>(mark[offset])) return false;
        }
        return true;
    }

    Py_ssize_t find(const std::string& mark, Py_ssize_t place) const {
        const Py_ssize_t last = text_.size - static_cast<Py_ssize_t>(mark.size());
        for (; place <= last; place++)
            if (has(mark, place)) return place;
        return text_.size;
    }

    const Text& text_;
    TagReader reader_;
    Py_ssize_t left_;
    std::vector<std::pair<Py_ssize_t, Py_ssize_t>> open_;  // by begin; the last one is open
    std::map<std::pair<std::string, bool>, Py_ssize_t> ends_;
};

// The end of a match of `_MARKUP` that is no tag and begins at a `<`; `mark` becomes what ends it. 0: no match.
inline Py_ssize_t end_of_mark(const Text& text, Py_ssize_t place, std::string& mark) {
    const auto has = [&](std::string_view letters) {
        if (text.size - place < static_cast<Py_ssize_t>(letters.size())) return false;
        for (size_t offset = 0; offset < letters.size(); offset++)
            if (text[place + static_cast<Py_ssize_t>(offset)] != static_cast<unsigned char>(letters[offset]))
                return false;
        return true;
    };
    mark = ">";
    if (has("<!--")) {
        mark = "-->";
        return place + 4;
    }
    if (has("<![CDATA[")) {
        mark = "]]>";
        return place + 9;
    }
    return has("<!") || has("<?") || has("</") ? place + 2 : 0;
}

struct Nesting {
    long long depth = 0, formatting = 0, reopened = 0;
};

struct NestingLimits {
    long long depth, reopened;
};

// Returns the name of the limit that a page exceeds, or nullptr.
inline const char* scan_nesting(PyObject* page, const Text& text, PyObject* kinds, Py_ssize_t factor,
                                const NestingLimits& limits, Nesting& sums) {
    TagNames tags(page, text, kinds);
    Hiding hiding(text, factor);
    std::vector<std::vector<Py_ssize_t>> opened;
    std::string mark;
    Py_ssize_t after;
    for (Py_ssize_t place = next_tag(text, 0); place < text.size; place = next_tag(text, after)) {
        after = place + 1;
        if (after < text.size && text[after] == '/') after++;
        if (after == text.size || !is_ascii_letter(text[after])) {
            const Py_ssize_t end = end_of_mark(text, place, mark);
            after = end == 0 ? place + 1 : end;
            if (end == 0) continue;
            hiding.around(place);
            hiding.add(place, after, hiding.after_mark(mark, after));
            continue;
        }
        while (after < text.size && !ends_name(text[after])) after++;
        const Tag& tag = tags.of(place + 1, after);
        const Py_ssize_t begin = hiding.around(place);
        hiding.add(place, after,
                   tag.is_raw ? hiding.after_raw(tags.name(tag.element), after) : hiding.after_attributes(after));
        if (opened.size() <= tag.element) opened.resize(tag.element + 1);
        std::vector<Py_ssize_t>& places = opened[tag.element];
        if (!tag.starts) {
            if (places.empty() || places.back() <= begin) continue;
            places.pop_back();
            sums.depth--;
            sums.formatting -= tag.formats;
            continue;
        }
        if (tag.nests) {
            places.push_back(place);
            if (++sums.depth > limits.depth) return "too_deep";
        }
        if (tag.formats)
            sums.formatting++;
        else if ((sums.reopened += sums.formatting) > limits.reopened)
            return "unclosed_formatting";
    }
    return nullptr;
}

inline PyObject* nesting(PyObject*, PyObject* args) {
    PyObject *page, *kinds;
    Py_ssize_t factor;
    NestingLimits limits;
    if (!PyArg_ParseTuple(args, "UO!nLL", &page, &PyDict_Type, &kinds, &factor, &limits.depth, &limits.reopened))
        return nullptr;
    return guarded([&]() -> PyObject* {
        try {
            Nesting sums;
            const char* rule = scan_nesting(page, Text(page), kinds, factor, limits, sums);
            if (rule == nullptr) Py_RETURN_NONE;
            return Py_BuildValue("(sL)", rule, std::string_view(rule) == "too_deep" ? sums.depth : sums.reopened);
        } catch (const PythonError&) {
            return nullptr;
        }
    });
}

// The number of `<` in the bytes of a page, and of `</`.
inline PyObject* count_tags(PyObject*, PyObject* page) {
    if (!PyBytes_Check(page)) return PyErr_Format(PyExc_TypeError, "count_tags: expected bytes.");
    const char* bytes = PyBytes_AS_STRING(page);
    const Py_ssize_t size = PyBytes_GET_SIZE(page);
    Py_ssize_t tags = 0, ends = 0;
    for (Py_ssize_t place = 0; place < size; place++) {
        tags += bytes[place] == '<';
        // The bytes of an object of Python are followed by a zero.
        ends += bytes[place] == '<' && bytes[place + 1] == '/';
    }
    return Py_BuildValue("(nn)", tags, ends);
}
