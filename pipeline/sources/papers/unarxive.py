"""Reader of unarXive: JSON lines with one paper each, whose formulas and citations are marks in the text.

A formula's mark is replaced by its LaTeX. Source: Saier, Krause, Färber 2023, arXiv 2303.14957 (unarXive 2022).
"""

import re
from collections.abc import Mapping
from typing import Any

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows, parse_object, read_lines
from pipeline.sources.papers.ids import identify
from pipeline.sources.provenance import encodable, new_row, set_text
from pipeline.sources.rows import date_of, meta_of

_MARK = re.compile(r"\{\{(formula|cite|figure|table|section|ref):([^{}]{1,200})\}\}")
_MARK_SPACE = re.compile(r"\}\} +(?=[.,;:!?)\]'’-])")
"""The space that unarXive writes between a formula and what follows it directly."""
_NO_TARGET = re.compile(r"REF(?<=\bREF)\b(?!-)")
"""The mark of a reference whose target is not in the paper; a pattern is searched much faster by its first letters."""
_NO_CAPTION = "NO_CAPTION"
_CUT = "\x1c"
_BRACKETS = re.compile(rf"[(\[](?:see|e\.g\.,?|cf\.|and|[\s,;–-]|{_CUT})*+[)\]]")
_CUT_LIST = re.compile(rf"{_CUT} ?(?:[,;–-] ?)?(?={_CUT})")
_CUT_SPACE = re.compile(rf"{_CUT} ?(?=[.,;:!?)\]]|\n|\Z)")
_LEVELS = {"section": 2, "subsection": 3, "subsubsection": 4}
_FIELDS = ("authors", "categories", "doi", "journal-ref")


def open_unarxive(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a file of unarXive, one for each paper."""
    return read_lines(split, stream, config, _parse)


def _parse(line: bytes, config: SourceConfig) -> tuple[Row, Drop | None]:
    paper = parse_object(line)
    return paper_row(paper, config) if paper is not None else (new_row("row"), Drop("bad_line"))


def paper_row(paper: Mapping[str, Any], config: SourceConfig) -> tuple[Row, Drop | None]:
    """Return the row of a paper, with a Drop if it has no text."""
    metadata = _object(paper.get("metadata"))
    name = paper.get("paper_id") or metadata.get("id")
    number, month = identify(name) if isinstance(name, str) else (None, None)
    row = new_row("paper", encodable(f"https://arxiv.org/abs/{number}") if number else None)
    versions = metadata.get("versions")
    first = (
        versions[0].get("created")
        if isinstance(versions, list) and versions and isinstance(versions[0], dict)
        else None
    )
    row["date"] = next((day for value in (first, metadata.get("update_date")) if (day := date_of(value))), month)
    licence = metadata.get("license")
    row["licence"] = encodable(licence) if isinstance(licence, str) and licence else None
    if title := _text(metadata.get("title")):
        row["title"] = encodable(" ".join(title.split()))
    fields = {key.replace("-", "_"): _one_line(metadata.get(key)) for key in _FIELDS}
    fields["discipline"] = paper.get("discipline")
    row["meta"], row["_meta"] = meta_of(fields, set(), config)
    body = paper.get("body_text")
    if not isinstance(body, list):
        return row, Drop("no_text_field")
    try:
        text = _paper_text(paper, body, config)
    except _TooLargeError:
        return row, Drop("page_too_large", None, float(config.max_page_bytes))
    return row, set_text(row, text, config)


class _TooLargeError(Exception):
    """What the marks of a paper stand for is far longer than a text may be."""


def _paper_text(paper: Mapping[str, Any], body: list[Any], config: SourceConfig) -> str:
    settings, most = config.unarxive, 4 * config.max_page_bytes  # white space included; the text is compared later
    entries, sources = _object(paper.get("ref_entries")), _object(paper.get("bib_entries"))
    abstract = paper.get("abstract")
    if isinstance(abstract, list):
        abstract = " ".join(_text(_object(part).get("text")) for part in abstract)
    parts = [" ".join(_text(_object(abstract).get("text") if isinstance(abstract, dict) else abstract).split())]
    section = None
    for paragraph in map(_object, body):
        heading = _text(paragraph.get("section"))
        heading = " ".join(heading.split())
        if heading and heading != section:
            level = _LEVELS.get(_text(paragraph.get("sec_type")), 5)
            parts.append(f"{'#' * level} {heading}" if settings.headings == "markdown" else heading)
        section = heading or section
        parts.append(_text(paragraph.get("text")))
    if settings.captions:
        captions = [_text(_object(entry).get("caption")) for entry in entries.values()]
        parts += [" ".join(caption.split()) for caption in captions if caption != _NO_CAPTION]
    # All marks at once: one call for each paragraph takes three times as long.
    text = "\n\n".join(part for part in map(str.strip, parts) if part)
    return restore_marks(text, entries, sources, settings.citations == "keep", most)


def restore_marks(
    text: str, entries: Mapping[str, Any], sources: Mapping[str, Any], keeps_citations: bool, most: int
) -> str:
    """Return a text with the LaTeX of its formulas in place of their marks, and citations kept or left out.

    Raises _TooLargeError if that is longer than `most`: a long formula may be named a million times.
    """
    size = 0

    def counted(match: re.Match[str]) -> str:
        nonlocal size
        found = replaced(match)
        size += len(found)
        if size > most:
            raise _TooLargeError
        return found

    def replaced(match: re.Match[str]) -> str:
        kind, key = match[1], match[2]
        entry = _object(entries.get(key))
        if kind == "formula":
            latex = _text(entry.get("latex")).strip()
            return (f"${latex}$" if "\n" not in latex and not latex.startswith("\\begin") else latex) if latex else _CUT
        if not keeps_citations:
            return _CUT
        source = _object(sources.get(key)) if kind == "cite" else {}
        return f"[{' '.join(_text(source.get('bib_entry_raw')).split())[:500] or key}]"

    text = _MARK_SPACE.sub("}}", text.replace(_CUT, ""))
    if "REF" in text and not keeps_citations:
        text = _NO_TARGET.sub(_CUT, text)
    text = _MARK.sub(counted, text)
    text = one_space(text)
    if _CUT in text:
        text = _BRACKETS.sub(lambda match: _CUT if _CUT in match.group() else match.group(), text)
        text = _CUT_LIST.sub("", text).replace(f" {_CUT}", _CUT)
        text = one_space(_CUT_SPACE.sub("", text).replace(_CUT, " "))
    return text


def one_space(text: str) -> str:
    """Return the text with one space in place of several, of tabs and of no-break spaces; line ends stay."""
    # Replacing is ten times as fast as a pattern that matches at every space.
    text = text.replace("\t", " ").replace("\xa0", " ")
    while "  " in text:
        text = text.replace("  ", " ")
    return text


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _one_line(value: Any) -> str | None:
    return " ".join(value.split()) if isinstance(value, str) else None
