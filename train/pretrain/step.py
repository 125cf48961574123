"""One optimizer step: the model, optimizer and loss scale that it updates, and the batches that feed it.

`Learner` holds the training state and computes gradients and updates. `Feed` requests the rows of each step and the
sums over all ranks one step ahead, so that no step waits for the slowest rank.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType

import torch
from torch import Tensor

from schemas.storage import Store
from train.checkpoint.folder import CheckpointMetadata, TrainerState
from train.checkpoint.state import MODEL_PREFIX, State, read_state, stored_shapes
from train.data.batches import HeldoutRows, Prefetch
from train.data.rows import Rows
from train.data.stages import row_length
from train.model.loss import LossTally
from train.model.stopwatch import Stopwatch
from train.monitor.guard import GuardState
from train.optim.average import exchange_averages, start_averages
from train.optim.optimizer import clear_gradients, make_optimizer, set_step, state_tensors, update
from train.optim.parameter import Gradients, without_torchao_wrapper
from train.optim.schedule import LossScale, first_loss_scale
from train.optim.streamed import StreamedRule, state_place, streamed
from train.parallel.parallelize import SplitModel
from train.parallel.ranks import PendingSum, Ranks
from train.plan.plan import Plan

COMPRESSION_PREFIX = "compress."
"""Prefix of the names of the tensors of compression state."""


class StepResult:
    """Loss and gradient norm of a step before its update, the same on every rank.

    The values are copied from the device while later work runs; the first access to a value waits for the copy.
    """

    def __init__(self, tally: LossTally, norm: Tensor, scale: float):
        """`norm`: Euclidean norm of the gradient of the scaled loss, 0-d; `scale`: the loss scale, or 1 for none."""
        right_S = tally.right_S if tally.right_S is not None else tally.counts_S[:0]
        own_F = tally.figures_F if tally.figures_F is not None else tally.counts_S[:0]
        norm_1 = norm[None].to(tally.losses_S.device)
        self._own = slice(2 * len(tally.losses_S) + 1, 2 * len(tally.losses_S) + 1 + len(own_F))
        figures = torch.cat((tally.losses_S, tally.counts_S, norm_1, own_F, right_S))
        self._number, self._scale = len(tally.losses_S), scale
        self.norm = norm
        """Euclidean norm of the gradient with the loss scale, 0-d, on the device."""
        self.found_inf = (~torch.isfinite(figures).all()).to(norm.device, torch.float32)
        """1 if loss or gradient is not finite, so that no update is made; else 0; 0-d float32, on the device."""
        self._event: torch.cuda.Event | None = None
        self._host = figures
        if figures.is_cuda:
            self._host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._host.copy_(figures, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @cached_property
    def _figures(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

    @property
    def losses(self) -> list[float]:
        """Sum of the losses of each source [nats]."""
        return self._figures[: self._number]

    @property
    def counts(self) -> list[float]:
        """Number of targets of each source."""
        return self._figures[self._number : 2 * self._number]

    @property
    def model_sums(self) -> list[float]:
        """Sums of the figures of a model of the user; empty if it has none."""
        return self._figures[self._own]

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of the gradient, without the loss scale."""
        return self._figures[2 * self._number] / self._scale

    @property
    def accuracy(self) -> float | None:
        """Share of the targets that have the largest logit, 0 to 1; None = not counted in this step."""
        right = self._figures[2 * self._number + 1 :]
        return sum(right) / max(sum(self.counts), 1) if right else None

    @property
    def loss(self) -> float:
        """Mean cross-entropy [nats/token]."""
        return sum(self.losses) / max(sum(self.counts), 1)

    @property
    def finite(self) -> bool:
        """True if loss and gradient are finite, so that the update is made."""
        return all(map(math.isfinite, self._figures))


