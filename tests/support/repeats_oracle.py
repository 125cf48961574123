"""The step `repeats` without Spark: totals over the tallies of all parts by a dictionary, for tests."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.dedup.config import RepeatsConfig
from pipeline.dedup.repeats.keys import NO_ORDER, SEED, SUBSTRING, KeyOccurrences, KnownRepeats, known_repeats, tallies
from pipeline.dedup.repeats.units import Tokens, grams, scoped, seeds, window_seeds

KNOWN = pa.schema([("key", pa.binary()), ("part", pa.int32()), ("first", pa.binary())])
NO_SCOPE = np.uint64(0)


def total_rows(batches: Sequence[pa.RecordBatch], min_count: int, keep_first: bool) -> list[pa.RecordBatch]:
    """Return the rows (key, part, first) that `pipeline.dedup.repeats.step.repeated` computes from tallies."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    totals: dict[bytes, int] = defaultdict(int)
    best: dict[bytes, bytes] = {}
    for row in rows:
        totals[row["key"]] += row["count"]
        best[row["key"]] = min(row["first"], best.get(row["key"], row["first"]))
    kept = [
        {"key": row["key"], "part": row["part"], "first": row["first"] if keep_first and here else None}
        for row in rows
        if totals[row["key"]] >= min_count
        for here in [row["first"] == best[row["key"]]]
    ]
    return pa.Table.from_pylist(kept, KNOWN).to_batches()


def of_part(rows: Sequence[pa.RecordBatch], part: int) -> list[pa.RecordBatch]:
    """Return the rows of one part."""
    return [batch.filter(pa.compute.equal(batch.column("part"), part)) for batch in rows]


def repeats_by_steps(texts: Sequence[str], config: RepeatsConfig, parts: int, at_once: int) -> list[KnownRepeats]:
    """Return, for each text, the windows that its part receives; text i is in part i modulo `parts`, in order of i."""
    n = config.length
    tokens = [Tokens(text, config.substring_unit) for text in texts]
    orders = [number.to_bytes(16, "big") + (number % parts).to_bytes(4, "big") for number in range(len(texts))]
    order = [np.frombuffer(node, np.uint8) for node in orders]
    seed_rows, window_rows = [], []
    for part in range(parts):
        own = range(part, len(texts), parts)
        places = (
            KeyOccurrences(NO_ORDER, scoped(codes, SEED, NO_SCOPE)[:, None], np.zeros(len(codes), np.int64))
            for codes in (seeds(tokens[number].codes, n) for number in own)
        )
        seed_rows += tallies(places, part, at_once)
    known_seeds = total_rows(seed_rows, config.min_count, False)
    for part in range(parts):
        (known,) = known_repeats(of_part(known_seeds, part), (1,))
        windows = []
        for number in range(part, len(texts), parts):
            codes = tokens[number].codes
            at = np.flatnonzero(known.has_first_number(scoped(window_seeds(codes, n), SEED, NO_SCOPE)))
            prints = scoped(grams(codes, n)[at], SUBSTRING, NO_SCOPE)
            windows.append(KeyOccurrences(order[number], np.stack([prints, tokens[number].checks(at, n)], axis=1), at))
        window_rows += tallies(iter(windows), part, at_once)
    known_windows = total_rows(window_rows, config.min_count, config.keep_first)
    by_part = [known_repeats(of_part(known_windows, part), (2,))[0] for part in range(parts)]
    return [by_part[number % parts] for number in range(len(texts))]
