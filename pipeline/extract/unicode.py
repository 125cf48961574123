"""Unicode repair of extracted text: entities, mojibake, C1 characters, no-break spaces and invisible characters.

Each kind has a fast search of its own, so that text that needs no repair costs little. ftfy is imported when a text has
the first sequence that looks like mojibake. A repair that is not certain is not made: the text stays and is counted.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from html.entities import html5
from typing import Any

REPAIRS = ("entities", "mojibake_lines", "c1", "spaces", "soft_hyphens", "invisible")
"""The kinds of repairs: entities decoded; lines of mojibake decoded; C1 characters replaced by those of windows-1252;
no-break and other special spaces replaced; soft hyphens removed; zero-width and directional characters removed."""


@dataclass(frozen=True)
class RepairedText:
    """A text after repair, and what was done."""

    text: str
    repairs: dict[str, int] = field(default_factory=dict)
    """Kind of repair (one of REPAIRS) → number of repairs; kinds without a repair are absent."""
    mojibake: int = 0
    """Number of sequences, as ftfy counts them, that look like mojibake and were left as they are."""


def repair_text(text: str, has_entities: bool = True) -> RepairedText:
    """Return the text after Unicode repair. If `has_entities` is False, entities such as `&amp;` are not decoded.

    A repair is made once: `&amp;amp;` becomes `&amp;`. The line breaks and the order of the text do not change.
    """
    repairs: dict[str, int] = {}
    mojibake = 0
    if has_entities and "&" in text:
        text, repairs["entities"] = decode_entities(text)
    if not text.isascii():
        if _MOJIBAKE.search(text):
            text, repairs["mojibake_lines"], mojibake = repair_mojibake(text)
        special = set(_SPECIAL.findall(text))
        for char in special & SPACES:
            repairs["spaces"] = repairs.get("spaces", 0) + text.count(char)
            text = text.replace(char, " ")
        if SOFT_HYPHEN in special:
            repairs["soft_hyphens"] = text.count(SOFT_HYPHEN)
            text = text.replace(SOFT_HYPHEN, "")
        if special - SPACES:
            text, repairs["c1"] = _C1.subn(_as_windows_1252, text)
            text, repairs["invisible"] = remove_invisible(text)
    return RepairedText(text, {kind: repairs[kind] for kind in REPAIRS if repairs.get(kind)}, mojibake)


# Entities that are left in extracted text: the page was escaped twice, as in `Q&amp;amp;A`.
#
# A text that shows `&lt;` or `&gt;` is about markup, and a line with brackets, braces, an equals sign, a backslash or a
# backtick is likely to be code, such as `var b = &num;`, or a URL. Both keep their entities: there, they are content.
# `&lt;` and `&gt;` are never decoded, because the result would look like markup.

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_MARKUP = re.compile(r"&(?:lt|gt|LT|GT|#60|#62|#[xX]3[cCeE]);")
_CODE_SIGN = re.compile(r"[<>{}=\\`]")


def decode_entities(text: str) -> tuple[str, int]:
    """Return the text with its HTML entities decoded once, and their number. Markup and lines of code keep theirs."""
    if not _ENTITY.search(text) or _MARKUP.search(text):
        return text, 0
    num_decoded = 0
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if "&" in line and not _CODE_SIGN.search(line):
            lines[number] = _ENTITY.sub(_decode_entity, line)
            num_decoded += sum(_decode_entity(match) != match.group() for match in _ENTITY.finditer(line))
    return "\n".join(lines), num_decoded


def _decode_entity(match: re.Match[str]) -> str:
    """Return the character of an entity, or the entity itself if its name is unknown or it is a line break."""
    entity = match.group()
    known = entity[1] == "#" or entity[1:] in html5
    decoded = html.unescape(entity) if known else entity
    return entity if decoded in ("\n", "\r", "") else decoded


# Mojibake: UTF-8 that was decoded as windows-1252 or a similar encoding, so that one character became two or three.
#
# A text is suspected by a sequence that correct text hardly has, such as `Ã©` or `â€`. Closing quotes, dashes and the
# ellipsis do not count as the second character, because they follow capital letters in correct text: `“Ã”`. Letters
# such as Š count only after the first characters that are most frequent: Czech has `NÍŽE`.

_SIGN = r"\x80-\x9f\xa1-\xaa\xac-\xba\xbc-\xbf\u02c6-\u02dd\u2030\u20ac"
_SECOND = rf"{_SIGN}\u0104-\u017e\u0192"
_ANY = rf"{_SECOND}\xa0\xab\xbb\u2013-\u203a\u2122"
_SECOND_1251 = r"\x90-\xbf\u0402-\u040f\u0451-\u045f\u0490\u0491\u2013-\u203a\u20ac\u2122"
_MOJIBAKE = re.compile(
    r"[\xc2-\xdd\xe0-\xf0\u0102\u0139\u0420\u0421](?:"
    rf"(?<=[\xc3-\xc5\xd0\xd1\u0102\u0139])[{_SECOND}]"  # two bytes in windows-1252 or windows-1250
    rf"|(?<=[\xc2-\xdd])[{_SIGN}]"
    r"|(?<=\xc2)\xa0"
    r"|(?<=\xe2)[\x80\u20ac]"  # the first two bytes of quotes, dashes and the ellipsis
    rf"|(?<=[\xe0-\xf0])[{_SECOND}][{_ANY}]"
    rf"|(?<=[\u0420\u0421])[{_SECOND_1251}](?:[\u0420\u0421][{_SECOND_1251}]){{2}})"
)
_MAY_BE_MOJIBAKE = re.compile(
    rf"[\xc2-\xdd\u0102\u0139][{_ANY}]|[\xe0-\xf0][{_ANY}]{{2,3}}|[\u0420\u0421][{_SECOND_1251}]"
)
_ABOUT_ENCODINGS = re.compile(
    r"mojibake|unicode|utf-?8|charset|latin-?1\b|iso[- ]?8859|windows-125|\bcp125\d|character (?:set|encoding)"
    r"|encodage|codificaci|zeichensatz|zeichenkodierung|кодировк|文字化け|乱码|字符编码",
    re.IGNORECASE,
)
MAX_SUSPECTED = 1_000_000
"""Maximum number of code points of a document that ftfy reads; it takes up to 4 µs for each. Further lines stay as they
are."""


def repair_mojibake(text: str) -> tuple[str, int, int]:
    """Return the text with certain mojibake decoded, the number of repaired lines, and the sequences that are left.

    A line is repaired if ftfy finds a decoding that leaves at most a tenth of the mojibake, and if the line does not
    already contain a character that the repair would produce: a text that shows `Ã©` beside `é` is about mojibake. In a
    text that names encodings, only lines with C1 characters are repaired, because no one types these. Nothing is
    repaired if more is left than repaired, as in Chinese that was decoded as windows-1252. ftfy counts the sequences.
    """
    fix, count = _ftfy()
    about_encodings = _ABOUT_ENCODINGS.search(text) is not None
    lines = text.split("\n")
    num_lines = num_repaired = num_left = num_read = 0
    is_certain = False
    for number, line in enumerate(lines):
        if not _MAY_BE_MOJIBAKE.search(line):
            continue
        num_read += len(line)
        if num_read > MAX_SUSPECTED:
            break
        before = count(line)
        repaired = fix(line) if before and (not about_encodings or _C1.search(line)) else line
        after = count(repaired) if repaired != line else before
        num_left += before
        if after <= before // 10 and repaired != line and _is_consistent(line, repaired):
            lines[number] = repaired
            num_lines += 1
            num_repaired += before - after
            num_left += after - before
            is_certain |= _MOJIBAKE.search(line) is not None
    if not is_certain or num_left > num_repaired:
        return text, 0, num_left + num_repaired
    return "\n".join(lines), num_lines, num_left


def _is_consistent(line: str, repaired: str) -> bool:
    """Return True if no character that the repair produces is also in the line outside the mojibake."""
    correct = {char for char in _MAY_BE_MOJIBAKE.sub("", line) if char > "\x7f"}
    return all(repaired.count(char) <= line.count(char) for char in correct) and repaired.count("\ufffd") <= line.count(
        "\ufffd"
    )


@cache
def _ftfy() -> tuple[Callable[[str], str], Callable[[str], int]]:
    """Return ftfy's repair of the encoding of a line, and its count of sequences that look like mojibake."""
    import ftfy
    import ftfy.badness

    # ftfy can also guess a no-break space where the text has a space, and characters that were lost. Both guesses were
    # wrong on pages whose C1 characters are lost: `â€ now` became `† now`.
    config = ftfy.TextFixerConfig(restore_byte_a0=False, replace_lossy_sequences=False, fix_c1_controls=False)

    def fix(line: str) -> str:
        fixed: Any = ftfy.fix_encoding(line, config)
        return str(fixed)

    return fix, ftfy.badness.badness


