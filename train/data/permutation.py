"""The training order of one source, a pure function of its shards and the seed.

A source's stream is cut into chunks. A bijection of (seed, source, epoch) orders windows of adjacent shards, then the
chunks inside each window, so that consecutive steps read few shards. Concatenated in this order, the chunks are the
*ordered stream*. Each row consists of its next tokens. Because rows may have any length, a change of sequence length
neither repeats nor loses a token. The contiguous spans of the stream that a row consists of are its *pieces*. Nothing
is iterated: any position in the order, and the position of any token, is computed directly.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Counter-based random numbers: each is a hash of what it is for, so it is the same on every rank and at any time.

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix_bits(x: Bits) -> Bits:
    """Return a 64-bit hash of each number: the finalizer of SplitMix64.

    Source: Steele, Lea and Flood 2014, with the constants of Stafford's Mix13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key_of(*parts: int | str) -> np.uint64:
    """Return a key for random numbers: a 64-bit hash of `parts`, which say what the numbers are used for."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def keys_of(key: np.uint64, index: Ints) -> Bits:
    """Return a 64-bit key of a random number generator for each index, derived from `key`."""
    return mix_bits(np.full(index.shape, key) + GOLDEN * (index + 1).astype(np.uint64))


def random_bits(keys: Bits, number: int) -> Bits:
    """Return `number` random 64-bit numbers for each of B keys, (B, number). Source: Steele et al. 2014, SplitMix64."""
    steps = GOLDEN * np.arange(1, number + 1, dtype=np.uint64)
    return mix_bits(keys[:, None] + steps)


ROUNDS = np.arange(1, 7, dtype=np.uint64) * GOLDEN
MAX_CACHED_TABLES = 8
"""Maximum number of cached tables of epochs, and of cached tables of windows (groups of adjacent shards)."""


def _feistel(index: Ints, side: Ints, keys: Bits, backwards: bool) -> Ints:
    left, right = np.divmod(index, side)
    modulus = side.astype(np.uint64)
    for key in keys[::-1] if backwards else keys:
        half = left if backwards else right
        noise = mix_bits(half.astype(np.uint64) + key)
        noise = (noise % modulus).astype(np.int64)
        left, right = ((right - noise) % side, left) if backwards else (right, (left + noise) % side)
    return left * side + right


def permute(index: Ints, size: Ints, key: Bits, backwards: bool = False) -> Ints:
    """Map each index by a bijection of [0, size) that `key` selects; with `backwards`, by its inverse.

    `index`, `size` and `key` have the same shape: each index has its own size and key.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 5 (generalized Feistel) with cycle
    walking (section 4).
    """
    # The Feistel network permutes side² elements, at most 2·sqrt(size) + 1 more than `size`.
    side = np.sqrt(size).astype(np.int64) + 1
    keys = mix_bits(key + ROUNDS[:, None])  # for all rounds at once, since the calls cost most in small batches
    out = _feistel(index, side, keys, backwards)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], side[outside], keys[:, outside], backwards)
        outside = outside[out[outside] >= size[outside]]
    return out


def concatenate_ranges(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return the integers of all ranges [first, first + count), concatenated, and the index of each integer's range."""
    which = np.repeat(np.arange(len(count)), count)
    return np.arange(len(which)) - np.repeat(np.cumsum(count) - count - first, count), which


