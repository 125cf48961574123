// The tags of a page and the texts after them, as `read_markup_in_python` of blocks.py finds them.
#pragma once

#include <algorithm>
#include <cstring>

#include "python.h"

constexpr uint64_t LOW = 0x0101010101010101, HIGH = 0x8080808080808080;
constexpr uint64_t SPACES = 0x2020202020202020, BRACKETS = 0x3E3E3E3E3E3E3E3E;
constexpr int NAME_BYTES = 16;
constexpr int8_t NOTHING = 0, BREAK = 10, LEFT_OUT = 12;

// The numbers of tags.py by which it finds the effect of a name.
struct Names {
    const uint64_t* keys;
    const int8_t* effects;
    uint64_t mix, factor;
    int shift;
};

inline uint64_t before_end(uint64_t word) {
    const uint64_t spaces = word ^ SPACES, brackets = word ^ BRACKETS;
    const uint64_t ends = (((spaces - LOW) & ~spaces) | ((brackets - LOW) & ~brackets)) & HIGH;
    return ((ends & (~ends + 1)) >> 7) - 1;
}

inline uint64_t word_at(Bytes html, size_t place) {
    char bytes[8];
    std::memset(bytes, ' ', sizeof bytes);
    if (place < html.size()) std::memcpy(bytes, html.data() + place, std::min<size_t>(8, html.size() - place));
    uint64_t word = 0;
    for (int byte = 7; byte >= 0; byte--) word = word << 8 | static_cast<unsigned char>(bytes[byte]);
    return word;
}

inline int8_t effect_of(Bytes html, size_t start, const Names& names) {
    const uint64_t first = word_at(html, start + 1), mask = before_end(first);
    uint64_t second = 0;
    if (mask == ~uint64_t{0}) {
        second = word_at(html, start + 9);
        second &= before_end(second);
    }
    const uint64_t key = (first & mask) * names.mix + second;
    const size_t slot = static_cast<size_t>((key * names.factor) >> names.shift);
    return names.keys[slot] == key ? names.effects[slot] : NOTHING;
}

// The end of a tag as `_end_of_head` of blocks.py finds it, and the number of bytes that were read in vain.
struct Head {
    int64_t end, vain;
};

inline Head head_of(Bytes html, size_t start, int64_t close) {
    const size_t size = html.size();
    if (html.substr(std::min(start, size), 3) == "!--") return {close, 0};
    size_t place = start, reached = 0;
    while (place < size && html[place] != ' ' && html[place] != '>') place++;
    while (place < size && html[place] == ' ') {
        size_t name = place + 1;
        while (name < size && html[name] != ' ' && html[name] != '=' && html[name] != '>') name++;
        reached = name;
        if (name + 1 >= size || html[name] != '=' || html[name + 1] != '"') break;
        const size_t quote = html.find('"', name + 2);
        reached = quote == Bytes::npos ? size : quote + 1;
        if (quote == Bytes::npos) break;
        place = quote + 1;
    }
    if (place < size && html[place] == '>') return {static_cast<int64_t>(place), 0};
    return {close, static_cast<int64_t>(std::max(place, reached) - start)};
}

inline int64_t find(Bytes html, Bytes part, size_t start) {
    const size_t place = start > html.size() ? Bytes::npos : html.find(part, start);
    return place == Bytes::npos ? -1 : static_cast<int64_t>(place);
}

inline size_t count(Bytes html, Bytes part, size_t start, size_t end) {
    size_t number = 0;
    const Bytes within = html.substr(0, end);
    for (size_t place = start; (place = within.find(part, place)) != Bytes::npos; place += part.size()) number++;
    return number;
}

inline bool is_raw(Bytes name) {
    for (const char* raw : {"script", "style", "iframe", "textarea", "noembed", "noframes"})
        if (name == raw) return true;
    return false;
}

// The position of the end tag of an element whose start tag ends at `end`, which is -1 for the last byte.
inline size_t close_of(Bytes name, Bytes html, int64_t end) {
    const std::string closing = "</" + std::string(name) + ">", opening = "<" + std::string(name);
    size_t place = end >= 0 ? static_cast<size_t>(end) : html.size() - 1;
    for (int64_t open = 1;;) {
        const int64_t close = find(html, closing, place);
        if (close < 0) return html.size();
        if (!is_raw(name)) open += static_cast<int64_t>(count(html, opening, place, static_cast<size_t>(close)));
        if (--open == 0) return static_cast<size_t>(close);
        place = static_cast<size_t>(close) + 1;
    }
}

