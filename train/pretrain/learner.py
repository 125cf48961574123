"""The state that learns: a model in its layout, the optimiser, the loss scale; and one step of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.storage import Store
from train.checkpoint.note import Note, Progress
from train.checkpoint.state import State, read_state, stored_shapes
from train.data.batches import Heldout
from train.data.stages import row_length
from train.model.loss import Tally
from train.optim.norm import gradient_norm, scale_gradients
from train.optim.optimizer import clear_gradients, make_optimizer, set_step, state_tensors, update
from train.optim.scaler import LossScale, first_loss_scale
from train.parallel.split import SplitModel
from train.plan.planned import Plan
from train.ranks import Ranks
from train.rows import Rows
from train.watch.guard import GuardState

REMEMBERED = "compress."
"""What the names of the tensors begin with that compression remembers."""


@dataclass(frozen=True)
class Measured:
    """What a step has found out before its update; the same on every rank."""

    losses: list[float]
    """Sum of the losses of each source [nats]."""
    counts: list[float]
    """Number of targets of each source."""
    grad_norm: float
    """Euclidean norm of the gradient, without the loss scale."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy [nats/token]."""
        return sum(self.losses) / max(sum(self.counts), 1)


class Learner:
    """A model that is being trained."""

    def __init__(self, plan: Plan, ranks: Ranks, num_sources: int):
        self.plan, self.settings, self._ranks = plan, plan.settings, ranks
        longest = max(plan.stages, key=lambda stage: stage.seq_len)
        largest = row_length(plan.settings.train, longest.seq_len), longest.global_batch
        self.model = SplitModel(plan.shape, plan.settings, ranks, num_sources, largest)
        self.optimizer = make_optimizer(self.model.to_update(), plan.settings.optim)
        self.loss_scale = first_loss_scale(plan.settings.optim) if plan.settings.train.precision == "fp16" else None
        self._first = {name: value.clone() for name, value in self._remembered().items() if value.any()}

    def begin(self) -> None:
        """Take the state that a run begins with."""
        self.model.set_initial_weights(self.settings.train.seed)
        for value in state_tensors(self.optimizer).values():
            value.zero_()
        self._forget()
        set_step(self.optimizer, 0)
        if self.loss_scale is not None:
            self.loss_scale = first_loss_scale(self.settings.optim)

    def go_on(self, run: Store, note: Note, same_layout: bool) -> list[str]:
        """Take the state of a checkpoint; returns the names of what was left behind.

        That is what compression remembers of each rank, which another layout has no use for.
        """
        state, left = self.state(), list[str]()
        if not same_layout:
            self._forget()
            state = {name: value for name, value in state.items() if not name.startswith(REMEMBERED)}
        read_state(run, note, state, self._ranks)  # compares digests before anything is unpickled
        if not same_layout:
            left = sorted(name for name in stored_shapes(run, note) if name.startswith(REMEMBERED))
        set_step(self.optimizer, note.step - note.progress.guard.skipped)
        if self.loss_scale is not None and note.progress.loss_scale is not None:
            growth = self.settings.optim.loss_scale_steps
            self.loss_scale = LossScale(note.progress.loss_scale, note.progress.finite_steps, growth)
        return left

    def state(self) -> State:
        """The tensors of a checkpoint by name, the very ones in use."""
        weights = {f"model.{name}": parameter.data for name, parameter in self.model.parameters.items()}
        return weights | self._states()

    def _states(self) -> dict[str, Tensor]:
        return state_tensors(self.optimizer) | self._remembered()

    def _remembered(self) -> dict[str, Tensor]:
        return self.model.compressor.state_tensors() if self.model.compressor else {}

    def _forget(self) -> None:
        """Compression remembers what it did before the first step: PowerSGD begins with a random factor."""
        for name, value in self._remembered().items():
            value.copy_(self._first.get(name, torch.zeros(())))

    def progress(self, guard: GuardState, heldout: tuple[tuple[int, float], ...]) -> Progress:
        """What a checkpoint's note says beside the tensors."""
        if self.loss_scale is None:
            return Progress(heldout=heldout, guard=guard)
        scale = self.loss_scale
        return Progress(heldout=heldout, guard=guard, loss_scale=scale.scale, finite_steps=scale.finite_steps)

    def compute(self, step: int, rows: Rows, num_rows: int, num_targets: float) -> Measured:
        """Make the gradient of step `step` (1 = first) from this rank's rows of a batch of `num_rows`."""
        if self.model.compressor is not None:
            self.model.compressor.start(step)
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        tally = self.model.backward(self.model.micro_batches(rows, num_rows), scale / max(num_targets, 1))
        norm = gradient_norm(self.model.parameters, self.model.mesh.axes["pipeline"], self.model.copies)
        found = torch.cat((tally.losses_S, tally.counts_S, norm[None].to(tally.losses_S.device))).tolist()
        number = len(tally.losses_S)
        return Measured(found[:number], found[number:-1], found[-1] / scale)

    def update(self, rate: float, measured: Measured) -> None:
        """Clip the gradient and make the update at learning rate `rate`."""
        scale, clip = self.loss_scale.scale if self.loss_scale else 1.0, self.settings.optim.clip_norm
        factor = 1.0 if clip is None else min(1.0, clip / max(measured.grad_norm, 1e-30))
        if factor / scale != 1.0:
            scale_gradients(self.model.parameters, factor / scale)
        with self.model.updating():
            update(self.optimizer, rate)
        if self.model.compressor is not None:
            self.model.compressor.keep()
        self._after(finite=True)

    def skip(self) -> None:
        """Drop the gradient: the step makes no update."""
        clear_gradients(self.optimizer)
        self._after(finite=False)

    def _after(self, finite: bool) -> None:
        for parameter in self.model.parameters.values():
            parameter.grad = None
        if self.loss_scale is None:
            return
        before, self.loss_scale = self.loss_scale, self.loss_scale.after(finite)
        if self.model.compressor is not None and self.loss_scale.scale != before.scale:
            self.model.compressor.rescale(self.loss_scale.scale / before.scale)

    def measure(self, heldout: Heldout) -> Tally:
        """The losses of held-out rows, by their sources."""
        return self.model.measure(self.model.part_of(heldout.rows), len(heldout.sources))

    def measure_groups(self, rows: Rows, groups_BT: Tensor, number: int, num_rows: int) -> Tally:
        """The losses of this rank's rows of a batch of `num_rows`, by group of each position; gradients stay."""
        return self.model.measure(self.model.micro_batches(rows.grouped(groups_BT), num_rows), number)
