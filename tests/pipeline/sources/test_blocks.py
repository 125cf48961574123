"""Blocks: bytes anywhere in a stream, and every match of a pattern in it."""

import io
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sources.blocks import BLOCK_BYTES, OVERLAP_BYTES, BlockReader


class ShortReads(io.BytesIO):
    """A file whose reads return less than was asked for, as pipes and object stores may."""

    def read(self, size=-1):
        return super().read(min(size, 40_000) if size > 0 else size)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES - 8), min_size=1, max_size=8, unique=True), st.booleans())
def test_search_finds_every_match_across_blocks(positions, short):
    content = bytearray(3 * BLOCK_BYTES)
    expected = []
    for position in sorted(positions):
        if not expected or position >= expected[-1] + 6:
            content[position : position + 6] = b"needle"
            expected.append(position)
    blocks = BlockReader((ShortReads if short else io.BytesIO)(bytes(content)))
    assert list(blocks.search(re.compile(b"needle"), 0)) == expected
    assert list(blocks.search(re.compile(b"needle"), expected[-1] + 1)) == []


def test_at_and_peek_reach_the_end_and_not_further():
    content = bytes(BLOCK_BYTES) + b"tail"
    blocks = BlockReader(io.BytesIO(content))
    assert len(blocks.at(0, BLOCK_BYTES + 4)) == BLOCK_BYTES
    assert bytes(blocks.at(BLOCK_BYTES + 1, 10)) == b"ail"
    assert blocks.peek(BLOCK_BYTES - 1, 3) == b"\0ta"
    assert blocks.peek(BLOCK_BYTES + 2, 100) == b"il"
    assert blocks.peek(BLOCK_BYTES + 4, 1) == b""
    assert not blocks.at(BLOCK_BYTES + 4, 1)
    assert blocks.size() == BLOCK_BYTES + 4
    assert OVERLAP_BYTES < BLOCK_BYTES >> 4
