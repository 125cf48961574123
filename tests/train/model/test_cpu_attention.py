"""Attention in tiles: tiles by hand, the same values as with a mask, isolated documents, compilation, recomputation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.model_oracle import TINY, small_model, some_ids
from tests.support.rank_pool import shared_pool
from train.config.settings import load_settings
from train.data.rows import Rows
from train.model.attention import AttentionMask, attend, document_mask
from train.model.cpu_attention import MAX_TILE_QUERIES, attend_in_tiles, tiles_of
from train.model.transformer import Recompute
from train.parallel.parallelize import SplitModel
from train.parallel.ranks import Ranks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: it is faster for tensors this small, above all when other processes use the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def documents_of(*rows: list[int]) -> Tensor:
    """Return the document numbers, from 3, of rows with documents of these lengths."""
    return torch.stack([torch.arange(3, 3 + len(row)).repeat_interleave(torch.tensor(row)) for row in rows]).int()


def cuts_of(documents: Tensor | None, num_rows: int, length: int, causal: bool) -> list[tuple[int, ...]]:
    """Return every tile: rows [first, stop), first key, queries [first, stop), and whether documents share it."""
    documents_bytes = None if documents is None else documents.numpy().tobytes()
    return [(t.rows.start, t.rows.stop, *t[1:]) for t in tiles_of(documents_bytes, num_rows, length, causal)]


# ------------------------------------------------------------------------------------------------------------ the cuts


def test_tiles_by_hand() -> None:
    assert MAX_TILE_QUERIES == 128
    # Documents share a tile up to 128 queries; 129 are two tiles of a causal document, and one without a causal mask.
    row = [100, 28, 1, 129, 128, 14]
    both = [(0, 1, 0, 0, 128, True), (0, 1, 128, 128, 129, False)]
    rest = [(0, 1, 258, 258, 386, False), (0, 1, 386, 386, 400, False)]
    halves = [(0, 1, 129, 129, 193, False), (0, 1, 129, 193, 258, False)]
    assert cuts_of(documents_of(row), 1, 400, True) == [*both, *halves, *rest]
    assert cuts_of(documents_of(row), 1, 400, False) == [*both, (0, 1, 129, 129, 258, False), *rest]
    # A document after a long document starts a new tile.
    assert cuts_of(documents_of([256, 2, 3]), 1, 261, False) == [(0, 1, 0, 0, 256, False), (0, 1, 256, 256, 261, True)]
    # Without documents a row is one document; a tile's keys start at the row's first.
    assert cuts_of(None, 3, 300, True) == [
        (0, 3, 0, 0, 100, False),
        (0, 3, 0, 100, 200, False),
        (0, 3, 0, 200, 300, False),
    ]
    assert cuts_of(None, 3, 128, True) == [(0, 3, 0, 0, 128, False)]


def test_rows_with_the_same_tiles_are_computed_together() -> None:
    documents = documents_of([20, 30], [10, 40], [50], [50], [20, 30])
    assert cuts_of(documents, 5, 50, True) == [
        (0, 2, 0, 0, 50, True),
        (2, 4, 0, 0, 50, False),
        (4, 5, 0, 0, 50, True),
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=12),
    st.lists(st.integers(1, 400), min_size=1, max_size=12),
    st.booleans(),
)
def test_every_query_is_in_one_tile_with_its_visible_keys(left: list[int], right: list[int], causal: bool) -> None:
    left, right = [*left, max(0, sum(right) - sum(left)) + 1], [*right, max(0, sum(left) - sum(right)) + 1]
    documents = documents_of(left, right)
    length = documents.shape[1]
    met = torch.zeros(2, length, dtype=torch.int32)
    for tile in tiles_of(documents.numpy().tobytes(), 2, length, causal):
        met[tile.rows, tile.first : tile.stop] += 1
        for row in range(tile.rows.start, tile.rows.stop):
            here = documents[row, tile.begin : tile.stop]
            assert tile.shared == (here[0] != here[-1]).item()
            assert tile.begin == 0 or documents[row, tile.begin - 1] != here[0]
            whole = tile.stop == length or documents[row, tile.stop] != here[-1]
            assert whole or (causal and not tile.shared)
            assert tile.stop - tile.first <= MAX_TILE_QUERIES or (not causal and not tile.shared)
            assert tile.first == tile.begin or not tile.shared
    assert torch.equal(met, torch.ones_like(met))


# ---------------------------------------------------------------------------------------------------------- the numbers

ROWS = (
    documents_of([400], [400]),
    documents_of([400], [100, 28, 1, 129, 128, 14], [129, 200, 71], [1] * 400, [399, 1]),
    documents_of([5, 6], [11], [4, 7]),
)


def projections(num_rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries of four heads, keys and values of two, in a layer's memory layout."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(num_rows, length, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn]


def with_gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad((y.double().square() * torch.arange(8)).sum(), inputs)]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 5e-5), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [*ROWS, None])
def test_tiles_equal_the_masked_attention(
    documents: Tensor | None, causal: bool, dtype: torch.dtype, atol: float
) -> None:
    size = (2, 300) if documents is None else tuple(documents.shape)
    inputs = projections(*size, torch.float64)
    whole = torch.zeros(size, dtype=torch.int32) if documents is None else documents
    visible = document_mask(whole, causal)
    square = F.scaled_dot_product_attention(*inputs, attn_mask=visible, enable_gqa=True)
    expected = with_gradients(square, inputs)
    inputs = projections(*size, dtype)
    actual = with_gradients(attend_in_tiles(*inputs, documents, causal), inputs)
    assert {x.dtype for x in actual} == {dtype}
    for of_tiles, of_square in zip(actual, expected):
        torch.testing.assert_close(
            of_tiles.double(), of_square, rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=atol
        )


@pytest.mark.parametrize("window", [1, 2, 64, 127, 128, 129, 399])
@pytest.mark.parametrize("documents", [ROWS[1], None])
def test_a_window_equals_the_masked_attention(documents: Tensor | None, window: int) -> None:
    size = (2, 300) if documents is None else tuple(documents.shape)
    inputs = projections(*size, torch.float64)
    whole = torch.zeros(size, dtype=torch.int32) if documents is None else documents
    distance = torch.arange(size[1])[:, None] - torch.arange(size[1])
    visible = (whole[:, :, None] == whole[:, None]) & (distance >= 0) & (distance < window)
    square = F.scaled_dot_product_attention(*inputs, attn_mask=visible[:, None], enable_gqa=True)
    actual = attend_in_tiles(*inputs, documents, True, window)
    for of_tiles, of_square in zip(with_gradients(actual, inputs), with_gradients(square, inputs)):
        torch.testing.assert_close(of_tiles, of_square, rtol=1e-9, atol=1e-12)


def test_tiles_have_no_keys_before_the_window() -> None:
    rows = tiles_of(None, 1, 384, True, 50)
    assert [(tile.begin, tile.first, tile.stop) for tile in rows] == [(0, 0, 128), (79, 128, 256), (207, 256, 384)]


def test_attention_that_is_computed_in_tiles() -> None:
    def operators(mask: AttentionMask, length: int) -> set[str]:
        inputs = projections(1, length, torch.float32)
        with torch.profiler.profile() as profile:
            attend(*inputs, mask)
        return {event.key for event in profile.key_averages() if event.key.startswith("penstock::")}

    tiles, places = {"penstock::attend_in_tiles"}, torch.arange(1)
    for length, causal, expected in ((257, True, tiles), (256, True, set()), (257, False, set())):
        assert operators(AttentionMask(places, None, None, causal), length) == expected
        documents = torch.zeros(1, length, dtype=torch.int32)
        assert operators(AttentionMask(places, None, None, causal, documents), length) == tiles
        assert operators(AttentionMask(places, None, document_mask(documents, causal), causal), length) == set()
    assert operators(AttentionMask(places, None, None, True, window=8), 64) == tiles


def test_the_operator_passes_torchs_opcheck() -> None:
    inputs = projections(5, 400, torch.float32)
    for documents in (ROWS[1], None):
        for causal in (True, False):
            torch.library.opcheck(torch.ops.penstock.attend_in_tiles.default, (*inputs, documents, causal, 0))
    torch.library.opcheck(torch.ops.penstock.attend_in_tiles.default, (*inputs, ROWS[1], True, 20))


# ----------------------------------------------------------------------------------------------------------- in a model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mlm"])
def test_a_document_does_not_depend_on_its_neighbors(causal: bool, dtype: torch.dtype | None) -> None:
    documents, model = ROWS[1], small_model(TINY, causal=causal)
    ids = some_ids(5, 400)
    model.embedding, embedding = None, model.embedding

    def of_others(ids: Tensor, here: Tensor) -> list[Tensor]:
        stream = embedding(ids).detach().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(stream, documents)[~here]
        inputs = [*model.parameters(), stream]
        return [logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), inputs)]

    for changed in (3, 4, 6):
        here = documents == changed
        before, after = of_others(ids, here), of_others(torch.where(here, (ids + 5) % 97, ids), here)
        assert all(torch.equal(a, b) for a, b in zip(before, after))
        assert torch.count_nonzero(after[-1][here]) == 0
        assert torch.count_nonzero(after[-1][~here]) > 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mlm"])
def test_a_row_does_not_depend_on_the_rows_beside_it(causal: bool) -> None:
    documents, model, ids = ROWS[1], small_model(TINY, causal=causal), some_ids(5, 400)
    together = model(ids, documents)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        torch.testing.assert_close(model(ids[rows], documents[rows]), together[rows], rtol=0, atol=2e-6)


def loss_and_gradients(documents: Tensor | None, recompute: Recompute, compiled: bool) -> list[Tensor]:
    model = small_model(TINY)
    for block in model.layers:
        block.recompute = recompute
        if compiled:
            block.compile(backend="aot_eager", fullgraph=True)
    loss = model(some_ids(5, 400), documents).logsumexp(-1).sum()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("documents", [ROWS[1], None], ids=["documents", "causal"])
def test_recomputed_layers_return_the_same_bits(documents: Tensor | None) -> None:
    expected = loss_and_gradients(documents, "none", compiled=False)
    for recompute in ("full", "selective"):
        actual = loss_and_gradients(documents, recompute, compiled=False)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_compiled_layers_return_the_same_and_are_compiled_once() -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    for documents in (ROWS[1], ROWS[1].flip(0).contiguous(), torch.ones_like(ROWS[1])):
        actual = loss_and_gradients(documents, "none", compiled=True)
        for value, expected_value in zip(actual, loss_and_gradients(documents, "none", compiled=False)):
            torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-5)
    # Other documents are other values in the same tensor.
    assert counted["stats"]["unique_graphs"] == 1
    loss_and_gradients(ROWS[1], "full", compiled=True)


def test_memory_grows_with_the_length_and_not_its_square() -> None:
    """The memory for a row is linear in its length; a mask of 4,096 positions alone would be 67 MB."""
    assert _bytes(4096) < 2.1 * _bytes(2048)


def _bytes(length: int) -> int:
    inputs = projections(1, length, torch.float32)
    documents = documents_of([30] * (length // 30) + [length % 30])
    with torch.profiler.profile(profile_memory=True) as profile:
        with_gradients(attend_in_tiles(*inputs, documents, True), inputs)
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())


# ------------------------------------------------------------------------------------------------------------- layouts


def losses_in_a_layout(ranks: Ranks, layout: dict[str, Any], objective: str) -> list[float]:
    """Return the sums of losses by source in two steps of plain gradient descent, on rows of several tiles."""
    settings = load_settings({"layout": layout, "train": {"objective": objective, "seq_len": 400}}, [], "test")
    split = SplitModel(TINY, settings, ranks, 4, [(400, 4)])
    split.set_initial_weights(0)
    ids = some_ids(4, 401)
    rows = Rows(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), ROWS[1][:4].contiguous(), torch.arange(4))
    losses = []
    for _ in range(2):
        losses += split.backward(split.part_of(rows), 1 / 1600).losses_S.tolist()
        with torch.no_grad():
            for parameter in (each for part in split.parts for each in part.parameters()):
                if parameter.grad is not None:
                    parameter -= parameter.grad
                    parameter.grad = None
    return losses


@pytest.mark.dist
@pytest.mark.parametrize("objective", ["causal", "mlm"])
def test_tiles_return_the_same_in_every_layout(objective: str) -> None:
    (expected,) = shared_pool().play(1, losses_in_a_layout, {}, objective)
    layouts = [{"context": 2, "context_by": by} for by in ("heads", "keys")] if objective == "causal" else []
    for layout in (*layouts, {"tensor": 2}, {"pipeline": 2, "micro_batch": 2}, {"data": "zero3"}):
        for actual in shared_pool().play(2, losses_in_a_layout, layout, objective):
            assert actual == pytest.approx(expected, rel=1e-7), layout
