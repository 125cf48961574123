"""Counts of the graphs that torch.compile makes of some modules: forward, backward, breaks and recompilations."""

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters


class Graphs:
    """A torch.compile backend that counts its graphs and runs them unchanged; the counts start at its construction."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.forward = self.backward = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.forward += 1
        return make_boxed_func(graph.forward)

    def _backward(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.backward += 1
        return make_boxed_func(graph.forward)

    @property
    def breaks(self) -> int:
        """Graph breaks."""
        return sum(counters["graph_break"].values())

    @property
    def recompilations(self) -> int:
        """Compilations of code that had been compiled before."""
        return max(0, counters["stats"]["unique_graphs"] - 1)
