"""The compute time of a micro-batch on one rank: matrix products, attention, element-wise traffic and launches.

Communication is not part of it. A product takes the longer of its FLOPs at the device's share of the peak and its
bytes at the memory bandwidth (the roofline of Williams et al. 2009, Communications of the ACM 52(4)). Element-wise
bytes are counted from the code. Document borders are unknown here: each token attends to all earlier ones in its row.
"""

import bisect
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from train.config.optim import OPTIMIZERS
from train.config.settings import Settings
from train.model.shape import (
    ModelShape,
    counted_keys,
    matrix_params_of_layer,
    num_parameters,
    padded_columns,
    params_of_layer,
    value_parameters,
)
from train.parallel.devices import Device, NumberFormat, number_format_of
from train.plan.search.candidates import LayoutSplit

BACKWARD = (2.0, 2.5, 2.0, 2.0)
"""Time of each component's backward pass relative to its forward pass. A product has two products as its gradients;
flash attention also computes its scores again (Dao 2023, arXiv 2307.08691, section 3.1.2: five products for two)."""


FP8_BYTES = 5
"""Bytes of memory traffic for each input element of a product in fp8: largest magnitude, quantization and transposition
of the input, and a part of those of the gradients. From layers of 350 M parameters on an H200."""


class ForwardCost(NamedTuple):
    """Seconds of each component of a layer's forward pass."""

    products: float
    attention: float
    traffic: float
    launches: float


class MicroBatchCost(NamedTuple):
    """Predicted times of a micro-batch in a pipeline, on the busiest rank unless a field says otherwise."""

    parts: dict[str, float]
    """Seconds by component."""
    forward: float
    """Seconds in the forward pass."""
    backward: float
    others: float
    """Seconds of computation on the other ranks of the pipeline."""
    mean: float
    """Mean computation time over the ranks, as a share of the time of the busiest rank."""


def loss_bytes_per_logit(width: int, compiled: bool) -> int:
    """Return the bytes that the loss and its gradient read and write for each logit of `width` bytes."""
    # Compiled, a logit is read twice and written once. Eager passes are in float32: maximum 4, difference 8,
    # exponential 8, sum 4, product 8 bytes. A 16-bit dtype adds a copy to float32 and one back, 6 bytes each.
    return 3 * width if compiled else 32 + (12 if width == 2 else 0)


