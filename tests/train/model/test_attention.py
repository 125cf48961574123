"""Attention masks, positions, and the isolation of documents in a row: bit by bit, forward and backward."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.support.model_oracle import TINY, frequency, sinusoid, small_model, some_ids
from train.model.attention import (
    BLOCK,
    AttentionMask,
    RowDocuments,
    align_distances,
    attend,
    document_blocks,
    document_mask,
    flex_block_mask,
    rotary_frequencies,
    rotate,
    rotation_table,
    sinusoids,
    uses_blocks,
)
from train.model.flash_attention import uses_flash_attention
from train.model.shape import ModelShape

CPU = torch.device("cpu")
SHAPES = {
    "rope": TINY,
    "all heads, bias": TINY.model_copy(update={"num_kv_heads": 4, "bias": True, "qk_norm": True}),
    "relative": TINY.model_copy(update={"positions": "relative"}),
}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
BORDERS = ([6], [3, 7, 12], [1, 15], [8])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: it is faster for tensors this small, above all when other processes use the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def documents_of(*borders: list[int], length: int = 16) -> Tensor:
    """Return the document numbers of rows whose documents start at 0 and at each border."""
    places = torch.arange(length)
    return torch.stack([sum((places >= border).int() for border in row) for row in borders]).int()


# -------------------------------------------------------------------------------------------------- the document mask


def logits_and_gradients(
    shape: ModelShape, causal: bool, dtype: torch.dtype | None, ids: Tensor, documents: Tensor | None
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a function of chosen positions (B, T): their logits, and the gradients of a loss on them."""
    model = small_model(shape, causal=causal)
    stream = model.embedding(ids).detach().requires_grad_()
    model.embedding = None
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(stream, documents)

    def of(chosen: Tensor) -> tuple[Tensor, ...]:
        counted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        loss = logits[chosen].logsumexp(-1).sum()
        return (logits[chosen], *torch.autograd.grad(loss, [*counted, stream], retain_graph=True))

    return of


@pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mlm"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_document_does_not_depend_on_its_neighbors(
    shape: ModelShape, causal: bool, dtype: torch.dtype | None
) -> None:
    documents = documents_of(*BORDERS)
    ids = some_ids(len(BORDERS), 16)
    before = logits_and_gradients(shape, causal, dtype, ids, documents)
    for changed in range(int(documents.max()) + 1):
        here = documents == changed
        after = logits_and_gradients(shape, causal, dtype, torch.where(here, (ids + 5) % 97, ids), documents)
        actual, expected = after(~here), before(~here)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected))
        # The loss of other documents has no gradient for this document's input, to the last bit.
        assert torch.count_nonzero(actual[-1][here]) == 0
        assert torch.count_nonzero(actual[-1][~here]) > 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mlm"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_a_document_mask_neighbors_do_change(shape: ModelShape, causal: bool) -> None:
    documents, ids = documents_of([6], [6]), some_ids(2, 16)
    for changed, visible_to_others in ((0, True), (1, not causal)):
        here = documents == changed
        changed_ids = torch.where(here, (ids + 5) % 97, ids)
        before = logits_and_gradients(shape, causal, None, ids, None)(~here)
        after = logits_and_gradients(shape, causal, None, changed_ids, None)(~here)
        assert torch.isclose(before[0], after[0], atol=1e-5).all(-1).any() == (not visible_to_others)
        assert bool(torch.count_nonzero(after[-1][here])) == visible_to_others


def test_a_document_alone_has_the_same_logits_as_in_a_row() -> None:
    ids, documents = some_ids(1, 16), documents_of([3, 9])
    for shape in SHAPES.values():
        for causal in (True, False):
            model = small_model(shape, causal=causal)
            packed = model(ids, documents)
            for start, stop in ((0, 3), (3, 9), (9, 16)):
                # Positions are relative in both encodings: a document may start anywhere.
                torch.testing.assert_close(packed[:, start:stop], model(ids[:, start:stop]), rtol=0, atol=3e-6)


def test_seen_in_document() -> None:
    documents = torch.tensor([[4, 4, 7]], dtype=torch.int32)
    assert document_mask(documents, causal=False).int().tolist() == [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    assert document_mask(documents, causal=True).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]


# -------------------------------------------------------------------------------------------------------- FlexAttention

LONG_ROWS = {
    512: [[100, 128, 300], [1], [256, 384], [511], [129, 130, 131, 383]],
    400: [[100, 128, 300], [399], [384], [385], [1, 2, 3]],
    128: [[64]],
    100: [[50], []],
    129: [[128], [], [127]],
}


