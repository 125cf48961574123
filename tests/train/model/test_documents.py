"""FlashAttention from document starts: values, gradients, and one graph for any number of documents."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from schemas.errors import ConfigError
from tests.support.flash_oracle import flash_4_on_cpu, flash_on_cpu, no_flash_4
from tests.support.graph_counts import Graphs
from tests.support.model_oracle import TINY, small_model, some_ids
from train.data.rows import Rows, document_starts
from train.model.attention import (
    AttentionMask,
    attend,
    document_mask,
)
from train.model.flash_attention import activate_flash_attention, attend_varlen, load_flash_4, uses_flash_attention

ROOT = Path(__file__).resolve().parents[3]
BORDERS = ([6], [3, 7, 12], [1, 15], [], [8])


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    with flash_on_cpu():
        yield
    torch.set_num_threads(number)


def kernels_of(flash: int) -> AbstractContextManager[None]:
    return flash_4_on_cpu() if flash == 4 else nullcontext()


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


@pytest.mark.parametrize("flash", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_mask(groups: int, causal: bool, flash: int) -> None:
    documents = documents_of(BORDERS)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 16, heads, 8) for heads in (4, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]
    gradient = torch.randn(5, 4, 16, 8, generator=generator)
    with kernels_of(flash):
        starts = attend_varlen(*inputs, document_starts(documents), causal)
        found = torch.autograd.grad(starts, inputs, gradient)
    square = attend(*inputs, AttentionMask(torch.arange(16), None, document_mask(documents, causal), causal))
    torch.testing.assert_close(starts, square, rtol=0, atol=2e-6)
    for actual, expected in zip(found, torch.autograd.grad(square, inputs, gradient)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("flash", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_one_graph_for_any_number_of_documents(recompute: str, flash: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU the model itself would cut rows into tiles; here it uses the document starts, like a CUDA device.
    monkeypatch.setattr(f"train.model.transformer.{uses_flash_attention.__name__}", lambda *unused: True)
    model, plain = (small_model(TINY, recompute=recompute) for _ in range(2))
    graphs = Graphs()
    for block in model.layers:
        block.compile(dynamic=False, backend=graphs.backend)
    with kernels_of(flash):
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


@pytest.mark.parametrize("flash", [2, 4])
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA, and cannot fake its tensors")
def test_shapes_on_a_cuda_device_that_is_not_there(flash: int) -> None:
    with FakeTensorMode(), kernels_of(flash):
        q, k = (torch.empty(2, 16, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2))
        starts = torch.empty(9, device="cuda", dtype=torch.int32)
        y = attend_varlen(q, k, k, starts, causal=True)
    assert (y.shape, y.dtype, y.device.type) == (q.shape, torch.bfloat16, "cuda")


def test_no_flash_attention_is_activated_for_a_cpu() -> None:
    assert activate_flash_attention(torch.device("cpu")) == 0


def test_a_flash_attention_4_without_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.model.flash_attention.version", lambda package: "5.0")
    monkeypatch.setattr("train.model.flash_attention.import_module", lambda name: SimpleNamespace())
    with pytest.raises(ConfigError, match=r"flash-attn-4 5.0: expected flash_attn.cute.interface with its two kernels"):
        load_flash_4()


def test_flash_attention_4_compiles_for_hopper_without_a_gpu() -> None:
    pytest.importorskip("flash_attn.cute.interface", reason="flash-attn-4 is not installed")
    if torch.version.cuda is None:
        pytest.skip("torch is built without CUDA, and cannot fake its tensors")
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    subprocess.run([sys.executable, "-c", COMPILE_4], env=os.environ | target, check=True, cwd=ROOT)


COMPILE_4 = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from train.model import flash_attention as flash
flash.load_flash_4()
with FakeTensorMode():
    q, k, v = (torch.empty(2048, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
    starts = torch.empty(9, dtype=torch.int32, device="cuda")
    limits = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1024, "max_seqlen_k": 1024}
    y, log_z, *_ = flash.KERNELS_4.forward(q, k, v, causal=True, return_lse=True, **limits)
    assert (y.shape, log_z.shape) == (q.shape, (4, 2048)), (y.shape, log_z.shape)
    found = flash.KERNELS_4.backward(q, k, v, y, y, log_z, causal=True, deterministic=False, **limits)
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("heads", "groups", "width"), [(12, 12, 64), (16, 4, 128)])
@pytest.mark.parametrize("flash", [2, 4])
def test_kernels_of_a_gpu_compute_the_masked_attention(flash: int, heads: int, groups: int, width: int) -> None:
    device = torch.device("cuda")
    if flash == 4 and activate_flash_attention(device) != 4:
        pytest.skip("flash-attn-4 is not installed, or has no kernels for this GPU")
    documents = documents_of(([100, 130], [1, 500], []), 512)
    generator = torch.Generator(device).manual_seed(0)
    draw = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    inputs = [torch.randn(3, 512, number, width, **draw).transpose(1, 2) for number in (heads, groups, groups)]
    gradient = torch.randn(3, heads, 512, width, **draw)
    with no_flash_4() if flash == 2 else nullcontext():
        narrow = [x.clone().requires_grad_() for x in inputs]
        starts = attend_varlen(*narrow, document_starts(documents).to(device), causal=True)
        found = torch.autograd.grad(starts, narrow, gradient)
    wide = [x.double().requires_grad_() for x in inputs]
    square = attend(*wide, AttentionMask(torch.arange(512), None, document_mask(documents.to(device), True), True))
    expected = torch.autograd.grad(square, wide, gradient.double())
    for one, other in zip((starts, *found), (square, *expected)):
        assert (one.double() - other).norm() < 1e-2 * other.norm()
