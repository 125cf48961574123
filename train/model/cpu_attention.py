"""Attention on a CPU in tiles. A tile is a range of queries, and the keys of their document up to the last query.

torch's kernel computes 512 keys at a time, masked or not. So a causal row is cut into tiles that end with their last
query, and a row of documents also at document borders; only short documents share a tile, with a mask. With a window, a
tile has no keys before the window of its first query. The scores of a whole row are never held. Compilation,
recomputation and autograd treat the whole as one operator.

Shape suffixes: B rows, T positions, H query heads, G key-value heads, K head width; n queries, m keys of a tile.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_TILE_QUERIES = 128
"""Maximum number of queries in a tile with earlier keys or with several documents.

Forward and backward over 4 x 512 positions, 8 heads of 32, in documents of 200: 0.46, 0.52 and 0.56 of one masked
call's time for 64, 128 and 192 (one core), 0.59 and 0.62 for 64 and 128 (two); 64 is too small to occupy many cores.
"""


class Tile(NamedTuple):
    """A tile of attention: queries [first, stop) of some rows, and their keys [begin, stop)."""

    rows: slice
    begin: int
    first: int
    stop: int
    shared: bool
    """True if the tile contains several documents."""


def attend_in_tiles(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    documents_BT: Tensor | None,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Return the attention output within documents, (B, H, T, K).

    `documents_BT`: document number of each position; None = every row is one document. `window`: number of latest
    positions that a causal query attends to; None = all.
    """
    y_BHTK: Tensor = _forward(q_BHTK, k_BGTK, v_BGTK, documents_BT, causal, window or 0)[0]
    return y_BHTK


@lru_cache(maxsize=64)
def tiles_of(documents: bytes | None, num_rows: int, length: int, causal: bool, window: int = 0) -> tuple[Tile, ...]:
    """Return the tiles of all rows; adjacent rows with the same document borders share their tiles.

    `documents`: int32 document numbers of all positions, as bytes; None = every row is one document. `window`: number
    of positions that a causal query attends to; 0 = all.
    """
    if documents is None:
        borders = [(0, length)] * num_rows
    else:
        documents_BT = torch.frombuffer(bytearray(documents), dtype=torch.int32).view(num_rows, length)
        begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        borders = [(*begins_T.nonzero()[:, 0].tolist(), length) for begins_T in begins_BT]
    tiles, row = [], 0
    for cuts, alike in groupby(tuple(_cut_row(places, causal, window)) for places in borders):
        rows = slice(row, row + len(list(alike)))
        tiles += [Tile(rows, *cut) for cut in cuts]
        row = rows.stop
    return tuple(tiles)


