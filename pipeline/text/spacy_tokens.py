"""Tokenization of a string without whitespace (a piece): a reimplementation of spaCy's blank English pipeline.

Punctuation is removed from both ends until a known form, such as `don't`, or a core without such affixes is left. The
core is a single token if it is an amount or an address. Otherwise it is split at hyphens, commas and similar signs
between letters. Other languages use the same rules without English forms.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product

Tokens = tuple[str, ...]


def _members(test: Callable[[str], bool], *spans: tuple[int, int]) -> str:
    """Return the characters in the ranges [start, end) of code points for which `test` is true."""
    return "".join(char for span in spans for char in map(chr, range(*span)) if test(char))


def _is_icon(char: str) -> bool:
    return unicodedata.category(char) == "So"


UNCASED = "\u0591-\u05f4\u0620-\u06ff\u0900-\u0dff\u1100-\u137f\u2e80-\u30ff\u3400-\u9fff\uac00-\ud7af"
LOWER = _members(str.islower, (0x61, 0x530), (0x1E00, 0x1F00)) + UNCASED
UPPER = _members(str.isupper, (0x41, 0x530), (0x1E00, 0x1F00)) + UNCASED
ICONS = _members(_is_icon, (0xA0, 0x3400), (0xFFE0, 0x10000))
FACES = _members(_is_icon, (0x1F000, 0x1FB00))
"""Icons above U+FFFF. They are in a set of their own, because `re` searches a set of lower code points by a table."""
QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉⟦⟧"
MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
CURRENCY = "$£€¥฿" + "".join(map(chr, range(0x20A0, 0x20C0))) + "﷼"
UNITS = (
    "km² km³ km m² m³ m dm² dm³ dm cm² cm³ cm mm² mm³ mm ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa "
    "mbar mb MB kb KB gb GB tb TB T G M K %"
)
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9d\U00020000-\U0003ffff"
)
"""Code points of scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han."""
UNSPACED_LANGUAGES = frozenset(("bo", "ja", "km", "lo", "my", "th", "wuu", "yue", "zh"))
"""The languages that use these scripts, as the fastText model lid.176 names them."""

HEADS = frozenset("§%=—–" + MARKS + QUOTES + CURRENCY + ICONS + FACES)
TAILS = frozenset("—–" + MARKS + QUOTES + ICONS + FACES)
STOPS = frozenset("%²+-|" + MARKS + QUOTES + string.digits + string.ascii_lowercase)
_LOWER = re.compile(f"[{LOWER}]")
_UPPER = re.compile(f"[{UPPER}]")
_MEASURE = re.compile(rf"[0-9]({'|'.join(map(re.escape, UNITS.split()))}|(?:US|C|A)\$|[+{re.escape(CURRENCY)}])\Z")
MEASURE_ENDS = frozenset("".join(UNITS.split()) + CURRENCY + "+")


def case_of(char: str) -> tuple[bool, bool]:
    """Return whether the rules take a character for lower case and for upper case; uncased letters are both."""
    return _LOWER.match(char) is not None, _UPPER.match(char) is not None


def is_unspaced(char: str) -> bool:
    """Return True if a character is of a script without spaces between words."""
    return _UNSPACED.match(char) is not None


def _infixes(lower: str, upper: str, quotes: str, icon: str) -> re.Pattern[str]:
    """Return the pattern of the separators, such as hyphens, at which `_cut` splits a string."""
    letter = lower + upper
    # The pattern starts with \W, so that `re` can skip to the next match of \W. Lookbehinds then test what is before.
    return re.compile(
        rf"\W(?:(?<=\.)\.+|(?<={icon})|(?<=[0-9][+\-*^])(?=[0-9\-])|(?<=[{lower}{quotes}]\.)(?=[{upper}{quotes}])"
        rf"|(?<=[{letter}],)(?=[{letter}])|(?<=[{letter}0-9][\-–—~:<>=/])(?=[{letter}])"
        rf"|(?<=[{letter}0-9]-)--?(?=[{letter}])|(?<=[{letter}0-9]—)—(?=[{letter}]))"
    )


_INFIX = _infixes(LOWER, UPPER, re.escape(QUOTES), f"…)|(?<=[{ICONS}])|(?<=[{FACES}]")
_ASCII_INFIX = _infixes("a-z", "A-Z", "'\"`", "…")
_AMOUNT = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_HOST = r"A-Za-z0-9\u00a1-\uffff"
_ADDRESS = re.compile(
    rf"(?:[\w+.\-]{{2,}}://)?(?:[^\s@]+@)?(?:(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}"
    rf"|(?:[{_HOST}](?:[{_HOST}_\-]{{0,62}}[{_HOST}])?\.)+[{LOWER}]{{2,63}})(?::[0-9]{{2,5}})?(?:[/?#]\S*)?"
)
_MAX_ADDRESS = 2_000  # [characters] longer strings are not matched, so that time is linear in their length
_PLAIN_AND_MARK = re.compile(r"([A-Za-z]*[a-z])([,.;:!?)”\"])")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_RUNS = re.compile(rf"([{UNSPACED}]+)|[^{UNSPACED}]+")


def _contractions() -> Iterator[tuple[str, Tokens]]:
    """Yield English contractions and their tokens, with a straight apostrophe and without one."""
    questions = "who what when where why how there"
    families = (
        ("i", "'m 'm|a"),
        ("i you he she it we they that this these those " + questions, "'ll 'll|'ve 'd 'd|'ve"),
        ("i you we they these those could might must should would " + questions, "'ve"),
        ("you we they these those " + questions, "'re"),
        ("he she it that this " + questions, "'s"),
        ("ca could do does did had may might must need ought sha should wo would", "n't n't|'ve"),
        ("ai are is was were have has dare", "n't"),
        ("not", "'ve"),
    )
    ambiguous = {"ill", "its", "hell", "shell", "shed", "were", "well", "whore"}
    for stems, endings in families:
        for stem, ending in product(stems.split(), endings.split()):
            for word in (stem, stem.title()):
                tokens = (word, *ending.split("|"))
                for form in (tokens, tuple(token.replace("'", "") for token in tokens)):
                    if "".join(form).lower() not in ambiguous:
                        yield "".join(form), form


_OTHER_FACES = """(; (-; (= [= ]= ): )-: (-8 (o: :o) :() :1 >:( >:o xD XD xDD XDD ^_^ ^__^ ^___^ >.< >.> <.< ._. ;_; -_-
-__- v.v V.V v_v V_V o_o o_O O_o O_O 0_o o_0 0_0 o.O O.o O.O o.o 0.0 o.0 0.o @_@ <3 <33 <333 </3 (^_^) (-_-) (._.) (>_<)
(*_*)"""
_SPLIT_FORMS = """y' all|y all|how 'd 'y|How 'd 'y|can not|Can not|gon na|Gon na|got ta|Got ta|let 's|Let 's
|c'm on|C'm on|° f .|° c .|° k .|° F .|° C .|° K ."""
_WHOLE_FORMS = """'S 's ‘S ‘s 'd 're 'll 'em 'nuff 'bout 'cause 'Cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz ma'am Ma'am o'clock
O'clock ' '' and/or w/o C++ \\n \\t \\") <space> a.m. p.m. e.g. E.g. E.G. i.e. I.e. I.E. vs. v.s. co. Co. Corp. Inc.
Ltd. Bros. Mr. Mrs. Ms. Messrs. Dr. Prof. Jr. St. Mt. Adm. Gen. Gov. Rep. Rev. Sen. Ph.D. D.C. ä. ö. ü. Jan. Feb.
Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec. Ak. Ala. Ariz. Ark. Calif. Colo. Conn. Del. Fla. Ga. Ia. Id.
Ill. Ind. Kan. Kans. Ky. La. Mass. Md. Mich. Minn. Miss. Mo. Mont. Neb. Nebr. Nev. Okla. Ore. Pa. Tenn. Va.
Wash. Wis. N.C. N.D. N.H. N.J. N.M. N.Y. S.C."""
_DROPPED_G = "doin goin havin lovin nothin nuthin ol somethin"


def _emoticons() -> Iterator[str]:
    """Yield emoticons of punctuation and letters; each is a single token."""
    for eyes, noses, mouths in (
        (":", ("", "-"), ") )) ))) ( (( ((( ] } / | P p O o 0 * 3 > X x D"),
        (":", ("'", "'-"), ") ("),
        (";", ("", "-"), ") D"),
        ("=", ("",), ") ( / | 3 ] [ D"),
        ("8", ("", "-"), ") D"),
    ):
        yield from (eyes + nose + mouth for nose, mouth in product(noses, mouths.split()))
    yield from ("".join(face) for face in product("([", ("", "-"), ":"))
    yield from _OTHER_FACES.split()


def _english_forms() -> dict[str, Tokens]:
    """Return a map from each form that the rules must not split, such as a contraction, to the tokens of this form."""
    forms = dict(_contractions())
    for joined in _SPLIT_FORMS.split("|"):
        forms["".join(joined.split())] = tuple(joined.split())
    for hour, half in product(range(1, 13), ("a.m.", "am", "p.m.", "pm")):
        forms[f"{hour}{half}"] = (str(hour), half)
    whole = [*_WHOLE_FORMS.split(), *_emoticons(), *(f"{letter}." for letter in string.ascii_lowercase)]
    whole += [word + "'" for stem in _DROPPED_G.split() for word in (stem, stem.title())]
    forms |= {form: (form,) for form in whole}
    curly = {form.replace("'", "’"): tuple(t.replace("'", "’") for t in tokens) for form, tokens in forms.items()}
    return forms | curly


def _head(text: str, low: int, high: int) -> int:
    """Return the length of the token to remove from the start of text[low:high], such as a bracket; 0 if none."""
    first = text[low]
    if first in HEADS:
        return 1
    if first == "." and text.startswith("..", low, high):
        end = low + 2
        while end < high and text[end] == ".":
            end += 1
        return end - low
    if first == "+":
        return 0 if low + 1 < high and text[low + 1] in string.digits else 1
    if first in "UCA" and text.startswith(("US$", "C$", "A$"), low, high):
        return 3 if first == "U" else 2
    return 0


def _tail(text: str, low: int, high: int) -> int:
    """Return the length of the token to remove from the end of text[low:high], such as a comma or unit; 0 if none."""
    last, before = text[high - 1], text[high - 2] if high - 2 >= low else ""
    if last in TAILS:
        return 2 if last == before == "…" else 1
    if last == ".":
        if before == ".":
            start = high - 2
            while start > low and text[start - 1] == ".":
                start -= 1
            return high - start
        if before in STOPS or _LOWER.match(before):
            return 1
        earlier = text[high - 3] if high - 3 >= low else ""
        return 1 if _UPPER.match(before) and (earlier == "°" or _UPPER.match(earlier)) else 0
    if last in "sS" and before and before in "'’":
        return 2
    if last in MEASURE_ENDS:
        measure = _MEASURE.search(text, max(low, high - 5), high)
        return len(measure[1]) if measure else 0
    return 0


def _peel(piece: str, forms: Mapping[str, Tokens], longest: int) -> list[str]:
    """Return the tokens of a string without whitespace.

    Punctuation is removed from both ends. If the rest is a key of `forms`, its tokens are the value of this key;
    otherwise `_cut` splits the rest. `longest` is the length of the longest key.
    """
    low, high = 0, len(piece)
    heads: list[str] = []
    tails: list[str] = []
    while low < high:
        small = high - low <= longest + 2  # a longer string cannot become a known form by removing one affix
        if small and piece[low:high] in forms:
            break
        head, tail = _head(piece, low, high), 0
        if not (head and small and piece[low + head : high] in forms):
            tail = _tail(piece, low + head, high) if low + head < high else 0
            if tail and small and piece[low : high - tail] in forms:
                head = 0
        if not head and not tail:
            break
        if head:
            heads.append(piece[low : low + head])
        if tail:
            tails.append(piece[high - tail : high])
        low, high = low + head, high - tail
    core = piece[low:high]
    if core in forms:
        heads.extend(forms[core])
    elif core:
        heads.extend(_cut(core))
    heads.extend(reversed(tails))
    return heads


def _cut(core: str) -> list[str]:
    """Return the tokens of a string without punctuation at its ends, split at separators such as hyphens.

    Each separator is also a token. An amount or an address is not split.
    """
    if core.isalnum() or _AMOUNT.fullmatch(core):
        return [core]
    if "." in core and len(core) <= _MAX_ADDRESS and _ADDRESS.fullmatch(core):
        return [core]
    tokens, at = [], 0
    for match in (_ASCII_INFIX if core.isascii() else _INFIX).finditer(core):
        if match.start() == 0:
            continue
        if match.start() > at:
            tokens.append(core[at : match.start()])
        tokens.append(match.group())
        at = match.end()
    if at < len(core):
        tokens.append(core[at:])
    return tokens


def _joinable(forms: Mapping[str, Tokens], longest: int) -> dict[Tokens, Tokens]:
    """Return a map from the tokens into which `_peel` would split a known form to the right tokens of this form."""
    cut = {tuple(_peel(form, {}, longest)): tokens for form, tokens in forms.items()}
    return {parts: tokens for parts, tokens in cut.items() if len(parts) > 1}


def _join(tokens: list[str], joinable: Mapping[Tokens, Tokens], firsts: frozenset[str]) -> list[str]:
    """Replace each sequence of tokens that is a key of `joinable` by its value; the longest key is tried first."""
    if firsts.isdisjoint(tokens):
        return tokens
    joined: list[str] = []
    at = 0
    while at < len(tokens):
        for width in range(min(_WIDEST, len(tokens) - at), 1, -1):
            form = joinable.get(tuple(tokens[at : at + width]))
            if form:
                joined.extend(form)
                at += width
                break
        else:
            joined.append(tokens[at])
            at += 1
    return joined


FORMS = _english_forms()
_LONGEST = max(map(len, FORMS))
JOINABLE = _joinable(FORMS, _LONGEST)
_FIRSTS = frozenset(parts[0] for parts in JOINABLE)
_WIDEST = max(map(len, JOINABLE))


def split_english(piece: str) -> Sequence[str]:
    """Return the English tokens of a piece, a string without whitespace."""
    if piece in FORMS:
        return FORMS[piece]
    if piece.isalpha():
        return (piece,)
    plain = _PLAIN_AND_MARK.fullmatch(piece)
    if plain and plain[1] not in FORMS:
        return plain.groups()
    return _join(_peel(piece, FORMS, _LONGEST), JOINABLE, _FIRSTS)


def _split(piece: str, words: Callable[[str], Sequence[str]]) -> Sequence[str]:
    if piece.isascii() and piece.isalpha():
        return (piece,)
    tokens: list[str] = []
    for run in _RUNS.finditer(piece):
        tokens.extend(words(run[1]) if run[1] else _peel(run[0], {}, 0))
    return tokens


def split_neutral(piece: str) -> Sequence[str]:
    """Return the tokens of a string without whitespace by rules that do not depend on the language.

    English contractions are not recognized. In scripts without spaces between words, each character is a token.
    """
    return _split(piece, list)


# Words in scripts without spaces, by ICU's dictionaries of Chinese, Japanese, Thai, Lao, Khmer and Burmese. ICU selects
# the dictionary by the script of the text, not by the locale. There is none for Tibetan, which is split into syllables:
# its spelling marks their ends.

LOCALE = "und"
MAX_RUN = 4_096
"""Maximum length of text that is passed to ICU at once [code points], because ICU's tables grow with it."""


@cache
def _word_breaker() -> Callable[[str, str], Iterable[str]]:
    from icu4py.breakers import WordBreaker

    return WordBreaker


def words_of_run(run: str) -> list[str]:
    """Return the words of a text in a script without spaces, in order; joined, they equal the text."""
    breaker = _word_breaker()
    words: list[str] = []
    for start in range(0, len(run), MAX_RUN):
        words.extend(breaker(run[start : start + MAX_RUN], LOCALE))
    return words


def split_unspaced(piece: str) -> Sequence[str]:
    """Return the tokens of a string without whitespace in a language without spaces; a dictionary finds the words."""
    return _split(piece, words_of_run)


def splitter_of(language: str) -> Callable[[str], Sequence[str]]:
    """Return the tokenizer of a language: a function from a string without whitespace to its tokens.

    `language` is a code of the fastText model lid.176.
    """
    other = split_unspaced if language in UNSPACED_LANGUAGES else split_neutral
    return split_english if language == "en" else other
