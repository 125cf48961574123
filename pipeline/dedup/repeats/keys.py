"""Counts of keys in one part for the step `repeats`: keys of units, seeds and windows; and the repeats of a part.

Three passes read the documents of a part: for units of text, for seeds of windows, and for the windows whose seed is a
repeat. `KnownRepeats` then looks up which keys of a document are repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dedup.config import REPEATS, DedupConfig, RepeatsConfig
from pipeline.dedup.keep_order import NODE_BYTES, Bytes, big_endian, binary_array, order_columns, orders, rows_of_bytes
from pipeline.dedup.keys import scopes_of, sort_words
from pipeline.dedup.repeats.units import Tokens, grams, scoped, seeds, units_of, window_seeds
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, read_measured
from pipeline.engine.spark import TALLIES
from pipeline.engine.stage import Cutoffs, Row, RowStep
from pipeline.text.spans import Span, union, without
from pipeline.text.words import Codes, Ints
from schemas.config import Recipe
from schemas.ids import DOC_ID_BYTES
from schemas.storage import Store

# Counts of the keys of a part (TALLIES): a row for each key in some consecutive documents, with the number of its
# occurrences and the first of them in keep order.

PLACES_AT_ONCE = 1 << 20
"""Occurrences of keys that are counted together, so that the memory of a task does not grow with its part."""
POSITION_BYTES = 8
"""Bytes of a position in a document."""


@dataclass(frozen=True, slots=True)
class KeyOccurrences:
    """The occurrences of all keys (of units, windows or seeds) in one document."""

    order: Bytes
    """Keep order of the document, (order_bytes,)."""
    keys: Codes
    """Key of each occurrence, (occurrences, 1 or 2): one number for units and seeds, two numbers for windows."""
    positions: Ints
    """Position in the document of each occurrence, (occurrences,)."""


def tallies(documents: Iterator[KeyOccurrences], part: int, at_once: int = PLACES_AT_ONCE) -> Iterator[pa.RecordBatch]:
    """Yield the number of occurrences of each key in the documents of a part, as rows (TALLIES).

    A batch counts about `at_once` occurrences, so several batches may have the same key. `first` is the keep order of
    the document with the first occurrence, followed by the position in the document.
    """
    held: list[KeyOccurrences] = []
    size = 0
    for places in documents:
        if len(places.keys):
            held.append(places)
            size += len(places.keys)
        if size >= at_once:
            yield tally(held, part)
            held, size = [], 0
    if held:
        yield tally(held, part)


def tally(held: list[KeyOccurrences], part: int) -> pa.RecordBatch:
    """Return one row (TALLIES) for each distinct key of the documents `held`.

    Each of the documents must have at least one key.
    """
    orders = np.stack([places.order for places in held])
    document = np.repeat(np.arange(len(held)), [len(places.keys) for places in held])
    keys = np.concatenate([places.keys for places in held])
    positions = np.concatenate([places.positions for places in held])
    rank = np.empty(len(held), np.int64)
    rank[np.lexsort(sort_words(orders))] = np.arange(len(held))
    ranking = np.lexsort((positions, rank[document], *keys.T[::-1]))
    ranked = keys[ranking]
    begins = np.flatnonzero(np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1)))
    counts = np.diff(np.append(begins, len(ranked)))
    firsts = ranking[begins]
    first = np.concatenate(
        [orders[document[firsts]], big_endian(positions[firsts].astype(np.uint64), POSITION_BYTES)], axis=1
    )
    return pa.RecordBatch.from_arrays(
        [
            binary_array(key_bytes(keys[firsts])),
            pa.array(np.full(len(firsts), part, np.int32)),
            pa.array(counts.astype(np.int64)),
            binary_array(first),
        ],
        schema=TALLIES,
    )


def key_bytes(keys: Codes) -> Bytes:
    """Return each key as big-endian bytes (keys, 8 or 16); a key is one 64-bit number or two."""
    count, numbers = keys.shape
    return keys.astype(">u8").view(np.uint8).reshape(count, 8 * numbers)


# The repeats of a part: its keys that occur often enough in the run, and their first occurrence if it is in this part.

ELSEWHERE = -1
"""Position of a first occurrence that is not in this part."""
Bools = npt.NDArray[np.bool_]


class KnownRepeats:
    """The sorted keys of one part that occur more than once, and those first occurrences that are in this part.

    All keys have the same length: one or two 64-bit numbers.
    """

    def __init__(self, keys: Codes, documents: Bytes, positions: Ints):
        # a key arrives once from each batch of `tallies` that has it; its row with the first occurrence sorts first
        ranking = np.lexsort((positions == ELSEWHERE, *keys.T[::-1]))
        ranked = keys[ranking]
        begins = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1))[: len(ranked)]
        self.keys = ranked[begins]
        self._documents, self._positions = documents[ranking[begins]], positions[ranking[begins]]
        self._leading = np.ascontiguousarray(self.keys[:, 0])

    def __len__(self) -> int:
        return len(self.keys)

    def has_first_number(self, numbers: Codes) -> Bools:
        """Return, for each of `numbers`, True if a repeated key begins with it (numbers,)."""
        if not len(self):
            return np.zeros(len(numbers), bool)
        known: Bools = self._leading[self._near(numbers)] == numbers
        return known

    def is_repeat(self, keys: Codes, positions: Ints, doc_id: bytes) -> Bools:
        """Return True for each occurrence in a document that must be cut (occurrences,).

        An occurrence is cut if its key is repeated. With `repeats.keep_first`, the first occurrence in the run is not
        cut.
        """
        if not len(self):
            return np.zeros(len(keys), bool)
        rows = self._near(keys[:, 0])
        while True:  # once for each of the keys with the same first number: more than one only by chance or attack
            later = (self._leading[rows] == keys[:, 0]) & (self.keys[rows] != keys).any(axis=1)
            later &= rows + 1 < len(self)
            if not later.any():
                break
            rows = rows + later
        repeated: Bools = (self.keys[rows] == keys).all(axis=1)
        here = (self._documents[rows] == np.frombuffer(doc_id, np.uint8)).all(axis=1)
        cut: Bools = repeated & ~(here & (self._positions[rows] == positions))
        return cut

    def _near(self, numbers: Codes) -> npt.NDArray[np.intp]:
        return np.minimum(np.searchsorted(self._leading, numbers), len(self) - 1)


def known_repeats(batches: Iterable[pa.RecordBatch], numbers: Sequence[int]) -> list[KnownRepeats]:
    """Return the repeated keys of a part, one object for each entry of `numbers`.

    An entry is the length of the object's keys: 1 or 2 numbers of 64 bits. The input rows (key, part, first) are those
    of `repeated_keys`.
    """
    held: dict[int, list[tuple[Codes, Bytes, Ints]]] = {number: [] for number in numbers}
    for batch in batches:
        sizes = pc.binary_length(batch.column("key"))
        for number in numbers:
            rows = batch.filter(pc.equal(sizes, 8 * number))
            if rows.num_rows:
                held[number].append(_rows_of(rows, number))
    return [_joined(held[number], number) for number in numbers]


def _joined(held: list[tuple[Codes, Bytes, Ints]], number: int) -> KnownRepeats:
    empty = np.zeros((0, number), np.uint64), np.zeros((0, DOC_ID_BYTES), np.uint8), np.zeros(0, np.int64)
    keys, documents, positions = (np.concatenate(columns) for columns in zip(empty, *held))
    return KnownRepeats(keys, documents, positions)


def _rows_of(batch: pa.RecordBatch, number: int) -> tuple[Codes, Bytes, Ints]:
    keys = rows_of_bytes(batch.column("key"), 8 * number).copy().view(">u8").astype(np.uint64)
    documents = np.zeros((len(keys), DOC_ID_BYTES), np.uint8)
    positions = np.full(len(keys), ELSEWHERE, np.int64)
    here = batch.column("first").is_valid().to_numpy(zero_copy_only=False)
    if here.any():
        firsts = batch.column("first").drop_null()
        rows = rows_of_bytes(firsts, len(firsts[0].as_py()))
        node = rows[:, -NODE_BYTES - POSITION_BYTES :]
        documents[here] = node[:, :DOC_ID_BYTES]
        positions[here] = node[:, -POSITION_BYTES:].copy().view(">i8")[:, 0]
    return keys, documents, positions


SUBSTRING, SEED = "substring", "seed"
"""Kinds that are mixed into the keys of windows and of their seeds."""
NO_ORDER = np.zeros(1, np.uint8)
"""Value in place of a keep order where the first occurrence does not matter."""
Paths = Mapping[str, Mapping[str, str]]


class Reevaluator(Protocol):
    """Interface of an object that measures documents again after cuts and applies the checks to them again."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Return the stored columns that must be read to evaluate a document again, by table."""

    @property
    def reasons(self) -> Sequence[tuple[str, Mapping[str, str]]]:
        """Return (name, drop reasons with their meanings) of each stage whose checks are applied again."""

    def __call__(self, rows: list[Row]) -> None:
        """Measure the documents in `rows` again, and add their new signals and verdicts to the rows.

        A row has the stored `columns` and two texts without the repeats: `text` is the raw text, `_rest` the visible
        text.
        """