def _cut_row(borders: tuple[int, ...], causal: bool, window: int) -> list[tuple[int, int, int, bool]]:
    """Return the tiles of a row, each a tuple of the fields of `Tile` after `rows`."""
    tiles: list[tuple[int, int, int, bool]] = []
    open_at, number = borders[0], 0
    # Documents share a tile of up to MAX_TILE_QUERIES positions. A longer document has its own: several if `causal`.
    for begin, stop in pairwise(borders):
        if number and stop - open_at > MAX_TILE_QUERIES:
            tiles.append((open_at, open_at, begin, number > 1))
            open_at, number = begin, 0
        number += 1
        if stop - begin > MAX_TILE_QUERIES:
            count = -(-(stop - begin) // MAX_TILE_QUERIES) if causal else 1
            ends = [begin + (stop - begin) * index // count for index in range(count + 1)]
            # The keys of a tile begin with the window of its first query.
            tiles += [
                (max(begin, first + 1 - window) if window else begin, first, end, False)
                for first, end in pairwise(ends)
            ]
            open_at, number = stop, 0
    if number:
        tiles.append((open_at, open_at, borders[-1], number > 1))
    return tiles


def _tiles(
    q_BHTK: Tensor, documents_BT: Tensor | None, causal: bool, window: int
) -> Iterator[tuple[Tile, bool, Tensor | None]]:
    """Yield each tile, whether the kernel masks it causally, and its additive mask (None = no mask)."""
    num_rows, _, length, _ = q_BHTK.shape
    documents = None if documents_BT is None else documents_BT.to(torch.int32).contiguous().numpy().tobytes()
    tiles = tiles_of(documents, num_rows, length, causal, window)
    longest = max((tile.stop - tile.begin for tile in tiles if _is_cut(tile, window)), default=0)
    # The last n rows and m columns of this matrix mask n queries that are the last n of m keys.
    height = min(MAX_TILE_QUERIES, longest)
    corner_nm = q_BHTK.new_full((height, longest), -torch.inf).triu_(1 + longest - height)
    if window:
        corner_nm += q_BHTK.new_full((height, longest), -torch.inf).tril_(longest - height - window)
    for tile in tiles:
        if tile.shared and documents_BT is not None:
            yield tile, False, _mask(q_BHTK, documents_BT[tile.rows, tile.first : tile.stop], causal, window)
        elif _is_cut(tile, window):
            yield tile, False, corner_nm[tile.first - tile.stop :, tile.begin - tile.stop :]
        else:
            yield tile, causal, None


def _is_cut(tile: Tile, window: int) -> bool:
    """Return True if a causal mask alone is wrong for the only document of a tile: keys precede or leave its window."""
    return not tile.shared and (tile.first > tile.begin or 0 < window < tile.stop - tile.first)


def _mask(q_BHTK: Tensor, documents_Bn: Tensor, causal: bool, window: int) -> Tensor:
    """Return the additive mask, (B, 1, n, n) in the dtype of the queries: 0 where a query may attend, else -inf."""
    masked_Bnn = documents_Bn[:, :, None] != documents_Bn[:, None, :]
    if causal:
        masked_Bnn |= torch.ones(masked_Bnn.shape[1:], dtype=torch.bool).triu_(1)
    if window:
        masked_Bnn |= torch.ones(masked_Bnn.shape[1:], dtype=torch.bool).tril_(-window)
    return q_BHTK.new_zeros(masked_Bnn.shape).masked_fill_(masked_Bnn, -torch.inf)[:, None]


def _empty_like_stored(x_BHTK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x_BHTK.new_empty(x_BHTK.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@torch.library.custom_op("penstock::attend_in_tiles", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """Return the attention output, (B, H, T, K), and the log of each query's softmax denominator (log Z), (B, H, T)."""
    y_BHTK = _empty_like_stored(q)
    log_z_BHT = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    for tile, is_causal, added in _tiles(q, documents, causal, window):
        queries, keys = slice(tile.first, tile.stop), slice(tile.begin, tile.stop)
        mine, seen = (tile.rows, slice(None), queries), (tile.rows, slice(None), keys)
        y_BHTK[mine], log_z_BHT[mine] = _KERNEL(q[mine], k[seen], v[seen], 0.0, is_causal, attn_mask=added)
    return y_BHTK, log_z_BHT


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, causal: bool, window: int) -> tuple[Tensor, Tensor]:
    return _empty_like_stored(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("penstock::attend_in_tiles_backward", mutates_args=(), device_types="cpu")
def _backward(
    gradient: Tensor, saved: list[Tensor], documents: Tensor | None, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    `saved`: queries, keys, values, attention output and log Z.
    """
    q, k, v, y, log_z = saved
    wide = torch.promote_types(q.dtype, torch.float32)
    gradient_of_q, gradient_of_k, gradient_of_v = (
        _empty_like_stored(q),
        _empty_like_stored(k, wide),
        _empty_like_stored(v, wide),
    )
    for tile, is_causal, added in _tiles(q, documents, causal, window):
        queries, keys = slice(tile.first, tile.stop), slice(tile.begin, tile.stop)
        mine, seen = (tile.rows, slice(None), queries), (tile.rows, slice(None), keys)
        of_q, *of_both = _KERNEL_BACKWARD(
            gradient[mine], q[mine], k[seen], v[seen], y[mine], log_z[mine], 0.0, is_causal, attn_mask=added
        )
        gradient_of_q[mine] = of_q
        # Keys before the tile's first query already have a gradient from an earlier tile; the others do not.
        earlier, number = (tile.rows, slice(None), slice(tile.begin, tile.first)), tile.first - tile.begin
        for total, addend in zip((gradient_of_k, gradient_of_v), of_both):
            total[earlier] += addend[:, :, :number]
            total[mine] = addend[:, :, number:]
    return gradient_of_q, gradient_of_k.to(k.dtype), gradient_of_v.to(v.dtype)


@_backward.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], documents: Tensor | None, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    return _empty_like_stored(q), _empty_like_stored(k), _empty_like_stored(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *projections, documents, ctx.causal, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*projections, *output, documents)


def _differentiate(ctx: Any, gradient: Tensor, of_log_z: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    return *_backward(gradient, list(saved), documents, ctx.causal, ctx.window), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
