"""Lines of text as chunks of word numbers: the only step that sees text.

Words stand between spaces, tabs, carriage returns and null bytes, as for lmplz; a word is bytes, UTF-8 or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ContractError

RESERVED = (b"<s>", b"</s>", b"<unk>")
SPACES = np.arange(256, dtype=np.uint8)
SPACES[[0, 9, 13]] = ord(" ")


@dataclass(frozen=True)
class Chunk:
    """Some sentences whose words are numbered by themselves."""

    words: pa.Array
    """Each word once (binary); the first has the number 1."""
    line: npt.NDArray[np.int32]
    """The numbers of all words, sentence after sentence; 0 ends a sentence."""


def chunks(lines: Iterable[pa.Array], num_tokens: int, reserved: Literal["refuse", "skip"]) -> Iterator[Chunk]:
    """The lines (binary or string arrays; nulls are left out) as chunks of about `num_tokens` words.

    Raises ContractError if reserved words are to be refused and one occurs.
    """
    pending: list[pa.Array] = []
    held = 0
    for batch in lines:
        split = split_words(batch)
        pending.append(split)
        held += len(split.flatten())
        if held >= num_tokens:
            yield _chunk(pending, reserved)
            pending, held = [], 0
    if any(len(split) for split in pending):
        yield _chunk(pending, reserved)


def split_words(lines: pa.Array) -> pa.Array:
    """The words of each line as a list array; a line feed inside a value ends a sentence like any other."""
    lines = lines.drop_null().cast(pa.binary())
    if lines.offset:
        lines = pa.concat_arrays([lines])
    _, offsets, data = lines.buffers()
    if data is None or not data.size:
        return pc.split_pattern(lines, pattern=" ")
    plain = SPACES[np.frombuffer(data, np.uint8)]
    lines = pa.BinaryArray.from_buffers(pa.binary(), len(lines), [None, offsets, pa.py_buffer(plain)])
    if (plain == ord("\n")).any():
        lines = pc.split_pattern(lines, pattern="\n").flatten()
    return pc.split_pattern(lines, pattern=" ")


def _chunk(pending: list[pa.Array], reserved: Literal["refuse", "skip"]) -> Chunk:
    """One chunk of split lines; empty words, which stand between two spaces, are left out."""
    coded = pa.chunked_array([split.flatten() for split in pending], pa.binary()).dictionary_encode().combine_chunks()
    lengths = np.concatenate([pc.list_value_length(split).to_numpy() for split in pending]).astype(np.int64)
    if isinstance(coded, pa.ChunkedArray):  # no chunk at all
        coded = pa.array([], pa.binary()).dictionary_encode()
    words, tokens = coded.dictionary, coded.indices.to_numpy()
    special = pc.is_in(words, pa.array(RESERVED, pa.binary())).to_numpy(zero_copy_only=False)
    if special.any() and reserved == "refuse":
        raise ContractError(
            f"train_lm: promised text without the reserved words <s>, </s> and <unk>, found "
            f"{words.filter(pa.array(special))[0].as_py().decode()}; remove them or set reserved_words to skip"
        )
    left_out = special | pc.equal(words, b"").to_numpy(zero_copy_only=False)
    stays = ~left_out[tokens]
    ends = np.concatenate([[0], np.cumsum(stays)])[np.cumsum(lengths)]
    numbers = np.cumsum(~left_out)[tokens[stays]]
    return Chunk(words.filter(pa.array(~left_out)), np.insert(numbers, ends, 0).astype(np.int32))