MakeReevaluator = Callable[[Recipe, Any, Cutoffs, bool, Callable[[RowStep], RowStep]], Reevaluator]
"""Function (recipe, model paths, cut-offs, has scores, guard) → Reevaluator. `has scores` is True if the run has
scores of models; `guard` returns the guard of a function of a row."""


@dataclass(frozen=True)
class RepeatsTask:
    """Input of `write_repeats`: one part, settings and models, and the folder of the table."""

    part: Part
    recipe: Recipe
    models: Paths
    cutoffs: Cutoffs
    folder: Store
    make_reevaluator: MakeReevaluator

    @property
    def config(self) -> RepeatsConfig:
        """Return the settings of the step `repeats`."""
        return self.recipe.section(REPEATS.name, RepeatsConfig)

    @property
    def dedup(self) -> DedupConfig:
        """Return the settings of deduplication, which define scope and keep order."""
        return self.recipe.section("dedup", DedupConfig)


@dataclass(frozen=True, slots=True)
class Document:
    """A document that deduplication keeps, as the search for repeats reads it."""

    doc_id: bytes
    body: str
    """Text of the document after cuts."""
    scope: np.uint64
    """Hash of the document's values in the columns `dedup.scope`."""
    order: Bytes
    """Keep order of the document."""


def documents_of(task: RepeatsTask) -> Iterator[Document]:
    """Yield the documents of a part that deduplication keeps."""
    columns: dict[str, Sequence[str]] = {**order_columns(task.dedup), **text_columns(task.part)}
    columns |= {"dedup": ["drop_stage"], "documents": [*columns["documents"], *task.dedup.scope]}
    for whole in read_measured(task.part, columns, TEXTS_AT_ONCE):
        batch = whole.filter(whole.column("drop_stage").is_null())
        if not batch.num_rows:
            continue
        order, scope = orders(batch, task.part.ordinal, task.dedup), scopes_of(batch, task.dedup)
        texts = batch.select(["doc_id", "text", *cut_columns(task.part)]).to_pylist()
        for row, first, number in zip(texts, order, scope):
            yield Document(row["doc_id"], without(row["text"], cuts_before(row)), number, first)


