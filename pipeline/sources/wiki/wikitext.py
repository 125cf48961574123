"""Converter of wikitext, the markup of MediaWiki, to the text that a reader of the page sees.

Markup is resolved from the outside in: comments, elements whose content is no wikitext, templates, links, tags, and
then line by line headings, lists and tables. Each pass takes time linear in the length of the page, whatever markup is
left open: brackets are matched once with a stack, and an opening bracket without its end is ignored. The parser
mwparserfromhell 0.7.2 takes quadratic time for those, 27 s for a page of 40 kB.

Source: mediawiki.org, Help:Formatting, Help:Tables, Help:Links; Writing systems/Syntax (`-{…}-`).
"""

import re
from collections.abc import Iterator, Mapping, Set
from html import unescape

from pipeline.sources.wiki.blocks import BREAK, CELL, EDGE, GONE, Held, WikiForm, mark_of, text_of_lines
from pipeline.sources.wiki.names import FILE_NAMESPACES, KEPT_TEMPLATES, NAME, POWER

MAX_DEPTH = 20
"""Maximum number of kept templates, or of links, inside each other; deeper ones are left out."""
LEFT_OUT = (
    "ref references gallery timeline imagemap templatestyles graph mapframe maplink score hiero inputbox categorytree "
    "section indicator templatedata includeonly dynamicpagelist rss chart phonos"
)
"""Elements that are left out with their content."""
RAW = "nowiki math chem ce pre source syntaxhighlight poem"
"""Elements whose content is not wikitext, and poems."""
_BLOCKS = "p div center blockquote ul ol li dl dt dd table tr caption hr h1 h2 h3 h4 h5 h6 tbody thead tfoot"
_INLINE = (
    "b i u s em strong small big sub sup span font tt code kbd samp var cite dfn abbr acronym q del ins strike bdi bdo "
    "ruby rb rt rp rtc time data mark wbr a nobr noinclude onlyinclude td th br translate tvar languages"
)
BLOCK_TAGS = frozenset(_BLOCKS.split())
KNOWN_TAGS = frozenset(f"{_BLOCKS} {_INLINE} {LEFT_OUT} {RAW}".split())
"""Tags that do not show; others are text, as in MediaWiki."""
MATH = frozenset(("math", "chem", "ce"))

_MARKS = re.compile("[\0\ufdd0-\ufdef]")
_SPECIAL = re.compile(rf"<({'|'.join((LEFT_OUT + ' ' + RAW).split())})(?=[\s/>])([^<>]*+)>", re.IGNORECASE)
_BRACES = re.compile(r"\{{2,}|\}{2,}")
_TEMPLATE_NAME = re.compile(r"\s*([^|{}\[\]<>\n]*+)")
_LINK_TOKENS = re.compile(r"\[\[|\]\]|\n\s*\n")
_PREFIX = re.compile(r"\s*([^:|\[\]{}<>\n]{1,40}+):")
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]{2,8}){0,2}|simple)\Z")
_EXTERNAL = re.compile(r"\[(?:(?:https?|ftps?|irc|news|gopher):|mailto:|//)[^\s\[\]<>]*+[ \t]*+([^\[\]\n]*+)\]", re.I)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*+)(?=[\s/>])([^<>]*+)>")
_HIDDEN = re.compile(
    r"display\s*+:\s*+none|\bclass\s*+=\s*+[\"']?[^\"'<>]*?\b(?:infobox|navbox|noprint|metadata|mw-empty-elt|ambox)\b",
    re.IGNORECASE,
)
_SWITCH = re.compile(r"__[^\W\d_]{3,40}+__")
_VARIANTS = re.compile(r"-\{([^{}]{0,2000}+)\}-")
_VARIANT = re.compile(r"(?:^|;)\s*+([a-z]{2,3}(?:-[a-z]{2,8})?)\s*+:([^;]*+)")
_FUNCTION = re.compile(r"\s*+(formatnum):", re.IGNORECASE)
_POWER = re.compile(rf"((?<![\d.,])10(?={POWER})|\d)?+[ \xa0]?+{POWER}")
_EXPONENT = re.compile(
    r"\s*+[+\u2212\u2013-]?+\d{1,6}+(?:[.,]\d{1,6}+)?+\s*+</su([pb])\s*+>(\s*+[/\u2044])?", re.IGNORECASE
)
_QUOTES = re.compile(r"'{2,}")


