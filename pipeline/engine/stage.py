"""Declarations of stages: their settings, the columns they read and add, their reasons for drops, and their functions.

A row is a dict of column values. Names that begin with `_` are passed from stage to stage and never written to a table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.config import Section

Row = dict[str, Any]
CPU = "_cpu"
"""Field of a row: the CPU time [s] that was spent on it, by stage, and by work that a stage does in other processes."""

TITLE_FIRST = "_title_first"
"""Field of a row: True if the title becomes the first line of the text, as `source.title` asks."""
EMPTY_LINES_KEPT = "_empty_lines_kept"
"""Field of a row: True if several empty lines of its text do not become one, as in code."""

TEXT_FIELDS = frozenset(("text", "_body", "_words"))
"""Fields of a row that hold its text: the whole text, the text after cuts, and the hashes of its words."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Why a document is dropped: the name of the rule, the value that it measured, and the limit."""

    rule: str
    value: float | None = None
    limit: float | None = None


class RangeStart(NamedTuple):
    """The first row of a range of a file, and how its reader finds it."""

    offset: int
    """Offset of the row, as in `documents`."""
    number: int = 0
    """Number of the row among those at this offset."""
    resume: tuple[int, ...] = ()
    """Where the reader of the format resumes, which alone knows the meaning; empty: at the start of the file."""


FILE_START = RangeStart(0)


@dataclass(frozen=True)
class FileRange:
    """A range of a large file, which is read into a part of its own.

    Its rows are those from `first` up to, but not including, `following`.
    """

    number: int
    """Number of the range in its file, from 0 on."""
    begin: int
    """The bytes [begin, end) of the stored file: those in the digest of the range. Its first row begins there or after
    it, and its last row may extend over the end."""
    end: int
    first: RangeStart | None = None
    """Its first row; None: it has no row, because a row of the range before extends over it."""
    following: RangeStart | None = None
    """The first row of the file after the range; None: the range extends to the end of the file."""


@dataclass(frozen=True)
class Split:
    """An input file that one task reads, or a range of one.

    `name` does not depend on the folder or bucket of the file. `identity` is made from the file's size and modification
    time.
    """

    ordinal: int
    """Number of the part that the file is read into; small files may share one."""
    name: str
    uri: str
    size: int
    identity: str
    source: str
    format: str
    snapshot: str | None = None
    """The crawl that the file belongs to."""
    key: str = ""
    """Name of the file among the inputs of a run: `name`, and with several sources `source/name`."""
    companions: tuple[str, ...] = ()
    """URIs of other files that its reader needs, such as those of the comments on posts."""
    is_crawl: bool = False
    """True for a file of Common Crawl, found by `source.crawl`. Its size is an estimate until it has been read."""
    ranges: str = ""
    """Place of the list of its records to read, as `schemas.storage.Store.address` and a name; empty: all records."""
    num_ranges: int = 1
    """Number of ranges of the file, each read into a part of its own, from number `ordinal` on."""
    span: FileRange | None = None
    """The range of the file that is read; None: the whole file."""

    @property
    def first(self) -> RangeStart:
        """The first row to read."""
        return FILE_START if self.span is None or self.span.first is None else self.span.first


EVERY = "*"
"""Key in the limits of a check for every language without a limit of its own."""

Cutoffs = Mapping[str, Mapping[str, float]]
"""The value of each quantile, by the quantile's name and language."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a measured value with a limit.

    The value and the limit are rounded to float32. A null value breaks no limit.
    """

    reason: str
    column: str
    """The stored column that is compared; with `value`, the column under which the result is shown."""
    setting: str
    """The field of the stage's section that holds the limit. Its prefix is min_ or max_; both limits are inclusive."""
    limits: Mapping[str, float]
    """The limit by language; EVERY is for all others. A language without a limit is not checked."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """Computes the compared value from stored columns (NaN: not measured); None compares the column itself."""
    needs: tuple[str, ...] = ()
    """The stored columns that `value` reads."""
    label: str = ""
    """Text that distinguishes checks with the same reason, such as the name of a model."""
    drops: Callable[[pa.RecordBatch], npt.NDArray[np.bool_]] | None = None
    """Decides from the stored columns `needs` whether each document is dropped, in place of a comparison. `column` and
    `limits` then only describe the decision, if it is a comparison with a number; else they are empty."""
    side: Literal["min", "max"] | None = None
    """With `drops`: the kind of the limit that `column` is compared with; None: there is no limit."""
    inclusive: bool = True
    """False if a value equal to the limit is dropped."""
    marks: bool = False
    """True if a document beyond the limit is kept, and only marked with the reason."""
    sources: frozenset[str] | None = None
    """The sources whose documents are checked; None: all."""
    own_source: str | None = None
    """The source that has the section of the check for itself; None: the section is that of the run."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A limit that is computed from the data for each language: a quantile of the values of the documents.

    If `column` is a column of lists, the quantile is that of all elements, such as paragraphs.
    """

    name: str
    column: str
    share: float
    """The share of documents, or of elements, below the value, 0..1."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """Computes the values from stored columns (NaN: not measured); None uses the column itself."""
    needs: tuple[str, ...] = ()
    """The stored columns that `value` reads."""
    sources: frozenset[str] | None = None
    """The sources whose documents are counted; None: all."""
    keeps_highest: bool = False
    """True for a minimum: the highest values are kept, also if they are equal and more than the share above it, or if a
    language has few documents."""


RowFunction = Callable[[Row], Drop | None]
"""Function of a stage: adds the stage's columns to a row, and returns a Drop if the document is dropped."""