def long_documents(length: int) -> Tensor:
    rows = [
        torch.zeros(length, dtype=torch.int32) if not row else documents_of(row, length=length)[0]
        for row in LONG_ROWS[length]
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LONG_ROWS)
def test_blocks_are_those_of_the_whole_mask(length: int, causal: bool) -> None:
    documents = long_documents(length) * 2 + 1
    actual = flex_block_mask(documents, causal)
    expected = create_block_mask(actual.mask_mod, len(documents), None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    assert actual.shape == expected.shape
    for name in ("kv", "full_kv"):
        numbers, places = (getattr(actual, f"{name}_{of}") for of in ("num_blocks", "indices"))
        numbers_expected, places_expected = (getattr(expected, f"{name}_{of}") for of in ("num_blocks", "indices"))
        assert torch.equal(numbers, numbers_expected)
        for row in range(len(documents)):
            for block, number in enumerate(numbers[row, 0].tolist()):
                assert torch.equal(places[row, 0, block, :number], places_expected[row, 0, block, :number])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [400, 512])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flex_attention_equals_the_fused_kernel(length: int, groups: int, causal: bool) -> None:
    documents = long_documents(length)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(documents), 4, length, 16, generator=generator)
    k, v = torch.randn(2, len(documents), groups, length, 16, generator=generator)
    positions = torch.arange(length)
    with torch.no_grad():
        blocks = attend(q, k, v, AttentionMask(positions, None, None, causal, flex_block_mask(documents, causal)))
        square = attend(q, k, v, AttentionMask(positions, None, document_mask(documents, causal), causal))
    torch.testing.assert_close(blocks, square, rtol=0, atol=2e-6)


def test_devices_and_shapes_with_blocks_and_with_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(8, 0)]
    monkeypatch.setattr("train.model.flash_attention._capability", lambda device: capability[0])
    cuda, bf16, fp32 = torch.device("cuda"), torch.bfloat16, torch.float32
    wide = TINY.model_copy(update={"head_dim": 16})
    assert uses_blocks(cuda, wide, bf16)
    assert uses_flash_attention(cuda, wide, torch.float16)
    assert uses_flash_attention(cuda, wide, bf16)
    assert uses_blocks(CPU, TINY, fp32)
    assert not uses_flash_attention(CPU, wide, bf16)
    assert not uses_blocks(torch.device("meta"), wide, bf16)
    for takes in (uses_blocks, uses_flash_attention):
        assert not takes(cuda, wide, fp32)
        assert not takes(cuda, wide.model_copy(update={"head_dim": 15}), bf16)
        assert not takes(cuda, wide.model_copy(update={"positions": "relative"}), bf16)
    assert not uses_blocks(CPU, wide.model_copy(update={"positions": "relative"}), fp32)
    for head_dim in (20, 264):
        assert uses_blocks(cuda, wide.model_copy(update={"head_dim": head_dim}), bf16)
        assert not uses_flash_attention(cuda, wide.model_copy(update={"head_dim": head_dim}), bf16)
    capability[0] = (7, 5)
    assert not uses_flash_attention(cuda, wide, torch.float16)
    assert uses_blocks(cuda, wide, torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [400, 512])
