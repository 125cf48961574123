"""The order of the training samples, a pure function of (dataset, seed, stages, skip list), and its inverse.

A sample is the next row of its source (permutation.py); the training stage's mixture decides which source is next. In a
later stage, each source continues after the last row that the previous stage used. Any sample or step is computed
directly, without iteration.
"""

import hashlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.tokens import HELDOUT, TRAIN, Dataset
from train.config.train import TrainConfig
from train.data.packed_rows import PackedIndex, PackedRows
from train.data.permutation import (
    ChunkOrder,
    Ints,
    Pieces,
    RowOrder,
    StreamRows,
    join_pieces,
)
from train.data.shares import check_sources, number_of, reads_of_epochs, shares_of_weights
from train.data.stages import (
    MAX_BLOCK,
    NO_SKIPS,
    STAGE_BITS,
    SkipList,
    StagePlan,
    chosen_sources,
    stage_lengths,
    stage_name,
    stage_weights,
)

# The mixture of sources: shares become exact counts per block of samples, scheduled by earliest deadline first.
#
# Within a block, after t samples, a source with c samples in a block of M has been taken between c·t/M - 1 and c·t/M
# + 1 times (exclusive). A schedule with that property exists for any counts (Tijdeman 1980, "The chairman assignment
# problem"); earliest deadline first constructs it (Steiner and Yeomans 1993, "Level schedules for mixed-model,
# just-in-time processes"). The common rule of the largest deficit reaches deviations above 1.


