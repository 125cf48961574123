// The module `pipeline.text._native`: the words of a text and their properties, the keys of its normal words, and the
// recurring n-grams, each with one call for a text. `pipeline/text/_native.pyi` documents the functions for Python.
//
// Arrays are returned as bytes of native 64-bit numbers, which NumPy reads without a copy. Every answer equals that of
// the functions in Python, which remain for machines without a compiler; tests compare them.

#include "characters.h"

#include <new>
#include <utility>

#include "blake2s.h"
#include "fasttext_model.h"
#include "mask_signs.h"
#include "ngram_sums.h"
#include "ngrams.h"
#include "normal.h"
#include "pieces.h"
#include "tokens.h"
#include "term_set.h"
#include "url_rules.h"
#include "word_set.h"

namespace {

// A Python object that holds a C++ one.
template <class Value>
struct Holder {
    PyObject_HEAD
    Value* value;
};

template <class Value>
void release(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<Holder<Value>*>(self)->value;
    type->tp_free(self);
    Py_DECREF(type);
}

template <class Value>
Value& held(PyObject* self) { return *reinterpret_cast<Holder<Value>*>(self)->value; }

// Creates the object, whose C++ object `create` returns; it is created first, since it may raise.
template <class Value, class Create>
PyObject* hold(PyTypeObject* type, Create create) {
    return guarded([&]() -> PyObject* {
        std::unique_ptr<Value> value(create());
        PyObject* self = type->tp_alloc(type, 0);
        if (!self) return nullptr;
        reinterpret_cast<Holder<Value>*>(self)->value = value.release();
        return self;
    });
}

bool is_text(PyObject* text, const char* where) {
    if (PyUnicode_Check(text)) return true;
    PyErr_Format(PyExc_TypeError, "%s: expected str, got %s. Pass a text.", where, Py_TYPE(text)->tp_name);
    return false;
}

// Returns a tuple of bytes objects; steals the references, of which any may be null.
template <class... Parts>
PyObject* tuple(Parts... parts) {
    const Py_ssize_t size = sizeof...(parts);
    PyObject* all[] = {parts...};
    PyObject* out = PyTuple_New(size);
    bool complete = out != nullptr;
    for (PyObject* part : all) complete = complete && part;
    for (Py_ssize_t at = 0; at < size; ++at) {
        if (complete) {
            PyTuple_SET_ITEM(out, at, all[at]);
        } else {
            Py_XDECREF(all[at]);
        }
    }
    if (!complete) Py_CLEAR(out);
    return out;
}

// Tokenizer.

PyObject* new_tokenizer(PyTypeObject* type, PyObject* arguments, PyObject* names) {
    const char* keywords[] = {"dialect", "properties", "split", "forms", "joinable", nullptr};
    int dialect;
    PyObject *properties, *split, *forms, *joinable;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "iOOO!O!", const_cast<char**>(keywords), &dialect, &properties,
                                     &split, &PyDict_Type, &forms, &PyDict_Type, &joinable))
        return nullptr;
    if (dialect < 0 || dialect > 2)
        return PyErr_Format(PyExc_ValueError, "dialect: expected 0, 1 or 2, got %d. Pass a constant of the module.", dialect);
    return hold<Tokenizer>(
        type, [&] { return new Tokenizer(static_cast<Dialect>(dialect), properties, split, forms, joinable); });
}

PyObject* words(PyObject* self, PyObject* text) {
    if (!is_text(text, "words")) return nullptr;
    return guarded([&] {
        const Columns out = held<Tokenizer>(self).words(text);
        return tuple(as_bytes(out.lines), as_bytes(out.counts), as_bytes(out.lengths), as_bytes(out.flags),
                     as_bytes(out.codes));
    });
}

PyObject* cached(PyObject* self, PyObject*) { return PyLong_FromSize_t(held<Tokenizer>(self).cached()); }

// Pieces.

PyObject* new_pieces(PyTypeObject* type, PyObject* arguments, PyObject* names) {
    const char* keywords[] = {"properties", "normal_piece", "unicode_words", nullptr};
    PyObject *properties, *normal_piece, *unicode_words;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOO", const_cast<char**>(keywords), &properties, &normal_piece,
                                     &unicode_words))
        return nullptr;
    return hold<Pieces>(type, [&] { return new Pieces(properties, normal_piece, unicode_words); });
}