def test_flex_attention_on_cuda_forward_and_backward(length: int, causal: bool) -> None:
    documents = long_documents(length).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(len(documents), heads, length, 64) for heads in (4, 2, 2)]
    results = []
    inputs = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    for dtype in (torch.float16, torch.bfloat16):
        for mask in ("blocks", "square"):
            q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
            visible = document_mask(documents, causal) if mask == "square" else None
            blocks = document_blocks(documents, causal) if mask == "blocks" else None
            y = attend(q, k, v, AttentionMask(torch.arange(length, device="cuda"), None, visible, causal, blocks))
            results.append((y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
    for pair, atol in ((results[:2], 1e-2), (results[2:], 5e-2)):
        for actual, expected in zip(*pair):
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=atol)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_depend_on_their_neighbors_on_cuda(causal: bool) -> None:
    shape = TINY.model_copy(update={"head_dim": 16})
    model = small_model(shape, causal=causal).cuda().bfloat16()
    documents, ids = long_documents(400).cuda(), some_ids(5, 400).cuda()
    given = RowDocuments(documents, None, torch.bfloat16)
    assert model.attention_mask(400, given, documents.device).blocks is not None
    for changed in (0, 1):
        here = documents == changed
        after = model(torch.where(here, (ids + 5) % 97, ids), documents)
        assert torch.equal(model(ids, documents)[~here], after[~here])


# ------------------------------------------------------------------------------------------------------------ positions


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = table = rotation_table(torch.arange(9), TINY)
    assert cos.shape == sin.shape == (9, 1, 4)
    # theta = 10000, head width 8: the second frequency is 10000^(-2/8) = 0.1.
    assert [cos[3, 0, 0].item(), sin[3, 0, 1].item()] == pytest.approx([math.cos(3), math.sin(0.3)], rel=1e-6)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    everywhere = [rotate(x.expand(1, 9, 1, 8), table)[0, :, 0] for x in (q, k)]
    products = everywhere[0] @ everywhere[1].T
    for distance in range(-8, 9):
        assert torch.diagonal(products, distance).std(unbiased=False) < 1e-5
    assert products[0].std() > 0.1


def test_stretched_frequencies() -> None:
    shape = TINY.model_copy(update={"head_dim": 8, "rope_theta": 10_000.0})
    assert rotary_frequencies(shape, CPU).tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    linear = shape.model_copy(update={"rope_scaling": "linear", "rope_factor": 4.0})
    assert rotary_frequencies(linear, CPU).tolist() == pytest.approx([0.25, 0.025, 0.0025, 0.00025])
    # Waves of 6.283, 62.83, 628.3 and 6283 positions. For a length of 1000, the first two are shorter than 250 and
    # unchanged. The last is longer than 1000 and divided by 8. The third has 1.5915 turns: (1.5915 - 1) / 3 = 0.1972
    # of it is unchanged.
    llama = shape.model_copy(update={"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 1000})
    kept = (1000 * 0.01 / (2 * math.pi) - 1) / 3
    expected = [1, 0.1, 0.01 * (kept + (1 - kept) / 8), 0.001 / 8]
    assert kept == pytest.approx(0.19718, abs=1e-5)
    assert rotary_frequencies(llama, CPU).tolist() == pytest.approx(expected, rel=1e-6)
    assert rotary_frequencies(llama, CPU).tolist() == pytest.approx([frequency(llama, p) for p in range(4)], rel=1e-6)


@pytest.mark.parametrize(("original", "factor"), [(8192, 8.0), (8192, 32.0), (64, 2.0)])
@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_stretched_frequencies_are_those_of_transformers(kind: str, original: int, factor: float) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama")
    shape = TINY.model_copy(
        update={"head_dim": 128, "rope_theta": 500_000.0, "rope_scaling": kind, "rope_factor": factor}
    ).model_copy(update={"rope_original": original})
    parameters = {"rope_type": kind, "rope_theta": 500_000.0, "factor": factor}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = llama.LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters)
    expected, scale = rope.ROPE_INIT_FUNCTIONS[kind](config, CPU)
    assert scale == 1
    torch.testing.assert_close(rotary_frequencies(shape, CPU), expected, rtol=1e-6, atol=0)


def test_shifted_puts_each_distance_where_its_key_is() -> None:
    for length in (1, 2, 5):
        for causal in (True, False):
            distances = torch.arange(length - 1, -2 if causal else -length - 1, -1).float()
            actual = align_distances(distances.expand(2, 3, length, -1))
            expected = torch.arange(length)[:, None] - torch.arange(length)
            if causal:
                actual, expected = actual.tril(), expected.tril()
            assert torch.equal(actual, expected.float().expand(2, 3, -1, -1))


def test_sinusoids() -> None:
    table = sinusoids(3, False, 6, CPU)
    assert table.shape == (6, 6)
    torch.testing.assert_close(
        table.double(), torch.stack([sinusoid(d, 6) for d in (2, 1, 0, -1, -2, -3)]), rtol=1e-6, atol=1e-6
    )
    assert sinusoids(3, True, 6, CPU).shape == (4, 6)
    assert sinusoids(3, True, 5, CPU).shape == (4, 5)


def test_relative_positions_without_distances_are_rejected() -> None:
    model = small_model(SHAPES["relative"])
    with pytest.raises(ValueError, match=r"expected distances_LD for relative positions, got None\. Set distances_LD"):
        model.blocks["0"](torch.zeros(1, 4, 32), AttentionMask(torch.arange(4), None, None, True))


def test_attend_is_softmax() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    scores = q @ k.mT / 2
    for causal in (True, False):
        visible = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
        expected = F.softmax(scores.masked_fill(~visible, -math.inf), -1) @ v
        actual = attend(q, k, v, AttentionMask(torch.arange(5), None, None, causal))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
