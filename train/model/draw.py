"""Normal numbers by position: a rank draws its own part of a tensor without the numbers of other ranks.

The number at a position is a function of (seed, name, position). A counter-based generator turns the position into 32
random bits, and the inverse of the normal distribution turns the bits into a number. Only integer operations and
+, -, *, / and square roots of float64 are used. IEEE 754 defines their last bit, so every platform draws the same.
Sources: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x64-10); Wichura 1988, "Algorithm AS
241" (PPND7, relative error 1e-7).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

BY_TENSOR, BY_POSITION = 1, 2
"""Versions of the rule for initial weights. 1: torch's generator, which draws whole tensors; 2: this module."""
Floats = NDArray[np.float64]
PER_BLOCK = 8
"""Numbers of 32 bits that Philox makes of one counter."""
AT_ONCE, IN_CACHE = 1 << 18, 1 << 14
"""Numbers that a thread draws at once, and those of them that it computes at once, which fit into a core's cache."""
CENTER = 0.425
"""Distance from the median, as a probability, within which a number is computed without a logarithm."""
A = (5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179e0)
B = (6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0)
C = (1.7023821103e-1, 1.3067284816e0, 2.7568153900e0, 1.4234372777e0)
D = (1.2021132975e-1, 7.3700164250e-1, 1.0)
"""Coefficients of AS 241, highest power first. A third region, beyond 6.6 deviations, does not occur with 32 bits."""


def normal_part(
    key: tuple[int, str], size: Sequence[int], region: Sequence[slice], deviation: float, threads: int = 1
) -> NDArray[np.float32]:
    """Return a region of a tensor of normal numbers with mean 0, float32, in the shape of the region.

    `key`: (seed, name of the tensor). `size`: shape of the whole tensor.
    """
    shape = [bounds.stop - bounds.start for bounds in region]
    values = np.empty(math.prod(shape), np.float32)
    seed, name = key
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")

    def fill(piece: tuple[int, list[tuple[int, int]]]) -> None:
        begin, runs = piece
        bits = np.concatenate([_bits(number, first, length) for first, length in runs])
        for part in range(0, len(bits), IN_CACHE):
            numbers = _normal(bits[part : part + IN_CACHE])
            np.multiply(numbers, deviation, out=values[begin + part : begin + part + len(numbers)], casting="same_kind")

    if values.size:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(fill, _pieces(_runs(size, region))):
                pass
    return values.reshape(shape)


def num_drawn(size: Sequence[int], region: Sequence[slice]) -> int:
    """Return how many numbers of 32 bits are generated for a region; whole blocks, so a few more than it has."""
    blocks = (-(-(first + length) // PER_BLOCK) - first // PER_BLOCK for first, length in _runs(size, region))
    return PER_BLOCK * sum(blocks)


def _runs(size: Sequence[int], region: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """Yield (first position, length) of each run of consecutive positions in a region, in order."""
    dims = len(size)
    while dims > 1 and (region[dims - 1].start, region[dims - 1].stop) == (0, size[dims - 1]):
        dims -= 1  # the last dimensions are whole, so a run goes over them
    inner = math.prod(size[dims:])
    last = region[dims - 1]
    strides = [math.prod(size[dim + 1 :]) for dim in range(dims - 1)]
    for index in np.ndindex(*(bounds.stop - bounds.start for bounds in region[: dims - 1])):
        begin = sum((region[dim].start + i) * strides[dim] for dim, i in enumerate(index))
        if last.stop > last.start:
            yield begin + last.start * inner, (last.stop - last.start) * inner


def _pieces(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (place in the result, runs) in pieces of at most AT_ONCE numbers."""
    place, piece, held = 0, list[tuple[int, int]](), 0
    for first, length in runs:
        while length:
            part = min(length, AT_ONCE - held)
            piece.append((first, part))
            first, length, held = first + part, length - part, held + part
            if held == AT_ONCE:
                yield place, piece
                place, piece, held = place + held, [], 0
    if piece:
        yield place, piece


def _bits(key: int, first: int, length: int) -> NDArray[np.uint32]:
    """Return 32 random bits for each of `length` positions from `first` on."""
    block, skipped = divmod(first, PER_BLOCK)
    # numpy promises that the raw numbers of a generator do not change between its versions (NEP 19).
    blocks = -(-(skipped + length) // PER_BLOCK)
    words = Philox(key=key, counter=block).random_raw(blocks * PER_BLOCK // 2)
    return words.astype("<u8", copy=False).view("<u4")[skipped : skipped + length]


def _normal(bits: NDArray[np.uint32]) -> Floats:
    """Return a standard normal number for each 32 bits, float64."""
    # The middle of one of 2^32 equal parts of (0, 1), less 1/2; exact in float64.
    centered = np.multiply(bits, 2.0**-32, dtype=np.float64)
    centered += 2.0**-33 - 0.5
    squares = np.multiply(centered, centered)
    np.subtract(CENTER**2, squares, out=squares)
    values = _polynomial(A, squares)
    values /= _polynomial(B, squares)
    values *= centered
    tails = np.flatnonzero(squares < 0)
    sides = centered[tails]
    roots = np.sqrt(-_log(0.5 - np.abs(sides)))
    roots -= 1.6
    values[tails] = np.copysign(_polynomial(C, roots) / _polynomial(D, roots), sides)
    return values


def _polynomial(coefficients: Sequence[float], at: Floats) -> Floats:
    """Return the polynomial with these coefficients, highest power first."""
    first, second, *others = coefficients
    values = np.multiply(at, first)
    values += second
    for coefficient in others:
        values *= at
        values += coefficient
    return values


def _log(values: Floats) -> Floats:
    """Return the natural logarithm of positive numbers, with an error below 1e-9."""
    # log(2^e m) = e log 2 + log c + 2 artanh((m - c) / (m + c)); libraries differ in the last bits of their logarithms.
    mantissas, exponents = np.frexp(values)
    center = math.sqrt(0.5)
    ratios = (mantissas - center) / (mantissas + center)
    series = _polynomial([1 / n for n in (11, 9, 7, 5, 3, 1)], ratios * ratios)
    series *= 2 * ratios
    return (exponents - 0.5) * LOG_2 + series


LOG_2 = 0.6931471805599453
