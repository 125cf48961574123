"""Generate the Triton code of torch's compiler for an H100 without a GPU, and count its passes over a chunk's logits.

Run it in a separate process, since torch is patched to report the device: `python -m tests.support.cuda_code` prints a
JSON line for each function of the compiled loss. It requires a torch that is built with CUDA, and Triton.
"""

import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from train.model.loss import softmax_sums, write_gradient

TOKENS, VOCABULARY = 4096, 50304
"""Of a chunk."""
KINDS = ("load", "store")
H100 = SimpleNamespace(
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32},
    **{"total_memory": 80 << 30, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048},
    **{"max_threads_per_block": 1024, "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 << 20},
    **{"shared_memory_per_block": 49152, "shared_memory_per_multiprocessor": 233472, "gcnArchName": ""},
)
NOTHING: tuple[str, ...] = (
    "torch.cuda._lazy_init",
    "torch.cuda.synchronize",
    "torch._subclasses.fake_tensor.init_gpu_context",
    # Patterns of attention, padding and permutations, which would be traced on the device.
    "torch._inductor.fx_passes.fuse_attention._sfdp_init",
    "torch._inductor.fx_passes.pad_mm._pad_mm_init",
    "torch._inductor.fx_passes.misc_patterns._misc_patterns_init",
)
ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available": True,
    "torch.cuda.get_device_properties": H100,
    "torch.cuda.get_device_capability": (9, 0),
    "torch.cuda.current_device": 0,
    "torch.cuda.device_count": 1,
    "torch.cuda.get_device_name": H100.name,
}
"""Properties that torch reads of the pretended device."""


class NoDriver:
    """The properties that Triton queries of a driver during code generation."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def pretend() -> None:
    """Patch torch and Triton so that they report an H100."""
    import triton

    for name in NOTHING:
        mock.patch(name, return_value=None).start()
    for name, answer in ANSWERS.items():
        mock.patch(name, return_value=answer).start()
    for kind in (CudaInterface, CudaInterface.Worker):
        for name in ("is_available", "get_device_properties", "current_device", "device_count"):
            setattr(kind, name, staticmethod(lambda *unused, answer=ANSWERS[f"torch.cuda.{name}"]: answer))
        kind.get_compute_capability = staticmethod(lambda *unused: 90)  # type: ignore[method-assign]
    triton.runtime.driver.set_active(NoDriver())


class WithValues(torch.fx.Interpreter):
    """Stores the fake tensor of every operation, as the compiler requires."""

    def run_node(self, node: torch.fx.Node) -> Any:
        node.meta["val"] = output = super().run_node(node)
        return output


def code_of(function: Callable[..., Any], make: Callable[[str], tuple[Tensor, ...]]) -> str:
    """Return the code that torch's compiler generates for a function of the tensors that `make` makes on a device."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # Traced on the CPU, since indexing calls the driver, and moved to the device afterwards.
        on_cpu, inputs = make("cpu"), make("cuda")
        graph = make_fx(function, decomposition_table=select_decomp_table())(*on_cpu)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        WithValues(graph).run(*inputs)
        with V.set_fake_mode(mode):
            joint_graph_passes(graph)
            post_grad_passes(graph, True)
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock()):
            lowering.run(*inputs)
            output: Any = lowering.codegen()[0]
    return str(getattr(output, "value", output))


def passes(code: str) -> dict[str, list[int]]:
    """Return, for every kernel over the whole chunk, how often it reads and writes a tensor of the chunk's size."""
    counts = {}
    for text in code.split("async_compile.triton(")[1:]:
        name, hints = re.search(r"'kernel_name': '(\w+)'", text), re.search(r"size_hints=\{([^}]*)\}", text)
        sizes = [int(size) for size in re.findall(r": (\d+)", hints[1])] if hints else []
        if name is None or math.prod(sizes) < TOKENS * VOCABULARY:
            continue
        # Kernels index the chunk by row and column, or by both in one number; values of a token by the row alone.
        whole = re.compile(r"\(r0_1 \+|\(x2\)")
        lines = text.partition("def triton")[2].splitlines()
        counts[name[1]] = [sum(f"tl.{kind}(" in line and bool(whole.search(line)) for line in lines) for kind in KINDS]
    return counts


def main() -> None:
    """Print the passes of both functions of the compiled loss."""
    pretend()

    def logits(device: str) -> Tensor:
        return torch.empty(TOKENS, VOCABULARY, device=device, dtype=torch.bfloat16)

    def numbers(device: str) -> Tensor:
        return torch.empty(TOKENS, device=device)

    def places(device: str) -> Tensor:
        return torch.empty(TOKENS, device=device, dtype=torch.int64)

    functions: dict[Callable[..., Any], tuple[Callable[[str], Tensor], ...]] = {
        softmax_sums: (logits, places),
        write_gradient: (logits, numbers, numbers, places, numbers),
    }
    # Constants would be folded on the device.
    with config.patch({"compile_threads": 1, "joint_graph_constant_folding": False}):
        for function, makers in functions.items():
            code = code_of(function, lambda device, makers=makers: tuple(make(device) for make in makers))
            print(json.dumps({function.__name__: passes(code)}))


if __name__ == "__main__":
    main()
