"""Declarations of stages: columns read and added, settings, the closed list of reasons, and the function.

A row is a dict of column values; names that begin with `_` exist only inside the fused pass and are never written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.config import Section

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drop:
    """The verdict of a rule: its name, the value that it measured, and the limit."""

    rule: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Split:
    """One input that one task reads: `name` has no location, `identity` changes when the file does."""

    ordinal: int
    name: str
    uri: str
    size: int
    identity: str
    source: str
    format: str
    snapshot: str | None = None
    """The crawl that it belongs to."""


EVERY = "*"
"""In the limits of a check: every language without a limit of its own."""

Cutoffs = Mapping[str, Mapping[str, float]]
"""The value of each quantile by name and language."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a measured value with a limit, made after every document has been measured.

    Both sides are rounded to float32. A null value was not measured and breaks no limit.
    """

    reason: str
    column: str
    """The stored column that is compared; with `value`, the column under which the result is shown."""
    setting: str
    """The field of the stage's section that holds the limit. Its prefix min_ or max_ is the side, both inclusive."""
    limits: Mapping[str, float]
    """The limit by language; EVERY is for all others. A language without a limit is not checked."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """Computes the compared value from stored columns (NaN: not measured); None: the column itself."""
    needs: tuple[str, ...] = ()
    """The stored columns that `value` reads."""
    label: str = ""
    """Distinguishes checks with the same reason, such as by the name of a model."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A cut-off that depends on the data: the value below which a share of a language's measured documents lies."""

    name: str
    column: str
    share: float
    """0..1."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """As for Check."""
    needs: tuple[str, ...] = ()
    """As for Check."""


RowFunction = Callable[[Row], Drop | None]
"""Adds its columns to the row; returns a Drop if a rule of the stage drops the document."""


def no_models(config: Any) -> dict[str, str]:
    """Return no models, for a stage that needs none."""
    return {}


def no_checks(config: Any, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Return no checks, for a stage without decisions on stored columns."""
    return ()


def no_quantiles(config: Any) -> Sequence[Quantile]:
    """Return no quantiles, for a stage whose limits do not depend on the data."""
    return ()


@dataclass(frozen=True)
class PerDocument:
    """A stage that processes one document at a time; consecutive ones run fused in one pass."""

    name: str
    version: int
    config: type[Section]
    reads: tuple[str, ...]
    adds: tuple[str, ...]
    """Names of the columns that it sets, in `schemas/tables.py` or in `columns`."""
    reasons: Mapping[str, str]
    """Reason → meaning; every drop of the stage has one of these reasons."""
    make: Callable[[Any, Mapping[str, str]], RowFunction]
    """(config, local model paths by name) → the function. It is called once per worker and loads heavy resources."""
    models: Callable[[Any], dict[str, str]] = no_models
    """(config) → names in the model store or paths, by the name under which `make` gets them."""
    compile: Callable[[Any, Mapping[str, str], str], dict[str, str]] | None = None
    """(config, local model paths, folder) → paths of files made from them once, before anything runs; `make` gets both.
    """
    stays: tuple[str, ...] = ()
    """Prefixes of names of models that its workers never open, such as those that another process reads."""
    again: Literal["text", "rest"] | None = None
    """How a document is measured again after passages were cut from it: by its text without the passages, by what all
    cuts leave of it, or not at all (None: the stored values are used)."""
    ends: bool = True
    """Whether a drop ends the pass for the document; otherwise later stages still measure it (law 6)."""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """Reason → meaning of the checks: drops that are decided later, from stored columns alone."""
    checks: Callable[[Any, Mapping[str, str], Cutoffs], Sequence[Check]] = no_checks
    """(config, local model paths by name, cut-offs) → the checks in the order in which they decide."""
    quantiles: Callable[[Any], Sequence[Quantile]] = no_quantiles
    """(config) → the cut-offs of its checks that depend on the data."""
    columns: tuple[pa.Field, ...] = ()
    """Columns of `documents` that `schemas/tables.py` does not declare, because no other step and not the training half
    reads them; each has its meaning and unit. They follow the columns declared there."""


def extend_schema(schema: pa.Schema, stages: Iterable[PerDocument]) -> pa.Schema:
    """Return the schema of a table followed by the columns that the stages declare themselves."""
    return pa.schema([*schema, *(column for stage in stages for column in stage.columns)], schema.metadata)


@dataclass(frozen=True)
class Source:
    """A stage that opens one split and yields its rows, gap rows included, never loading a split whole."""

    name: str
    version: int
    config: type[Section]
    adds: tuple[str, ...]
    reasons: Mapping[str, str]
    open: Callable[[Split, Any, Any], Iterator[tuple[Row, Drop | None]]]
    """(split, byte stream, config) → rows with a Drop where the record cannot be a document."""


@dataclass(frozen=True)
class Relation:
    """A stage that needs all rows, written in DataFrame expressions, or one that writes files that Spark cannot."""

    name: str
    version: int
    config: type[Section]
    reasons: Mapping[str, str] = field(default_factory=dict)
    models: Callable[[Any], dict[str, str]] = no_models
    """As for PerDocument."""