RowStep = Callable[[Row], Row]
"""Function of several stages, or of a guard of them: returns the row, with its verdict if one of them drops it."""


def no_models(config: Any) -> dict[str, str]:
    """Return an empty dict: the default of a stage that needs no models."""
    return {}


def no_checks(config: Any, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Return no checks: the default of a stage that compares no stored column with a limit."""
    return ()


def no_quantiles(config: Any) -> Sequence[Quantile]:
    """Return no quantiles: the default of a stage whose limits do not depend on the data."""
    return ()


@dataclass(frozen=True)
class PerDocument:
    """A stage that processes one document at a time; consecutive stages of this kind run together in one pass."""

    name: str
    version: int
    config: type[Section]
    reads: tuple[str, ...]
    adds: tuple[str, ...]
    """Names of the columns that it sets, in `schemas/tables.py` or in `columns`."""
    reasons: Mapping[str, str]
    """Reason → meaning; every drop of the stage has one of these reasons."""
    make: Callable[[Any, Mapping[str, str]], RowFunction]
    """(config, local model paths by name) → the stage's function. It is called once per worker and loads the models."""
    models: Callable[[Any], dict[str, str]] = no_models
    """(config) → the models that the stage needs: names in the model store or paths, by the names that `make` reads."""
    compile: Callable[[Any, Mapping[str, str], str], dict[str, str]] | None = None
    """(config, local model paths, folder) → paths of files made from the models once, before any task runs. `make` gets
    the paths of both."""
    stays: tuple[str, ...] = ()
    """Prefixes of the names of models that no worker opens, such as models that only another process reads."""
    secrets: tuple[str, ...] = ()
    """Names of models that are secret keys. A commitment to the key is recorded in place of the SHA-256 of the file."""
    again: Literal["text", "rest"] | None = None
    """How a document is measured again after passages were cut from it. "text": on its whole text without the passages;
    "rest": on what is left after all cuts; None: not at all, and the stored values are used."""
    ends: bool = True
    """True if the stages after this one do not run on a document that it drops. If False, they measure it too, so that
    another limit can be tried without reading text."""
    after_drops: bool = False
    """True if it also runs on a document with a text that an earlier stage dropped; its own drop is then ignored."""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """Reason → meaning, for the drops that the stage's checks decide later from stored columns."""
    checks: Callable[[Any, Mapping[str, str], Cutoffs], Sequence[Check]] = no_checks
    """(config, local model paths by name, cut-offs) → the checks in the order in which they decide."""
    quantiles: Callable[[Any], Sequence[Quantile]] = no_quantiles
    """(config) → the quantiles of the data that its checks use as limits."""
    max_failed_share: float | None = None
    """Share of the documents, 0..1, above which errors of the stage end the step; None: calls are not counted."""
    describe: Callable[[BaseException, Row], tuple[str, str]] | None = None
    """(error, row) → the place in the code and the message, which is stored. None: no message, because it may quote the
    document."""
    columns: tuple[pa.Field, ...] = ()
    """Columns of `documents`, with meaning and unit, that only this stage uses. `schemas/tables.py` does not declare
    them; they follow the columns declared there."""

    @property
    def reads_text(self) -> bool:
        """True if what it measures depends on the text of a document, and not on its URL or other facts alone."""
        return not TEXT_FIELDS.isdisjoint(self.reads)


def extend_schema(schema: pa.Schema, stages: Iterable[PerDocument]) -> pa.Schema:
    """Return the schema of a table, extended by the columns that the stages declare in their field `columns`."""
    return pa.schema([*schema, *(column for stage in stages for column in stage.columns)], schema.metadata)


@dataclass(frozen=True)
class Source:
    """A stage that reads one split as a stream and yields a row for each record and each gap."""

    name: str
    version: int
    config: type[Section]
    adds: tuple[str, ...]
    reasons: Mapping[str, str]
    open: Callable[[Split, Any, Any], Iterator[tuple[Row, Drop | None]]]
    """(split, byte stream, config) → its rows, each with a Drop if the record cannot be a document, else with None."""


@dataclass(frozen=True)
class Relation:
    """A stage that needs all documents, or that writes files other than tables.

    It only declares settings, reasons and models; the code is in the `build` function of its step.
    """

    name: str
    version: int
    config: type[Section]
    reasons: Mapping[str, str] = field(default_factory=dict)
    models: Callable[[Any], dict[str, str]] = no_models
    """(config) → the models that the stage needs: names in the model store or paths, by the names that it reads."""
