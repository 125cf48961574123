// Signs of masked words in a casefolded text, in one pass: a screen for `pipeline.toxicity.masks`, which searches a text
// only for what this finds. It reports at least every text in which a pattern of that module matches.
#pragma once

#include "tokens.h"

namespace masks {

enum Sign { SPACED = 1, HIDDEN = 2, TRIPLE = 4, MIXED = 8, UNUSUAL = 16 };

inline bool is_mark(uint32_t code) {
    return (code >= '0' && code <= '9') || code == '@' || code == '$' || code == '!' || code == '|' || code == '+' ||
           code == '*' || code == '#' || code == 0x20AC;
}

// Letters, and all other characters above ASCII.
inline bool may_be_letter(uint32_t code) { return code >= 0x80 || (code >= 'a' && code <= 'z'); }

inline bool may_be_inside(uint32_t code) { return may_be_letter(code) || (code >= '0' && code <= '9'); }

inline bool is_greek_or_cyrillic(uint32_t code) { return code >= 0x370 && code <= 0x52F; }

// Invisible and styled characters, marks and parts of a decomposed text, and scripts in which a gap may be between two
// letters of a word.
inline bool is_unusual(uint32_t code) {
    if (code < 0x300) return code == 0xAD;
    if (code < 0x200B) {
        return code <= 0x36F || (code >= 0x653 && code <= 0x655) || code == 0x93C || (code >= 0x958 && code <= 0x95F) ||
               code == 0x9BC || (code >= 0x9DC && code <= 0x9DF) || (code >= 0x1100 && code <= 0x11FF) || code == 0x180E;
    }
    return code <= 0x200F || (code >= 0x2060 && code <= 0x2064) || (code >= 0x2460 && code <= 0x24FF) ||
           (code >= 0x3040 && code <= 0xD7A3) || (code >= 0xFE00 && code <= 0xFE0F) || code >= 0xFEFF;
}

template <class View>
int signs(const View& view) {
    int found = 0, singles = 0;
    Py_ssize_t word = 0, gap = 0;  // Lengths of the current word and of the gap after the last one.
    for (Py_ssize_t at = 0; at <= view.size; ++at) {
        const uint32_t code = at < view.size ? view.chars[at] : ' ';
        const uint32_t last = at > 0 ? view.chars[at - 1] : ' ', before = at > 1 ? view.chars[at - 2] : ' ';
        if (code == last && code == before && may_be_letter(code)) found |= TRIPLE;
        if (may_be_letter(code) && (last == '$' || is_mark(last)) && (last == '$' || may_be_letter(before) || is_mark(before)))
            found |= HIDDEN;
        if ((is_greek_or_cyrillic(code) && last >= 'a' && last <= 'z') ||
            (is_greek_or_cyrillic(last) && code >= 'a' && code <= 'z'))
            found |= MIXED;
        if (is_unusual(code)) found |= UNUSUAL;
        if (may_be_inside(code)) {
            if (++word == 1 && gap > 2) singles = 0;
            gap = 0;
        } else {
            if (word == 1 && ++singles >= 4) found |= SPACED;
            if (word > 1) singles = 0;
            word = 0;
            ++gap;
        }
    }
    return found;
}

}  // namespace masks
