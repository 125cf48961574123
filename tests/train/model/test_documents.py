"""FlashAttention from document starts: values, gradients, and one graph for any number of documents."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.flash_oracle import flash_on_cpu
from tests.support.graph_counts import Graphs
from tests.support.model_oracle import TINY, small_model, some_ids
from train.data.rows import Rows, document_starts
from train.model.attention import (
    AttentionMask,
    activate_flash_3,
    attend,
    attend_varlen,
    document_mask,
    uses_flash_attention,
)

BORDERS = ([6], [3, 7, 12], [1, 15], [], [8])


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    with flash_on_cpu():
        yield
    torch.set_num_threads(number)


def documents_of(borders: tuple[list[int], ...], length: int = 16) -> Tensor:
    places = torch.arange(length)
    return torch.stack([sum((places >= b).int() for b in row) + 0 * places.int() for row in borders])


def test_where_documents_start() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [4, 5, 5, 7]], dtype=torch.int32)
    starts = document_starts(documents)
    # A document in two rows is two documents: no query attends across the end of a row.
    assert starts.tolist() == [0, 2, 4, 8, 9, 11, 12]
    assert starts.dtype == torch.int32
    rows = Rows(documents.long(), documents.long(), documents, torch.zeros(3, dtype=torch.int64))
    assert rows.to(torch.device("cpu")).starts_N is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_mask(groups: int, causal: bool) -> None:
    documents = documents_of(BORDERS)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 16, heads, 8) for heads in (4, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]
    gradient = torch.randn(5, 4, 16, 8, generator=generator)
    starts = attend_varlen(*inputs, document_starts(documents), causal)
    square = attend(*inputs, AttentionMask(torch.arange(16), None, document_mask(documents, causal), causal))
    torch.testing.assert_close(starts, square, rtol=0, atol=2e-6)
    for actual, expected in zip(
        torch.autograd.grad(starts, inputs, gradient), torch.autograd.grad(square, inputs, gradient)
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_one_graph_for_any_number_of_documents(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU the model itself would cut rows into tiles; here it uses the document starts, like a CUDA device.
    monkeypatch.setattr(f"train.model.transformer.{uses_flash_attention.__name__}", lambda *unused: True)
    model, plain = (small_model(TINY, recompute=recompute) for _ in range(2))
    graphs = Graphs()
    for block in model.layers:
        block.compile(dynamic=False, backend=graphs.backend)
    for borders in (BORDERS, BORDERS[1:] + BORDERS[:1], ([1], [2], [3], [4], [5, 6, 7, 8, 9, 10, 11])):
        ids, documents = some_ids(5, 16), documents_of(borders)
        losses = []
        for variant, starts in ((model, document_starts(documents)), (plain, None)):
            targets, sources = ids.roll(-1, 1), torch.zeros(5, dtype=torch.int64)
            loss = variant(ids, documents, targets, sources, starts)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (graphs.forward, graphs.backward, graphs.breaks, graphs.recompilations) == (1, 1, 0, 0)
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA, and cannot fake its tensors")
def test_shapes_on_a_cuda_device_that_is_not_there() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 16, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2))
        starts = torch.empty(9, device="cuda", dtype=torch.int32)
        y = attend_varlen(q, k, k, starts, causal=True)
    assert (y.shape, y.dtype, y.device.type) == (q.shape, torch.bfloat16, "cuda")


def test_flash_attention_3_needs_a_hopper_device() -> None:
    assert not activate_flash_3(torch.device("cpu"))