def text_of_wikitext(source: str, form: WikiForm, namespaces: Set[str] = frozenset()) -> str:
    """Return the text of a page.

    `namespaces`: the names of the namespaces of files and categories in this wiki, in lower case, besides known ones.
    """
    held: list[Held] = []
    text = _without_comments(_MARKS.sub("", source))
    text = _hold_raw(text, form, held)
    text = _resolve_templates(text)
    text = _POWER.sub(_power, text) if POWER in text else text
    text = _resolve_links(text, FILE_NAMESPACES | namespaces)
    text = _EXTERNAL.sub(lambda match: match[1] or GONE, text)
    if "-{" in text:
        text = _VARIANTS.sub(_variant, text)
    text = _resolve_tags(text)
    if "__" in text:
        text = _SWITCH.sub(lambda match: GONE if match[0].isupper() else match[0], text)
    text = "\n".join(map(_without_quotes, text.split("\n"))) if "''" in text else text
    return text_of_lines(text.replace("&nbsp;", " "), form, held)


def template_names(source: str) -> Iterator[str]:
    """Yield the names of the templates that a page uses, in lower case and without a namespace."""
    for match in re.finditer(r"\{\{\s*+([^|{}\[\]<>\n]{1,80}+)\s*+[|}\n]", source):
        yield plain_name(match[1])


def plain_name(name: str) -> str:
    """Return the name of a template, category or page as names are compared."""
    name = " ".join(name.replace("_", " ").split()).casefold()
    return name.rpartition(":")[2].strip()