PyObject* plain(PyObject* self, PyObject* text) {
    if (!is_text(text, "plain")) return nullptr;
    return guarded([&] {
        std::vector<uint64_t> lowered;
        const Columns out = held<Pieces>(self).plain(text, lowered);
        return tuple(as_bytes(out.counts), as_bytes(out.lengths), as_bytes(out.flags), as_bytes(out.codes),
                     as_bytes(lowered));
    });
}

PyObject* normal(PyObject* self, PyObject* text) {
    if (!is_text(text, "normal")) return nullptr;
    return guarded([&] {
        std::vector<int64_t> numeric;
        const Columns out = held<Pieces>(self).normal(text, numeric);
        return tuple(as_bytes(out.counts), as_bytes(out.lengths), as_bytes(out.flags), as_bytes(out.codes),
                     as_bytes(numeric));
    });
}

template <Columns (Pieces::*read)(PyObject*)>
PyObject* columns(PyObject* self, PyObject* text) {
    if (!is_text(text, "pieces")) return nullptr;
    return guarded([&] {
        const Columns out = (held<Pieces>(self).*read)(text);
        return tuple(as_bytes(out.counts), as_bytes(out.lengths), as_bytes(out.flags), as_bytes(out.codes));
    });
}

PyObject* may_repeat(PyObject* self, PyObject* arguments) {
    PyObject* text;
    long long least;
    if (!PyArg_ParseTuple(arguments, "UL", &text, &least)) return nullptr;
    return guarded([&] { return PyBool_FromLong(held<Pieces>(self).may_repeat(text, least)); });
}

// Normal words.

PyObject* new_normal(PyTypeObject* type, PyObject* arguments, PyObject* names) {
    const char* keywords[] = {"properties", "expand", "words", "zero", nullptr};
    PyObject *properties, *expand, *words;
    int zero;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOp", const_cast<char**>(keywords), &properties, &expand, &words,
                                     &zero))
        return nullptr;
    return hold<Normal>(type, [&] { return new Normal(properties, expand, words, zero != 0); });
}

template <std::vector<uint64_t> (Normal::*read)(PyObject*)>
PyObject* numbers(PyObject* self, PyObject* text) {
    if (!is_text(text, "normal words")) return nullptr;
    return guarded([&] { return as_bytes((held<Normal>(self).*read)(text)); });
}

// Sets of words.

PyObject* new_word_set(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *words, *prefixes, *pairs;
    if (!PyArg_ParseTuple(arguments, "OOO", &words, &prefixes, &pairs)) return nullptr;
    return hold<WordSet>(type, [&] { return new WordSet(words, prefixes, pairs); });
}

PyObject* may_have(PyObject* self, PyObject* text) {
    if (!is_text(text, "word set")) return nullptr;
    return guarded([&] { return PyBool_FromLong(held<WordSet>(self).may_have(text)); });
}

PyObject* new_term_set(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *phrases, *anywhere;
    if (!PyArg_ParseTuple(arguments, "OO", &phrases, &anywhere)) return nullptr;
    return hold<TermSet>(type, [&] { return new TermSet(phrases, anywhere); });
}

PyObject* find_terms(PyObject* self, PyObject* text) {
    if (!is_text(text, "term set")) return nullptr;
    return guarded([&]() -> PyObject* {
        const auto found = held<TermSet>(self).find(text);
        Owned numbers(PyList_New(0));
        for (const int64_t term : found) {
            Owned number(PyLong_FromLongLong(term));
            if (PyList_Append(numbers.get(), number.get()) < 0) return nullptr;
        }
        Py_INCREF(numbers.get());
        return numbers.get();
    });
}

// Lists and words of URLs.

PyObject* new_url_rules(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *keys, *masks, *starts, *banned, *soft, *subwords;
    int shift;
    Py_ssize_t longest;
    if (!PyArg_ParseTuple(arguments, "(OOOin)OOO", &keys, &masks, &starts, &shift, &longest, &banned, &soft, &subwords))
        return nullptr;
    return hold<UrlRules>(type, [&] {
        auto rules = std::make_unique<UrlRules>(keys, masks, starts, shift, longest);
        rules->add(banned, 1);
        rules->add(soft, 2);
        rules->add_subwords(subwords);
        return rules.release();
    });
}

