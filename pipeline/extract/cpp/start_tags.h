// What the start tags of a page say, as `read_tags_in_python` of tags.py reads them.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "python.h"

struct TagTables {
    std::unordered_map<std::string, long> elements, roles;
    std::vector<long> marks;  // by element, the last one for elements that are no containers
    std::unordered_set<std::string> comments, properties;
    long comment_bit, hidden_bit, property_bit, body_property_bit, scope_bit;
};

constexpr const char* TAG_TABLES = "pipeline.extract._native.TagTables";

inline bool add_string(PyObject* key, std::string& name) {
    Py_ssize_t size;
    const char* text = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &size) : nullptr;
    if (text == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected a str in each table.");
        return false;
    }
    name.assign(text, static_cast<size_t>(size));
    return true;
}

inline bool fill(std::unordered_map<std::string, long>& table, PyObject* values) {
    PyObject *key, *value;
    std::string name;
    for (Py_ssize_t place = 0; PyDict_Next(values, &place, &key, &value);) {
        if (!add_string(key, name)) return false;
        const long number = PyLong_AsLong(value);
        if (number == -1 && PyErr_Occurred()) return false;
        table[name] = number;
    }
    return true;
}

inline bool fill(std::unordered_set<std::string>& table, PyObject* values) {
    Ref iterator(PyObject_GetIter(values));
    if (!iterator) return false;
    std::string name;
    while (PyObject* key = PyIter_Next(iterator.get())) {
        Ref owned(key);
        if (!add_string(key, name)) return false;
        table.insert(name);
    }
    return !PyErr_Occurred();
}

inline PyObject* tag_tables(PyObject*, PyObject* args) {
    PyObject *elements, *roles, *marks, *comments, *properties;
    long bits[5];
    if (!PyArg_ParseTuple(args, "O!O!O!OO(lllll)", &PyDict_Type, &elements, &PyDict_Type, &roles, &PyList_Type, &marks,
                          &comments, &properties, &bits[0], &bits[1], &bits[2], &bits[3], &bits[4]))
        return nullptr;
    return guarded([&]() -> PyObject* {
        auto tables = std::make_unique<TagTables>();
        if (!fill(tables->elements, elements) || !fill(tables->roles, roles) || !fill(tables->comments, comments) ||
            !fill(tables->properties, properties))
            return nullptr;
        for (Py_ssize_t number = 0; number < PyList_GET_SIZE(marks); number++) {
            tables->marks.push_back(PyLong_AsLong(PyList_GET_ITEM(marks, number)));
            if (PyErr_Occurred()) return nullptr;
        }
        tables->comment_bit = bits[0], tables->hidden_bit = bits[1], tables->property_bit = bits[2];
        tables->body_property_bit = bits[3], tables->scope_bit = bits[4];
        for (const auto& [name, number] : tables->elements)
            if (number < 0 || number + 1 >= static_cast<long>(tables->marks.size())) {
                PyErr_SetString(PyExc_ValueError, "tag_tables: expected marks for each element and one more.");
                return nullptr;
            }
        PyObject* capsule = PyCapsule_New(tables.get(), TAG_TABLES, destroy<TagTables>);
        if (capsule != nullptr) tables.release();
        return capsule;
    });
}

inline bool is_small(char byte) { return byte >= 'a' && byte <= 'z'; }
inline bool is_capital(char byte) { return byte >= 'A' && byte <= 'Z'; }
inline char small(char byte) { return is_capital(byte) ? static_cast<char>(byte + 32) : byte; }

