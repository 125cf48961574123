"""The bytes of shingles, for families that hash text rather than the keys of words."""

from collections.abc import Iterator

import numpy as np


def runs(joined: bytes, size: int) -> Iterator[bytes]:
    """Every run of `size` units of a text whose units are separated by one space; all of it if there are fewer."""
    ends = np.flatnonzero(np.frombuffer(joined + b" ", np.uint8) == ord(" "))
    size = min(size, len(ends))
    starts = np.concatenate(([0], ends[: len(ends) - size] + 1))
    for start, end in zip(starts.tolist(), ends[size - 1 :].tolist()):
        yield joined[start:end]
