"""What two runs keep: documents in and out, and the rule of the other run that decided each, part by part.

Documents are joined by doc_id, which follows from source, file and offset: a document of one crawl has one id in every
run. Rows are streamed; what is kept in memory are counts by source and rule, and the examples that were asked for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.parquet import ROWS_AT_ONCE
from pipeline.tokens.streams import MIX_RULE, TOKENS, Sorting, mix_drops, mixed_sorting, sorting_of
from schemas.errors import ContractError
from schemas.manifest import Manifest, TableVersion, open_table, part_key, read_run
from schemas.storage import Store
from schemas.takedown import takedown_ancestry
from schemas.tokens import shard_key

KEPT = "kept"
NOT_READ = "source/not_read"
"""The fate of a document in a run that never read its file or found nothing at its place."""
TABLES = ("documents", "scores", "verdicts", "dedup", "repeats", "clean")
"""Tables that say which documents are kept, in the order they look at them; some only where a run has them. What the
mix of a dataset leaves out is in no table: it follows from the document."""
OPTIONAL_TABLES = ("scores", "repeats")
DROPPING_TABLES = ("verdicts", "dedup", "repeats", "clean")
"""Those that may drop a document after `documents`."""
EARLIER_DROPS = ("dropped_before",)
DROP_COLUMNS = ("drop_stage", "drop_rule", "drop_value", "drop_limit")
PROVENANCE_COLUMNS = ("doc_id", "source", "offset", "url")
Row = dict[str, Any]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class ComparedRun:
    """One run, with the tables that decide what it keeps."""

    run: Store
    tables: Mapping[str, TableVersion]
    dataset: Manifest | None
    """None = no dataset stands yet."""
    sorting: Sorting | None = None
    """How a mix chose among its clean documents; None = all of them are in the dataset."""

    @property
    def digest(self) -> str:
        """What it is known by: the digest of its dataset, or of its clean documents."""
        return (self.dataset or self.tables["clean"].manifest).digest

    @property
    def identity(self) -> list[str]:
        """Digests of what decides which documents it keeps."""
        return [table.manifest.digest for table in self.tables.values()]


@dataclass(frozen=True)
class Example:
    """One document whose fate differs."""

    doc_id: str
    url: str | None
    value: float | None
    """What the rule measured; None = it measures nothing."""
    limit: float | None


@dataclass
class Difference:
    """How two runs differ."""

    documents: Counter[Key] = field(default_factory=Counter)
    """By source, fate in A and fate in B."""
    examples: dict[Key, list[Example]] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings, versions of stages and models that differ, by name."""
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens of each stream in A and in B, without tombstones."""
    kept: tuple[int, int] = (0, 0)
    """Documents that A keeps, and B."""

    def moved(self, out: bool) -> dict[tuple[str, str], int]:
        """Documents out of B, or into it, by source and the rule that dropped them in the run without them."""
        return {
            (source, b if out else a): count
            for (source, a, b), count in self.documents.items()
            if (a == KEPT if out else b == KEPT)
        }


def open_compared_run(run: Store) -> ComparedRun:
    """The tables of a run. Raises ContractError if it has no clean documents yet, or they are not of one piece."""
    standing = read_run(run).tables
    tables = {
        name: TableVersion(*open_table(run, name)) for name in TABLES if name not in OPTIONAL_TABLES or name in standing
    }
    found = {name: table.manifest.digest for name, table in tables.items()}
    for name, table in tables.items():
        reads = {entry.name: entry.sha256 for entry in table.manifest.content.inputs}
        for read, digest in reads.items():
            if read in TABLES and found.get(read) != digest:
                stands = found.get(read, "none")[:12]
                raise ContractError(
                    f"{run.uri}: expected `{name}` made from the `{read}` that stands ({stands}), got it "
                    f"made from {digest[:12]}. Run the recipe to its end, or name an earlier version as RUN@digest."
                )
    dataset = open_table(run, "tokens")[1] if "tokens" in standing else None
    return ComparedRun(run, tables, dataset, mixed_sorting(dataset, found["clean"]) if dataset else None)


def compare_runs(a: ComparedRun, b: ComparedRun, num_examples: int) -> Difference:
    """Every document whose fate differs, counted by source and fates, with up to `num_examples` of each."""
    found = Difference(settings=_settings(a, b), tokens=_tokens(a, b))
    found.kept = (_num_kept(a), _num_kept(b))
    same_mix = a.sorting == b.sorting
    if same_mix and a.identity == b.identity:
        return found
    parts_a, parts_b = _splits(a), _splits(b)
    for split in sorted({*parts_a, *parts_b}):
        parts = parts_a.get(split), parts_b.get(split)
        if same_mix and None not in parts and _part_digests(a, parts[0]) == _part_digests(b, parts[1]):
            continue  # the same files decide the same
        for left, right in _pairs(_rows(a, parts[0]), _rows(b, parts[1])):
            _note(found, left, right, num_examples)
    return found


def _note(found: Difference, left: Row | None, right: Row | None, num_examples: int) -> None:
    fates = outcome_of(left), outcome_of(right)
    if fates[0] == fates[1]:
        return
    row = left or right or {}
    key = (row["source"], *fates)
    found.documents[key] += 1
    examples = found.examples.setdefault(key, [])
    if len(examples) < num_examples:
        dropped = (right if fates[0] == KEPT else left) or {}
        value, limit = dropped.get("drop_value"), dropped.get("drop_limit")
        examples.append(Example(row["doc_id"].hex(), row["url"], value, limit))


def outcome_of(row: Row | None) -> str:
    """`kept`, or `stage/rule` of what dropped the document; a row that is None was not read."""
    if row is None:
        return NOT_READ
    return KEPT if row["drop_stage"] is None else f"{row['drop_stage']}/{row['drop_rule']}"


def _splits(side: ComparedRun) -> dict[str, int]:
    """Number of the part of each input file."""
    inputs = side.tables["documents"].manifest.content.inputs
    return {entry.name: number for number, entry in enumerate(inputs)}


def _part_digests(side: ComparedRun, number: int | None) -> list[str]:
    key = part_key(number or 0)
    return [
        entry.sha256 for table in side.tables.values() for entry in table.manifest.content.files if entry.key == key
    ]


def _rows(side: ComparedRun, number: int | None) -> Iterator[Row]:
    """The rows of one part with their final verdict, in the order of the file they were read from."""
    if number is None:
        return
    key = part_key(number)
    documents = _table_rows(side.tables["documents"], key, (*PROVENANCE_COLUMNS, *DROP_COLUMNS))
    later = {
        name: _table_rows(side.tables[name], key, ("doc_id", *DROP_COLUMNS))
        for name in DROPPING_TABLES
        if name in side.tables
    }
    last = mix_drops(side.tables, number, side.sorting) if side.sorting else None
    for row in documents:
        if row["drop_stage"] is not None:
            yield row
            continue
        for name, rows in later.items():
            if name == "clean" and row["drop_stage"] is not None:
                break  # it holds survivors alone
            verdict = next(rows, None)
            if verdict is None or verdict["doc_id"] != row["doc_id"]:
                raise ContractError(
                    f"{side.run.uri}: expected the same documents in `documents` and `{name}`, {key}, got others at "
                    f"{row['doc_id'].hex()}. Run the stages again."
                )
            if verdict["drop_stage"] is not None and verdict["drop_rule"] not in EARLIER_DROPS:
                row |= {column: verdict[column] for column in DROP_COLUMNS}
        if last and row["drop_stage"] is None and (drop := next(last)[1]) is not None:
            row |= dict(zip(DROP_COLUMNS, (TOKENS.name, drop.rule, drop.value, drop.limit), strict=True))
        yield row


def _table_rows(table: TableVersion, key: str, columns: tuple[str, ...]) -> Iterator[Row]:
    with table.folder.open_input(table.manifest.run.paths[key]) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=list(columns)):
            yield from batch.to_pylist()


def _pairs(left: Iterator[Row], right: Iterator[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    """Rows of two runs over one file, joined by doc_id: both go by offset, and few rows share one."""
    groups = [_by_offset(left), _by_offset(right)]
    heads = [next(group, None) for group in groups]
    while any(heads):
        first = min(head[0] for head in heads if head is not None)
        found: list[dict[bytes, Row]] = [{}, {}]
        for side, head in enumerate(heads):
            if head is not None and head[0] == first:
                found[side], heads[side] = head[1], next(groups[side], None)
        for identifier in {**found[0], **found[1]}:
            yield found[0].get(identifier), found[1].get(identifier)


def _by_offset(rows: Iterator[Row]) -> Iterator[tuple[int, dict[bytes, Row]]]:
    """The rows of each offset by doc_id."""
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
    last = side.dataset if side.dataset and side.sorting else side.tables["clean"].manifest
    return last.content.counts.rows_kept


def _settings(a: ComparedRun, b: ComparedRun) -> dict[str, tuple[Any, Any]]:
    """What the manifests say was set otherwise."""
    both = [_flat(side) for side in (a, b)]
    names = sorted({*both[0], *both[1]})
    return {name: (both[0].get(name), both[1].get(name)) for name in names if both[0].get(name) != both[1].get(name)}


def _flat(side: ComparedRun) -> dict[str, Any]:
    found: dict[str, Any] = {}
    manifests = [table.manifest for table in side.tables.values()] + ([side.dataset] if side.dataset else [])
    for manifest in manifests:
        for stage, version in manifest.content.stages.items():
            found[f"version of {stage}"] = version
        for stage, settings in manifest.content.config.items():
            found |= {f"{stage}.{key}": value for key, value in settings.items()}
        found |= {f"model {name}": digest[:12] for name, digest in manifest.content.models.items()}
        shares = sorting_of(manifest).keep if manifest is side.dataset else {}
        found |= {f"{TOKENS.name}.{MIX_RULE} {name}: keep": share for name, share in shares.items() if share < 1}
    return found


def _tokens(a: ComparedRun, b: ComparedRun) -> dict[str, tuple[int, int]]:
    """Tokens of each stream of both datasets."""
    both = [live_tokens(side.run, side.dataset) if side.dataset else {} for side in (a, b)]
    return {name: (both[0].get(name, 0), both[1].get(name, 0)) for name in sorted({*both[0], *both[1]})}


def live_tokens(run: Store, dataset: Manifest) -> dict[str, int]:
    """Tokens of each stream of a dataset, those left out that a takedown has blanked where they stood."""
    streams: Mapping[str, list[int]] = dataset.content.figures["streams"]
    found = {name: sum(shards) for name, shards in streams.items()}
    blanked = {shard_key(name, number): name for name, shards in streams.items() for number in range(len(shards))}
    for certificate in takedown_ancestry(run, dataset):
        for change in certificate.tables["tokens"].rewritten:
            if certificate.mode == "tombstones" and change.key in blanked:  # what was compacted is no longer counted
                found[blanked[change.key]] -= sum(length for _, length in change.spans)
    return found
