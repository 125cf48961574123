"""What a stage declares: what it reads and adds, its settings, its closed list of reasons, and its function.

A row is a dict of column values; names that begin with `_` live only inside the fused pass and are never written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


RowFunction = Callable[[Row], Drop | None]
"""Adds its columns to the row; returns a Drop when a rule says so."""


def no_models(config: Any) -> dict[str, str]:
    """The models of a stage that needs none."""
    return {}


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
    ends: bool = True
    """Whether a drop ends the pass for the document; otherwise later stages still measure it (law 6)."""


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
