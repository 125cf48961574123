"""The ranges of a large file, each of which is a split and a part of its own: where they lie, and how they begin.

A range is planned by bytes: the n ranges of a file have equal shares of its stored bytes. Its rows are those that begin
in its share. Where the first of them begins is never guessed from the bytes, which a page may forge: the same code that
reads the rows finds it, from the start of the file on unless the format has line ends or a footer. So the rows of all
ranges are those of the whole file, each exactly once, also where the file is damaged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from pipeline.engine.stage import FILE_START, FileRange, RangeStart, Split
from pipeline.sources.blocks import BlockReader, ByteStream
from pipeline.sources.compression import FrameState, max_restarts
from pipeline.sources.config import SourceConfig
from pipeline.sources.decoders import MAGIC_BYTES
from pipeline.sources.formats import FORMATS
from schemas.errors import ContractError, PenstockError
from schemas.storage import resolve_uri

Guarded = Callable[[Iterable[RangeStart], ByteStream], Iterator[RangeStart]]
"""Function that yields what an iterator over a file yields, with limits on each step of it, as `RecordGuard.read`."""


def ranges_of(split: Split) -> list[Split]:
    """Return the splits that a file is read by: itself, or its ranges. These have no rows yet; see `with_starts`."""
    number = split.num_ranges
    if number == 1:
        return [split]
    places = [split.size * each // number for each in range(number + 1)]
    return [
        replace(split, ordinal=split.ordinal + each, span=FileRange(each, places[each], places[each + 1]))
        for each in range(number)
    ]


def find_starts(
    split: Split, stream: ByteStream, config: SourceConfig, guarded: Guarded, retried: bool
) -> list[RangeStart | None]:
    """Return the first row of each range of a file but the first range; None for ranges at the end without rows.

    If the reader fails at some row, no range begins after it. The last one reads up to this row too, and makes the rest
    of the file a gap, as in a file that is not divided. `retried`: an earlier attempt may have failed.
    """
    finder = FORMATS[split.format].starts(split.name)
    starts: list[RangeStart | None] = []
    places = [each.span.begin for each in ranges_of(split) if each.span is not None][1:]
    try:
        if finder is not None:
            starts.extend(guarded(finder(stream, config, places), stream))
    except (OSError, PenstockError):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) and not retried:
            raise  # something else may have taken the memory
    starts += [None] * (len(places) - len(starts))
    return _limited(starts, BlockReader(stream))


def _limited(starts: Sequence[RangeStart | None], blocks: BlockReader) -> list[RangeStart | None]:
    """Return the starts with at most `max_restarts` of them inside a frame; each of the others becomes the next one.

    A range that begins inside a frame decodes all of the frame before it.
    """
    limited: list[RangeStart | None] = []
    for frame, group in groupby(starts, key=_frame_of):
        inside = [*group]
        most = len(inside) if frame is None else max_restarts(blocks.peek(frame, MAGIC_BYTES))
        if len(inside) > most:
            kept = {(each + 1) * len(inside) // (most + 1) for each in range(most)}
            inside = [start if place in kept else None for place, start in enumerate(inside)]
        limited += inside
    following: RangeStart | None = None
    for place in reversed(range(len(limited))):
        limited[place] = following = limited[place] or following
    return limited


def _frame_of(start: RangeStart | None) -> int | None:
    """Return the offset of the frame inside which a range begins; None if it begins with a frame or in plain bytes."""
    size = len(FrameState._fields)
    if start is None or len(start.resume) <= size:
        return None
    state, skipped = FrameState(*start.resume[:size]), start.resume[size]
    return state.position if skipped and not state.inside_plain else None


def with_starts(ranges: Sequence[Split], starts: Sequence[RangeStart | None]) -> list[Split]:
    """Return the ranges of a file with their rows. `starts`: what `find_starts` returned."""
    firsts = [FILE_START, *starts]
    known = []
    for split, first, following in zip(ranges, firsts, [*starts, None], strict=True):
        if split.span is not None:
            is_empty = first is None or first == following
            rows = {"first": None, "following": None} if is_empty else {"first": first, "following": following}
            split = replace(split, span=replace(split.span, **rows))
        known.append(split)
    return known


def check_unchanged(split: Split) -> None:
    """Raise ContractError if a file does not have the size and time that it had when the run was prepared."""
    fs, path = resolve_uri(split.uri)
    info = fs.get_file_info(path)
    identity = f"{info.size}:{info.mtime_ns or 0}"
    if identity != split.identity:
        raise ContractError(
            f"{split.uri}: expected the size and modification time {split.identity}, got {identity} while its ranges "
            "are read. Run `penstock run` again when the file is complete and no longer changes."
        )