LATER_CUTS = ("templates", "paragraphs")
"""Tables with cuts that were made before, besides `text`, whose cuts include those of `templates`."""


def text_columns(part: Part) -> Mapping[str, Sequence[str]]:
    """Return the columns with the raw text and the cuts that were made before, by table."""
    return {"text": ["text", "cuts"]} | {table: ["cuts"] for table in LATER_CUTS if table in part.paths}


def cut_columns(part: Part) -> list[str]:
    """Return the names of the columns with the cuts that were made before, as `read_measured` names them."""
    return ["cuts", *(f"{table}.cuts" for table in LATER_CUTS if table in part.paths)]


def cuts_before(row: Row) -> list[Span]:
    """Return the spans of the raw text that were cut before the step `repeats`, for a row with `cut_columns`."""
    lines, paragraphs = (
        [(cut["start"], cut["end"]) for cut in row.get(name) or ()] for name in ("cuts", "paragraphs.cuts")
    )
    return union(lines, paragraphs)


def template_cuts(row: Row) -> list[Span]:
    """Return the spans of the raw text that were cut as templates, for a row with `cut_columns`."""
    return [(cut["start"], cut["end"]) for cut in row.get("templates.cuts") or ()]


def units_of_part(task: RepeatsTask) -> Iterator[pa.RecordBatch]:
    """Yield the number of occurrences (TALLIES) of each unit (line, paragraph or span of sentences) in one part."""
    config = task.config

    def places() -> Iterator[KeyOccurrences]:
        for document in documents_of(task):
            for kind in config.units:
                if kind != SUBSTRING:
                    units = units_of(document.body, kind, config)
                    keys = scoped(units.keys, kind, document.scope)
                    yield KeyOccurrences(document.order, keys[:, None], units.starts)

    yield from tallies(places(), task.part.ordinal)


def seeds_of_part(task: RepeatsTask) -> Iterator[pa.RecordBatch]:
    """Yield the number of occurrences (TALLIES) of each seed in one part; for seeds, see `window_seeds`."""
    config = task.config

    def places() -> Iterator[KeyOccurrences]:
        for document in documents_of(task):
            codes = Tokens(document.body, config.substring_unit).codes
            keys = scoped(seeds(codes, config.length), SEED, document.scope)
            yield KeyOccurrences(NO_ORDER, keys[:, None], np.zeros(len(keys), np.int64))

    yield from tallies(places(), task.part.ordinal)


def windows_of_part(task: RepeatsTask, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of occurrences (TALLIES) of each window in one part, if its seed is repeated.

    `rows` are the repeated seeds of the part, as `repeated_keys` returns them.
    """
    config = task.config
    (known,) = known_repeats(rows, (1,))

    def places() -> Iterator[KeyOccurrences]:
        for document in documents_of(task) if len(known) else ():
            tokens = Tokens(document.body, config.substring_unit)
            repeated = known.has_first_number(scoped(window_seeds(tokens.codes, config.length), SEED, document.scope))
            positions = np.flatnonzero(repeated)
            if len(positions):
                prints = scoped(grams(tokens.codes, config.length)[positions], SUBSTRING, document.scope)
                keys = np.stack([prints, tokens.checks(positions, config.length)], axis=1)
                yield KeyOccurrences(document.order, keys, positions)

    yield from tallies(places(), task.part.ordinal)
