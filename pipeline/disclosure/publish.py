"""Papers as files: written by version, read again, and compared with an earlier version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.disclosure.answers import GIVEN, MISSING, FactsFile
from pipeline.disclosure.paper import SHORT_DIGEST, Paper, to_html, to_markdown
from schemas.errors import ConfigError, ContractError, reading
from schemas.ids import canonical_json, digest_of
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.takedown import SUMMARIES, check_no_pending_takedown
from schemas.text import printable_value


def to_json(paper: Paper, more: Mapping[str, Any]) -> bytes:
    """Return a paper as JSON; `more`: further members, such as the score."""
    fields = {
        field.id: {"title": field.title, "entries": [asdict(entry) for entry in field.entries]}
        for section in paper.sections
        for field in section.fields
    }
    value = {
        "paper": paper.name,
        "title": paper.title,
        "form": paper.form,
        "version": paper.version,
        "notes": list(paper.notes),
        "fields": fields,
        "origins": {name: asdict(origin) for name, origin in paper.origins.items()},
        "missing": [{"field": field, "name": name} for field, name in paper.missing],
    }
    return canonical_json(printable_value(value | dict(more))) + b"\n"


class SummaryFile(Protocol):
    """A file in the form of another tool."""

    @property
    def name(self) -> str:
        """Name of the paper, such as `croissant`."""

    @property
    def file_name(self) -> str:
        """Path in the folder of the paper."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the answers that it would state, and that are not given."""

    @property
    def has_paths(self) -> bool:
        """True: it names files by paths relative to the run folder. A takedown deletes it there by its name."""

    @property
    def version(self) -> str:
        """The digest of all that it states."""

    def to_bytes(self) -> bytes:
        """Return the file."""


@dataclass(frozen=True)
class MetadataFile:
    """A JSON file in the form of another tool."""

    name: str
    """Name of the paper, such as `croissant`."""
    file_name: str
    values: Mapping[str, Any]
    missing: tuple[str, ...]
    """Names of the answers that it would state, and that are not given."""
    has_paths: bool = False
    """True: it names files by paths relative to the run folder. A takedown deletes it there by its name."""

    @property
    def version(self) -> str:
        """The digest of all that it states."""
        return digest_of(dict(self.values))

    def to_bytes(self) -> bytes:
        """Return the file, with characters that a terminal executes as escapes."""
        return canonical_json(printable_value(dict(self.values))) + b"\n"


def stated(answers: FactsFile, key: str) -> str:
    """Return an answer as one text; empty if it is not given."""
    answer = answers.of(key)
    if answer.state != GIVEN:
        return ""
    return answer.value if isinstance(answer.value, str) else ", ".join(answer.value)


WRITERS: Mapping[str, Callable[[Paper, Mapping[str, Any]], bytes]] = {
    "html": to_html,
    "md": to_markdown,
    "json": to_json,
}
"""The writer of each format, by the end of the file's name."""
MAX_OLDER_BYTES = 256 << 20
"""Maximum size of an earlier paper; a domain takes about 40 bytes."""
SHOWN_CHARS = 200
"""Maximum length of a value in a list of changes."""


def changes_since(paper: Paper, path: str) -> list[dict[str, str]]:
    """Return what changed since an earlier version: name, before and after, sorted by name.

    `path`: the JSON file of the earlier paper. An entry of a table has one line for each row. Raises ConfigError if
    there is no such file, and ContractError if it is no such paper.
    """
    file = Path(path)
    if not file.is_file() or file.stat().st_size > MAX_OLDER_BYTES:
        raise ConfigError(f"--against {path}: expected the JSON file of an earlier paper, got none. Correct the path.")
    older = Store(str(file.absolute().parent)).read_json(file.name)
    with reading(f"--against {path}", "a paper that `penstock summary` wrote", "Name another file."):
        if older["paper"] != paper.name:
            raise ValueError(f"paper {older['paper']!r:.50}, not {paper.name!r}")
        entries = [entry for field in older["fields"].values() for entry in field["entries"]]
        before = {name: text for entry in entries for name, text in _lines(entry)}
    after = {name: text for entry in paper.entries for name, text in _lines(vars(entry))}
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [{"name": name, "before": before.get(name, ""), "after": after.get(name, "")} for name in names]


def _lines(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of an entry: of each row of its table, or of its value."""
    if entry["head"]:
        return [(f"{entry['key']}: {row[0]}", ", ".join(row[1:])[:SHOWN_CHARS]) for row in entry["rows"]]
    value = entry["value"]
    text = value if isinstance(value, str) else "; ".join(value)
    return [(entry["key"], text[:SHOWN_CHARS] if text else "" if entry["state"] == MISSING else entry["state"])]


def write_paper(
    run: Store, out: Store | None, paper: Paper, formats: Sequence[str], more: Mapping[str, Any]
) -> list[str]:
    """Write a paper in some formats, and return the paths of the files.

    `out`: the folder; None: `summaries/VERSION` of the run, from which a takedown deletes it. `more`: further members,
    as for `to_json`. Raises ContractError, and leaves no file, if a table of the run was replaced meanwhile.
    """
    folder = out or run.child(f"{SUMMARIES}/{paper.version[:SHORT_DIGEST]}")
    return _write(run, folder, {f"{paper.name}.{kind}": WRITERS[kind](paper, more) for kind in formats})


def write_metadata(run: Store, out: Store | None, file: SummaryFile) -> str:
    """Write a file in the form of another tool, as `write_paper` does, and return its path.

    A file with paths of the run is by default in the run folder itself.
    """
    folder = run if file.has_paths else run.child(f"{SUMMARIES}/{file.version[:SHORT_DIGEST]}")
    return _write(run, out or folder, {file.file_name: file.to_bytes()})[0]


def _write(run: Store, folder: Store, files: Mapping[str, bytes]) -> list[str]:
    check_no_pending_takedown(run)
    tables = read_run(run).tables
    for name, content in files.items():
        folder.write_atomic(name, content)
    if read_run(run).tables != tables:
        # A takedown replaces tables before it deletes papers: either it deletes these, or this check does.
        for name in files:
            folder.delete(name)
        raise ContractError(
            f"{run.uri}: expected the same tables at the end as at the start, got other versions. Run this command "
            "again."
        )
    return [f"{folder.uri}/{name}" for name in files]