class Learner:
    """A model that is being trained, with its optimizer, loss scale and gradient compression."""

    def __init__(self, plan: Plan, ranks: Ranks, num_sources: int):
        self.plan, self.settings, self._ranks = plan, plan.settings, ranks
        batches = [(row_length(plan.settings.train, stage.seq_len), stage.global_batch) for stage in plan.stages]
        self.model = SplitModel(plan.shape, plan.settings, ranks, num_sources, batches)
        updated = self.model.parameters_to_update()
        place = state_place(plan.settings.layout, ranks.device)
        group = {} if place is None else {"group": partial(streamed, place)}
        width = plan.shape.width_multiplier
        self.optimizer = make_optimizer(updated, plan.settings.optim, width_multiplier=width, **group)
        self._streamed = [rule for rule in self.optimizer.rules if isinstance(rule, StreamedRule)]
        self.stopwatch = Stopwatch(ranks.device)
        """Measures the computation of this rank between its collectives."""
        for part in self.model.parts:
            part.loss.stopwatch = self.stopwatch
        # The updates of the other optimizers have collectives.
        self._times_update = plan.settings.optim.optimizer == "adamw"
        self._gradients = Gradients(self.model.parameters, self.model.mesh.axes["pipeline"], self.model.copies)
        self._updated = self._gradients if updated is self.model.parameters else Gradients(updated)
        self.loss_scale = first_loss_scale(plan.settings.optim) if plan.settings.train.precision == "fp16" else None
        self._first = {name: value.clone() for name, value in self._compression_state().items() if value.any()}

    def init_state(self, read: Callable[[State], None] | None = None) -> None:
        """Set the initial state of a run: zero optimizer state, first loss scale, and its initial weights.

        `read`: function that reads the weights in place; None = random weights from `train.seed`.
        """
        if read is None:
            self.model.set_initial_weights(self.settings.train.seed, self.plan.initial_weights)
        else:
            read(self._weights())
        for value in state_tensors(self.optimizer).values():
            value.zero_()
        if self.optimizer.ema is not None:
            start_averages(self.optimizer.members)
        self._reset_compression()
        set_step(self.optimizer, 0)
        self._release()
        if self.loss_scale is not None:
            self.loss_scale = first_loss_scale(self.settings.optim)

    def load_checkpoint(self, run: Store, checkpoint: CheckpointMetadata, same_layout: bool) -> list[str]:
        """Load the state of a checkpoint; return the names of the tensors that were not loaded.

        With `same_layout` every tensor is loaded. Otherwise the gradient-compression state of each rank is reset and
        the rest is loaded.
        """
        state, dropped = self.state(), list[str]()
        if not same_layout:
            self._reset_compression()
            state = {name: value for name, value in state.items() if not name.startswith(COMPRESSION_PREFIX)}
        read_state(run, checkpoint, state, self._ranks)
        if not same_layout:
            shapes = self._ranks.on_first(lambda: stored_shapes(run, checkpoint))
            dropped = sorted(name for name in shapes if name.startswith(COMPRESSION_PREFIX))
        set_step(self.optimizer, checkpoint.step - checkpoint.progress.guard.skipped)
        self._release()
        if self.loss_scale is not None and checkpoint.progress.loss_scale is not None:
            growth = self.settings.optim.loss_scale_steps
            self.loss_scale = LossScale(checkpoint.progress.loss_scale, checkpoint.progress.finite_steps, growth)
        return dropped

    def state(self) -> State:
        """Return the tensors that a checkpoint stores, by name, without copying them."""
        for rule in self._streamed:
            rule.wait()
        return self._weights() | self._states()

    def _weights(self) -> State:
        return {
            f"{MODEL_PREFIX}{name}": without_torchao_wrapper(parameter.data)
            for name, parameter in self.model.parameters.items()
        }

    def _release(self) -> None:
        self.model.release()
        for rule in self._streamed:
            rule.release()

    def _states(self) -> dict[str, Tensor]:
        return state_tensors(self.optimizer) | self._compression_state()

    def _compression_state(self) -> dict[str, Tensor]:
        return self.model.compressor.state_tensors() if self.model.compressor else {}

    def _reset_compression(self) -> None:
        # PowerSGD starts from a random factor, the other states from 0.
        for name, value in self._compression_state().items():
            value.copy_(self._first.get(name, torch.zeros(())))

    def progress(self, guard: GuardState, heldout: tuple[tuple[int, float], ...]) -> TrainerState:
        """Return the trainer state that checkpoint metadata stores beside the tensors."""
        if self.loss_scale is None:
            return TrainerState(heldout=heldout, guard=guard)
        scale = self.loss_scale
        return TrainerState(heldout=heldout, guard=guard, loss_scale=scale.scale, finite_steps=scale.finite_steps)

    def compute(self, step: int, rows: Rows, num_rows: int, num_targets: float) -> StepResult:
        """Compute the gradient of a step (1 = first) from `rows`, this rank's rows of a global batch of `num_rows`.

        `num_targets`: targets of the global batch, by which the loss is divided. The targets that have the largest
        logit are counted in steps that print a progress line.
        """
        if self.model.compressor is not None:
            self.model.compressor.start(step)
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        counts_right = step % self.settings.train.log_every == 0 or step == self.plan.steps
        share = scale / max(num_targets, 1)
        tally = self.model.backward(self.model.micro_batches(rows, num_rows), share, counts_right)
        self._gradients.take()
        return StepResult(tally, self._gradients.norm(), scale)

    def update(self, rate: float, measured: StepResult) -> None:
        """Clip the gradient and update the weights at learning rate `rate`.

        Skip the update if loss or gradient norm is not finite.
        """
        scale, clip = self.loss_scale.scale if self.loss_scale else 1.0, self.settings.optim.clip_norm
        divisor = None if scale == 1.0 else torch.full((), scale, device=measured.norm.device)
        if clip is not None:
            # A norm beyond float32 is clipped further, since the division must not be by infinity.
            most = torch.finfo(torch.float32).max
            divisor = ((measured.norm / (scale * clip)).clamp(min=1.0) * scale).clamp(max=most).float()
        with self.model.updating():
            gradients = self._gradients.taken if self._updated is self._gradients else self._updated.take()
            with self.stopwatch.running() if self._times_update else nullcontext():
                update(self.optimizer, rate, gradients, divisor, measured.found_inf)
        self._clear()
        # `finite` makes the host wait for the device, so it is read only where the state depends on it.
        if self.settings.layout.compress != "none" and self.model.compressor is not None and measured.finite:
            self.model.compressor.keep()
        if self.loss_scale is None:
            return
        before, self.loss_scale = self.loss_scale, self.loss_scale.after(measured.finite)
        if self.model.compressor is not None and self.loss_scale.scale != before.scale:
            self.model.compressor.rescale(self.loss_scale.scale / before.scale)

    def drop(self) -> None:
        """Discard the gradient without an update."""
        clear_gradients(self.optimizer)
        self._clear()

    def _clear(self) -> None:
        self._gradients.taken, self._updated.taken = {}, {}
        for parameter in self.model.parameters.values():
            parameter.grad = None

    def measure(self, heldout: HeldoutRows) -> LossTally:
        """Return the losses [nats], targets and targets with the largest logit of held-out rows, summed by source."""
        return self.model.measure(self.model.part_of(heldout.rows), len(heldout.sources), counts_right=True)

    def measure_average(self, heldout: HeldoutRows) -> LossTally | None:
        """Return what `measure` does for the moving average of the weights; None if there is no average."""
        if self.optimizer.ema is None:
            return None
        with self.model.updating():
            exchange_averages(self.optimizer.members)
        try:
            return self.measure(heldout)
        finally:
            with self.model.updating():
                exchange_averages(self.optimizer.members)

    def measure_groups(self, rows: Rows, groups_BT: Tensor, number: int, num_rows: int) -> LossTally:
        """Return the losses of a global batch of `num_rows` rows, summed over the positions of each group.

        `rows`: the rows of this rank. `groups_BT`: the group, 0 to `number` - 1, of each position in `rows`. The
        gradients do not change.
        """
        return self.model.measure(self.model.micro_batches(rows.grouped(groups_BT), num_rows), number)


