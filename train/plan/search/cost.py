"""The cost model of an optimizer step: computation of a rank, exposed communication, and the pipeline bubble.

Collectives of weights and gradients overlap with computation (Zhao et al. 2023, arXiv 2304.11277, section 3.3.1), those
of the tensor and the context axis do not. Waiting for data, checkpoints and evaluation are left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from train.config.layout import LayoutConfig
from train.config.optim import OPTIMIZERS
from train.parallel.devices import Cluster
from train.parallel.layout import layers_of, stages_of
from train.plan.search.candidates import LayoutSplit
from train.plan.search.compute import BACKWARD, Compute, ForwardCost, MicroBatchCost

# The cost of collectives: the ranks of an axis form a ring over the links between them.
#
# A ring passes through every device of a node before it leaves the node, so with k ranks per node, k network adapters
# carry its traffic in parallel. Source: Thakur et al. 2005, "Optimization of collective communication operations in
# MPICH", section 4 (ring).


@dataclass(frozen=True)
class Ring:
    """The ranks that communicate along some axes of the mesh."""

    size: int
    per_node: int
    """Ranks of the ring on each node."""
    nodes: int
    bandwidth: float
    """Bandwidth of the slowest link of the ring [bytes/s]."""
    hops: float
    """Latency of one pass around the ring [s]."""
    begin: float
    """Startup time of a collective [s]."""

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `size` bytes in total."""
        if self.size == 1:
            return 0.0
        return self.begin + self.hops + (self.size - 1) / self.size * size / self.bandwidth

    def reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes."""
        return 2 * self.gather(size) - (self.begin if self.size > 1 else 0)

    def exchange(self, size: float) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank."""
        if self.size == 1:
            return 0.0
        # Between nodes every device has only its own adapter.
        away = self.bandwidth if self.nodes == 1 else self.bandwidth / self.per_node
        share = (self.size - 1) / self.size if self.nodes == 1 else 1 - self.per_node / self.size
        return self.begin + self.hops + share * size / away


class ClusterRings:
    """Finds the ring that connects a group of ranks of a cluster, and computes the time of a transfer along it."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._ring = cache(self._find_ring)

    def ring(self, axes: Mapping[str, int], *names: str) -> Ring:
        """Return the communication ring of the ranks that differ only on the axes `names`.

        `axes`: sizes of all axes, outermost first. `names` must be adjacent in `axes`.
        """
        order, last = list(axes), names[-1]
        stride = math.prod(axes[name] for name in order[order.index(last) + 1 :])
        return self._ring(math.prod(axes[name] for name in names), stride)

    def _find_ring(self, size: int, stride: int) -> Ring:
        device = self.cluster.device
        # For the worst-placed group: of four consecutive ranks on nodes of six, two lie on each of two nodes.
        per_node = max(1, math.gcd(self.cluster.gpus_per_node, size * stride) // stride)
        nodes = -(-size // per_node)
        bandwidth = device.within.bandwidth
        if nodes > 1:
            away = per_node * device.between.bandwidth
            bandwidth = away if per_node == 1 else min(bandwidth, away)
        hops = (size - nodes) * device.within.latency + (nodes - 1) * device.between.latency
        return Ring(size, per_node, nodes, bandwidth, hops, device.collective_seconds)

    def send(self, ring: Ring, size: float) -> float:
        """Return the seconds to send `size` bytes to the next rank of a pipeline, whose ranks form `ring`."""
        if ring.size == 1:
            return 0.0
        # The slowest transfer counts: the one between nodes, over the rank's own adapter.
        link = self.cluster.device.within if ring.nodes == 1 else self.cluster.device.between
        return ring.begin + link.latency + size / link.bandwidth


SENT_SHARES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 0.05}
"""Share of the gradient bytes that replicas exchange; for sparse compression it follows from layout.compress_share."""
STEP_COMPONENTS = {
    "products": "matrix products of the layers, forward and backward",
    "attention": "products of queries, keys and values",
    "traffic": "norms, residuals, rotation and activation: bytes through memory; the embedding",
    "launches": "launching operations, and waiting for the host",
    "recompute": "layers, or their cheap operations, computed again in the backward pass",
    "head": "logits and loss",
    "pages": "page faults of newly allocated memory, on a CPU",
    "tensor": "all-gathers and reduce-scatters of activations along the tensor axis",
    "context": "exchanges of heads or keys along the context axis",
    "weights": "all-gathers of weights, and their copies from the host, that do not overlap with computation",
    "gradients": "reductions of gradients, and their copies to the host, that do not overlap with computation",
    "sends": "activations sent between pipeline stages",
    "bubble": "ranks of a pipeline that wait for others",
    "update": "gradient norm, clipping and optimizer",
    "cores": "ranks that wait for a CPU core of the machine that they share",
}
"""Components of a step's time, with their descriptions."""


