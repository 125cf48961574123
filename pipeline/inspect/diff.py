"""The difference between two runs: settings, the documents that only one keeps with the other's rule, and training.

Documents are joined by doc_id, which is derived from source, file and offset, so a document of a crawl has the same id
in every run. Rows are streamed part by part. Only counts by source and rule, and the examples to print, are kept in
memory.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.parquet import ROWS_AT_ONCE
from pipeline.inspect.diff_training import NAMES, PairRow, compare_training, read_trained_run
from pipeline.language import LANGUAGE
from pipeline.quality.limits import limit_in_force
from pipeline.quality.stage import QUALITY
from pipeline.tokens.streams import (
    MIX_RULE,
    STREAM_TABLES,
    TOKENS,
    Sorting,
    live_tokens,
    mix_drops,
    mixed_sorting,
    sorting_of,
)
from schemas.errors import ContractError
from schemas.field_docs import toml_value
from schemas.manifest import Manifest, TableVersion, open_table, part_key, read_run
from schemas.older_tables import read_batches
from schemas.storage import Store
from schemas.tables import DROPPED_BEFORE, LATER_VERDICTS, TABLES, VERDICT_COLUMNS
from schemas.versions import DATASET

KEPT = "kept"
NOT_READ = "source/not_read"
"""The verdict on a document in a run that read its input file, but found no document at its offset."""
PROVENANCE_COLUMNS = ("doc_id", "source", "split", "offset", "url")
Row = dict[str, Any]
Key = tuple[str, str, str]
Place = tuple[str, str]
"""Source and split of an input file."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs to compare, with all its tables."""

    run: Store
    tables: Mapping[str, TableVersion]
    deciding: frozenset[str]
    """Names of the tables that decide which documents the run keeps: `clean`, and all tables that `clean` was made
    from. No table stores which documents the mix leaves out; this is computed from the doc_id."""
    sorting: Sorting | None = None
    """The choice of the documents that the mix leaves out of the dataset; None = the dataset has all clean
    documents, or the run has no dataset."""

    @property
    def dataset(self) -> Manifest | None:
        """The manifest of the dataset; None = the run has no dataset yet."""
        return self.tables[DATASET].manifest if DATASET in self.tables else None

    @property
    def has_documents(self) -> bool:
        """True if the run has the tables `documents` and `clean`, or another run on whose dataset it is has them."""
        return {"documents", "clean"} <= self.tables.keys()

    @property
    def digest(self) -> str:
        """The digest of the dataset, or of the table `clean` if the run has no dataset."""
        return (self.dataset or self.tables["clean"].manifest).digest

    @property
    def read_by_dataset(self) -> str | None:
        """The digest of the table `clean` that the dataset was made from; None = there is no dataset, or no `clean`."""
        return self.dataset.tables_read.get("clean") if self.dataset else None

    @property
    def clean(self) -> str | None:
        """The digest of the current table `clean`, or of the one that the dataset was made from if that is absent."""
        return self.tables["clean"].manifest.digest if "clean" in self.tables else self.read_by_dataset


@dataclass(frozen=True)
class Example:
    """One document on which the two runs have different verdicts."""

    doc_id: str
    url: str | None
    value: float | None
    """The value that the rule compared with `limit`; None = the rule compares no value."""
    limit: float | None


@dataclass
class UnsharedInputs:
    """The input files that only one of the two runs read, with their rows."""

    names: list[str] = field(default_factory=list)
    rows: int = 0
    kept: int = 0
    """Number of documents of these files that the run keeps."""


