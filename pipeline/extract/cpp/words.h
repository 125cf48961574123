// The characters and first words of texts, as the functions of features.py count and look them up.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <unordered_map>
#include <unordered_set>

#include "python.h"

constexpr uint8_t WORD = 1, COMMA = 2, IDEOGRAPH = 4, SEPARATOR = 8, CLOSING = 16;

inline PyObject* count_characters(PyObject*, PyObject* args) {
    PyObject* texts;
    Py_buffer classes;
    if (!PyArg_ParseTuple(args, "O!y*", &PyList_Type, &texts, &classes)) return nullptr;
    PyObject* result = guarded([&]() -> PyObject* {
        if (classes.len != 1 << 16) {
            PyErr_SetString(PyExc_ValueError, "count_characters: expected 65,536 classes.");
            return nullptr;
        }
        if (!are_texts(texts)) return nullptr;
        const auto* kinds = static_cast<const uint8_t*>(classes.buf);
        const auto size = static_cast<size_t>(PyList_GET_SIZE(texts));
        std::vector<float> counts(5 * size);
        std::vector<char> is_closed(size);
        for (size_t number = 0; number < size; number++) {
            const Text text(PyList_GET_ITEM(texts, static_cast<Py_ssize_t>(number)));
            int64_t words = 0, commas = 0, ideographs = 0, separators = 0;
            bool in_word = false;
            uint8_t kind = 0;
            for (Py_ssize_t place = 0; place < text.size; place++) {
                kind = kinds[std::min<Py_UCS4>(text[place], 0xFFFF)];
                const bool is_spaced = (kind & (WORD | IDEOGRAPH)) == WORD;
                words += is_spaced && !in_word;
                in_word = is_spaced;
                ideographs += (kind & IDEOGRAPH) > 0;
                commas += (kind & COMMA) > 0;
                separators += (kind & SEPARATOR) > 0;
            }
            const int64_t row[] = {std::max<int64_t>(text.size, 1), ideographs, words, commas, separators};
            for (size_t column = 0; column < 5; column++)
                counts[column * size + number] = static_cast<float>(row[column]);
            is_closed[number] = (kind & CLOSING) > 0;
        }
        return Py_BuildValue("(NN)", as_bytearray(counts), as_bytearray(is_closed));
    });
    PyBuffer_Release(&classes);
    return result;
}

constexpr const char* LEXICON = "pipeline.extract._native.Lexicon";

inline uint64_t mixed(uint64_t hash, char32_t point) { return (hash ^ point) * 0x9E3779B97F4A7C15; }

inline uint64_t hash_of(const Points& word) {
    uint64_t hash = word.size();
    for (const char32_t point : word) hash = mixed(hash ^ hash >> 29, point);
    return hash ^ hash >> 32;
}

// The codes of words, in a table of 2^n slots of which at most half are taken.
class Lexicon {
public:
    explicit Lexicon(size_t size) {
        while (slots_.size() < 2 * size + 2) slots_.resize(slots_.size() * 2);
    }

    void add(Points word, float code) {
        Slot& slot = find(word);
        if (slot.number == 0) {
            words_.push_back(std::move(word));
            slot = {hash_of(words_.back()), words_.size(), code};
        }
    }

    float code_of(const Points& word, float absent) const {
        const Slot& slot = const_cast<Lexicon*>(this)->find(word);
        return slot.number ? slot.code : absent;
    }

    std::unordered_set<char32_t> stripped;
    bool is_stripped[128] = {};

private:
    struct Slot {
        uint64_t hash;
        size_t number;  // of the word, from 1 on; 0 = the slot is free
        float code;
    };

    // The slot of a word, or the free one in which it belongs.
    Slot& find(const Points& word) {
        const uint64_t hash = hash_of(word);
        for (size_t place = hash;; place++) {
            Slot& slot = slots_[place & (slots_.size() - 1)];
            if (slot.number == 0 || (slot.hash == hash && words_[slot.number - 1] == word)) return slot;
        }
    }

    std::vector<Slot> slots_ = std::vector<Slot>(16);
    std::vector<Points> words_;
};

inline Points points_of(PyObject* text) {
    const Text source(text);
    Points points(static_cast<size_t>(source.size), U'\0');
    for (Py_ssize_t place = 0; place < source.size; place++) points[static_cast<size_t>(place)] = source[place];
    return points;
}

inline PyObject* lexicon(PyObject*, PyObject* args) {
    PyObject *values, *stripped;
    if (!PyArg_ParseTuple(args, "O!U", &PyDict_Type, &values, &stripped)) return nullptr;
    return guarded([&]() -> PyObject* {
        auto words = std::make_unique<Lexicon>(static_cast<size_t>(PyDict_GET_SIZE(values)));
        PyObject *key, *value;
        for (Py_ssize_t place = 0; PyDict_Next(values, &place, &key, &value);) {
            const double code = PyFloat_AsDouble(value);
            if (PyErr_Occurred()) return nullptr;
            if (!PyUnicode_Check(key)) {
                PyErr_SetString(PyExc_TypeError, "lexicon: expected a dict with keys of type str.");
                return nullptr;
            }
            words->add(points_of(key), static_cast<float>(code));
        }
        for (const char32_t point : points_of(stripped)) {
            words->stripped.insert(point);
            if (point < 128) words->is_stripped[point] = true;
        }
        PyObject* capsule = PyCapsule_New(words.get(), LEXICON, destroy<Lexicon>);
        if (capsule != nullptr) words.release();
        return capsule;
    });
}