# Spaces, C1 characters, and characters without a width.

_SPECIAL = re.compile(
    r"[\x80-\xa0\xad\u061c\u2000-\u200f\u202a-\u202f\u205f-\u206f\ufeff\ufff9-\ufffb\U000e0001-\U000e007f]"
)
_C1 = re.compile(r"[\x80-\x9f]")
SPACES = frozenset("\xa0\u202f\u205f").union(map(chr, range(0x2000, 0x200B)))
"""Spaces of other widths or without a line break. The ideographic space U+3000 is normal in Chinese and Japanese."""
SOFT_HYPHEN = "\xad"

# Scripts in which joiners are part of the spelling: Arabic to N'Ko, Indic, Tibetan, Myanmar, Khmer, Mongolian, others.
_JOINING = "\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u18af\u1900-\u1c7f\ua800-\ua8ff\ua980-\uabff\ufb50-\ufefe"
_JOINING += "\U00010a00-\U00011fff"
# Scripts without spaces, in which U+200B separates words: Thai, Lao, Tibetan, Myanmar, Khmer, New Tai Lue, Tai Tham.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaa7f"
_EMOJI = "\u00a9\u00ae\u203c-\u3299\ufe0f\U0001f000-\U0001faff"
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
_JOINER = re.compile(f"[{_JOINING}]")
_WORD_BREAK = re.compile(f"[{_UNSPACED}]")
_PICTURE = re.compile(f"[{_EMOJI}]")
_BLACK_FLAG = "\U0001f3f4"
_INVISIBLE = re.compile("[\u200b-\u200d\u2060-\u2064\ufeff\ufff9-\ufffb]|[\U000e0001-\U000e007f]+")
_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f]")