struct Tags {
    std::vector<int64_t> starts, ends, text_ends;
    std::vector<int8_t> effects;
};

inline size_t first_from(const std::vector<int64_t>& starts, int64_t place) {
    return static_cast<size_t>(std::lower_bound(starts.begin(), starts.end(), place) - starts.begin());
}

// The end of a special tag, and the range of tags that are left out with it, as `_corrected` of blocks.py.
struct Corrected {
    int64_t end;
    size_t begin, done;
};

inline Corrected corrected(const std::vector<int64_t>& starts, size_t number, Bytes html, bool is_left_out,
                           int64_t end) {
    const size_t start = static_cast<size_t>(starts[number]) + 1;
    if (html.substr(std::min(start, html.size()), 3) == "!--") {
        const int64_t close = find(html, "-->", start);
        end = close >= 0 ? close + 2 : static_cast<int64_t>(html.size());
    } else if (is_left_out) {
        const size_t last = end >= 0 ? static_cast<size_t>(end) : html.size() - 1;
        Bytes name = html.substr(std::min(start, html.size()), last > start ? last - start : 0);
        name = name.substr(0, name.find(' '));
        return {end, number, first_from(starts, static_cast<int64_t>(close_of(name, html, end)))};
    }
    return {end, number + 1, first_from(starts, end)};
}

inline Tags tags_of(Bytes html, const std::vector<int64_t>& starts, const Names& names, int64_t head_factor) {
    const size_t size = html.size(), num_tags = starts.size();
    std::vector<char> is_kept(num_tags, 1);
    std::vector<int64_t> ends(num_tags);
    std::vector<int8_t> effects(num_tags);
    size_t done = 0, close = 0;
    int64_t wasted = 0;
    const int64_t most_wasted = head_factor * static_cast<int64_t>(size);
    for (size_t number = 0; number < num_tags; number++) {
        // The bracket is looked for once, because an attribute may hold thousands of tags.
        const size_t start = static_cast<size_t>(starts[number]);
        if (close < start || number == 0) close = std::min(html.find('>', start), size);
        const int64_t end = static_cast<int64_t>(close);
        ends[number] = end;
        effects[number] = effect_of(html, start, names);
        if (number < done) continue;
        const bool is_left_out = effects[number] == LEFT_OUT;
        const int64_t next = number + 1 < num_tags ? starts[number + 1] : static_cast<int64_t>(size);
        bool is_special = is_left_out || next < end || (start + 1 < size && html[start + 1] == '!');
        if (!is_special) is_special = std::count(html.data() + start, html.data() + end, '"') & 1;
        if (!is_special) continue;
        Head head{close < size ? end : -1, 0};
        if (wasted <= most_wasted) head = head_of(html, start + 1, head.end);
        wasted += head.vain;
        const Corrected found = corrected(starts, number, html, is_left_out, head.end);
        ends[number] = found.end;
        done = found.done;
        for (size_t other = found.begin; other < found.done; other++) is_kept[other] = 0;
    }
    Tags tags;
    for (size_t number = 0; number < num_tags; number++) {
        if (!is_kept[number]) continue;
        int64_t end = ends[number];
        // A page that is cut inside a tag or a comment ends with it: there is no last bracket.
        if (end < 0 || end >= static_cast<int64_t>(size)) end = static_cast<int64_t>(size) - 1;
        const size_t next = first_from(starts, end);
        tags.starts.push_back(starts[number]);
        tags.ends.push_back(end);
        tags.text_ends.push_back(next < num_tags ? starts[next] : static_cast<int64_t>(size));
        tags.effects.push_back(effects[number]);
    }
    return tags;
}

// The length of a text without the white space at its ends.
inline int64_t stripped_length(PyObject* text) {
    const int kind = PyUnicode_KIND(text);
    const void* data = PyUnicode_DATA(text);
    Py_ssize_t first = 0, last = PyUnicode_GET_LENGTH(text);
    while (first < last && Py_UNICODE_ISSPACE(PyUnicode_READ(kind, data, first))) first++;
    while (first < last && Py_UNICODE_ISSPACE(PyUnicode_READ(kind, data, last - 1))) last--;
    return last - first;
}