def block_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of samples of each source in a block, the period of the mixture. Weights of 0 are omitted.

    The counts are proportional to the weights if a block of at most MAX_BLOCK samples allows it. Otherwise the counts
    are rounded by largest remainder (Hamilton's method). Raises ConfigError if a count is rounded to 0.
    """
    # Fractions are made from the decimal text, not the binary float: 0.7 means 7/10.
    parts = {name: Fraction(str(weight)) for name, weight in weights.items() if weight > 0}
    total = sum(parts.values())
    shares = {name: part / total for name, part in parts.items()}
    block = lcm(*(share.denominator for share in shares.values()))
    if block <= MAX_BLOCK:
        return {name: int(share * block) for name, share in shares.items()}
    counts = {name: int(share * MAX_BLOCK) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (counts[name] - shares[name] * MAX_BLOCK, name))
    for name in by_remainder[: MAX_BLOCK - sum(counts.values())]:
        counts[name] += 1
    lost = [f"{name} ({float(shares[name]):.3g})" for name, count in counts.items() if not count]
    if lost:
        raise ConfigError(
            f"train.weights: expected shares of at least {1 / MAX_BLOCK:.3g} (one sample in {MAX_BLOCK}), "
            f"got {', '.join(lost)}. Set each of these weights to 0 in train.weights, or to a larger share."
        )
    return counts


def nearest_counts(shares: Mapping[str, int | Fraction], setting: str) -> dict[str, int]:
    """Return the counts of a block that are proportional to these shares, all above 0.

    They are exact if a block of at most MAX_BLOCK samples allows it. Otherwise the block is the one whose largest
    relative error of a count is least. Raises ConfigError, which names `setting`, if a count is rounded to 0.
    """
    scale = lcm(*(Fraction(share).denominator for share in shares.values()))
    numbers = {name: int(share * scale) for name, share in shares.items()}
    divisor, total = gcd(*numbers.values()), sum(numbers.values())
    if total // divisor <= MAX_BLOCK:
        return {name: number // divisor for name, number in numbers.items()}
    wanted = np.array([float(Fraction(number, total)) for number in numbers.values()])
    counts = np.rint(np.arange(MAX_BLOCK // 2, MAX_BLOCK + 1)[:, None] * wanted)
    errors = np.abs(counts / counts.sum(axis=1, keepdims=True) / wanted - 1).max(axis=1)
    best = counts[np.argmin(errors)].astype(np.int64).tolist()
    if lost := [f"{name} ({share:.3g})" for name, share, count in zip(numbers, wanted, best, strict=True) if not count]:
        raise ConfigError(
            f"{setting}: expected shares of at least {1 / MAX_BLOCK:.3g} (one sample in {MAX_BLOCK}), got "
            f"{', '.join(lost)}. Set each of these sources to 0 in {setting}, or to a larger number."
        )
    return dict(zip(numbers, best, strict=True))


def schedule(counts: list[int]) -> NDArray[np.int64]:
    """Return the source of each sample of a block, as an index into `counts`; source i occurs `counts[i]` times."""
    block = sum(counts)
    released: list[tuple[int, int, int]] = []
    future = [(1, source, 0) for source, count in enumerate(counts) if count]
    slots = np.empty(block, np.int64)
    for slot in range(1, block + 1):
        while future and future[0][0] <= slot:
            _, source, k = heapq.heappop(future)
            heapq.heappush(released, (-(-(k + 1) * block // counts[source]), source, k))
        _, source, k = heapq.heappop(released)
        slots[slot - 1] = source
        if k + 1 < counts[source]:
            # In an earlier slot, the source would be a whole sample ahead of its share.
            heapq.heappush(future, ((k + 1) * block // counts[source] + 1, source, k + 1))
    return slots


class Mixture:
    """Maps a sample's index in a training stage to (source, index within the source), and back."""

    def __init__(self, counts: Mapping[str, int]):
        self.counts = np.array(list(counts.values()), np.int64)
        self.block = int(self.counts.sum())
        self._slots = schedule(self.counts.tolist())
        self._places = [np.flatnonzero(self._slots == source) for source in range(len(counts))]
        self._ranks = np.empty(self.block, np.int64)
        for places in self._places:
            self._ranks[places] = np.arange(len(places))

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each sample index, its source and its index among the samples of that source."""
        block, slot = np.divmod(index, self.block)
        source = self._slots[slot]
        return source, block * self.counts[source] + self._ranks[slot]

    def find(self, source: int, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in the stage of each sample at `position` of its source: the inverse of `locate`."""
        block, rank = np.divmod(position, self.counts[source])
        return block * self.block + self._places[source][rank]

    def taken(self, number: int) -> list[int]:
        """Return how many of the first `number` samples come from each source."""
        blocks, slots = divmod(number, self.block)
        partial = [int(np.searchsorted(places, slots)) for places in self._places]
        return [blocks * count + rest for count, rest in zip(self.counts.tolist(), partial, strict=True)]


ORDER_VERSION = 2
NUM_PROBED = 512


@dataclass(frozen=True)
class Samples:
    """Samples in the order of their use, with the spans of the streams that they consist of."""

    index: Ints
    """Global sample index, as in the skip list; skipped samples are counted too."""
    source: Ints
    """Source of each sample, as an index into `SampleOrder.sources`."""
    pieces: Pieces
    """The pieces (contiguous spans of a stream) of all samples; `pieces.row` is the index of the sample here."""
    seq_len: int
    """Number of inputs in a sample; positions after its pieces are padding."""


@dataclass(frozen=True)
class _Stage:
    """A training stage, and its range of positions in the row order of each source."""

    plan: StagePlan
    mixture: Mixture
    which: Ints
    """Index in `SampleOrder.sources` of each source of the mixture."""
    skip: SkipList
    begins: dict[int, int]
    """By index in `SampleOrder.sources`: the position in the row order of that source at which the stage begins."""
    ends: dict[int, int]
    """By the same index: the position in that row order after the stage's last sample."""


class SampleOrder:
    """The order of a run's training samples, without those of the skip list."""

    def __init__(
        self, streams: Mapping[str, RowOrder], stages: Sequence[StagePlan], skip: SkipList = NO_SKIPS, seed: int = 0
    ):
        self.sources = tuple(sorted({source for stage in stages for source in stage.counts}))
        self.streams = [streams[source] for source in self.sources]
        self.skip, self.seed = skip, seed
        if skip.last_stage >= len(stages):
            raise ConfigError(
                f"train.skip_file: expected samples of stages 0 to {len(stages) - 1}, got one of stage "
                f"{skip.last_stage} (index >> {STAGE_BITS}). Remove the lines with samples of that stage from the file "
                "that train.skip_file names (default train/skips.txt)."
            )
        self._stages: list[_Stage] = []
        position = dict.fromkeys(range(len(self.sources)), 0)
        for number, plan in enumerate(stages):
            self._stages.append(self._stage(plan, skip.of_stage(number), position))
            position = self._stages[-1].ends

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """The training stages of the plan."""
        return tuple(stage.plan for stage in self._stages)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all inputs of the order, except the skip list and the length of the last stage.

        Both may grow during a run. The first samples are hashed too, so that a change of the code is detected.
        """
        if self.skip.indices:
            streams = dict(zip(self.sources, self.streams, strict=True))
            return SampleOrder(streams, self.stages, NO_SKIPS, self.seed).digest
        probe = hashlib.sha256()
        for number in range(len(self._stages)):
            samples = self._at(number, np.arange(NUM_PROBED))
            pieces = [getattr(samples.pieces, field.name) for field in fields(Pieces)]
            for values in (samples.index, samples.source, *pieces):
                probe.update(values.astype("<i8").tobytes())
        rows = [[s.identity, s.num_units, s.chunks.chunk_tokens, s.chunks.windows.tolist()] for s in self.streams]
        ends = [stage.num_samples for stage in self.stages[:-1]]
        shapes = [[stage.seq_len, stage.counts] for stage in self.stages]
        return digest_of([ORDER_VERSION, self.seed, list(self.sources), rows, shapes, ends, probe.hexdigest()])

    def place(self, step: int) -> tuple[int, int]:
        """Return the stage that contains a step, and the step in that stage, both from 0.

        Steps after the end of the last stage count as part of that stage.
        """
        number = max(i for i, stage in enumerate(self._stages) if stage.plan.first_step <= step)
        return number, step - self._stages[number].plan.first_step

    def stage_of(self, step: int) -> StagePlan:
        """Return the training stage that contains a step."""
        return self._stages[self.place(step)[0]].plan

    def samples(self, step: int, rows: range | None = None) -> Samples:
        """Return the samples of these rows of a step's global batch; None = all rows.

        Raises ValueError if `rows` is not a contiguous range of rows of that batch.
        """
        stage, within = self.place(step)
        batch = self._stages[stage].plan.global_batch
        rows = range(batch) if rows is None else rows
        if rows.step != 1 or rows.start < 0 or rows.stop > batch:
            raise ValueError(
                f"SampleOrder.samples: expected contiguous rows of a global batch of {batch}, got {rows}. "
                f"Pass a range with step 1 within 0 to {batch}."
            )
        return self.at(stage, within * batch + np.arange(rows.start, rows.stop))

    def at(self, stage: int, number: Ints) -> Samples:
        """Return a stage's samples at these positions. Skipped samples have no position."""
        return self._at(stage, self._stages[stage].skip.index_of_used(number))

    def find(self, source: str, start: int, stop: int) -> list[tuple[int, Ints]]:
        """Return the positions of all samples with an input token in [start, stop) of a source's stream.

        The result has a pair for each stage: the index of the stage, and the positions, as in `at`. All epochs up to
        the last step of the plan are covered.
        """
        which = self.sources.index(source)
        stream, last = self.streams[which], self._stages[-1].ends[which]
        parts = [stream.touching(epoch, start, stop) for epoch in range(-(-last // stream.num_units))]
        begins = np.concatenate([first for first, _ in parts]) if parts else np.empty(0, np.int64)
        ends = np.concatenate([end for _, end in parts]) if parts else begins
        return [(i, self._numbers(stage, which, begins, ends)) for i, stage in enumerate(self._stages)]

    def epochs(self) -> dict[str, float]:
        """Return the number of epochs of each source up to the last step, counting skipped samples too."""
        ends = self._stages[-1].ends
        return {source: ends[i] / self.streams[i].num_units for i, source in enumerate(self.sources)}

    def end_of(self, source: str) -> int:
        """Return the position in a source's row order after its last sample, counted over all epochs."""
        return self._stages[-1].ends[self.sources.index(source)]

    def skipped(self) -> Iterator[Samples]:
        """Yield, for each stage, the samples before its last used one that the skip list leaves out."""
        for number, stage in enumerate(self._stages):
            index = np.array(stage.skip.indices, np.int64)
            last = stage.skip.index_of_used(np.array([stage.plan.num_samples - 1]))[0]
            yield self._at(number, index[index < last])

    def _stage(self, plan: StagePlan, skip: SkipList, begins: dict[int, int]) -> _Stage:
        mixture = _mixture(tuple(plan.counts.items()))
        which = np.array([self.sources.index(source) for source in plan.counts])
        # Skipped samples after the last used sample do not count: the next stage may use their tokens.
        end = int(skip.index_of_used(np.array([plan.num_samples - 1]))[0]) + 1
        ends = dict(begins)
        for number, taken in zip(which.tolist(), mixture.taken(end), strict=True):
            ends[number] += taken * self.streams[number].width(plan.seq_len)
        return _Stage(plan, mixture, which, skip, begins, ends)

    def _at(self, stage: int, index: Ints) -> Samples:
        """Return a stage's samples at these indices. Skipped samples have an index too."""
        state = self._stages[stage]
        local, taken = state.mixture.locate(index)
        parts, rows = [], []
        for number in np.unique(local).tolist():
            rows.append(np.flatnonzero(local == number))
            source = int(state.which[number])
            position = state.begins[source] + taken[rows[-1]] * self.streams[source].width(state.plan.seq_len)
            parts.append(self.streams[source].pieces(position, state.plan.seq_len))
        pieces = join_pieces(parts, rows)
        return Samples((stage << STAGE_BITS) + index, state.which[local], pieces, state.plan.seq_len)

    def _numbers(self, stage: _Stage, which: int, begins: Ints, ends: Ints) -> Ints:
        """Return the positions, as in `at`, of a stage's samples that overlap one of the ranges [begin, end).

        The ranges are positions in the row order of source `which`. Skipped samples are left out.
        """
        local = np.flatnonzero(stage.which == which)
        if not local.size:
            return np.empty(0, np.int64)
        width = self.streams[which].width(stage.plan.seq_len)
        begins = np.maximum(begins, stage.begins[which]) - stage.begins[which]
        ends = np.minimum(ends, stage.ends[which]) - stage.begins[which]
        begins, ends = begins[begins < ends] // width, -(-ends[begins < ends] // width)
        taken = np.unique(np.concatenate([np.arange(a, b) for a, b in zip(begins, ends)] or [begins]))
        number = stage.skip.number_of(stage.mixture.find(int(local[0]), taken))
        return number[(number >= 0) & (number < stage.plan.num_samples)]


@lru_cache(maxsize=32)
def _mixture(counts: tuple[tuple[str, int], ...]) -> Mixture:
    return Mixture(dict(counts))


def tokens_by_source(stages: Sequence[StagePlan]) -> dict[str, int]:
    """Return how many tokens of each source the stages use if no sample is skipped, padding of packed rows included."""
    drawn: dict[str, int] = {}
    for stage in stages:
        taken = _mixture(tuple(stage.counts.items())).taken(stage.num_samples)
        for source, number in zip(stage.counts, taken, strict=True):
            drawn[source] = drawn.get(source, 0) + number * stage.seq_len
    return dict(sorted(drawn.items()))


def open_streams(
    dataset: Dataset, config: TrainConfig, packings: Mapping[str, PackedIndex] | None = None
) -> dict[str, RowOrder]:
    """Return the order of the training rows of every source that a training stage uses, by source.

    `packings`: the packed rows of each source, for `train.packing = best_fit`. Raises ConfigError if a sequence length,
    the weights of a stage or the epochs do not fit the dataset.
    """
    chunk_tokens, tokens = dataset.chunk_tokens, dataset.num_tokens(TRAIN)
    used = set()
    for number, (seq_len, chosen) in enumerate(zip(stage_lengths(config), chosen_sources(config), strict=True)):
        where, (setting, values) = stage_name(config, number), chosen
        if chunk_tokens % seq_len:
            valid = [length for length in range(1, chunk_tokens + 1) if chunk_tokens % length == 0]
            raise ConfigError(
                f"{where}.seq_len: expected a divisor of the dataset's chunk_tokens {chunk_tokens}, got {seq_len}. "
                f"Set {where}.seq_len to one of {', '.join(map(str, valid[-8:]))}."
            )
        check_sources(setting, values, tokens)
        used |= {name for name in tokens if not values or number_of(values, name) > 0}
    chunks = {source: _chunks(dataset, source, config) for source in sorted(used)}
    # Documents that rehydration repeats have a stream of their own, which may lack a chunk as any stream's end does.
    chunks = {source: chunk for source, chunk in chunks.items() if chunk.num_chunks or source not in dataset.copies}
    short = [f"{source} has {tokens[source]} tokens" for source in chunks if not chunks[source].num_chunks]
    if short or not chunks:
        raise ConfigError(
            f"{dataset.folder.uri}: expected at least {chunk_tokens + 1} training tokens (chunk_tokens + 1) in every "
            f"source, got {'; '.join(short) or 'no training source'}. Set the source's "
            f"{'number to 0 in train.epochs' if config.epochs else 'weight to 0 in train.weights'}, "
            "or lower tokens.chunk_tokens and run the step `tokens` again."
        )
    if packings is None:
        return {source: StreamRows(order) for source, order in chunks.items()}
    return {source: PackedRows(order, packings[source]) for source, order in chunks.items()}


def stage_counts(
    streams: Mapping[str, RowOrder], config: TrainConfig, copies: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return, for each training stage, the number of samples of each source in a block, the period of the mixture.

    `copies`: how often an epoch reads the documents of a source, by source; sources that are read once are absent.
    """
    if config.epochs:
        samples = [samples_of_epochs(streams, config, seq_len, copies) for seq_len in stage_lengths(config)]
        return [nearest_counts(numbers, "train.epochs") for numbers in samples]
    units = {source: streams[source].num_units for source in sorted(streams)}
    if not copies:
        by_tokens: dict[str, float] = {**units}
        return [block_counts(dict(sorted((weights or by_tokens).items()))) for weights in stage_weights(config)]
    counts = []
    for number, weights in enumerate(stage_weights(config)):
        shares, where = shares_of_weights(weights, units, copies), f"{stage_name(config, number)}.weights"
        if not shares:
            raise ConfigError(
                f"{where}: expected a weight above 0 for one of {', '.join(units)}, which have a chunk of tokens, got "
                f"{weights}. Raise the weight of one of them."
            )
        counts.append(nearest_counts(shares, where))
    return counts


def samples_of_epochs(
    streams: Mapping[str, RowOrder], config: TrainConfig, seq_len: int, copies: Mapping[str, int]
) -> dict[str, int]:
    """Return how many samples of `seq_len` tokens of each source `train.epochs` asks for: reads x samples, rounded."""
    reads = reads_of_epochs(config.epochs, sorted(streams), copies)
    samples = {source: streams[source].num_units // streams[source].width(seq_len) for source in reads}
    return {source: max(1, round(times * samples[source])) for source, times in reads.items()}


def make_order(
    dataset: Dataset,
    config: TrainConfig,
    stages: Sequence[StagePlan],
    skip: SkipList = NO_SKIPS,
    packings: Mapping[str, PackedIndex] | None = None,
) -> SampleOrder:
    """Return the order of a dataset's training samples. Raises ConfigError if the settings do not fit the dataset."""
    streams = open_streams(dataset, config, packings)
    if missing := sorted({source for stage in stages for source in stage.counts} - streams.keys()):
        raise ConfigError(
            f"{dataset.folder.uri}: expected a chunk of {dataset.chunk_tokens} tokens in every source of the plan, got "
            f"none in {', '.join(missing)}. Run `penstock plan` again."
        )
    return SampleOrder(streams, stages, skip, config.seed)


def heldout_streams(dataset: Dataset, seq_len: int) -> dict[str, StreamRows]:
    """Return, by source, the held-out rows of every source that has any; the same for every seed and packing."""
    tokens = dataset.num_tokens(HELDOUT)
    shards = {source: [shard.num_tokens for shard in dataset.streams[f"{source}/{HELDOUT}"]] for source in tokens}
    streams = {source: StreamRows(ChunkOrder(source, shards[source], seq_len, 0, 8)) for source in sorted(tokens)}
    return {source: stream for source, stream in streams.items() if stream.num_units}


def _chunks(dataset: Dataset, source: str, config: TrainConfig) -> ChunkOrder:
    shards = [shard.num_tokens for shard in dataset.streams[f"{source}/{TRAIN}"]]
    return ChunkOrder(
        source, shards, dataset.chunk_tokens, config.seed, config.window_shards, together=config.chunks_together
    )