PyObject* match(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    char *host, *path;
    Py_ssize_t host_size, path_size;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "match: expected 2 arguments, got %zd. Pass host and path.", count);
    if (PyBytes_AsStringAndSize(arguments[0], &host, &host_size) < 0) return nullptr;
    if (PyBytes_AsStringAndSize(arguments[1], &path, &path_size) < 0) return nullptr;
    return guarded([&] {
        const auto hits = held<UrlRules>(self).match({host, static_cast<size_t>(host_size)},
                                                     {path, static_cast<size_t>(path_size)});
        return tuple(PyLong_FromUnsignedLongLong(hits.mask), PyLong_FromLongLong(hits.banned),
                     PyLong_FromLongLong(hits.soft), PyLong_FromLongLong(hits.subwords));
    });
}

// Sums of the weights of n-grams.

PyObject* new_ngram_sums(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *properties, *weights;
    int labels, max_n;
    if (!PyArg_ParseTuple(arguments, "OOii", &properties, &weights, &labels, &max_n)) return nullptr;
    return hold<NgramSums>(type, [&] { return new NgramSums(properties, weights, labels, max_n); });
}

PyObject* sums(PyObject* self, PyObject* arguments) {
    PyObject* sentences;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "OK", &sentences, &seed)) return nullptr;
    return guarded([&]() -> PyObject* {
        Owned fast(PySequence_Fast(sentences, "n-gram sums: expected a list, got another type. Pass a list of str."));
        std::vector<int64_t> counts, totals;
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            PyObject* sentence = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!is_text(sentence, "n-gram sums")) return nullptr;
            held<NgramSums>(self).add(sentence, seed, counts, totals);
        }
        return tuple(as_bytes(counts), as_bytes(totals));
    });
}

// Models of fastText.

// A model, and its labels as Python has them.
struct LabelledModel {
    explicit LabelledModel(PyObject* data) : model(data), labels(PyList_New(model.num_labels())) {
        for (int32_t at = 0; at < model.num_labels(); ++at) {
            const auto label = model.label(at);
            PyObject* text = PyUnicode_DecodeUTF8(label.data(), static_cast<Py_ssize_t>(label.size()), "replace");
            if (!text) throw PythonError();
            PyList_SET_ITEM(labels.get(), at, text);
        }
    }
    fasttext::Model model;
    Owned labels;
};

PyObject* new_fasttext(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject* data;
    if (!PyArg_ParseTuple(arguments, "O", &data)) return nullptr;
    return hold<LabelledModel>(type, [&] { return new LabelledModel(data); });
}

PyObject* labels(PyObject* self, PyObject*) {
    PyObject* list = held<LabelledModel>(self).labels.get();
    return PyList_GetSlice(list, 0, PyList_GET_SIZE(list));
}

// Returns the most probable labels of a line, each with its probability.
PyObject* predicted(LabelledModel& own, PyObject* line, int most) {
    Py_ssize_t size;
    const char* data = PyUnicode_AsUTF8AndSize(line, &size);
    if (!data) return nullptr;
    if (std::memchr(data, '\n', static_cast<size_t>(size)))
        return PyErr_Format(PyExc_ValueError, "predict: expected one line, got several. Replace the line ends.");
    const auto found = own.model.predict({data, static_cast<size_t>(size)}, most);
    Owned out(PyList_New(static_cast<Py_ssize_t>(found.size())));
    for (size_t at = 0; at < found.size(); ++at) {
        PyObject* label = PyList_GET_ITEM(own.labels.get(), found[at].second);
        PyObject* pair = Py_BuildValue("(Od)", label, static_cast<double>(std::exp(found[at].first)));
        if (!pair) return nullptr;
        PyList_SET_ITEM(out.get(), static_cast<Py_ssize_t>(at), pair);
    }
    Py_INCREF(out.get());
    return out.get();
}

PyObject* predict(PyObject* self, PyObject* arguments) {
    PyObject* lines;
    int most;
    if (!PyArg_ParseTuple(arguments, "Oi", &lines, &most)) return nullptr;
    return guarded([&]() -> PyObject* {
        Owned fast(PySequence_Fast(lines, "predict: expected a list, got another type. Pass a list of str."));
        Owned out(PyList_New(PySequence_Fast_GET_SIZE(fast.get())));
        for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast.get()); ++at) {
            PyObject* line = PySequence_Fast_GET_ITEM(fast.get(), at);
            if (!is_text(line, "predict")) return nullptr;
            PyObject* found = predicted(held<LabelledModel>(self), line, most);
            if (!found) return nullptr;
            PyList_SET_ITEM(out.get(), at, found);
        }
        Py_INCREF(out.get());
        return out.get();
    });
}

