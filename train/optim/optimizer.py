"""The optimizer of a run: update rules, each with its parameters, made from `[optim]` for any layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor, nn

from schemas.errors import ContractError
from train.config.optim import OPTIMIZERS, DeclaredOptimizer, OptimConfig
from train.model.shape import HIDDEN_NAMES
from train.optim.average import allocate_averages, update_averages
from train.optim.parameter import Gradients, ShardedParameter, UpdateInputs, local_tensor, region_of

EMBEDDING_NAMES = ("embedding.", "value_embeddings.", "extra.")
"""Beginnings of the names of the parameters that `decay_embeddings` is for."""
LAYERS_PREFIX = "blocks."
"""Beginning of the names of the parameters of layers."""


class UpdateRule(Protocol):
    """An update rule for some parameters; it allocates their state at construction."""

    @property
    def members(self) -> Sequence[ShardedParameter]:
        """The parameters that this rule updates, in the order of the model."""

    def update(self, inputs: UpdateInputs) -> None:
        """Update weights and states once, or change nothing if `inputs.found_inf` is 1."""


@dataclass
class Optimizer:
    """Update rules, which together cover all parameters of this rank, and the number of updates made."""

    rules: list[UpdateRule]
    ema: float | None = None
    """Decay of the moving average of the weights; None = no average."""
    count: Tensor = field(init=False)
    """Number of updates made, 0-d float32 on the parameters' device; a skipped update does not count."""

    def __post_init__(self) -> None:
        device = next((local_tensor(member.parameter).device for member in self.members), torch.device("cpu"))
        self.count = torch.zeros((), device=device)

    @property
    def step(self) -> int:
        """The number of updates made; synchronizes with the device."""
        return int(self.count.item())

    @property
    def members(self) -> list[ShardedParameter]:
        """The model parameters of this rank, grouped by the rule that updates them."""
        return [member for rule in self.rules for member in rule.members]


GroupRules = Callable[[Sequence[ShardedParameter], Callable[[Sequence[ShardedParameter]], UpdateRule]], UpdateRule]
"""Return one rule for some parameters from a function that returns the rule of a part of them."""


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimConfig,
    group: GroupRules = lambda members, make: make(members),
    width_multiplier: float = 1.0,
) -> Optimizer:
    """Return the optimizer of these parameters, with its state allocated. `group`: by default one rule for all.

    Parameters, by name, are plain tensors or DTensors on any meshes. Ranks with shards of the same parameters must pass
    the parameters in the same order. Weight decay applies to matrices, but to embeddings only with
    `decay_embeddings`. `width_multiplier`: that of the model's shape, 1 without muP.
    """
    members = [ShardedParameter(name, parameter, region_of(name, parameter)) for name, parameter in parameters.items()]
    for member in members:
        matrices = member.is_matrix or member.is_stack
        if matrices and (config.decay_embeddings or not member.name.startswith(EMBEDDING_NAMES)):
            member.weight_decay = config.weight_decay
    config = config.for_device(next((member.parameter.device.type for member in members), "cpu"))
    declared = OPTIMIZERS[config.optimizer]
    for member in (m for m in members if m.is_matrix and m.name.startswith(HIDDEN_NAMES)):
        updated_by = declared if member.name.startswith(LAYERS_PREFIX) else declared.of_others
        member.rate_multiplier = width_multiplier ** -(updated_by.width_power or 0.0)
    if declared.others is None:
        return _with_averages(Optimizer([group(members, partial(_update_rule, declared, config))], config.ema))
    of_layers = [m for m in members if m.name.startswith(LAYERS_PREFIX) and (m.is_matrix or m.is_stack)]
    names = {m.name for m in of_layers}
    others = [m for m in members if m.name not in names]
    pairs = ((declared, of_layers), (declared.of_others, others))
    rules = [group(own, partial(_update_rule, each, config)) for each, own in pairs]
    return _with_averages(Optimizer(rules, config.ema))


def _with_averages(optimizer: Optimizer) -> Optimizer:
    if optimizer.ema is not None:
        allocate_averages(optimizer.members)
    return optimizer


def _update_rule(declared: DeclaredOptimizer, config: OptimConfig, members: Sequence[ShardedParameter]) -> UpdateRule:
    make: Callable[..., UpdateRule] = resolve_name(declared.rule)
    return make(members, **{name: getattr(config, name) for name in declared.settings})


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state for a checkpoint, by `<state>.<parameter>`, without the number of updates.

    Each tensor is sharded like its parameter. Adafactor's `row_mean` and `column_mean` are instead plain tensors of the
    whole matrix.
    """
    return {f"{key}.{member.name}": value for member in optimizer.members for key, value in member.state.items()}


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the number of updates made. Call it after a checkpoint was read into the optimizer state."""
    optimizer.count.fill_(step)
    for member in optimizer.members:
        # State may have been restored.
        member.reset_lookups()


@torch.no_grad()
def update(
    optimizer: Optimizer,
    rate: float,
    gradients: Mapping[str, Tensor] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update all parameters once at learning rate `rate`, then clear the gradients.

    `gradients`: local tensors by name from `Gradients.take`, to be overwritten; None = take the gradients now.
    `grad_scale`: divisor of the gradients, 0-d float32; None = 1.
    `found_inf`: 1 = change no weight, state or count, 0-d float32; None = 0.
    Raises ContractError before any change if a parameter has no gradient, or if `take` rejects one.
    """
    if gradients is None:
        gradients = Gradients({member.name: member.parameter for member in optimizer.members}).take()
    for member in optimizer.members:
        if member.name not in gradients:
            raise ContractError(
                f"optim: expected a gradient for {member.name}, got none. Compute the gradient of a loss that "
                "depends on this parameter, or remove the parameter from the model."
            )
    skipped = torch.zeros_like(optimizer.count) if found_inf is None else found_inf
    optimizer.count += 1 - skipped
    inputs = UpdateInputs(gradients, rate, optimizer.count, grad_scale, skipped)
    for rule in optimizer.rules:
        rule.update(inputs)
    if optimizer.ema is not None:
        update_averages(optimizer.members, inputs, optimizer.ema)
    clear_gradients(optimizer)


def clear_gradients(optimizer: Optimizer) -> None:
    """Discard the gradients of all parameters."""
    for member in optimizer.members:
        member.parameter.grad = None
