"""What a stage declares: what it reads and adds, its settings, its closed list of reasons, and its function.

A row is a dict of column values; names that begin with `_` live only inside the fused pass and are never written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.config import Section

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drop:
    """The verdict of a rule: its name, what it measured, and the limit it compared with."""

    rule: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Split:
    """One input that one task reads: `name` has no location, `identity` tells whether it changed."""

    ordinal: int
    name: str
    uri: str
    size: int
    identity: str
    source: str
    format: str
    snapshot: str | None = None
    """Crawl that it belongs to."""


EVERY = "*"
"""In the limits of a check: every language that has no limit of its own."""

Cutoffs = Mapping[str, Mapping[str, float]]
"""Value of each quantile, by its name and the language."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a measured value with a limit, taken after every document has been measured.

    Both sides are rounded to float32. A value that is null was not measured and breaks no limit.
    """

    reason: str
    column: str
    """Stored column that is compared; with `value`, the one it is shown as."""
    setting: str
    """Field of the stage's section that holds the limit; its prefix `min_` or `max_` tells the side, both inclusive."""
    limits: Mapping[str, float]
    """Limit by language; EVERY stands for all others. A language without one is not checked."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """Computes what is compared from stored columns (NaN: not measured); None: the column itself."""
    needs: tuple[str, ...] = ()
    """Stored columns that `value` looks at."""
    label: str = ""
    """What tells it from others with the same reason, such as the name of a model."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A cut-off that the data decide: the value below which a share of a language's measured documents lies."""

    name: str
    column: str
    share: float
    """0..1."""
    value: Callable[[pa.RecordBatch], npt.NDArray[np.float64]] | None = None
    """As for Check."""
    needs: tuple[str, ...] = ()
    """As for Check."""


RowFunction = Callable[[Row], Drop | None]
"""Adds its columns to the row; returns a Drop when a rule says so."""


def no_models(config: Any) -> dict[str, str]:
    """The models of a stage that needs none."""
    return {}


def no_checks(config: Any, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """The checks of a stage that decides nothing later."""
    return ()


def no_quantiles(config: Any) -> Sequence[Quantile]:
    """The quantiles of a stage whose limits do not depend on the data."""
    return ()


@dataclass(frozen=True)
class PerDocument:
    """A stage that looks at one document at a time; consecutive ones run fused in one pass."""

    name: str
    version: int
    config: type[Section]
    reads: tuple[str, ...]
    adds: tuple[str, ...]
    reasons: Mapping[str, str]
    """Reason → what it means; every drop of the stage is one of these."""
    make: Callable[[Any, Mapping[str, str]], RowFunction]
    """(config, local model paths by name) → the function; called once per worker, loads heavy resources."""
    models: Callable[[Any], dict[str, str]] = no_models
    """(config) → names in the model store or paths, by the name `make` knows them under."""
    compile: Callable[[Any, Mapping[str, str], str], dict[str, str]] | None = None
    """(config, local model paths, folder) → paths of files made from them once, before anything runs; `make` gets both.
    """
    stays: tuple[str, ...] = ()
    """What the names of models begin with that its workers never open, such as those another process reads."""
    again: Literal["text", "rest"] | None = None
    """How a document is measured again after passages were cut from it: by its text without the passages, by what all
    cuts leave of it, or not at all (None: the stored values are used)."""
    ends: bool = True
    """Whether a drop ends the pass for the document; otherwise later stages still measure it (law 6)."""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """Reason → what it means, of the checks: drops that are decided later, from stored columns alone."""
    checks: Callable[[Any, Mapping[str, str], Cutoffs], Sequence[Check]] = no_checks
    """(config, local model paths by name, cut-offs) → the checks in the order in which they decide."""
    quantiles: Callable[[Any], Sequence[Quantile]] = no_quantiles
    """(config) → the cut-offs that its checks ask of the data."""


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
    """A stage that needs all rows, written in DataFrame expressions; or one that writes what Spark cannot."""

    name: str
    version: int
    config: type[Section]
    reasons: Mapping[str, str] = field(default_factory=dict)
    models: Callable[[Any], dict[str, str]] = no_models
    """As for PerDocument."""
