"""The order of the training samples as a pure function of (streams, seed, seq_len, weights, skips), and its inverse.

A source's stream is cut into chunks; a bijection of (seed, source, epoch) orders windows of neighbouring shards, then
the chunks inside each window, so that consecutive steps touch few shards. A sample is the tokens
[start, start + seq_len + 1) of a stream. Nothing is iterated: any sample, epoch or step is reached directly.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schemas.config import nearest
from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.tokens import HELDOUT, TRAIN, Dataset
from train.config import TrainConfig
from train.mixture import Mixture, block_counts
from train.skips import NO_SKIPS, SkipList

Ints = NDArray[np.int64]

ORDER_VERSION = 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = np.arange(1, 7, dtype=np.uint64) * GOLDEN
PROBED = 512


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64. Source: Steele, Lea and Flood 2014, with the constants of Stafford's Mix13."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(index: Ints, side: Ints, key: NDArray[np.uint64], backwards: bool) -> Ints:
    left, right = np.divmod(index, side)
    modulus = side.astype(np.uint64)
    for round_key in ROUNDS[::-1] if backwards else ROUNDS:
        half = left if backwards else right
        noise = _mix(half.astype(np.uint64) + _mix(key + round_key))
        noise = (noise % modulus).astype(np.int64)
        left, right = ((right - noise) % side, left) if backwards else (right, (left + noise) % side)
    return left * side + right


def permute(index: Ints, size: Ints, key: NDArray[np.uint64], backwards: bool = False) -> Ints:
    """A keyed bijection of [0, size) applied to each index, or undone; the three arrays have one shape.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 5 (generalised Feistel on side²
    elements) with cycle walking (section 4) down to `size`; side² exceeds size by at most 2·sqrt(size) + 1.
    """
    side = np.sqrt(size).astype(np.int64) + 1
    out = _feistel(index, side, key, backwards)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], side[outside], key[outside], backwards)
        outside = outside[out[outside] >= size[outside]]
    return out


class StreamOrder:
    """The order of one source's samples, epoch after epoch."""

    def __init__(self, source: str, shard_tokens: list[int], chunk_tokens: int, config: TrainConfig):
        self.source = source
        self.seed = config.seed
        self.seq_len = config.seq_len
        self.chunk_tokens = chunk_tokens
        # A sample needs one token beyond its last input, so the very last token starts no chunk.
        self.num_chunks = max(0, sum(shard_tokens) - 1) // chunk_tokens
        self.samples_per_chunk = chunk_tokens // config.seq_len
        self.num_samples = self.num_chunks * self.samples_per_chunk
        starts = np.cumsum([0, *shard_tokens])[:: config.window_shards]
        first = np.unique(-(-starts // chunk_tokens))
        self.windows: Ints = first[first < self.num_chunks].astype(np.int64)
        self._size: Ints = np.diff(np.append(self.windows, self.num_chunks))
        self._tables: dict[int, tuple[Ints, Ints, Ints]] = {}

    def locate(self, position: Ints) -> tuple[Ints, Ints]:
        """Epoch and first token of positions in this source's order."""
        epoch, within = np.divmod(position, self.num_samples)
        place, part = np.divmod(within, self.samples_per_chunk)
        chunk = np.empty_like(place)
        for number in np.unique(epoch):
            chosen = epoch == number
            order, begins, _ = self._windows(int(number))
            slot = np.searchsorted(begins, place[chosen], side="right") - 1
            window = order[slot]
            key = self._window_keys(int(number), window)
            inside = permute(place[chosen] - begins[slot], self._size[window], key)
            chunk[chosen] = self.windows[window] + inside
        return epoch, chunk * self.chunk_tokens + part * self.seq_len

    def find(self, epoch: int, start: Ints) -> Ints:
        """The positions of the samples that begin at these tokens in an epoch: the inverse of `locate`."""
        chunk, part = np.divmod(start // self.seq_len, self.samples_per_chunk)
        window = np.searchsorted(self.windows, chunk, side="right") - 1
        _, begins, slots = self._windows(epoch)
        key = self._window_keys(epoch, window)
        inside = permute(chunk - self.windows[window], self._size[window], key, backwards=True)
        place = begins[slots[window]] + inside
        return epoch * self.num_samples + place * self.samples_per_chunk + part

    def _windows(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """Window in each slot of an epoch, first place of each slot, slot of each window."""
        if epoch not in self._tables:
            number = len(self._size)
            size = np.full(number, number, np.int64)
            order = permute(np.arange(number), size, np.full(number, self._key(epoch)))
            begins = np.cumsum(self._size[order]) - self._size[order]
            if len(self._tables) > 8:
                self._tables.clear()
            self._tables[epoch] = order, begins, np.argsort(order)
        return self._tables[epoch]

    def _key(self, epoch: int) -> np.uint64:
        digest = hashlib.blake2b(f"{self.seed}\x1f{self.source}\x1f{epoch}".encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def _window_keys(self, epoch: int, window: Ints) -> NDArray[np.uint64]:
        return _mix(np.full(len(window), self._key(epoch)) + GOLDEN * (window + 1).astype(np.uint64))


@dataclass(frozen=True)
class Samples:
    """Where samples lie; `source` indexes `Order.sources`, `start` is a token of the source's stream."""

    index: Ints
    """Global sample index as the skip list counts, skipped ones included."""
    source: Ints
    epoch: Ints
    start: Ints


class Order:
    """The one order of a run. The i-th sample to be used is the i-th one that is not skipped."""

    def __init__(self, streams: Mapping[str, StreamOrder], counts: Mapping[str, int], skip: SkipList = NO_SKIPS):
        self.sources = tuple(counts)
        self.streams = [streams[source] for source in self.sources]
        self.counts = dict(counts)
        self.seq_len = self.streams[0].seq_len
        self.skip = skip
        self._mixture = Mixture(counts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what decides the order and over its first samples, so that changed code is noticed too.

        The skip list is left out, because it may grow during a run.
        """
        probe = self._at(np.arange(PROBED))
        table = np.stack([probe.source, probe.epoch, probe.start]).astype("<i8")
        streams = [[s.source, s.num_chunks, s.chunk_tokens, s.windows.tolist()] for s in self.streams]
        samples = hashlib.sha256(table.tobytes()).hexdigest()
        return digest_of([ORDER_VERSION, self.streams[0].seed, self.seq_len, streams, self.counts, samples])

    def samples(self, first: int, count: int) -> Samples:
        """Where the `count` samples from the `first`-th used one on lie."""
        return self._at(self.skip.pass_over(np.arange(first, first + count)))

    def sample(self, number: int) -> tuple[str, int, int]:
        """Source, epoch and first token of the `number`-th used sample."""
        found = self.samples(number, 1)
        return self.sources[int(found.source[0])], int(found.epoch[0]), int(found.start[0])

    def find(self, source: str, epoch: int, start: Ints) -> tuple[Ints, Ints]:
        """Of the samples that begin at these tokens in an epoch: global indices, and numbers among the used ones.

        The number is -1 where the sample is skipped. Inverse of `samples`, at the cost of one look-up.
        """
        which = self.sources.index(source)
        index = self._mixture.find(which, self.streams[which].find(epoch, start))
        return index, self.skip.number_of(index)

    def _at(self, index: Ints) -> Samples:
        source, position = self._mixture.locate(index)
        epoch, start = np.empty_like(index), np.empty_like(index)
        for number in np.unique(source):
            chosen = source == number
            epoch[chosen], start[chosen] = self.streams[number].locate(position[chosen])
        return Samples(index=index, source=source, epoch=epoch, start=start)


def make_order(dataset: Dataset, config: TrainConfig, skip: SkipList = NO_SKIPS) -> Order:
    """The order of a dataset's training samples. Raises ConfigError if seq_len or weights do not fit the dataset."""
    chunk_tokens = dataset.chunk_tokens
    if chunk_tokens % config.seq_len:
        valid = [length for length in range(1, chunk_tokens + 1) if chunk_tokens % length == 0]
        raise ConfigError(
            f"train.seq_len: promised a divisor of the dataset's chunk_tokens {chunk_tokens}, found {config.seq_len}; "
            f"choose one of {', '.join(map(str, valid[-8:]))}"
        )
    streams = {
        source: StreamOrder(source, _shard_tokens(dataset, source, TRAIN), chunk_tokens, config)
        for source in dataset.num_tokens(TRAIN)
    }
    _check_weights(config.weights, streams)
    chosen = {name: stream for name, stream in streams.items() if config.weights.get(name, 1) > 0}
    short = [
        f"{name} has {sum(_shard_tokens(dataset, name, TRAIN))} tokens"
        for name, stream in chosen.items()
        if not stream.num_chunks
    ]
    if short or not chosen:
        raise ConfigError(
            f"{dataset.folder.uri}: promised at least {chunk_tokens + 1} training tokens (a chunk and one) in every "
            f"source, found {'; '.join(short) or 'no training source'}; add data, lower tokens.chunk_tokens, or leave "
            "the source out with weight 0 in train.weights"
        )
    weights = config.weights or {name: stream.num_samples for name, stream in chosen.items()}
    return Order(streams, block_counts(dict(sorted(weights.items()))), skip)


def make_heldout_order(dataset: Dataset, config: TrainConfig) -> Order | None:
    """The order of the held-out samples, the same for every seed; None if no source has one whole sample."""
    config = config.model_copy(update={"seed": 0})
    streams = {
        source: StreamOrder(source, _shard_tokens(dataset, source, HELDOUT), config.seq_len, config)
        for source in sorted(dataset.num_tokens(HELDOUT))
    }
    counts = {name: stream.num_samples for name, stream in streams.items() if stream.num_samples}
    return Order(streams, block_counts(counts)) if counts else None


def _shard_tokens(dataset: Dataset, source: str, split: str) -> list[int]:
    return [shard.num_tokens for shard in dataset.streams[f"{source}/{split}"]]


def _check_weights(weights: Mapping[str, float], streams: Mapping[str, StreamOrder]) -> None:
    problems = [f"{name!r} is no source{nearest(name, streams)}" for name in weights if name not in streams]
    problems += [f"{name!r} is not named (0 leaves it out)" for name in streams if weights and name not in weights]
    if problems:
        raise ConfigError(
            f"train.weights: promised the dataset's sources {sorted(streams)}, found {sorted(weights)}: "
            f"{'; '.join(problems)}; correct the names"
        )