def remove_invisible(text: str) -> tuple[str, int]:
    """Return the text without zero-width and directional characters, and the number that was removed.

    Joiners stay where a script spells with them and inside emoji, U+200B stays where it separates words, and marks of
    direction stay in a text with letters that are written from right to left.
    """
    before = len(text)
    text = _INVISIBLE.sub(_kept_invisible, text)
    if _DIRECTION.search(text) and not _RIGHT_TO_LEFT.search(text):
        text = _DIRECTION.sub("", text)
    return text, before - len(text)


def _kept_invisible(match: re.Match[str]) -> str:
    """Return a zero-width character, or a run of tags, if the characters beside it need it, else an empty text."""
    chars, text = match.group(), match.string
    previous, following = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    if chars == "\u200b":
        needed = bool(_WORD_BREAK.match(previous) or _WORD_BREAK.match(following))
    elif chars in "\u200c\u200d" and _JOINER.match(previous):
        needed = True
    elif chars == "\u200d":
        needed = bool(_PICTURE.match(previous) and _PICTURE.match(following))
    else:
        needed = chars[0] >= "\U000e0001" and previous == _BLACK_FLAG
    return chars if needed else ""


def _as_windows_1252(match: re.Match[str]) -> str:
    """Return what a C1 character is in windows-1252, as browsers read it; nothing for the five that it does not use."""
    return match.group().encode("latin-1").decode("windows-1252", "ignore")
