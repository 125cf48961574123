"""A paper: sections of fields, each with entries that are computed, given, missing or not applicable; and its texts.

Every renderer starts from this form: `to_markdown` and `to_html` show the same entries as the JSON file.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.disclosure.answers import GIVEN, MISSING, UNUSED, FactsFile
from pipeline.disclosure.fact import DisclosedFacts, Origin
from pipeline.disclosure.markdown import code, escaped, table_lines
from schemas.ids import digest_of
from schemas.text import printable_block

COMPUTED = "computed"
"""State of an entry whose value comes from the run."""
FACTS_FILE = "facts file"
"""The origin of an entry that a person gave."""
SHORT_DIGEST = 12
LINK = re.compile(r"https?://[^\s\"'<>]{1,2000}")


@dataclass(frozen=True)
class Entry:
    """One stated fact of a paper."""

    key: str
    """Name that is unique in the paper: that of an answer, or of a fact."""
    label: str
    state: str
    """COMPUTED, GIVEN, MISSING or UNUSED."""
    value: str | tuple[str, ...] = ""
    """A text, or several that are listed."""
    head: tuple[str, ...] = ()
    """Titles of the columns of a table; empty: no table."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Rows of the table."""
    origins: tuple[str, ...] = ()
    """Names in `Paper.origins`."""
    optional: bool = False


@dataclass(frozen=True)
class PaperField:
    """A field of a paper, such as 1.1.a of the template."""

    id: str
    title: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class PaperSection:
    """A section of a paper."""

    id: str
    title: str
    fields: tuple[PaperField, ...]


@dataclass(frozen=True)
class Paper:
    """A paper with all that it states."""

    name: str
    """Name of the paper, such as `eu`."""
    title: str
    form: str
    """The form that it follows, with its source."""
    notes: tuple[str, ...]
    """Sentences at its head."""
    sections: tuple[PaperSection, ...]
    origins: Mapping[str, Origin]

    @property
    def entries(self) -> Iterator[Entry]:
        """All entries, in order."""
        return (entry for section in self.sections for field in section.fields for entry in field.entries)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """(field, name of the answer) of every entry that a person has not given, without optional ones."""
        found: dict[str, str] = {}
        for field in (field for section in self.sections for field in section.fields):
            for entry in field.entries:
                if entry.state == MISSING and not entry.optional:
                    found.setdefault(entry.key, field.id)
        return [(field, key) for key, field in found.items()]

    @property
    def version(self) -> str:
        """The digest of all that the paper states and of the origins; equal facts give equal versions."""
        stated = [asdict(section) for section in self.sections]
        return digest_of(
            [self.name, self.form, self.notes, stated, {key: asdict(own) for key, own in self.origins.items()}]
        )


class Filler:
    """Makes entries of facts and answers."""

    def __init__(self, facts: DisclosedFacts, answers: FactsFile):
        self.facts, self.answers = facts, answers

    def asked(self, key: str, source: str = "") -> Entry:
        """Return the entry of an answer; `source`: of a question about this source."""
        answer = self.answers.of_source(source, key) if source else self.answers.of(key)
        label = f"{source}: {answer.question.text}" if source else answer.question.text
        origins = (FACTS_FILE,) if answer.state == GIVEN or answer.value else ()
        value = answer.value if answer.state == GIVEN else ""
        return Entry(answer.key, label, answer.state, value, (), (), origins, answer.question.optional)

    def computed(self, key: str, label: str, value: str | tuple[str, ...], *facts: str) -> Entry:
        """Return the entry of a value that facts state; `facts`: their names."""
        return Entry(key, label, COMPUTED, value, origins=self.origins_of(*facts))

    def table(self, key: str, label: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *facts: str) -> Entry:
        """Return an entry with a table."""
        return Entry(key, label, COMPUTED, "", head, tuple(rows), self.origins_of(*facts))

    def unused(self, key: str, label: str) -> Entry:
        """Return an entry that does not apply."""
        return Entry(key, label, UNUSED)

    def origins_of(self, *facts: str) -> tuple[str, ...]:
        """Return the origins of some facts, each once."""
        names = (origin for name in facts if name in self.facts.facts for origin in self.facts.facts[name].origins)
        return tuple(dict.fromkeys(names))

    def origins(self) -> dict[str, Origin]:
        """Return all origins, the facts file included if there is one."""
        own = dict(self.facts.origins)
        if self.answers.path:
            values = {
                key: list(value) if isinstance(value, tuple) else value for key, value in self.answers.values.items()
            }
            name = self.answers.path.rpartition("/")[2]
            own[FACTS_FILE] = Origin(FACTS_FILE, name, digest_of(values), f"cat {shlex.quote(name)}")
        return own


def to_markdown(paper: Paper, more: Mapping[str, Any]) -> bytes:
    """Return a paper as Markdown with footnotes for the origins."""
    numbers = {name: number for number, name in enumerate(paper.origins, 1)}
    lines = [f"# {escaped(paper.title)}", "", f"Form: {escaped(paper.form)}", f"Version: `{paper.version}`", ""]
    lines += [f"{escaped(note)}\n" for note in paper.notes]
    for section in paper.sections:
        lines += [f"## {section.id} {escaped(section.title)}", ""]
        for field in section.fields:
            lines += [f"### {field.id} {escaped(field.title)}", ""]
            for entry in field.entries:
                lines += [*_markdown_entry(entry, numbers), ""]
    lines += _markdown_changes(more.get("changes"))
    lines += ["## Origins", ""]
    for name, number in numbers.items():
        origin = paper.origins[name]
        lines.append(f"{number}. {code(origin.path)}, SHA-256 {code(origin.digest)}: {code(origin.query)}")
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _markdown_changes(changes: Sequence[Mapping[str, str]] | None) -> list[str]:
    if changes is None:
        return []
    lines = ["## Changes since the earlier version", ""]
    rows = [tuple(escaped(change[name]) for name in ("name", "before", "after")) for change in changes]
    return [*lines, *table_lines(("name", "before", "after"), rows), ""] if rows else [*lines, "None.", ""]


def _markdown_entry(entry: Entry, numbers: Mapping[str, int]) -> Iterator[str]:
    marks = "".join(f" [{numbers[name]}]" for name in entry.origins if name in numbers).replace("[", "\\[")
    label = f"**{escaped(entry.label)}**"
    if entry.state == MISSING:
        more = " (optional)" if entry.optional else f"; add {code(entry.key)} to the facts file"
        yield f"{label}: *not given{more}*"
    elif entry.state == UNUSED:
        yield f"{label}: *not applicable*"
    elif entry.head:
        yield f"{label}:{marks}"
        yield ""
        yield from table_lines(entry.head, [tuple(map(escaped, row)) for row in entry.rows])
    elif isinstance(entry.value, tuple):
        yield f"{label}:{marks}"
        yield ""
        yield from (f"- {escaped(item)}" for item in entry.value)
    else:
        yield f"{label}: {escaped(entry.value)}{marks}"


def to_html(paper: Paper, more: Mapping[str, Any]) -> bytes:
    """Return a paper as one HTML page without scripts, which loads nothing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = {name: number for number, name in enumerate(paper.origins, 1)}
    page = environment.get_template("paper.html").render(
        paper=paper, numbers=numbers, changes=more.get("changes"), is_link=is_link
    )
    return page.encode("utf-8", "replace")


def _printable(value: Any) -> Any:
    return printable_block(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def is_link(text: str) -> bool:
    """Return True if a whole text is an http or https address, which a page may link to."""
    return LINK.fullmatch(text) is not None