def _without_comments(text: str) -> str:
    """Return the text without comments, and without lines that hold nothing else."""
    parts, position = [], 0
    while (start := text.find("<!--", position)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        end += 3
        before = text[max(position, start - 100) : start].rstrip(" \t")
        is_line = before.endswith("\n") and text[end : end + 1] in ("", "\n")
        parts.append(text[position:start])
        position = end + is_line
    return "".join([*parts, text[position:]]) if parts else text


def _hold_raw(text: str, form: WikiForm, held: list[Held]) -> str:
    """Replace the elements whose content is no wikitext. Kept contents are appended to `held`."""
    parts: list[str] = []
    position = search = 0
    unclosed: set[str] = set()
    while (match := _SPECIAL.search(text, search)) is not None:
        name, attributes = match[1].lower(), match[2]
        search = match.end()
        if attributes.endswith("/"):
            content, end = "", match.end()
        elif name in unclosed:
            continue
        elif (closed := _end_tag(name).search(text, match.end())) is None:
            unclosed.add(name)
            continue
        else:
            content, end = text[match.end() : closed.start()], closed.end()
        parts += (text[position : match.start()], _held(name, attributes, content, form, held))
        position = search = end
    return "".join([*parts, text[position:]])


_END_TAGS = {name: re.compile(rf"</{name}\s*+>", re.IGNORECASE) for name in (LEFT_OUT + " " + RAW).split()}


def _end_tag(name: str) -> re.Pattern[str]:
    return _END_TAGS[name]


def _held(name: str, attributes: str, content: str, form: WikiForm, held: list[Held]) -> str:
    """Return what takes the place of an element, and append the content that is restored later to `held`."""
    if name == "poem":
        return content.strip("\n").replace("\n", f"{BREAK}\n")
    kept = name in ("nowiki", "pre", "source", "syntaxhighlight") or (name in MATH and form.math)
    if not kept or not content.strip():
        return GONE
    if name in MATH:
        latex = " ".join(content.split())
        is_display = re.search(r"\bdisplay\s*+=\s*+[\"']?block", attributes) is not None
        stored = Held("display" if is_display else "formula", latex if name == "math" else rf"\ce{{{latex}}}")
    elif name == "nowiki":
        stored = Held("inline", unescape(content))
    else:
        is_inline = name != "pre" and re.search(r"\binline\b", attributes) is not None
        code = unescape(content) if name == "pre" else content
        stored = Held("inline", code.strip()) if is_inline else Held("block", code.strip("\n").rstrip())
    held.append(stored)
    return mark_of(len(held) - 1, stored)


# Templates. Pairs of braces are matched in one pass, so that a template is passed over in one step.


def _pairs(text: str) -> dict[int, tuple[int, int]]:
    """Return the end of the content of each template `{{…}}` and parameter `{{{…}}}`, and the number of its braces.

    The keys are the starts of the contents.
    """
    opened: list[list[int]] = []
    ends: dict[int, tuple[int, int]] = {}
    for match in _BRACES.finditer(text):
        position, size = match.start(), match.end() - match.start()
        if match[0][0] == "{":
            opened.append([match.end(), size])
            continue
        while size >= 2 and opened:
            inner = opened[-1]
            width = 3 if inner[1] >= 3 and size >= 3 else 2
            ends[inner[0]] = position, width
            position, size = position + width, size - width
            inner[0], inner[1] = inner[0] - width, inner[1] - width
            if inner[1] < 2:
                opened.pop()
    return ends


def _resolve_templates(text: str) -> str:
    """Replace each template by GONE, or by its text if it is one of KEPT_TEMPLATES."""
    if "{{" not in text:
        return text
    ends = _pairs(text)
    # A frame is a kept template: where its content ends, its braces, its name, and its text before a nested template.
    frames: list[tuple[int, int, str, list[str]]] = [(len(text), 0, "", [])]
    position = 0
    for start in [*sorted(ends), len(text)]:
        while len(frames) > 1 and frames[-1][0] < start:
            end, width, name, parts = frames.pop()
            parts.append(text[position:end])
            frames[-1][3].append(KEPT_TEMPLATES[name](_arguments("".join(parts))) or GONE)
            position = end + width
        if start == len(text) or start < position:
            continue
        end, width = ends[start]
        frames[-1][3].append(text[position : start - width])
        match = _TEMPLATE_NAME.match(text, start, end)
        name = _kept_name(match[1]) if match is not None and width == 2 else ""
        if name and len(frames) <= MAX_DEPTH:
            frames.append((end, width, name, []))
            position = start
        else:
            frames[-1][3].append(GONE)
            position = end + width
    return "".join([*frames[0][3], text[position:]])


def _kept_name(written: str) -> str:
    """Return the key in KEPT_TEMPLATES of a template; empty if it is left out."""
    if (function := _FUNCTION.match(written)) is not None:
        return function[1].lower()
    name = plain_name(written[:200])
    return "nowrap" if name.startswith("lang-") else name if name in KEPT_TEMPLATES else ""


def _arguments(content: str) -> dict[str, str]:
    """Return the arguments of a template by name or number; the first part, its name, is left out."""
    arguments: dict[str, str] = {}
    number = depth = 0
    start = -1
    arguments[NAME] = content.partition("|")[0]
    for match in re.finditer(r"\[\[|\]\]|\||\Z", content):
        token = match[0]
        if token == "[[":
            depth += 1
        elif token == "]]":
            depth = max(0, depth - 1)
        elif not token or not depth:
            if start >= 0:
                name, equals, value = content[start : match.start()].partition("=")
                if equals and re.fullmatch(r"\s*+[\w -]{1,30}+", name):
                    arguments[name.strip()] = value.strip()
                else:
                    number += 1
                    arguments[str(number)] = content[start : match.start()]
            start = match.end()
    return arguments


# Links.


def _resolve_links(text: str, hidden: Set[str]) -> str:
    """Replace each link by its label or target; leave out links of files, categories and other languages."""
    if "[[" not in text:
        return text
    opened: list[int] = []
    ends: dict[int, int] = {}
    for match in _LINK_TOKENS.finditer(text):
        if match[0] == "[[":
            opened.append(match.start())
        elif match[0] != "]]":
            # A link does not extend over an empty line, unless it is a picture with a long caption.
            opened = [
                start for start in opened[:MAX_DEPTH] if _is_hidden(*_target(text, start + 2, len(text))[:2], hidden)
            ]
        elif opened:
            ends[opened.pop()] = match.start()
    return _linked(text, ends, hidden)


def _linked(text: str, ends: Mapping[int, int], hidden: Set[str]) -> str:
    parts: list[str] = []
    closes: list[int] = []
    position = 0
    for match in re.finditer(r"\[\[|\]\]", text):
        start = match.start()
        if start < position:
            continue
        parts.append(text[position:start])
        position = match.end()
        if match[0] == "]]":
            if closes and closes[-1] == start:
                closes.pop()
            continue
        if (end := ends.get(start)) is None:
            continue
        target, has_label, _ = _target(text, position, end)
        if len(closes) >= MAX_DEPTH or _is_hidden(target, has_label, hidden):
            parts.append(GONE)
            position = end + 2
            continue
        if has_label and text[position + len(target) + 1 : end].strip():
            position += len(target) + 1
        else:
            parts.append(target.strip().removeprefix(":").replace("_", " "))
            position = end
        closes.append(end)
    return "".join([*parts, text[position:]])


def _target(text: str, start: int, end: int) -> tuple[str, bool, int]:
    pipe = text.find("|", start, min(end, start + 1000))
    return (text[start:pipe], True, pipe) if pipe >= 0 else (text[start : min(end, start + 1000)], False, end)


def _is_hidden(target: str, has_label: bool, hidden: Set[str]) -> bool:
    match = _PREFIX.match(target)
    if match is None:
        return False
    prefix = match[1].strip()
    return plain_name(prefix) in hidden or (not has_label and _LANGUAGE.match(prefix) is not None)


def categories(source: str) -> Iterator[str]:
    """Yield the names of the categories of a page, and of other links with a namespace, in lower case."""
    for match in re.finditer(r"\[\[\s*+[^:|\[\]{}<>\n]{1,40}+:([^|\[\]{}<>\n]{1,200}+)", source):
        yield plain_name(match[1])


# Tags, variants of writing, and marks of bold and italic.


def _resolve_tags(text: str) -> str:
    if "<" not in text:
        return text
    parts: list[str] = []
    position = 0
    unclosed: set[str] = set()
    for match in _TAG.finditer(text):
        name = match[2].lower()
        if match.start() < position or name not in KNOWN_TAGS:
            continue
        parts.append(text[position : match.start()])
        position = match.end()
        if not match[1] and name not in unclosed and match[3] and _HIDDEN.search(match[3][:2000]):
            if (end := _end_of_element(text, name, match.end())) is None:
                unclosed.add(name)
            else:
                parts.append(GONE)
                position = end
                continue
        is_number = name in ("sup", "sub") and (mark := _mark_of_exponent(text, match))
        parts.append(mark if is_number else _tag_text(name, bool(match[1])))
    return "".join([*parts, text[position:]])


def _tag_text(name: str, closes: bool) -> str:
    if name == "br":
        return BREAK
    if name in ("td", "th"):
        return "" if closes else CELL
    if name == "li" and not closes:
        return f"{EDGE}* "
    return EDGE if name in BLOCK_TAGS else ""


def _end_of_element(text: str, name: str, start: int) -> int | None:
    """Return the end of the element whose content begins at `start`; None if it has no end."""
    depth = 1
    for match in _TAG.finditer(text, start):
        if match[2].lower() != name or match[3].endswith("/"):
            continue
        depth += -1 if match[1] else 1
        if not depth:
            return match.end()
    return None


def _power(match: re.Match[str]) -> str:
    """Return what the template `e` shows before its exponent: `×10` after a number, nothing after the base itself."""
    return match[1] if match[1] == "10" else f"{match[1]}\u00d710" if match[1] else ""


def _mark_of_exponent(text: str, match: re.Match[str]) -> str:
    """Return the mark that `pipeline.extract.exponents` puts between a number and the one in this tag."""
    if match[1] or not text[max(0, match.start() - 1) : match.start()].isdecimal():
        return ""
    inner = _EXPONENT.match(text, match.end())
    return "" if inner is None else "_" if inner[1] in "bB" else " " if inner[2] else "^"


def _variant(match: re.Match[str]) -> str:
    """Return the text of `-{…}-` in simplified Chinese, or in the first variant of other languages."""
    flags, pipe, rules = match[1].partition("|")
    if not pipe:
        flags, rules = "", match[1]
    if flags.strip() in ("H", "T", "-"):
        return GONE
    variants = dict(_VARIANT.findall(rules))
    chosen = next((variants[name] for name in ("zh-hans", "zh-cn", "zh") if name in variants), None)
    return (chosen if chosen is not None else next(iter(variants.values()), rules)).strip()


def _without_quotes(line: str) -> str:
    """Return a line without the marks of bold and italic.

    If both are left open, a mark of three is an apostrophe and one of two, as in `l'''amour''`.
    """
    if "''" not in line:
        return line
    runs = [(match.start(), match.end() - match.start()) for match in _QUOTES.finditer(line)]
    bold = sum(size != 2 for _, size in runs)
    italic = sum(size == 2 or size >= 5 for _, size in runs)
    apostrophe = None
    if bold % 2 and italic % 2:
        threes = [start for start, size in runs if size == 3]
        single = (start for start in threes if start > 1 and line[start - 2] == " " and line[start - 1] != " ")
        word = (start for start in threes if start > 0 and line[start - 1] != " ")
        apostrophe = next(single, next(word, threes[0] if threes else None))
    parts: list[str] = []
    position = 0
    for start, size in runs:
        literal = 1 if start == apostrophe or size == 4 else max(0, size - 5)
        parts += (line[position:start], "'" * literal)
        position = start + size
    return "".join([*parts, line[position:]])