def bubble_share(schedule: str, stages: int) -> float:
    """Return the bubble of a pipeline, the time in which its ranks wait, relative to that of 1F1B.

    Sources: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; Qi et al. 2023, arXiv 2401.10241, table 2.
    """
    # Computing the gradients of weights fills two thirds of the bubble; with zbv, most of it.
    if schedule == "zbv":
        return 1 / 6
    return 1 / (3 * stages) if schedule == "zero_bubble" else 1 / stages


class StepCost:
    """The cost of an optimizer step under one split, for any micro-batch size and recomputation mode."""

    def __init__(self, compute: Compute, links: ClusterRings, split: LayoutSplit):
        self._compute, self._links, self._split = compute, links, split
        self._layout = compute.settings.layout
        axes = split.axes
        self._states, self._replicas = links.ring(axes, "shard", "context"), links.ring(axes, "replicate")
        self._along_tensor, self._along_context = links.ring(axes, "tensor"), links.ring(axes, "context")
        self._along_pipeline = links.ring(axes, "pipeline")
        self._places = _places(compute.shape.num_layers, split.pipeline, split.schedule, split.stages)
        # Splits that differ only on other axes share the cached cost of a layer and of the head.
        settings = compute.settings
        # A single rank in fp32 does not use FSDP2, which otherwise sets the number format of the products.
        alone = links.cluster.world_size == 1 and settings.train.precision == "fp32"
        alone = alone and not settings.layout.offloads_parameters
        plain = split.whole or alone
        self._key = split._replace(data="ddp" if plain else "zero2", replicate=1, shard=1, pipeline=1)
        self._key = self._key._replace(schedule="1f1b", stages=1)
        self._weigh()

    def _weigh(self) -> None:
        """Set the seconds of gathering weights and reducing gradients, in a layer and outside the layers."""
        compute, split = self._compute, self._split
        self._layers = max(layers for layers, *_ in self._places)
        ends = (True, True) if split.pipeline == 1 else (False, True)
        self._layer_params, self._outer_params = compute.params(split, self._layers, ends)
        self._shares = 1 if split.whole else self._states.size
        width = compute.width
        self._gather, self._gather_outer = (
            self._moved(self._states, width * params, 4) + compute.to_device(params / self._shares)
            for params in (self._layer_params, self._outer_params)
        )
        self._reduce, self._reduce_outer = (
            self._moved(self._states, 4 * params, 3) + compute.to_host(params / self._shares)
            for params in (self._layer_params, self._outer_params)
        )
        self.params = self._layers * self._layer_params + self._outer_params
        """Parameters of a rank before they are sharded."""

    def states_bytes(self) -> float:
        """Return a lower bound on the bytes of weights and optimizer states on a rank."""
        # Only states that the optimizer has for every parameter are counted.
        state = OPTIMIZERS[self._compute.settings.optim.optimizer].state
        return self.params * (4 / self._shares + min(state.matrix, state.vector) / self._update_shares())

    def _moved(self, ring: Ring, size: float, copies: int) -> float:
        """Return the seconds of a collective over shards, with the copies into and out of its buffer."""
        if self._split.whole or ring.size == 1:
            return 0.0
        return ring.gather(size) + self._compute.traffic(copies * size)

    def parts(self, rows_of_rank: int, micro_batch: int, recompute: str) -> dict[str, float]:
        """Return the seconds of a step on the busiest rank, by the components of STEP_COMPONENTS."""
        compute, split = self._compute, self._split
        size = min(micro_batch, rows_of_rank)
        number = -(-rows_of_rank // size)
        # A pipeline and compiled layers pad the last micro-batch; elsewhere it is smaller.
        times = number if split.pipeline > 1 or compute.compiled else rows_of_rank / size
        turn = self._turn(size, recompute)
        parts = {name: times * seconds for name, seconds in turn.parts.items()}
        parts |= self._sent(number, turn.forward, turn.backward)
        parts["sends"] = number * self._sends(size)
        parts["bubble"] = bubble_share(split.schedule, split.stages) * turn.others
        parts["update"] = compute.update(self.params / self._update_shares(), self._update_shares())
        parts["cores"] = self._waiting(parts, turn.mean)
        return parts

    def _turn(self, size: int, recompute: str) -> MicroBatchCost:
        """Return the cost of a micro-batch."""
        # Splits that differ only in replicas and shards share the cached cost.
        split, turns = self._split, self._compute.turns
        key = (self._key, split.pipeline, split.schedule, split.stages, size, recompute)
        if key not in turns:
            turns[key] = self._find_turn(size, recompute)
        return turns[key]

    def _find_turn(self, size: int, recompute: str) -> MicroBatchCost:
        compute = self._compute
        layer = compute.layer(self._key, size)
        tensor, context = self._stream_seconds(size, recompute), self._context_seconds(size, recompute)
        again = _again(layer, recompute)
        head, embedding = compute.head(self._key, size), compute.embedding(self._key, size)
        head_tensor = self._head_stream_seconds(size)
        whole, outside = _with_backward(layer), self._links.cluster.device.layer_seconds.get("outside", 0.0)
        pages, head_pages = compute.pages(self._key, size)
        of_layer = sum(whole) + again + tensor + context
        busy = [
            outside + layers * (of_layer + pages) + ends * (head + head_tensor + head_pages) + begins * embedding
            for layers, begins, ends in self._places
        ]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        layers, begins, ends = self._places[slowest]
        parts = {
            "products": layers * whole[0],
            "attention": layers * whole[1],
            "traffic": layers * whole[2] + begins * embedding,
            "launches": layers * whole[3] + outside,
            "recompute": layers * again,
            "head": ends * head,
            "pages": layers * pages + ends * head_pages,
            "tensor": layers * tensor + ends * head_tensor,
            "context": layers * context,
        }
        forward, most = layers * sum(layer) + ends * head, max(busy)
        backward = layers * (of_layer - sum(layer))
        return MicroBatchCost(parts, forward, backward, sum(busy) - most, sum(busy) / len(busy) / most)

    def _update_shares(self) -> int:
        return self._replicas.size if self._split.data == "zero1" else self._shares

    def _waiting(self, parts: dict[str, float], mean: float) -> float:
        """Return the seconds that ranks wait for a CPU core if a machine has more ranks than cores."""
        at_once, ranks = self._links.cluster.device.at_once, self._links.cluster.gpus_per_node
        if at_once is None or ranks <= at_once:
            return 0.0
        # A rank in the pipeline bubble leaves its core to the other ranks.
        path = sum(parts.values())
        return max(0.0, (path - parts["bubble"]) * mean * ranks / at_once - path)

    # Communication of activations: tensor axis, context axis and pipeline.

    def _stream_bytes(self, rows: float) -> float:
        compute = self._compute
        return compute.width * compute.positions(self._split, rows) * compute.shape.d_model

    def _stream_seconds(self, rows: float, recompute: str) -> float:
        """Return the seconds of a layer's collectives along the tensor axis, forward and backward.

        Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
        """
        # Each pass has two all-gathers and two reduce-scatters of activations. Recomputation repeats those of the
        # forward pass.
        passes = 2 if recompute == "none" else 3
        return passes * 4 * self._along_tensor.gather(self._stream_bytes(rows))

    def _head_stream_seconds(self, rows: float) -> float:
        return 2 * self._along_tensor.gather(self._stream_bytes(rows))

    def _context_seconds(self, rows: float, recompute: str) -> float:
        """Return the seconds of a layer's collectives along the context axis, forward and backward."""
        ring, compute, split = self._along_context, self._compute, self._split
        if ring.size == 1:
            return 0.0
        shape, passes = compute.shape, 3 if recompute == "full" else 2
        numbers = compute.positions(split, rows) * compute.width / split.tensor
        # Keys and values are all-gathered, and their gradients are reduced.
        if split.context_by == "keys":
            return passes * ring.gather(2 * shape.key_width * numbers * split.context)
        # All-to-alls exchange queries, keys, values and results.
        kv_heads = shape.num_kv_heads // split.tensor
        keys = shape.key_width if kv_heads % split.context == 0 else shape.query_width
        return passes * 2 * (ring.exchange(shape.query_width * numbers) + ring.exchange(keys * numbers))

    def _sends(self, rows: float) -> float:
        """Return the seconds of sending activations to the next pipeline stage and gradients to the previous one."""
        split = self._split
        if split.pipeline == 1:
            return 0.0
        size = self._stream_bytes(rows) / split.tensor
        return 2 * split.stages * self._links.send(self._along_pipeline, size)

    # Communication of weights and gradients.

    def _sent(self, number: int, forward: float, backward: float) -> dict[str, float]:
        """Return the seconds of collectives of weights and gradients that do not overlap with computation.

        `number`: micro-batches of a step; `forward`, `backward`: seconds of each pass of a micro-batch.
        """
        hides = self._links.cluster.device.overlap
        gradient = 4 * self.params / self._shares * self._sent_share()
        between = self._replicas.reduce(gradient) if self._replicas.size > 1 else 0.0
        scalars = 2 * (self._states.begin + self._states.hops + self._replicas.hops)
        if self._split.whole:
            # The last of DDP's gradient buckets has no computation to overlap with.
            exposed = max(min(between, self._replicas.begin + self._replicas.hops), between - hides * backward)
            after = self._replicas.gather(4 * self.params) if self._split.data == "zero1" else 0.0
            return {"weights": after, "gradients": exposed + scalars if between else 0.0}
        if self._states.size == self._replicas.size == 1 and not self._gather_outer:
            return {"weights": 0.0, "gradients": 0.0}
        gathers, sums = self._layers * self._gather, self._layers * self._reduce
        if self._split.pipeline > 1:
            often = number if self._split.data == "zero3" and self._split.stages == 1 else 0
            once = gathers + self._gather_outer
            turn = 2 * (self._gather + max(0.0, gathers - self._gather - hides * forward))
            return {"weights": once + often * turn, "gradients": sums + self._reduce_outer + between + scalars}
        again = gathers if self._split.data == "zero3" else 0.0
        first = self._gather_outer + self._gather
        ahead = first + max(0.0, gathers - self._gather - hides * forward)
        excess = max(0.0, again + sums - hides * backward)
        # In the excess over the backward pass, weights come before gradients; the outermost reduction is last.
        late = min(excess, sums)
        last = max(0.0, between - max(0.0, hides * backward - again - sums))
        return {
            "weights": number * (ahead + excess - late),
            "gradients": number * (late + self._reduce_outer) + last + scalars,
        }

    def _sent_share(self) -> float:
        """Return the gradient bytes that replicas exchange, as a share of those without compression."""
        layout = self._layout
        if layout.compress in ("topk", "randomk"):
            return min(1.0, layout.compress_share * self._replicas.size)
        return SENT_SHARES[layout.compress]


def _with_backward(layer: ForwardCost) -> tuple[float, ...]:
    return tuple(seconds * (1 + times) for seconds, times in zip(layer, BACKWARD, strict=True))


def _again(layer: ForwardCost, recompute: str) -> float:
    """Return the seconds of recomputing a layer in the backward pass."""
    if recompute == "none":
        return 0.0
    return sum(layer) if recompute == "full" else layer.traffic + layer.launches


@cache
def _places(num_layers: int, ranks: int, schedule: str, stages: int) -> list[tuple[int, bool, bool]]:
    """Return for every pipeline rank (number of layers, has the first stage, has the last stage)."""
    if ranks == 1:
        return [(num_layers, True, True)]
    layout = LayoutConfig.model_validate(
        {"data": "zero2", "pipeline": ranks, "schedule": schedule, "stages_per_rank": stages}
    )
    total, places = ranks * stages, []
    for rank in range(ranks):
        own_stages = stages_of(layout, rank)
        layers = sum(len(layers_of(num_layers, total, stage)) for stage in own_stages)
        places.append((layers, 0 in own_stages, total - 1 in own_stages))
    return places