// The list of the texts after tags; `text_of` and `chars` are filled as `_read_tags` of blocks.py does.
inline PyObject* texts_of(Bytes html, const Tags& tags, std::vector<int64_t>& text_of, std::vector<int64_t>& chars) {
    Ref texts(PyList_New(0));
    if (!texts) return nullptr;
    std::string broken;
    for (size_t number = 0; number < tags.ends.size(); number++) {
        const bool is_break = tags.effects[number] == BREAK;
        const int64_t begin = tags.ends[number] + 1 - is_break, end = tags.text_ends[number];
        if (end <= begin) continue;
        const char* start = html.data() + begin;
        if (is_break) {  // The bracket of a `<br>` becomes the line break.
            broken.assign(start, static_cast<size_t>(end - begin));
            broken[0] = '\v';
            start = broken.data();
        }
        Ref text(decoded(start, static_cast<Py_ssize_t>(end - begin)));
        if (!text || PyList_Append(texts.get(), text.get()) < 0) return nullptr;
        text_of.push_back(static_cast<int64_t>(number));
        chars[number] = stripped_length(text.get());
    }
    return texts.release();
}

// The bytes of a page in UTF-8, with `&nbsp;` as the character.
inline std::string encoded(PyObject* source) {
    std::string html;
    if (PyUnicode_IS_ASCII(source)) {
        html.assign(static_cast<const char*>(PyUnicode_DATA(source)),
                    static_cast<size_t>(PyUnicode_GET_LENGTH(source)));
    } else {
        Ref bytes(PyUnicode_AsEncodedString(source, "utf-8", "surrogatepass"));
        if (!bytes) return html;
        html.assign(PyBytes_AS_STRING(bytes.get()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.get())));
    }
    size_t place = html.find("&nbsp;");
    if (place == std::string::npos) return html;
    std::string changed;
    changed.reserve(html.size());
    size_t done = 0;
    for (; place != std::string::npos; place = html.find("&nbsp;", done)) {
        changed.append(html, done, place - done).append("\xc2\xa0");
        done = place + 6;
    }
    return changed.append(html, done, std::string::npos);
}

inline PyObject* read_markup(PyObject*, PyObject* args) {
    PyObject* source;
    Py_ssize_t max_tags, head_factor;
    Py_buffer keys, effects;
    unsigned long long mix, factor;
    if (!PyArg_ParseTuple(args, "U(nn)y*y*KK", &source, &max_tags, &head_factor, &keys, &effects, &mix, &factor))
        return nullptr;
    PyObject* result = guarded([&]() -> PyObject* {
        int bits = 0;
        while ((Py_ssize_t{1} << bits) < effects.len) bits++;
        if (bits < 1 || (Py_ssize_t{1} << bits) != effects.len || keys.len != 8 * effects.len || max_tags < 1 ||
            head_factor < 0) {
            PyErr_SetString(PyExc_ValueError, "read_markup: expected tables of 2^n slots and at least one tag.");
            return nullptr;
        }
        const Names names{static_cast<const uint64_t*>(keys.buf), static_cast<const int8_t*>(effects.buf), mix, factor,
                          64 - bits};
        std::string html = encoded(source);
        if (PyErr_Occurred()) return nullptr;
        if (html.empty()) html = "<body>";
        std::vector<int64_t> starts;
        bool is_cut = false;
        for (size_t place = html.find('<'); place != std::string::npos; place = html.find('<', place + 1)) {
            if (static_cast<Py_ssize_t>(starts.size()) == max_tags) {
                is_cut = true;
                html.resize(place);
                break;
            }
            starts.push_back(static_cast<int64_t>(place));
        }
        const Tags tags = tags_of(html, starts, names, head_factor);
        std::vector<int64_t> text_of, chars(tags.starts.size(), 0);
        Ref texts(texts_of(html, tags, text_of, chars));
        if (!texts) return nullptr;
        return Py_BuildValue("(y#NNNNNNNO)", html.data(), static_cast<Py_ssize_t>(html.size()),
                             as_bytearray(tags.starts), as_bytearray(tags.ends), as_bytearray(tags.text_ends),
                             as_bytearray(tags.effects), as_bytearray(chars), texts.release(), as_bytearray(text_of),
                             is_cut ? Py_True : Py_False);
    });
    PyBuffer_Release(&keys);
    PyBuffer_Release(&effects);
    return result;
}
