"""A fact of a run: a value with the tables, digests and queries that it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Origin:
    """Where a fact comes from."""

    table: str
    """Table of the run, `checkpoint`, or `facts file`."""
    path: str
    """File that has it, relative to the run folder."""
    digest: str
    """SHA-256: of the content of a manifest, or of a file."""
    query: str
    """Command that prints the fact, for the run folder as the working directory."""


@dataclass(frozen=True)
class Fact:
    """A value, and the names of its origins in `DisclosedFacts.origins`."""

    value: Any
    origins: tuple[str, ...]


@dataclass(frozen=True)
class DisclosedFacts:
    """All facts of a run."""

    facts: Mapping[str, Fact]
    origins: Mapping[str, Origin]
    step: int | None = None
    """Step of the newest checkpoint; None: nothing was trained, so each training document counts once."""

    def value(self, name: str) -> Any:
        """Return the value of a fact."""
        return self.facts[name].value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, or `default` if the run does not have it."""
        return self.facts[name].value if name in self.facts else default