# The rows of each step and the sums over all ranks are requested while the previous step computes. The sums are the
# number of targets in the global batch, by which every loss is divided, and the number of ranks that received a stop
# signal. A signal that arrives after the request takes effect one step later.

StopSignals = Callable[[], tuple[bool, bool]]
"""A function that returns whether this process received SIGTERM, and whether it received SIGINT."""


@dataclass(frozen=True)
class StepInput:
    """The input of a step: its rows, the global number of targets and the stop signals."""

    rows: Rows
    """Rows of this rank."""
    num_targets: float
    """Targets of the global batch."""
    by_sigterm: bool
    """True if a rank received SIGTERM."""
    by_sigint: bool
    """True if a rank received SIGINT."""

    @property
    def stops(self) -> bool:
        """True if the run stops before this step, on every rank."""
        return self.by_sigterm or self.by_sigint


@dataclass(frozen=True)
class RequestedStep:
    """A step whose rows have been read, and whose targets and stop signals are being summed over the ranks."""

    step: int
    rows: Rows | Exception
    total: PendingSum


class Feed:
    """The source of the input of each step, requested one step ahead. Every rank requests the same steps in order."""

    def __init__(self, rows: Prefetch, ranks: Ranks, counts: bool, stop_signals: StopSignals):
        """`counts`: True if this rank adds its targets to the sum. Of ranks that read the same rows, only one does."""
        self._rows, self._ranks, self._counts, self._stop_signals = rows, ranks, counts, stop_signals
        self._ahead: RequestedStep | None = None
        self._waited = 0.0

    def request(self, step: int) -> RequestedStep:
        """Wait for the rows of a step (0 = first), and start to sum targets and stop signals over the ranks.

        If reading the rows fails, `take` raises the error.
        """
        rows: Rows | Exception
        try:
            rows, seconds = self._rows.take(step)
            self._waited += seconds
        except Exception as error:
            rows = error
        # The sums start even after an error, because every rank takes part in them.
        number = rows.num_targets if isinstance(rows, Rows) and self._counts else 0
        self._ahead = RequestedStep(step, rows, self._ranks.start_total(number, *self._stop_signals()))
        return self._ahead

    def take(self, step: int) -> StepInput:
        """Return the input of a step (0 = first); request it now if it is not requested yet."""
        ahead = self._ahead
        if ahead is None or ahead.step != step:
            self.drop()
            ahead = self.request(step)
        self._ahead = None
        if isinstance(ahead.rows, Exception):
            raise ahead.rows
        num_targets, by_sigterm, by_sigint = ahead.total.wait()
        return StepInput(ahead.rows, num_targets, bool(by_sigterm), bool(by_sigint))

    def drop(self) -> None:
        """Discard the requested step. Call it on every rank: it waits until all ranks have requested the step."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.total.wait()

    def waited(self) -> float:
        """Return the time spent waiting for rows since the last call [s]."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        """Stop reading rows, without waiting for the pending sums."""
        # Another rank may have failed, so the pending sums may never complete.
        self._ahead = None
        self._rows.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