inline bool is_stripped(char32_t point, const Lexicon& words) {
    return point < 128 ? words.is_stripped[point] : words.stripped.count(point) > 0;
}

constexpr Py_UCS4 DOTTED_I = 0x130, SIGMA = 0x3A3;

// Sets `word` to a piece as `normal_word` of features.py returns it.
inline bool normalize(const Text& text, Py_ssize_t begin, Py_ssize_t end, const Lexicon& words, Points& word) {
    Py_ssize_t first = begin, last = end;
    while (first < last && is_stripped(text[first], words)) first++;
    while (first < last && is_stripped(text[last - 1], words)) last--;
    const bool is_empty = first == last;
    if (is_empty) first = begin, last = end;
    word.clear();
    bool is_special = false;  // The lower case of these two depends on their neighbors, or is longer.
    for (Py_ssize_t place = first; place < last; place++) {
        const Py_UCS4 point = text[place];
        is_special |= point == DOTTED_I || point == SIGMA;
        word.push_back(is_empty ? point : static_cast<char32_t>(Py_UNICODE_TOLOWER(point)));
    }
    if (is_special && !is_empty) {
        Ref piece(PyUnicode_FromKindAndData(text.kind, static_cast<const char*>(text.data) + first * text.kind,
                                            last - first));
        Ref lower(piece ? PyObject_CallMethod(piece.get(), "lower", nullptr) : nullptr);
        if (!lower) return false;
        word = points_of(lower.get());
    }
    for (char32_t& point : word)
        if (point >= U'1' && point <= U'9') point = U'0';
    return true;
}

// A hash of words that no page can foresee: with a known one, a title could have words that all belong in one slot.
struct DrawnHash {
    size_t operator()(const Points& word) const {
        static const uint64_t odd = [] {
            std::random_device device;
            return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
        }();
        uint64_t hash = word.size();
        for (const char32_t point : word) hash = (hash ^ point) * odd, hash ^= hash >> 32;
        return static_cast<size_t>(hash);
    }
};

// Forms of the words of a page's title.
class Forms {
public:
    void add(Points form) {
        if (form.size() < 3) return;
        firsts_ |= uint64_t{1} << (form[0] & 63);
        forms_.insert(std::move(form));
    }

    // True if a piece of text is one of the forms, with or without a mark after it. `form` is room for the piece.
    bool has(const Text& text, Py_ssize_t begin, Py_ssize_t end, Points& form) const {
        if (!(firsts_ >> (text[begin] & 63) & 1)) return false;
        form.clear();
        for (Py_ssize_t place = begin; place < end; place++) form.push_back(text[place]);
        if (forms_.count(form)) return true;
        if (std::u32string_view(U",.:?!").find(form.back()) == std::u32string_view::npos) return false;
        form.pop_back();
        return forms_.count(form) > 0;
    }

private:
    std::unordered_set<Points, DrawnHash> forms_;
    uint64_t firsts_ = 0;  // bits of the first characters of the forms
};

inline PyObject* look_up(PyObject*, PyObject* args) {
    PyObject *capsule, *texts, *cases;
    Py_ssize_t most;
    float absent;
    if (!PyArg_ParseTuple(args, "OO!O!nf", &capsule, &PyList_Type, &texts, &PySet_Type, &cases, &most, &absent))
        return nullptr;
    return guarded([&]() -> PyObject* {
        const auto* words = static_cast<const Lexicon*>(PyCapsule_GetPointer(capsule, LEXICON));
        if (words == nullptr || !are_texts(texts)) return nullptr;
        Forms forms;
        Ref iterator(PyObject_GetIter(cases));
        if (!iterator) return nullptr;
        while (PyObject* item = PyIter_Next(iterator.get())) {
            Ref owned(item);
            if (PyUnicode_Check(item)) forms.add(points_of(item));
        }
        if (PyErr_Occurred()) return nullptr;
        std::vector<int64_t> counts;
        std::vector<float> codes;
        std::vector<char> in_title;
        Points word;
        for (Py_ssize_t number = 0; number < PyList_GET_SIZE(texts); number++) {
            const Text text(PyList_GET_ITEM(texts, number));
            int64_t found = 0;
            for (Py_ssize_t place = 0; place < text.size && found < most; found++) {
                while (place < text.size && Py_UNICODE_ISSPACE(text[place])) place++;
                const Py_ssize_t begin = place;
                while (place < text.size && !Py_UNICODE_ISSPACE(text[place])) place++;
                if (place == begin) break;
                if (!normalize(text, begin, place, *words, word)) return nullptr;
                codes.push_back(words->code_of(word, absent));
                in_title.push_back(forms.has(text, begin, place, word));
            }
            counts.push_back(found);
        }
        return Py_BuildValue("(NNN)", as_bytearray(counts), as_bytearray(codes), as_bytearray(in_title));
    });
}
