"""The optimiser of a run: rules, each with the parameters it updates, made from `[optim]` for any layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from schemas.errors import ContractError
from train.config.optim import OptimConfig
from train.optim.adafactor import Adafactor
from train.optim.adam import AdamW, Lamb
from train.optim.muon import Muon
from train.optim.parameter import Gradients, Member, UpdateInputs, local, region_of

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
EMBEDDING = "embedding.weight"


class Rule(Protocol):
    """How some parameters are updated; their state is allocated when the rule is made."""

    @property
    def members(self) -> Sequence[Member]:
        """The parameters, in the order of the model."""

    def update(self, inputs: UpdateInputs) -> None:
        """Make an update, or leave every bit of weights and states as it is where the inputs say to skip it."""


@dataclass
class Optimizer:
    """Rules, and how many updates they have made."""

    rules: list[Rule]
    count: Tensor = field(init=False)
    """Updates made, 0-d float32 on the device of the parameters; a skipped one does not count."""

    def __post_init__(self) -> None:
        device = next((local(member.parameter).device for member in self.members), torch.device("cpu"))
        self.count = torch.zeros((), device=device)

    @property
    def step(self) -> int:
        """Number of updates made; waits for the device."""
        return int(self.count.item())

    @property
    def members(self) -> list[Member]:
        """Every parameter."""
        return [member for rule in self.rules for member in rule.members]


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> Optimizer:
    """The optimiser of these parameters, by name; its state is allocated, so that a checkpoint can be read into it.

    Parameters are plain tensors or DTensors on any meshes; ranks that share some must name them in the same order.
    Matrices decay, the embedding where `decay_embeddings` says so, gains and biases never.
    """
    members = [Member(name, parameter, region_of(name, parameter)) for name, parameter in parameters.items()]
    for member in members:
        if member.is_matrix and (config.decay_embeddings or member.name != EMBEDDING):
            member.weight_decay = config.weight_decay
    betas = config.beta1, config.beta2, config.eps
    if config.optimizer == "adamw":
        return Optimizer([AdamW(members, *betas)])
    if config.optimizer == "lamb":
        return Optimizer([Lamb(members, *betas)])
    if config.optimizer == "adafactor":
        return Optimizer([Adafactor(members)])
    inner = [m for m in members if m.name.startswith("blocks.") and m.is_matrix]
    names = {m.name for m in inner}
    kind = next((member.parameter.device.type for member in members), "cpu")
    muon = Muon(inner, config.momentum, PRECISIONS[config.for_device(kind).muon_precision])
    return Optimizer([muon, AdamW([m for m in members if m.name not in names], *betas)])


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state to be stored, as `<state>.<parameter>`; reading into these tensors restores it but for the step.

    Each lies on the ranks as its parameter does, but for Adafactor's `row_mean` and `column_mean`: plain tensors of
    the whole matrix, the same on every rank that holds some of it.
    """
    return {f"{key}.{member.name}": value for member in optimizer.members for key, value in member.state.items()}


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the number of updates made; what each rank holds is looked up again, since state may have been read anew."""
    optimizer.count.fill_(step)
    for member in optimizer.members:
        member.look_up_again()


@torch.no_grad()
def update(
    optimizer: Optimizer,
    rate: float,
    gradients: Mapping[str, Tensor] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one update at learning rate `rate` from gradients by name, whose memory it uses up; then clear them.

    None: those that the parameters have; else what was taken from them before, as by `Gradients`.
    Gradients are divided by `grad_scale`; where `found_inf` is not 0, every bit of weights and states and the number
    of updates stay as they are. Both are 0-d float32 tensors on the device of the parameters, so the host never waits.
    Raises ContractError, before anything is changed, if a parameter has no gradient or one placed otherwise.
    """
    if gradients is None:
        gradients = Gradients({member.name: member.parameter for member in optimizer.members}).take()
    for member in optimizer.members:
        if member.name not in gradients:
            raise ContractError(
                f"optim: expected a gradient for {member.name}, got none. Leave out what no loss depends on."
            )
    skipped = torch.zeros_like(optimizer.count) if found_inf is None else found_inf
    optimizer.count += 1 - skipped
    inputs = UpdateInputs(gradients, rate, optimizer.count, grad_scale, skipped)
    for rule in optimizer.rules:
        rule.update(inputs)
    clear_gradients(optimizer)


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop all gradients: of a step that is not to be made."""
    for member in optimizer.members:
        member.parameter.grad = None