// Appends the words of a class or id in lower case, as `name_words` of tags.py.
inline void add_name_words(Bytes value, std::vector<std::string>& words) {
    const size_t size = value.size();
    for (size_t place = 0; place < size;) {
        size_t end = place;
        if (is_small(value[place])) {
            while (end < size && is_small(value[end])) end++;
            if (end - place < 2) {
                place = end;
                continue;
            }
        } else if (is_capital(value[place])) {
            while (end < size && is_capital(value[end])) end++;
            const bool has_small = end < size && is_small(value[end]);
            if (end - place == 1 && has_small) {
                while (end < size && is_small(value[end])) end++;
            } else {
                end -= has_small;  // The last capital begins the next word.
                if (end - place < 2) {
                    place++;
                    continue;
                }
            }
        } else {
            place++;
            continue;
        }
        std::string word(value.substr(place, end - place));
        std::transform(word.begin(), word.end(), word.begin(), small);
        words.push_back(std::move(word));
        place = end;
    }
}

inline Bytes value_of(Bytes source, Bytes start) {
    const size_t place = source.find(start);
    if (place == Bytes::npos) return {};
    const Bytes value = source.substr(place + start.size());
    return value.substr(0, value.find('"'));
}

constexpr Bytes ATTRIBUTES[] = {"role", "itemprop", "itemscope", "hidden", "aria-hidden", "style"};

inline bool is_word_byte(char byte) {
    return is_small(byte) || is_capital(byte) || (byte >= '0' && byte <= '9') || byte == '_';
}

// One of the ATTRIBUTES after a space at `place`; empty if there is none.
inline Bytes attribute_at(Bytes source, size_t place) {
    for (const Bytes name : ATTRIBUTES)
        if (source.compare(place + 1, name.size(), name) == 0) return name;
    return {};
}

inline bool is_marked(Bytes source) {
    for (size_t place = source.find(' '); place != Bytes::npos; place = source.find(' ', place + 1)) {
        const Bytes name = attribute_at(source, place);
        const size_t end = place + 1 + name.size();
        if (!name.empty() && (end >= source.size() || !is_word_byte(source[end]))) return true;
    }
    return false;
}

inline bool hides(Bytes value) {
    std::string plain(value);
    plain.erase(std::remove(plain.begin(), plain.end(), ' '), plain.end());
    return plain.find("display:none") != std::string::npos;
}

inline long marks_of(Bytes attribute, Bytes value, const TagTables& tables) {
    if (attribute == "role") {
        const auto found = tables.roles.find(std::string(value));
        return found == tables.roles.end() ? 0 : found->second;
    }
    if (attribute == "itemprop")
        return tables.property_bit | (tables.properties.count(std::string(value)) ? tables.body_property_bit : 0);
    if (attribute == "itemscope") return tables.scope_bit;
    const bool is_hidden = attribute == "hidden" || (attribute == "aria-hidden" && value == "true") ||
                           (attribute == "style" && hides(value));
    return is_hidden ? tables.hidden_bit : 0;
}

// `itemprop:` and the value in lower case, appended in UTF-8.
inline bool add_property(Bytes value, std::vector<std::string>& words) {
    std::string word = "itemprop:";
    if (std::all_of(value.begin(), value.end(), [](char byte) { return static_cast<signed char>(byte) >= 0; })) {
        std::transform(value.begin(), value.end(), std::back_inserter(word), small);
    } else {
        Ref text(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), "replace"));
        Ref lower(text ? PyObject_CallMethod(text.get(), "lower", nullptr) : nullptr);
        Ref bytes(lower ? PyUnicode_AsEncodedString(lower.get(), "utf-8", "surrogatepass") : nullptr);
        if (!bytes) return false;
        word.append(PyBytes_AS_STRING(bytes.get()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.get())));
    }
    words.push_back(std::move(word));
    return true;
}

