"""Optimizer states that lie outside of the device's memory: in the host's memory, or in files of a folder.

The states of a group of parameters are brought to the device, updated, and brought back, group by group. The update
stays on the device: every update rule then works unchanged, with the same bits. States in files are mapped. The files
of the next group are read ahead; those of a group that was updated leave the memory of the process, and the operating
system writes them later. Source: Rajbhandari et al. 2021, arXiv 2104.07857, sections 5.1 and 6.2 (ZeRO-Infinity).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from train.config.layout import LayoutConfig
from train.config.optim import STREAMED_NUMBERS
from train.optim.disk_tensor import DiskTensor
from train.optim.optimizer import UpdateRule
from train.optim.parameter import ShardedParameter, UpdateInputs, chunk_members, local_tensor

WEIGHT = ""
"""Key of the weights beside the keys of states."""


@dataclass(frozen=True)
class StatePlace:
    """Where the states of an optimizer lie, and where updates are computed."""

    device: torch.device
    """Device of updates. Weights and gradients that lie elsewhere are brought there, too."""
    on_device: bool = False
    """True = states stay on that device; only weights and gradients are brought to it."""
    folder: Path | None = None
    """Folder of the files of states; None = the host's memory."""


@dataclass
class StreamedRule:
    """Update rules, one for each group of parameters, whose states lie in a `StatePlace`."""

    place: StatePlace
    rules: list[UpdateRule] = field(default_factory=list)
    _files: list[list[DiskTensor]] = field(default_factory=list)
    """The files of the states of each rule."""

    @property
    def members(self) -> Sequence[ShardedParameter]:
        """The parameters of all groups, in order."""
        return [member for rule in self.rules for member in rule.members]

    def add(self, rule: UpdateRule) -> None:
        """Add a rule whose states have no storage yet, and allocate them in their place."""
        files: list[DiskTensor] = []
        for member in rule.members:
            for key, value in member.state.items():
                # A state that has no number for each element is small, and stays on the device.
                sharded = value.shape == member.parameter.shape
                moved = self._zeros(member.parameter, value.dtype, files) if sharded else value.to(self.place.device)
                member.state[key] = moved
        self.rules.append(rule)
        self._files.append(files)

    def _zeros(self, parameter: Tensor, dtype: torch.dtype, files: list[DiskTensor]) -> Tensor:
        """Return zeros in the place of states, sharded like a parameter."""
        shape, place = local_tensor(parameter).shape, self.place
        if place.on_device:
            held = torch.zeros(shape, dtype=dtype, device=place.device)
        elif place.folder is not None and shape.numel():
            files.append(DiskTensor(place.folder, shape, dtype, "layout.offload_dir"))
            held = files[-1].tensor
        else:
            held = torch.zeros(shape, dtype=dtype, pin_memory=place.device.type == "cuda")
        if not isinstance(parameter, DTensor):
            return held
        return DTensor(held, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def update(self, inputs: UpdateInputs) -> None:
        """Update all groups, one after another."""
        device, scale = self.place.device, inputs.grad_scale
        scale = None if scale is None else scale.to(device)
        inputs = replace(inputs, count=inputs.count.to(device), grad_scale=scale, found_inf=inputs.found_inf.to(device))
        for rule, files, following in zip(self.rules, self._files, [*self._files[1:], []], strict=True):
            for file in following:
                file.read_ahead()
            with self._on_device(rule.members):
                own = {member.name: inputs.gradients[member.name].to(device) for member in rule.members}
                rule.update(replace(inputs, gradients=own))
            for file in files:
                file.release()

    @contextmanager
    def _on_device(self, members: Sequence[ShardedParameter]) -> Iterator[None]:
        """Let the members look up copies on the device in the `with` block, then copy these back."""
        device, copies = self.place.device, list[tuple[Tensor, Tensor, bool]]()
        for member in members:
            for key, value in {WEIGHT: member.parameter, **member.state}.items():
                held = local_tensor(value)
                if held.device != device:
                    copy = held.to(device, non_blocking=True)
                    member.look_up_instead(key, copy)
                    copies.append((held, copy, key == WEIGHT))
        yield
        for held, copy, waits in copies:
            # Pinned states are read by the next update, which follows on the same stream, or after `wait`.
            held.copy_(copy, non_blocking=not waits and held.is_pinned())
        for member in members if copies else ():
            member.reset_lookups()

    def release(self) -> None:
        """Remove the pages of all files from the memory of this process, after something has read or written them."""
        for files in self._files:
            for file in files:
                file.release()

    def wait(self) -> None:
        """Wait until the states and weights in the host's memory are complete."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)


def state_place(layout: LayoutConfig, device: torch.device) -> StatePlace | None:
    """Return where `layout.offload` keeps the states of a rank with this device; None = where the weights are."""
    folder = Path(layout.offload_dir) if layout.offload_dir else None
    if layout.offload == "all":
        return StatePlace(torch.device("cpu"), folder=folder) if folder else None
    if layout.offload == "none":
        return None
    return StatePlace(device, layout.offload == "parameters", folder)


def streamed(
    place: StatePlace, members: Sequence[ShardedParameter], make: Callable[[Sequence[ShardedParameter]], UpdateRule]
) -> StreamedRule:
    """Return the update rules of groups of parameters; `make` returns the rule of a group."""
    rule = StreamedRule(place)
    for group in chunk_members(members, STREAMED_NUMBERS):
        with _WithoutStorage():
            own = make(group)
        rule.add(own)
    return rule


class _WithoutStorage(TorchFunctionMode):
    """Within this context, `torch.zeros_like` returns tensors without storage.

    An update rule allocates its states so. malloc kept the memory of states that were moved: as much as all of them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.zeros_like:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(*args, **(kwargs or {}))
