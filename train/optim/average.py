"""The exponential moving average of the weights (EMA), a state of each parameter beside those of its update rule.

After each update, average = decay · average + (1 - decay) · weight. The decay rises with the number of updates, since
the first weights are far from those that follow. The average of a shard needs no other rank, so it is sharded like the
weights, and a checkpoint stores it as `ema.<parameter>`. Source: Polyak and Juditsky 1992 (averages of the weights).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from train.optim.parameter import ShardedParameter, UpdateInputs, chunk_members

STATE = "ema"
"""Name of the state that holds the average of a parameter."""


def allocate_averages(members: Sequence[ShardedParameter]) -> None:
    """Allocate the averages of some parameters; `start_averages` sets them."""
    for member in members:
        member.state[STATE] = torch.zeros_like(member.parameter)


@torch.no_grad()
def start_averages(members: Sequence[ShardedParameter]) -> None:
    """Set each average to the current weights, as before the first update."""
    for member in members:
        member.held(STATE).copy_(member.values)


def decay_of(count: Tensor, most: float) -> Tensor:
    """Return the decay of an update, float32, 0-d: (1 + t) / (10 + t) for update t (1 = first), but at most `most`.

    Source: the documentation of TensorFlow's `tf.train.ExponentialMovingAverage`, argument `num_updates`.
    """
    return ((1 + count.double()) / (10 + count.double())).clamp(max=most).float()


def update_averages(members: Sequence[ShardedParameter], inputs: UpdateInputs, decay: float) -> None:
    """Move each average towards the updated weights, or change nothing if the update is skipped."""
    share = 1 - decay_of(inputs.count, decay)
    for chunk in chunk_members(members):
        averages = [member.held(STATE) for member in chunk]
        moved = [average.lerp(member.values, share) for average, member in zip(averages, chunk, strict=True)]
        inputs.store(averages, moved)


@torch.no_grad()
def exchange_averages(members: Sequence[ShardedParameter]) -> None:
    """Exchange the weights with their averages; a second call restores both exactly."""
    for member in members:
        weights = member.values.clone()
        member.values.copy_(member.held(STATE))
        member.held(STATE).copy_(weights)