@dataclass
class Difference:
    """The documents, settings and token counts in which two runs, A and B, differ."""

    documents: Counter[Key] = field(default_factory=Counter)
    """Number of documents by source, verdict in A and verdict in B, for the input files that both runs read."""
    unshared: tuple[UnsharedInputs, UnsharedInputs] = field(
        default_factory=lambda: (UnsharedInputs(), UnsharedInputs())
    )
    """The input files that only A read, and those that only B read."""
    examples: dict[Key, list[Example]] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings, stage versions and models that differ: name → (value in A, value in B)."""
    setting_texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The same settings as text: a limit that a run does not set is the limit in force with its origin."""
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Stream → its number of tokens in A and in B, not counting tombstones."""
    kept: tuple[int, int] = (0, 0)
    """Number of documents that A keeps, and that B keeps."""
    is_equal: bool = False
    """True if the documents are those of equal tables `clean`, and the tokens those of equal datasets."""
    training: list[PairRow] = field(default_factory=list)
    """Size, speed and losses of the models of A and B; empty if neither run has a plan."""
    notes: list[str] = field(default_factory=list)
    """What one of the runs lacks, so that it is not compared; one sentence each."""

    def moved(self, out: bool) -> dict[tuple[str, str], int]:
        """Return the number of documents that only one of the runs keeps, by source and rule.

        If `out` is True, this run is A, else B. The rule is the `stage/rule` that dropped the documents in the other
        run.
        """
        return {
            (source, b if out else a): count
            for (source, a, b), count in self.documents.items()
            if (a == KEPT if out else b == KEPT)
        }


def open_compared_run(run: Store) -> ComparedRun:
    """Open the tables of a run.

    Raises ContractError if the run has neither a dataset nor a table `clean`, or if a table was made from an outdated
    version of another table.
    """
    current = {*read_run(run).tables}
    if DATASET not in current:
        current |= {"documents", "clean"}
    tables = {name: TableVersion(*open_table(run, name, even_replaced=True)) for name in TABLES if name in current}
    digests = {name: table.manifest.digest for name, table in tables.items()}
    deciding = {"clean"}
    for name in reversed(tables):
        if name in deciding:
            deciding |= tables[name].manifest.tables_read.keys()
    for name in (name for name in tables if name in deciding):
        for read, digest in tables[name].manifest.tables_read.items():
            if digests.get(read) != digest:
                version = digests.get(read, "none")[:12]
                raise ContractError(
                    f"{run.uri}: expected `{name}` made from the current `{read}` ({version}), got `{name}` made "
                    f"from `{read}` {digest[:12]}. Run `penstock run` until all its steps are complete, or name an "
                    "earlier version as RUN@digest."
                )
    is_sorted = {DATASET, "clean"} <= tables.keys()
    sorting = mixed_sorting(tables[DATASET].manifest, digests["clean"]) if is_sorted else None
    return ComparedRun(run, tables, frozenset(deciding), sorting)


def compare_runs(a: ComparedRun, b: ComparedRun, num_examples: int) -> Difference:
    """Compare the verdicts, settings and tokens of two runs.

    Documents with different verdicts are counted by source, verdict in A and verdict in B. Up to `num_examples`
    documents of each combination are returned as examples.
    """
    difference = Difference(settings=_settings(a, b), tokens=_tokens(a, b))
    difference.kept = (_num_kept(a), _num_kept(b))
    # A run may have been built up to `clean` with other settings after its dataset.
    difference.is_equal = (a.digest, a.clean) == (b.digest, b.clean)
    trained = [
        read_trained_run(name, side.run, side.dataset.digest if side.dataset else None, _tokenizer(side))
        for name, side in zip(NAMES, (a, b), strict=True)
    ]
    training = compare_training(*trained)
    difference.settings |= training.settings
    difference.setting_texts = {
        name: (_setting_text(a, name, old), _setting_text(b, name, new))
        for name, (old, new) in difference.settings.items()
    }
    difference.training, difference.notes = training.figures, [*_lacking(a, b), *training.notes]
    if not (a.has_documents and b.has_documents):
        return difference
    same_mix = a.sorting == b.sorting
    if same_mix and a.tables["clean"].manifest.digest == b.tables["clean"].manifest.digest:
        return difference
    sides = _InputRows(a), _InputRows(b)
    for place in sorted({*sides[0].names, *sides[1].names}):
        names = [side.names.get(place) for side in sides]
        if None in names:
            number = names.index(None) ^ 1
            _add_input(difference.unshared[number], sides[number].names[place], sides[number].of(place))
            continue
        if same_mix and sides[0].digests(place) == sides[1].digests(place):
            continue  # identical part files contain identical verdicts
        for left, right in _pairs(sides[0].of(place), sides[1].of(place)):
            _add_document(difference, left, right, num_examples)
    return difference


def _add_input(unshared: UnsharedInputs, name: str, rows: Iterator[Row]) -> None:
    unshared.names.append(name)
    for row in rows:
        unshared.rows += 1
        unshared.kept += outcome_of(row) == KEPT


def _tokenizer(side: ComparedRun) -> str:
    return str(side.dataset.content.figures["tokenizer"]["sha256"]) if side.dataset else ""


def _lacking(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """Yield a sentence for each table that only one of the runs lacks, or that is needed of both."""
    for name, side in zip(NAMES, (a, b), strict=True):
        if not side.has_documents:
            yield (
                f"{name} has a dataset without the tables `documents` and `clean`, so documents, rules and lengths are "
                "not compared."
            )
    for name, side, other in ((NAMES[0], a, b), (NAMES[1], b, a)):
        if side.dataset is None and other.dataset is not None:
            yield f"{name} has no dataset yet, so it has no tokens."
        if side.read_by_dataset not in (None, side.clean):
            yield (
                f"{name} has a dataset made from another table `clean` than its current one, so its tokens are "
                "not those of its documents. `penstock run` makes a dataset from them."
            )


def _add_document(difference: Difference, left: Row | None, right: Row | None, num_examples: int) -> None:
    verdicts = outcome_of(left), outcome_of(right)
    if verdicts[0] == verdicts[1]:
        return
    row = left or right or {}
    key = (row["source"], *verdicts)
    difference.documents[key] += 1
    examples = difference.examples.setdefault(key, [])
    if len(examples) < num_examples:
        dropped = (right if verdicts[0] == KEPT else left) or {}
        value, limit = dropped.get("drop_value"), dropped.get("drop_limit")
        examples.append(Example(row["doc_id"].hex(), row["url"], value, limit))


def outcome_of(row: Row | None) -> str:
    """Return `kept`, the `stage/rule` that dropped the document of a row, or NOT_READ if the row is None."""
    if row is None:
        return NOT_READ
    return KEPT if row["drop_stage"] is None else f"{row['drop_stage']}/{row['drop_rule']}"


class _InputRows:
    """The rows of one run by input file, named by source and split: a run of one source has no source in its names.

    A part that several files share is read once, in the order of the splits.
    """

    def __init__(self, side: ComparedRun):
        self._side = side
        manifest = side.tables["documents"].manifest
        self.names = {place: name for name, place in manifest.places_of_inputs.items()}
        """Name of each input file in this run, by (source, split)."""
        self._parts = manifest.parts_of_inputs
        self._files = Counter(parts[0] for parts in self._parts.values())
        self._part = -1
        self._groups: Iterator[tuple[str, Iterator[Row]]] = iter(())
        self._group: tuple[str, Iterator[Row]] | None = None
        tables = [side.tables[name] for name in ("documents", *LATER_VERDICTS) if name in side.tables]
        self._digests = [{entry.key: entry.sha256 for entry in table.manifest.content.files} for table in tables]

    def digests(self, place: Place) -> list[str]:
        """Return the SHA-256 of the files that hold the verdicts of an input file."""
        return [of_table[part_key(part)] for of_table in self._digests for part in self._parts[self.names[place]]]

    def of(self, place: Place) -> Iterator[Row]:
        """Return the rows of an input file. Within a part, files are asked for in ascending order of their splits."""
        parts, split = self._parts[self.names[place]], place[1]
        if self._files[parts[0]] == 1:
            return itertools.chain.from_iterable(_rows(self._side, part) for part in parts)
        if self._part != parts[0]:
            self._part = parts[0]
            self._groups = itertools.groupby(_rows(self._side, self._part), key=lambda row: str(row["split"]))
            self._group = next(self._groups, None)
        while self._group is not None and self._group[0] < split:
            self._group = next(self._groups, None)
        return self._group[1] if self._group is not None and self._group[0] == split else iter(())


def _rows(side: ComparedRun, number: int) -> Iterator[Row]:
    """Yield the rows of one part of `documents` with their final verdicts, in the order of the input file."""
    key = part_key(number)
    documents = _table_rows(side.tables["documents"], key, (*PROVENANCE_COLUMNS, *VERDICT_COLUMNS))
    later = {
        name: _table_rows(side.tables[name], key, ("doc_id", *VERDICT_COLUMNS))
        for name in LATER_VERDICTS
        if name in side.deciding
    }
    streams = {name: side.tables[name] for name in STREAM_TABLES if name in side.tables}
    last = mix_drops(streams, number, side.sorting) if side.sorting else None
    for row in documents:
        if row["drop_stage"] is not None:
            yield row
            continue
        for name, rows in later.items():
            if TABLES[name].rows == "survivor" and row["drop_stage"] is not None:
                continue  # this table has no row for documents that an earlier table dropped
            verdict = next(rows, None)
            if verdict is None or verdict["doc_id"] != row["doc_id"]:
                raise ContractError(
                    f"{side.run.uri}: expected {key} of `{name}` to hold the same documents as {key} of `documents`, "
                    f"got a difference at doc_id {row['doc_id'].hex()}. Run `penstock run` with a new --out."
                )
            if verdict["drop_stage"] is not None and verdict["drop_rule"] != DROPPED_BEFORE:
                row |= {column: verdict[column] for column in VERDICT_COLUMNS}
        if last and row["drop_stage"] is None and (drop := next(last)[1]) is not None:
            row |= dict(zip(VERDICT_COLUMNS, (TOKENS.name, drop.rule, drop.value, drop.limit), strict=True))
        yield row


def _table_rows(table: TableVersion, key: str, columns: tuple[str, ...]) -> Iterator[Row]:
    with table.folder.open_input(table.manifest.paths[key]) as stream:
        for batch in read_batches(pq.ParquetFile(stream), table.manifest.content.table, columns, ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _pairs(left: Iterator[Row], right: Iterator[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    """Yield pairs of rows with the same doc_id, one row of each run. None replaces a missing row.

    Both inputs are rows of the same split, sorted by offset.
    """
    # A merge join by offset; few rows share an offset.
    groups = [_by_offset(left), _by_offset(right)]
    heads = [next(group, None) for group in groups]
    while any(heads):
        first = min(head[0] for head in heads if head is not None)
        rows: list[dict[bytes, Row]] = [{}, {}]
        for side, head in enumerate(heads):
            if head is not None and head[0] == first:
                rows[side], heads[side] = head[1], next(groups[side], None)
        for identifier in {**rows[0], **rows[1]}:
            yield rows[0].get(identifier), rows[1].get(identifier)


def _by_offset(rows: Iterator[Row]) -> Iterator[tuple[int, dict[bytes, Row]]]:
    """Yield (offset, {doc_id: row}) for each group of consecutive rows of equal offset."""
    offset, group = -1, dict[bytes, Row]()
    for row in rows:
        if row["offset"] != offset and group:
            yield offset, group
            group = {}
        offset = row["offset"]
        group[row["doc_id"]] = row
    if group:
        yield offset, group


def _num_kept(side: ComparedRun) -> int:
    is_last = side.dataset is not None and (side.sorting is not None or "clean" not in side.tables)
    last = side.dataset if side.dataset is not None and is_last else side.tables["clean"].manifest
    return last.content.counts.rows_kept


def _settings(a: ComparedRun, b: ComparedRun) -> dict[str, tuple[Any, Any]]:
    """Return (value in A, value in B) of each setting, stage version and model that differs, by name.

    The comparison covers the tables that decide which documents a run keeps, and the tables that both runs have.
    """
    both_have = a.tables.keys() & b.tables.keys()
    compared = a.deciding | b.deciding | both_have if a.has_documents and b.has_documents else both_have
    both = [_flat_settings(side, compared) for side in (a, b)]
    names = sorted({*both[0], *both[1]})
    return {name: (both[0].get(name), both[1].get(name)) for name in names if both[0].get(name) != both[1].get(name)}


def _flat_settings(side: ComparedRun, compared: Set[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in (name for name in side.tables if name in compared):
        manifest = side.tables[name].manifest
        for stage, version in manifest.content.stages.items():
            flat[f"version of {stage}"] = version
        for stage, settings in manifest.content.config.items():
            flat |= {f"{stage}.{key}": value for key, value in settings.items()}
        flat |= {f"model {name}": digest[:12] for name, digest in manifest.content.models.items()}
        shares = sorting_of(manifest).keep if name == DATASET else {}
        flat |= {f"{TOKENS.name}.{MIX_RULE} {source}: keep": share for source, share in shares.items() if share < 1}
    return flat


def _setting_text(side: ComparedRun, name: str, value: Any) -> str:
    """Return the value of a setting as text; a limit that is not set is that in force, as the run's tables have it."""
    section, _, key = name.partition(".")
    if section != QUALITY.name or value is not None or "verdicts" not in side.tables:
        return toml_value(value)
    config = {name: table.manifest.content.config for name, table in side.tables.items()}
    rules: Mapping[str, Any] = side.tables["verdicts"].manifest.content.figures.get("limits", {})
    shared = (rule for rule in rules.values() if "own_source" not in rule)
    limits = next((rule["limits"] for rule in shared if rule["setting"] == name), None)
    dialect = config["verdicts"].get(QUALITY.name, {}).get("dialect", "")
    languages = config["documents"].get(LANGUAGE.name, {}).get("languages", ())
    return limit_in_force(key, value, dialect, limits, languages) or toml_value(value)


def _tokens(a: ComparedRun, b: ComparedRun) -> dict[str, tuple[int, int]]:
    """Return the numbers of tokens in A and in B, by name of the stream; 0 for a run without the stream."""
    both = [
        live_tokens(side.tables[DATASET].folder.child("../.."), side.dataset) if side.dataset else {} for side in (a, b)
    ]
    return {name: (both[0].get(name, 0), both[1].get(name, 0)) for name in sorted({*both[0], *both[1]})}