// Functions of arrays.

// A view of the bytes of an array, given up at the end of its scope.
class View {
public:
    explicit View(PyObject* object) {
        if (PyObject_GetBuffer(object, &buffer_, PyBUF_SIMPLE) < 0) throw PythonError();
    }
    ~View() { PyBuffer_Release(&buffer_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    template <class Item>
    const Item* items() const { return static_cast<const Item*>(buffer_.buf); }
    size_t bytes() const { return static_cast<size_t>(buffer_.len); }

private:
    Py_buffer buffer_;
};

// The slots of a hash table have 32-bit places.
bool fits(size_t bytes) {
    if (bytes % 8 == 0 && bytes / 8 < UINT32_MAX) return true;
    PyErr_SetString(PyExc_ValueError, "n-grams: expected less than 2^32 64-bit numbers, got other bytes. Pass one array.");
    return false;
}

PyObject* gopher_ngrams(PyObject*, PyObject* arguments) {
    PyObject *codes, *lengths;
    if (!PyArg_ParseTuple(arguments, "OO", &codes, &lengths)) return nullptr;
    return guarded([&]() -> PyObject* {
        const View code(codes), length(lengths);
        if (!fits(code.bytes())) return nullptr;
        if (code.bytes() != length.bytes())
            return PyErr_Format(PyExc_ValueError, "n-grams: expected as many lengths as codes. Pass arrays of one text.");
        const auto out = ngrams::gopher(code.items<uint64_t>(), length.items<int64_t>(), code.bytes() / 8);
        PyObject* numbers = PyTuple_New(static_cast<Py_ssize_t>(out.size()));
        for (size_t at = 0; numbers && at < out.size(); ++at) {
            PyObject* number = PyLong_FromLongLong(out[at]);
            if (!number) {
                Py_CLEAR(numbers);
            } else {
                PyTuple_SET_ITEM(numbers, static_cast<Py_ssize_t>(at), number);
            }
        }
        return numbers;
    });
}

PyObject* recurring_ngrams(PyObject*, PyObject* codes) {
    return guarded([&]() -> PyObject* {
        const View code(codes);
        if (!fits(code.bytes())) return nullptr;
        ngrams::Growing growing(code.items<uint64_t>(), code.bytes() / 8);
        Owned out(PyList_New(0));
        for (int n = 2; n <= 10; ++n) {
            const auto found = growing.next();
            Owned row(tuple(as_bytes(found.places), PyLong_FromLongLong(found.most), as_bytes(found.firsts)));
            if (PyList_Append(out.get(), row.get()) < 0) return nullptr;
        }
        Py_INCREF(out.get());
        return out.get();
    });
}

PyObject* blake2s_digest(PyObject*, PyObject* arguments) {
    PyObject* data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(arguments, "On", &data, &size)) return nullptr;
    if (size < 1 || size > static_cast<Py_ssize_t>(blake2s::MAX_DIGEST))
        return PyErr_Format(PyExc_ValueError, "blake2s: expected a size of 1 to 32 bytes, got %zd. Pass such a size.", size);
    return guarded([&] {
        const View view(data);
        uint8_t out[blake2s::MAX_DIGEST];
        blake2s::digest(view.items<uint8_t>(), view.bytes(), static_cast<size_t>(size), out);
        return PyBytes_FromStringAndSize(reinterpret_cast<char*>(out), size);
    });
}

PyObject* mask_signs(PyObject*, PyObject* text) {
    if (!is_text(text, "mask signs")) return nullptr;
    return guarded([&] {
        int found = 0;
        with_text(text, [&](const auto& view) { found = masks::signs(view); });
        return PyLong_FromLong(found);
    });
}

PyMethodDef tokenizer_methods[] = {{"words", words, METH_O, "The tokens of a text."},
                                   {"cached", cached, METH_NOARGS, "The number of cached answers."},
                                   {nullptr, nullptr, 0, nullptr}};
PyMethodDef pieces_methods[] = {{"plain", plain, METH_O, "Pieces as they are."},
                                {"normal", normal, METH_O, "Pieces without punctuation."},
                                {"raw", columns<&Pieces::raw>, METH_O, "Runs of word characters and of others."},
                                {"unicode", columns<&Pieces::unicode>, METH_O, "Words by UAX #29."},
                                {"may_repeat", may_repeat, METH_VARARGS, "Whether two long lines may be equal."},
                                {nullptr, nullptr, 0, nullptr}};
PyMethodDef normal_methods[] = {{"keys", numbers<&Normal::keys>, METH_O, "The key of each normal word."},
                                {"points", numbers<&Normal::points>, METH_O, "The code points of normal words."},
                                {nullptr, nullptr, 0, nullptr}};
PyMethodDef word_set_methods[] = {{"may_have", may_have, METH_O, "Whether a text may have one of the words."},
                                  {nullptr, nullptr, 0, nullptr}};
PyMethodDef term_set_methods[] = {{"find", find_terms, METH_O, "The numbers of the terms that a text has."},
                                  {nullptr, nullptr, 0, nullptr}};
PyMethodDef url_rules_methods[] = {{"match", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(match)), METH_FASTCALL,
                                    "The lists and words that an address has."},
                                   {nullptr, nullptr, 0, nullptr}};