class Compute:
    """Times of a model's components on a device, for rows of one length."""

    def __init__(self, shape: ModelShape, settings: Settings, device: Device, seq_len: int):
        settings = settings.for_device(device.kind, device.capability)
        self.shape, self.settings, self.device, self.seq_len = shape, settings, device, seq_len
        precision = number_format_of(settings)
        self.width = 4 if precision == "fp32" else 2
        self.compiled = settings.layout.compile is True
        self._flops = device.product_share * device.peak_flops[precision]
        # With fp8 only the matrix products of the layers are in 8 bits.
        outside: NumberFormat = "bf16" if precision == "fp8" else precision
        self._outside_flops = device.product_share * device.peak_flops[outside]
        self._attention_flops = device.attention_share * device.peak_flops[outside]
        self._bandwidth = device.traffic_share * device.memory_bandwidth
        self.layer = cache(self._layer)
        self._chunk = settings.layout.chunk_on(device.kind)
        self.head = cache(self._head)
        self.pages = cache(self._pages)
        self.turns: dict[tuple[object, ...], MicroBatchCost] = {}
        """Cache of micro-batch costs, by everything that they depend on."""

    def traffic(self, size: float, tensor: float | None = None) -> float:
        """Return the seconds to move `size` bytes to or from the device's memory.

        `tensor`: bytes of each tensor; None = ignore that the bandwidth may depend on the tensor size.
        """
        sizes = self.device.by_size
        if not sizes or tensor is None:
            return size / self._bandwidth
        index = bisect.bisect([num_bytes for num_bytes, _ in sizes], tensor)
        if index in (0, len(sizes)):
            return size / sizes[max(0, index - 1)][1]
        (low, slow), (high, fast) = sizes[index - 1], sizes[index]
        share = math.log(tensor / low) / math.log(high / low)
        return size / math.exp((1 - share) * math.log(slow) + share * math.log(fast))

    def positions(self, split: LayoutSplit, rows: float) -> float:
        """Return the number of token positions of `rows` sequences that one rank of the context axis processes."""
        return rows * self.seq_len / split.context

    def _layer(self, split: LayoutSplit, rows: float) -> ForwardCost:
        """Return the cost of a forward pass of one layer over `rows` rows."""
        # Of the mesh axes, only tensor and context change this cost.
        positions = self.positions(split, rows)
        products, number = self._products(positions, split.tensor)
        attention = self._attention(split, rows)
        tensor = self.width * positions * max(self.shape.d_model, self.shape.d_ffw / split.tensor)
        traffic = self.traffic(positions * self._bytes_of_position(split), tensor) + self._squares(split, rows)
        if self.settings.train.precision == "fp8":
            traffic += self.traffic(FP8_BYTES * positions * self._quantized_width(split.tensor))
        if split.whole and self.width == 2:  # autocast makes a copy of every matrix
            traffic += self.traffic(6 * matrix_params_of_layer(self.shape))
        return ForwardCost(products, attention, traffic, self._launches(split, number, products + attention + traffic))

    def _products(self, positions: float, tensor: int) -> tuple[float, int]:
        """Return the seconds of a layer's matrix products in a forward pass, and the number of products."""
        shape = self.shape
        d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
        gated = 2 if shape.activation == "swiglu" else 1
        sizes = [(d, q / tensor, 1), (d, kv / tensor, 2), (q / tensor, d, 1)]
        sizes += [(d, ffw / tensor, gated), (ffw / tensor, d, 1)]
        seconds = sum(count * self.product(positions, k, n, self._flops) for k, n, count in sizes)
        return seconds, sum(count for *_, count in sizes)

    def _quantized_width(self, tensor: int) -> float:
        """Return the elements per position of a layer's inputs of matrix products that are quantized for fp8."""
        shape = self.shape
        return 2 * shape.d_model + (shape.query_width + shape.d_ffw) / tensor

    def product(self, m: float, k: float, n: float, flops: float) -> float:
        """Return the seconds of an m x k by k x n product at `flops` FLOP/s, or of its memory traffic if longer."""
        return max(2 * m * k * n / flops, self.traffic(self.width * (m * k + k * n + m * n)))

    def _attention(self, split: LayoutSplit, rows: float) -> float:
        shape, length = self.shape, self.seq_len
        pairs = rows * length * length / split.context
        by_keys = split.context > 1 and split.context_by == "keys"
        # A materialized mask is computed in full; otherwise a causal kernel skips half of the pairs.
        if self.settings.train.objective != "mlm" and not by_keys and shape.positions != "relative":
            pairs /= 2
        # On a CUDA device only the kernels for documents skip keys outside of a window.
        if not by_keys and (self.device.kind == "cpu" or self.settings.train.document_mask):
            pairs *= counted_keys(shape, length) / (shape.num_layers * length)
        products = 6 if shape.positions == "relative" else 4
        return products * pairs * shape.query_width / split.tensor / self._attention_flops

    def _squares(self, split: LayoutSplit, rows: float) -> float:
        """Return the seconds to read and write the (query, key) matrices of attention; 0 if none are stored."""
        pairs = rows * self.seq_len * self.seq_len / split.context
        # With relative positions, the scores are stored. If the context axis divides keys, a mask is stored.
        if self.shape.positions == "relative":
            return self.traffic(24 * pairs * self.shape.num_heads / split.tensor)
        by_keys = split.context > 1 and split.context_by == "keys"
        return self.traffic(self.width * pairs * self.shape.num_heads / split.tensor) if by_keys else 0.0

    def _bytes_of_position(self, split: LayoutSplit) -> float:
        """Return the bytes per position that a layer's element-wise operations read and write in a forward pass."""
        shape, width = self.shape, self.width
        # Norms, residuals, rotary embedding and activation.
        residual = 4 if split.whole else width
        compiled = self.compiled
        norms = 6 * residual if compiled else 10 * residual if self.device.kind == "cuda" else 6 * residual + 40
        rotation = 2 if compiled else 6
        gate = (3 if compiled else 5) if shape.activation == "swiglu" else 2
        heads = rotation * (shape.query_width + shape.key_width) + 2 * shape.query_width
        return (norms * shape.d_model + width * (heads + gate * shape.d_ffw)) / split.tensor

    def _launches(self, split: LayoutSplit, products: int, busy: float) -> float:
        """Return the seconds that launching a layer's operations takes, with the device's waits for the host."""
        device, compiled = self.device, self.compiled
        if device.layer_seconds:
            kind = "plain" if split.whole else "tensor" if split.tensor > 1 else "sharded"
            return device.layer_seconds[kind] / (1 + BACKWARD[3])
        number = products + (7 if compiled else 21)
        # DTensor dispatches each operation in Python; FSDP2 runs hooks around each layer.
        host = number * (1 if compiled or split.tensor == 1 else 3) + (0 if split.whole else 10)
        on_device = number * device.op_seconds
        return on_device + max(0.0, host * device.host_seconds - busy - on_device)

    def _head(self, split: LayoutSplit, rows: float) -> float:
        """Return the seconds of computing logits and loss, forward and backward."""
        positions, here = self.positions(split, rows), -(-self.shape.vocab_size // split.tensor)
        columns = padded_columns(here, self.device.kind == "cuda")
        products = 3 * self.product(positions, self.shape.d_model, columns, self._outside_flops)
        tensor = 4 * min(positions, self._chunk) * columns
        size = loss_bytes_per_logit(self.width, self.compiled)
        return products + self.traffic(positions * columns * size, tensor)

    def _pages(self, split: LayoutSplit, rows: float) -> tuple[float, float]:
        """Return the seconds of page faults in a layer, and in the computation of logits and loss."""
        tensor = split.tensor
        widest = self.width * self.positions(split, rows) * self.shape.d_ffw / tensor
        logits = 4 * min(self.positions(split, rows), self._chunk) * self.shape.vocab_size / tensor
        layer, head = (size * self.device.page_seconds if size >= MAPPED else 0.0 for size in (widest, logits))
        return 6 * layer, 3 * head

    def embedding(self, split: LayoutSplit, rows: float) -> float:
        """Return the seconds of the embedding lookup and of accumulating its gradients."""
        shape = self.shape
        looked_up = shape.d_model + sum(map(shape.has_values, range(shape.num_layers))) * shape.key_width
        return self.traffic(8 * self.positions(split, rows) * looked_up * self.width)

    def update(self, params: float, ranks: int) -> float:
        """Return the seconds of gradient norm, clipping and update on a rank.

        `params`: parameters of this rank; `ranks`: number of ranks over which the model is sharded.
        """
        optim = self.settings.optim
        declared = OPTIMIZERS[optim.optimizer]
        average = 12 if optim.ema is not None else 0
        size = (declared.update_bytes + 4 + average + (8 if optim.clip_norm else 0)) * params
        seconds = self.traffic(size)
        if self.device.kind == "cuda":
            seconds = self._offloaded_update(size, params, seconds)
        if declared.matrix_flops:
            share = params * ranks / num_parameters(self.shape)
            number: NumberFormat = "bf16" if optim.muon_precision == "bf16" else "fp32"
            flops = self.device.product_share * self.device.peak_flops[number]
            seconds += share * self._matrix_flops(declared.matrix_flops) / ranks / flops
        return seconds

    def _offloaded_update(self, size: float, params: float, on_device: float) -> float:
        """Return the seconds of an update of `size` bytes whose weights or states lie outside of the device.

        `on_device`: the seconds if everything were on the device.
        """
        layout, declared = self.settings.layout, OPTIMIZERS[self.settings.optim.optimizer]
        states = 2 * declared.state.matrix * params  # read and written
        on_disk = states / self.device.disk_bandwidth if layout.offload_dir else 0.0
        if layout.offload_weights_dir:
            on_disk += 8 * params / self.device.disk_bandwidth  # read and written
        if layout.offload == "all":
            # The host updates in its memory; gradients come from the device, and weights go to it.
            return (size + 8 * params) / self.device.host_bandwidth + on_disk
        if layout.offload == "optimizer":
            return on_device + states / self.device.host_bandwidth + on_disk
        if layout.offload == "parameters":
            # Gradients reach the host and come back with the weights, which return after the update.
            return on_device + 16 * params / self.device.host_bandwidth + on_disk
        return on_device

    def to_device(self, params: float) -> float:
        """Return the seconds in which the weights of `params` parameters reach the device, if they are offloaded."""
        layout, device = self.settings.layout, self.device
        if not layout.offloads_parameters or device.kind != "cuda":
            return 0.0
        return 4 * params * (1 / device.host_bandwidth + bool(layout.offload_weights_dir) / device.disk_bandwidth)

    def to_host(self, params: float) -> float:
        """Return the seconds in which the gradients of `params` parameters reach the host, if they are offloaded."""
        offloaded = self.settings.layout.offloads_parameters and self.device.kind == "cuda"
        return 4 * params / self.device.host_bandwidth if offloaded else 0.0

    def _matrix_flops(self, flops: Callable[[int, int], int]) -> int:
        """Return the FLOPs of one optimizer update of the matrices of all layers.

        `flops(shorter, longer)`: FLOPs to update a matrix with sides of these lengths.
        """
        shape = self.shape
        d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
        gated = 3 if shape.activation == "swiglu" else 2
        sides = [(d, q, 2), (d, kv, 2), (d, ffw, gated)]
        return shape.num_layers * sum(count * flops(min(m, n), max(m, n)) for m, n, count in sides)

    def params(self, split: LayoutSplit, layers: int, ends: tuple[bool, bool]) -> tuple[float, float]:
        """Return (parameters of a layer, parameters outside the layers) on one rank of the tensor axis.

        `ends`: whether the rank has the first pipeline stage, and whether it has the last.
        """
        shape, matrices = self.shape, matrix_params_of_layer(self.shape)
        layer = params_of_layer(shape) - matrices + matrices / split.tensor
        copies = sum(ends) - (1 if all(ends) and shape.tie_embeddings and split.pipeline == 1 else 0)
        tables = value_parameters(shape) / split.pipeline
        return layer, (copies * shape.vocab_size * shape.d_model + tables) / split.tensor


MAPPED = 32 << 20
"""Tensor size in bytes from which glibc maps fresh memory for each allocation (mallopt(3): the largest
M_MMAP_THRESHOLD)."""
