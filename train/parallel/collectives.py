"""Collectives on one flat tensor, by the names that they have from torch 2.12 on.

Older versions call them `all_gather_into_tensor` and `reduce_scatter_tensor`; newer ones warn about those names.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group=...): the ranks' inputs, one after the other, in the output of every rank."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group=...): this rank's part of the sum of the ranks' inputs."""