PyMethodDef ngram_sums_methods[] = {{"sums", sums, METH_VARARGS, "The number of n-grams and the sums of their weights."},
                                    {nullptr, nullptr, 0, nullptr}};
PyMethodDef fasttext_methods[] = {{"labels", labels, METH_NOARGS, "The labels."},
                                  {"predict", predict, METH_VARARGS, "The most probable labels of each line."},
                                  {nullptr, nullptr, 0, nullptr}};
PyMethodDef functions[] = {{"gopher_ngrams", gopher_ngrams, METH_VARARGS, "Gopher's counts of n-grams."},
                           {"recurring_ngrams", recurring_ngrams, METH_O, "The n-grams that occur more than once."},
                           {"mask_signs", mask_signs, METH_O, "Signs of masked words."},
                           {"blake2s", blake2s_digest, METH_VARARGS, "The BLAKE2s digest of a number of bytes."},
                           {nullptr, nullptr, 0, nullptr}};

template <class Value>
int add_type(PyObject* module, const char* name, newfunc create, PyMethodDef* methods) {
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(release<Value>)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    PyType_Spec spec = {name, sizeof(Holder<Value>), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) return -1;
    const int added = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    return added;
}

int add_constants(PyObject* module) {
    const std::pair<const char*, long> constants[] = {
        {"ENGLISH", 0}, {"NEUTRAL", 1}, {"UNSPACED_WORDS", 2},
        {"SPACE", SPACE}, {"BREAK", BREAK}, {"ALPHA", ALPHA}, {"ALNUM", ALNUM}, {"NUMERIC", NUMERIC},
        {"SENTENCE_END", SENTENCE_END}, {"SYMBOL", SYMBOL}, {"PUNCTUATION", PUNCTUATION}, {"UNSPACED", UNSPACED},
        {"HEAD", HEAD}, {"TAIL", TAIL}, {"STOP", STOP}, {"LOWER", LOWER}, {"UPPER", UPPER},
        {"MEASURE_END", MEASURE_END}, {"UPPERCASE", UPPERCASE}, {"OTHER_CASE", OTHER_CASE}, {"LOWERED", LOWERED},
        {"DECOMPOSED", DECOMPOSED}, {"JOINED", JOINED}};
    for (const auto& [name, value] : constants)
        if (PyModule_AddIntConstant(module, name, value) < 0) return -1;
    return PyModule_AddStringConstant(module, "SOURCES", SOURCES);
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pipeline.text._native", nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    if (add_type<Tokenizer>(module, "pipeline.text._native.Tokenizer", new_tokenizer, tokenizer_methods) < 0 ||
        add_type<Pieces>(module, "pipeline.text._native.Pieces", new_pieces, pieces_methods) < 0 ||
        add_type<WordSet>(module, "pipeline.text._native.WordSet", new_word_set, word_set_methods) < 0 ||
        add_type<TermSet>(module, "pipeline.text._native.TermSet", new_term_set, term_set_methods) < 0 ||
        add_type<UrlRules>(module, "pipeline.text._native.UrlRules", new_url_rules, url_rules_methods) < 0 ||
        add_type<NgramSums>(module, "pipeline.text._native.NgramSums", new_ngram_sums, ngram_sums_methods) < 0 ||
        add_type<LabelledModel>(module, "pipeline.text._native.FastTextModel", new_fasttext, fasttext_methods) < 0 ||
        add_type<Normal>(module, "pipeline.text._native.Normal", new_normal, normal_methods) < 0 ||
        add_constants(module) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