@dataclass(frozen=True)
class Pieces:
    """The pieces of some rows, sorted by row. A piece is a contiguous span of a stream."""

    row: Ints
    """Index of the piece's row among the rows that were requested."""
    column: Ints
    """Position in the row at which the piece starts."""
    epoch: Ints
    """Epoch of the source that the piece belongs to, from 0."""
    start: Ints
    """Position of the piece's first token in the source's stream: its inputs are stream[start : start + length]."""
    length: Ints
    """Number of inputs in the piece; the token after them is the target of the last input."""
    closed: NDArray[np.bool_]
    """True if the last input has no target, because its document ends there."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: Ints) -> "Pieces":
        """Return the pieces with these indices."""
        return Pieces(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def join_pieces(parts: Sequence[Pieces], rows: Sequence[Ints]) -> Pieces:
    """Return the pieces of all `parts`, sorted by row. `rows[i]`: the new index of each row of `parts[i]`."""
    empty = np.empty(0, np.int64)
    none = Pieces(empty, empty, empty, empty, empty, np.empty(0, np.bool_))
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in (none, *parts)]) for field in fields(none)
    }
    joined["row"] = np.concatenate([none.row, *(own[part.row] for part, own in zip(parts, rows, strict=True))])
    return Pieces(**joined).take(np.argsort(joined["row"], kind="stable"))


class ChunkOrder:
    """The order in which each epoch reads the chunks of one source.

    The epoch reads one window after the other; a *window* is a group of adjacent shards.
    """

    def __init__(
        self,
        source: str,
        shard_tokens: list[int],
        chunk_tokens: int,
        seed: int,
        window_shards: int,
        together: int = 1,
    ):
        """`together`: number of neighbouring chunks that are ordered as a single one; the last one may have fewer."""
        self.source, self.seed, self.chunk_tokens = source, seed, chunk_tokens * together
        # A row's last input needs the token after it as its target, so the last token of the stream is in no chunk.
        whole = max(0, sum(shard_tokens) - 1) // chunk_tokens
        self.num_tokens = whole * chunk_tokens
        """Number of tokens in all chunks."""
        self.num_chunks = -(-whole // together)
        starts = np.cumsum([0, *shard_tokens])[::window_shards]
        first = np.unique(-(-starts // self.chunk_tokens))
        self.windows: Ints = first[first < self.num_chunks].astype(np.int64)
        """First chunk of every window of shards."""
        self.sizes: Ints = np.diff(np.append(self.windows, self.num_chunks))
        """Number of chunks in every window."""
        self._slots: dict[int, tuple[Ints, Ints, Ints]] = {}

    def slots(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """Return the order in which an epoch reads the windows of shards. A *slot* is an index in this order.

        Three arrays: the window in each slot, the number of chunks before each slot, the slot of each window.
        """
        if epoch not in self._slots:
            number = len(self.sizes)
            key = np.full(number, key_of(self.seed, self.source, epoch))
            order = permute(np.arange(number), np.full(number, number, np.int64), key)
            begins = np.cumsum(self.sizes[order]) - self.sizes[order]
            if len(self._slots) >= MAX_CACHED_TABLES:
                self._slots.clear()
            self._slots[epoch] = order, begins, np.argsort(order)
        return self._slots[epoch]

    def chunks(self, epoch: int, place: Ints) -> Ints:
        """Return the chunks at the positions `place` in the order of an epoch."""
        order, begins, _ = self.slots(epoch)
        slot = np.searchsorted(begins, place, side="right") - 1
        return self.inside(epoch, order[slot], place - begins[slot])

    def inside(self, epoch: int, window: Ints, number: Ints) -> Ints:
        """Return the chunk at index `number` of a window of shards, in the order of an epoch."""
        return self.windows[window] + permute(number, self.sizes[window], self._keys(epoch, window))

    def places(self, epoch: int, chunk: Ints) -> Ints:
        """Return the positions of chunks in the order of an epoch: the inverse of `chunks`."""
        window = np.searchsorted(self.windows, chunk, side="right") - 1
        _, begins, slots = self.slots(epoch)
        number = permute(chunk - self.windows[window], self.sizes[window], self._keys(epoch, window), backwards=True)
        return begins[slots[window]] + number

    def _keys(self, epoch: int, window: Ints) -> Bits:
        return keys_of(key_of(self.seed, self.source, epoch), window)


class RowOrder(Protocol):
    """The order of a source's rows. Positions count units (tokens or packed rows) over all epochs."""

    chunks: ChunkOrder
    num_units: int
    """Number of units in an epoch: tokens of the ordered stream, or packed rows."""
    identity: str
    """Text that identifies how rows are made from the chunks: `stream`, or the digest of a packing index."""

    def width(self, seq_len: int) -> int:
        """Return the number of units in a row of `seq_len` tokens."""

    def pieces(self, position: Ints, seq_len: int) -> Pieces:
        """Return the pieces of the rows that start at these positions."""

    def touching(self, epoch: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the ranges (starts, ends) of an epoch's positions with a token in [start, stop) of the stream."""

    def read_before(self, epoch: int, units: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the spans (starts, lengths) in [start, stop) of the stream that an epoch's first `units` units read.

        Only inputs count, not the target after the last one.
        """


class StreamRows:
    """Rows of consecutive tokens of the ordered stream; positions count tokens. A row may span two chunks."""

    identity = "stream"

    def __init__(self, chunks: ChunkOrder):
        self.chunks = chunks
        self.num_units = chunks.num_chunks * chunks.chunk_tokens

    def width(self, seq_len: int) -> int:
        """Return the number of units in a row: `seq_len`, because a unit is a token."""
        return seq_len

    def pieces(self, position: Ints, seq_len: int) -> Pieces:
        """Return the pieces of the rows that start at these positions, at most two per row."""
        size = self.chunks.chunk_tokens
        first = np.minimum(seq_len, size - position % size)
        row = np.repeat(np.arange(len(position)), 1 + (first < seq_len))
        second = np.diff(row, prepend=-1) == 0
        column = np.where(second, first[row], 0)
        epoch, within = np.divmod(position[row] + column, self.num_units)
        place, offset = np.divmod(within, size)
        chunk = np.empty_like(place)
        for number in np.unique(epoch):
            chosen = epoch == number
            chunk[chosen] = self.chunks.chunks(int(number), place[chosen])
        length = np.where(second, seq_len - column, first[row])
        return Pieces(row, column, epoch, chunk * size + offset, length, np.zeros(len(row), np.bool_))

    def touching(self, epoch: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the ranges (starts, ends) of an epoch's positions with a token in [start, stop) of the stream."""
        size, stop = self.chunks.chunk_tokens, min(stop, self.num_units)
        chunk = np.arange(start // size, -(-stop // size))
        place = self.chunks.places(epoch, chunk) if chunk.size else chunk
        shift = epoch * self.num_units + (place - chunk) * size
        return np.maximum(start, chunk * size) + shift, np.minimum(stop, (chunk + 1) * size) + shift

    def read_before(self, epoch: int, units: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the spans (starts, lengths) of [start, stop) that the first `units` units of an epoch read."""
        size, stop = self.chunks.chunk_tokens, min(stop, self.num_units)
        chunk = np.arange(start // size, -(-stop // size))
        place = self.chunks.places(epoch, chunk) if chunk.size else chunk
        begin, end = chunk * size, np.minimum((chunk + 1) * size, chunk * size + units - place * size)
        first = np.maximum(start, begin)
        length = np.minimum(stop, end) - first
        return first[length > 0], length[length > 0]
