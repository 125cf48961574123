"""The parameters that a run does not train: the names that the patterns of `train.freeze` match."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from schemas.errors import ConfigError

MAX_SHOWN = 3


def frozen_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of the parameters that the patterns match.

    A pattern is a name, its beginning up to a dot, or a glob pattern of either. Raises ConfigError, with the nearest
    names, if a pattern matches nothing, or if nothing is left to train.
    """
    names = list(names)
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matched:
            near = difflib.get_close_matches(pattern, _beginnings(names), MAX_SHOWN, 0.0)
            raise ConfigError(
                f"train.freeze: expected the beginning of the name of a parameter, got {pattern!r}. The nearest are "
                f"{', '.join(near)}."
            )
        frozen |= matched
    if names and len(frozen) == len(names):
        raise ConfigError(
            f"train.freeze: expected parameters that are trained, got {', '.join(patterns)}, which freeze all "
            f"{len(names)}. Freeze fewer parameters."
        )
    return frozen


def _beginnings(names: Iterable[str]) -> list[str]:
    """Return every name, and every part of a name that ends before a dot."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join(own[:end]) for own in parts for end in range(1, len(own) + 1)))
