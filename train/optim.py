"""The optimiser: AdamW with decoupled decay, learning rate as a function of the step, clipping by the global norm."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from schemas.errors import PenstockError
from train.config import TrainConfig
from train.model import Transformer
from train.plan import Plan


class NonFiniteError(PenstockError):
    """Loss or gradient is infinite or not a number; the weights are those of the step before."""


def learning_rate(step: int, plan: Plan, final_share: float) -> float:
    """Learning rate of update `step` (1 = first): linear up to the peak, then half a cosine down to its final share.

    Source: Loshchilov 2017, 1608.03983, equation 5, one cycle without restart.
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    progress = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    share = final_share + (1 - final_share) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return plan.learning_rate * share


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the model, its state allocated and zero; matrices decay, norms and embeddings do not.

    Source: Loshchilov 2019, 1711.05101 (decoupled decay: each step shrinks weights by learning rate x decay).
    """
    embeddings = {id(model.embedding.weight)}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.ndim == 1 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.adam_eps, fused=True, foreach=False
    )
    # The state is made now and not by the first step, so that a checkpoint can be read into it.
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_step(optimizer: torch.optim.AdamW, step: int) -> None:
    """Set the number of updates made, which AdamW's bias correction is computed from."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Euclidean norm of the whole gradient over all ranks, a scalar that is the same on every rank."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(model: nn.Module, optimizer: torch.optim.AdamW, norm: torch.Tensor, clip_norm: float, rate: float) -> None:
    """Scale the gradient down to `clip_norm` if its norm is larger, and make one update at learning rate `rate`."""
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def non_finite(step: int, **values: float | None) -> NonFiniteError | None:
    """The error that stops the run at update `step` if one of the values is infinite or not a number (None: absent)."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return NonFiniteError(
                f"train, step {step}: promised a finite {name}, found {value}; the last checkpoint is from before. "
                "Lower train.learning_rate or train.clip_norm, or look at this step's documents with `penstock trace`"
            )
    return None
