"""AdamW: Adam with decoupled weight decay, by torch's fused kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from train.optim.inputs import UpdateInputs
from train.optim.parameter import Member


@dataclass(frozen=True)
class AdamW:
    """The rule, for the parameters it updates.

    Sources: Kingma 2014, arXiv 1412.6980, algorithm 1; Loshchilov 2019, arXiv 1711.05101, algorithm 2 (each update
    shrinks the weights by learning rate x decay).
    """

    members: Sequence[Member]
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        for member in self.members:
            for key in ("exp_avg", "exp_avg_sq"):
                member.state[key] = torch.zeros_like(member.parameter)

    def update(self, inputs: UpdateInputs) -> None:
        """Make an update; the kernel divides by the scale of the gradients, and does nothing where it is to skip."""
        for decay in dict.fromkeys(member.weight_decay for member in self.members):
            members = [m for m in self.members if m.weight_decay == decay and m.values.numel()]
            if not members:
                continue
            torch._fused_adamw_(
                [m.values for m in members],
                inputs.of(members),
                [m.held("exp_avg") for m in members],
                [m.held("exp_avg_sq") for m in members],
                [],
                [inputs.count] * len(members),  # the kernel only reads it, so one serves the whole list
                lr=inputs.rate,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=inputs.grad_scale,
                found_inf=inputs.found_inf,
            )
