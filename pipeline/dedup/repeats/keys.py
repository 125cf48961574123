"""What a worker tells of one part: its documents, the keys of their units and seeds, the windows worth comparing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import Bytes, order_columns, orders
from pipeline.dedup.keys import scopes_of
from pipeline.dedup.repeats.config import REPEATS, RepeatsConfig
from pipeline.dedup.repeats.known import known_of
from pipeline.dedup.repeats.substring import Tokens, grams, seeds, window_seeds
from pipeline.dedup.repeats.tally import Places, tallies
from pipeline.dedup.repeats.units import scoped, units_of
from pipeline.engine.parts import TEXTS_AT_ONCE, Part, apply_cuts, measured
from pipeline.engine.stage import Cutoffs, Row
from schemas.config import Recipe
from schemas.storage import Store

SUBSTRING, SEED = "substring", "seed"
NOWHERE = np.zeros(1, np.uint8)
"""In place of an order: who is first does not matter."""
Paths = Mapping[str, Mapping[str, str]]


class Judge(Protocol):
    """What measures and judges documents again after their cuts; `passes` has one."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Stored columns that it looks at, by table."""

    @property
    def reasons(self) -> Sequence[tuple[str, Mapping[str, str]]]:
        """The stages whose verdicts it gives, and their reasons."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Kinds and places of the errors met."""

    def __call__(self, rows: list[Row]) -> None:
        """Add signals and verdicts to rows that have those columns, `text` without the passages and the `_rest`."""

    def close(self) -> None:
        """End what it has started."""


MakeJudge = Callable[[Recipe, Any, Cutoffs, bool, bool], Judge]
"""(recipe, model paths, cut-offs, whether the run has scores, whether a record may have killed the worker)"""


@dataclass(frozen=True)
class RepeatsTask:
    """One part, and where its cuts go."""

    part: Part
    recipe: Recipe
    models: Paths
    cutoffs: Cutoffs
    folder: Store
    make_judge: MakeJudge

    @property
    def config(self) -> RepeatsConfig:
        """What is looked for."""
        return self.recipe.section(REPEATS.name, RepeatsConfig)

    @property
    def dedup(self) -> DedupConfig:
        """Scope and keep order."""
        return self.recipe.section("dedup", DedupConfig)


@dataclass(frozen=True, slots=True)
class Document:
    """A document that deduplication keeps."""

    doc_id: bytes
    body: str
    """Its text after cuts."""
    scope: np.uint64
    order: Bytes


def documents_of(task: RepeatsTask) -> Iterator[Document]:
    """The documents of a part that deduplication keeps."""
    columns: dict[str, list[str]] = {**order_columns(task.dedup), "text": ["text", "cuts"], "dedup": ["drop_stage"]}
    columns["documents"] = [*columns["documents"], *task.dedup.scope]
    for whole in measured(task.part, columns, TEXTS_AT_ONCE):
        batch = whole.filter(whole.column("drop_stage").is_null())
        if not batch.num_rows:
            continue
        order, scope = orders(batch, task.part.ordinal, task.dedup), scopes_of(batch, task.dedup)
        texts = batch.select(["doc_id", "text", "cuts"]).to_pylist()
        for row, first, number in zip(texts, order, scope):
            yield Document(row["doc_id"], apply_cuts(row["text"], row["cuts"] or []), number, first)


def units_of_part(task: RepeatsTask) -> Iterator[pa.RecordBatch]:
    """The tallies (TALLIES) of the lines, paragraphs and sentences of a part."""
    config = task.config

    def places() -> Iterator[Places]:
        for document in documents_of(task):
            for kind in config.units:
                if kind != SUBSTRING:
                    units = units_of(document.body, kind, config)
                    keys = scoped(units.keys, kind, document.scope)
                    yield Places(document.order, keys[:, None], units.starts)

    yield from tallies(places(), task.part.ordinal)


def seeds_of_part(task: RepeatsTask) -> Iterator[pa.RecordBatch]:
    """The tallies (TALLIES) of the seeds of a part."""
    config = task.config

    def places() -> Iterator[Places]:
        for document in documents_of(task):
            found = seeds(Tokens(document.body, config.substring_unit).codes, config.length)
            keys = scoped(found, SEED, document.scope)
            yield Places(NOWHERE, keys[:, None], np.zeros(len(keys), np.int64))

    yield from tallies(places(), task.part.ordinal)


def windows_of_part(task: RepeatsTask, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The tallies (TALLIES) of the windows of a part whose seed is among the rows."""
    config = task.config
    (known,) = known_of(rows, (1,))

    def places() -> Iterator[Places]:
        for document in documents_of(task) if len(known) else ():
            tokens = Tokens(document.body, config.substring_unit)
            wanted = known.begins_like(scoped(window_seeds(tokens.codes, config.length), SEED, document.scope))
            positions = np.flatnonzero(wanted)
            if len(positions):
                prints = scoped(grams(tokens.codes, config.length)[positions], SUBSTRING, document.scope)
                keys = np.stack([prints, tokens.checks(positions, config.length)], axis=1)
                yield Places(document.order, keys, positions)

    yield from tallies(places(), task.part.ordinal)
