"""What collectives cost: the ranks of an axis as a ring over the links that join them.

A ring passes through every device of a node before it leaves it, so with k members in each node k adapters carry it at
once. Source: Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 4 (ring).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from train.plan.search.devices import Cluster


@dataclass(frozen=True)
class Ring:
    """The ranks that talk on some axes of the mesh."""

    size: int
    per_node: int
    """Members on a node."""
    nodes: int
    bandwidth: float
    """Of the slowest link on the way [bytes/s]."""
    hops: float
    """Seconds that a number takes to go round."""
    begin: float
    """Seconds before anything is sent."""

    def gather(self, size: float) -> float:
        """Seconds until every rank has all of `size` bytes, of which each had its part; or has its part of a sum."""
        if self.size == 1:
            return 0.0
        return self.begin + self.hops + (self.size - 1) / self.size * size / self.bandwidth

    def reduce(self, size: float) -> float:
        """Seconds until every rank has the sum of what each had, `size` bytes."""
        return 2 * self.gather(size) - (self.begin if self.size > 1 else 0)

    def exchange(self, size: float) -> float:
        """Seconds of an all-to-all in which every rank has `size` bytes, and keeps its own part."""
        if self.size == 1:
            return 0.0
        # Off the node every device has its own adapter alone.
        away = self.bandwidth if self.nodes == 1 else self.bandwidth / self.per_node
        share = (self.size - 1) / self.size if self.nodes == 1 else 1 - self.per_node / self.size
        return self.begin + self.hops + share * size / away


class Links:
    """The rings of a cluster."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._ring = cache(self._find_ring)

    def ring(self, axes: Mapping[str, int], *names: str) -> Ring:
        """That of the ranks that differ on neighbouring axes `names` alone; the axes are the outermost first."""
        order, last = list(axes), names[-1]
        stride = math.prod(axes[name] for name in order[order.index(last) + 1 :])
        return self._ring(math.prod(axes[name] for name in names), stride)

    def _find_ring(self, size: int, stride: int) -> Ring:
        device = self.cluster.device
        # Of the group that is worst off: four ranks side by side on nodes of six lie two and two.
        per_node = max(1, math.gcd(self.cluster.gpus_per_node, size * stride) // stride)
        nodes = -(-size // per_node)
        bandwidth = device.within.bandwidth
        if nodes > 1:
            away = per_node * device.between.bandwidth
            bandwidth = away if per_node == 1 else min(bandwidth, away)
        hops = (size - nodes) * device.within.latency + (nodes - 1) * device.between.latency
        return Ring(size, per_node, nodes, bandwidth, hops, device.collective_seconds)

    def send(self, ring: Ring, size: float) -> float:
        """Seconds to hand `size` bytes to the next rank of a pipeline, whose ranks are the ring."""
        if ring.size == 1:
            return 0.0
        # The slowest hand-over counts: the one that leaves a node, over the rank's own adapter.
        link = self.cluster.device.within if ring.nodes == 1 else self.cluster.device.between
        return ring.begin + link.latency + size / link.bandwidth
