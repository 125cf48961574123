// The module `pipeline.extract._native`: the tags, texts and start tags of a page, and the words of its blocks, each
// with one call for a page. `pipeline/extract/_native.pyi` documents the functions for Python.
//
// Each function returns what the Python function that calls it, such as that of blocks.py, returns without
// this module, for every page. Positions and lengths that leave a function are those of Python: bytes of the page in
// UTF-8, or code points of a text. Unicode properties are those of the running Python.

#include "head_tags.h"
#include "markup.h"
#include "nesting.h"
#include "page_scan.h"
#include "start_tags.h"
#include "visible.h"
#include "words.h"

namespace {

PyMethodDef METHODS[] = {
    {"read_markup", read_markup, METH_VARARGS, "Return the fields of the markup of a page."},
    {"tag_tables", tag_tables, METH_VARARGS, "Return the tables by which start tags are read."},
    {"read_tags", read_tags, METH_VARARGS, "Return the distinct start tags of containers, and the tag of each."},
    {"count_characters", count_characters, METH_VARARGS, "Return the counts of characters and words of texts."},
    {"lexicon", lexicon, METH_VARARGS, "Return the table of the codes of words."},
    {"look_up", look_up, METH_VARARGS, "Return the codes of the first words of texts."},
    {"count_attributes", count_attributes, METH_VARARGS, "Return the sums of attributes of a page's tags."},
    {"count_formatting", count_formatting, METH_O, "Return the number of start tags of formatting elements."},
    {"count_tags", count_tags, METH_O, "Return the numbers of tags and of end tags in the bytes of a page."},
    {"nesting", nesting, METH_VARARGS, "Return the limit of nesting that a page exceeds."},
    {"head_tags", head_tags, METH_VARARGS, "Return the meta tags of a page's head that may declare a mark of rights."},
    {"text_between_tags", text_between_tags, METH_O, "Return the text between the tags of a page."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "pipeline.extract._native", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&MODULE);
    if (module != nullptr && PyModule_AddStringConstant(module, "SOURCES", SOURCES) < 0) Py_CLEAR(module);
    return module;
}
