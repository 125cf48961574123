"""Verify that a batch after a takedown equals the old batch without the removed documents, at every position.

The sample order alone determines the expected content: which token of which stream a position holds, and whether that
token, or the one it predicts, belonged to a removed document.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.tokens import TRAIN
from train.data.batches import Batches
from train.data.order import Samples
from train.data.rows import IGNORED

Mask = NDArray[np.bool_]
Span = tuple[str, int, int]


def differences(before: Batches, after: Batches, documents: Sequence[Span], tombstone: int, step: int) -> Iterator[str]:
    """Yield each unexpected difference between the batches of a step before and after a takedown.

    A removed token must be the token id `tombstone` in the inputs, and be ignored in the targets. `step` counts from 0.
    Works only for train.objective = causal.
    """
    samples, again = before.samples(step), after.samples(step)
    if not np.array_equal(samples.index, again.index) or not np.array_equal(samples.source, again.source):
        yield f"step {step + 1}: expected the same samples, got {again.index.tolist()} for {samples.index.tolist()}"
        return
    old, new = before.batch(step), after.batch(step)
    input_mask, target_mask = (removed_positions(samples, before.order.sources, documents, ahead) for ahead in (0, 1))
    inputs = np.where(input_mask, tombstone, old.inputs_BT.numpy())
    targets = np.where(target_mask, IGNORED, old.targets_BT.numpy())
    pairs = {"input": (inputs, new.inputs_BT.numpy()), "target": (targets, new.targets_BT.numpy())}
    if old.documents_BT is not None and new.documents_BT is not None:
        pairs["document"] = old.documents_BT.numpy(), new.documents_BT.numpy()
    for name, (expected, actual) in pairs.items():
        for row, column in np.argwhere(expected != actual).tolist():
            yield (
                f"step {step + 1}, row {row}, position {column}: expected {name} {expected[row, column]}, "
                f"got {actual[row, column]}"
            )


def removed_positions(samples: Samples, sources: Sequence[str], documents: Sequence[Span], ahead: int) -> Mask:
    """Return a mask (B, T): True where the input (`ahead` = 0) or target (`ahead` = 1) is a token of `documents`."""
    pieces = samples.pieces
    mask = np.zeros((len(samples.index), samples.seq_len), np.bool_)
    columns = (pieces.row, pieces.column, pieces.start, pieces.length)
    for row, column, start, length in zip(*(values.tolist() for values in columns), strict=True):
        stream = f"{sources[int(samples.source[row])]}/{TRAIN}"
        for name, first, number in documents:
            begin, end = max(first, start + ahead), min(first + number, start + ahead + length)
            if name == stream and begin < end:
                offset = column - start - ahead
                mask[row, begin + offset : end + offset] = True
    return mask