// (element, marks, words) of a start tag without its brackets, as `read_tag` of tags.py.
inline PyObject* tag_of_source(Bytes source, const TagTables& tables) {
    const size_t space = source.find(' ');
    const auto found = tables.elements.find(std::string(source.substr(0, space)));
    const long element = found == tables.elements.end() ? -1 : found->second;
    long marks = element < 0 ? tables.marks.back() : tables.marks[static_cast<size_t>(element)];
    std::vector<std::string> words;
    if (space != Bytes::npos && space + 1 < source.size()) {
        add_name_words(value_of(source, " class=\""), words);
        add_name_words(value_of(source, " id=\""), words);
        for (const std::string& word : words)
            if (tables.comments.count(word)) marks |= tables.comment_bit;
        size_t place = is_marked(source) ? source.find(' ') : Bytes::npos;
        while (place != Bytes::npos) {
            const Bytes name = attribute_at(source, place);
            if (name.empty()) {
                place = source.find(' ', place + 1);
                continue;
            }
            place += 1 + name.size();
            Bytes value;
            if (source.compare(place, 2, "=\"") == 0) {
                const size_t quote = source.find('"', place + 2);
                if (quote != Bytes::npos) {
                    value = source.substr(place + 2, quote - place - 2);
                    place = quote + 1;
                }
            }
            marks |= marks_of(name, value, tables);
            if (name == "itemprop" && !add_property(value, words)) return nullptr;
            place = source.find(' ', place);
        }
    }
    Ref texts(PyTuple_New(static_cast<Py_ssize_t>(words.size())));
    if (!texts) return nullptr;
    for (size_t number = 0; number < words.size(); number++) {
        PyObject* word = decoded(words[number].data(), static_cast<Py_ssize_t>(words[number].size()));
        if (word == nullptr) return nullptr;
        PyTuple_SET_ITEM(texts.get(), static_cast<Py_ssize_t>(number), word);
    }
    return Py_BuildValue("(llN)", element, marks, texts.release());
}

inline PyObject* read_tags(PyObject*, PyObject* args) {
    PyObject* capsule;
    Py_buffer html, begins, ends, is_read;
    Py_ssize_t name_bytes;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*n", &capsule, &html, &begins, &ends, &is_read, &name_bytes)) return nullptr;
    PyObject* result = guarded([&]() -> PyObject* {
        const auto* tables = static_cast<const TagTables*>(PyCapsule_GetPointer(capsule, TAG_TABLES));
        if (tables == nullptr) return nullptr;
        if (begins.len != ends.len || begins.len != 8 * is_read.len) {
            PyErr_SetString(PyExc_ValueError, "read_tags: expected begins, ends and is_read of one length.");
            return nullptr;
        }
        const Bytes page(static_cast<const char*>(html.buf), static_cast<size_t>(html.len));
        const auto *first = static_cast<const int64_t*>(begins.buf), *last = static_cast<const int64_t*>(ends.buf);
        const auto* is_whole = static_cast<const char*>(is_read.buf);
        std::map<Bytes, int64_t> numbers;  // ordered: pages cannot choose names that collide
        std::vector<int64_t> tag_of;
        Ref tags(PyList_New(0));
        if (!tags) return nullptr;
        for (Py_ssize_t number = 0; number < is_read.len; number++) {
            // As a slice of Python does, for positions at or after the end of a page that is cut.
            const auto begin = std::min(static_cast<size_t>(std::max<int64_t>(first[number], 0)), page.size());
            const auto end = is_whole[number] ? static_cast<size_t>(std::max<int64_t>(last[number], 0))
                                              : begin + static_cast<size_t>(name_bytes);
            Bytes source = page.substr(begin, end > begin ? end - begin : 0);
            if (!is_whole[number]) source = source.substr(0, source.find_first_of(" >"));
            const auto [entry, is_new] = numbers.try_emplace(source, static_cast<int64_t>(numbers.size()));
            tag_of.push_back(entry->second);
            if (!is_new) continue;
            Ref tag(tag_of_source(source, *tables));
            if (!tag || PyList_Append(tags.get(), tag.get()) < 0) return nullptr;
        }
        return Py_BuildValue("(NN)", tags.release(), as_bytearray(tag_of));
    });
    PyBuffer_Release(&html);
    PyBuffer_Release(&begins);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&is_read);
    return result;
}
