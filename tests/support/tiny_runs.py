"""Training runs over the tiny dataset on ranks of the shared pool, and readers of their output, for the loop's tests.

`train(folder, 2, "layout.data=zero1")` trains a run folder on two ranks. A `Disturbance` defines what happens to them
meanwhile: a context manager, named by module, that the ranks enter.
"""

import atexit
import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from schemas.ids import canonical_json, digest_of
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.rank_pool import shared_pool
from tests.support.tiny_dataset import make_tiny_dataset
from train.checkpoint.folder import DIGEST, CheckpointMetadata, list_checkpoints
from train.checkpoint.state import read_state, stored_shapes
from train.data.batches import Batches
from train.monitor.events import Event, read_events
from train.monitor.metrics import StepMetrics, read_metrics
from train.plan.layouts import plan_for_devices
from train.plan.plan import open_order, read_plan
from train.pretrain import loop as pretrain
from train.pretrain.step import Learner

# A batch of 5 and a feed-forward width of 74 divide by hardly anything, so splits are uneven. The warm-up is half the
# run because Adam's first updates have full size wherever the gradient is beyond rounding. Seen: one element in 83,280
# had a gradient of -4e-11 in one split and -3e-9 in another; at a first rate of 5e-4 it moved the loss by 1e-6.
RECIPE: dict[str, dict[str, Any]] = {
    "plan": {"num_layers": 2, "d_model": 48, "num_heads": 4, "num_kv_heads": 2, "d_ffw": 74, "tie_embeddings": False},
    "train": {"seq_len": 32, "global_batch": 5, "steps": 20, "eval_every": 7, "eval_sequences": 5},
    "optim": {"learning_rate": 1e-3, "warmup_steps": 10},
    "checkpoint": {"every": 5},
}
TIMES = ("tokens_per_second", "step_seconds", "data_seconds", "checkpoint_stall")
"""Metrics that are no two times the same."""
Disturbance = tuple[Callable[..., AbstractContextManager[Any]], tuple[Any, ...]]
"""A context manager to enter on every rank, called with these arguments."""


@dataclass(frozen=True)
class RankResult:
    """The result of a run on one rank."""

    code: int | None
    """Exit code; None = it raised."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""
    error: str
    """Type and text of the exception."""


# ------------------------------------------------------------------------------------------------------------- running


@cache
def _dataset() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiny-runs-"))
    make_tiny_dataset(folder / "run")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "run"


def make_run(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Return an untrained run folder; `changes` update the sections of RECIPE, None removes a key."""
    shutil.copytree(_dataset(), folder)
    recipe = {name: dict(section) for name, section in RECIPE.items()}
    for name, section in (changes or {}).items():
        recipe[name] = {k: v for k, v in (recipe.get(name, {}) | dict(section)).items() if v is not None}
    run = Store(str(folder))
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return folder


def train_on(ranks: Any, folder: str, overrides: Sequence[str], disturbances: Sequence[Disturbance]) -> RankResult:
    """Run training on one rank, with a single thread on any machine and the planner in this process, which saves its
    start; `tests/train/pretrain/test_setup.py` shows that its own process returns the same plan."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch("train.pretrain.setup.default_threads", return_value=1))
        stack.enter_context(mock.patch("train.pretrain.setup.call_planner", plan_for_devices))
        for disturb, arguments in disturbances:
            stack.enter_context(disturb(*arguments))
        code, error = None, ""
        try:
            code = pretrain.train(Store(folder), list(overrides), ranks)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return RankResult(code, out.getvalue(), err.getvalue(), error)


def train(folder: Path, ranks: int, *overrides: str, during: Sequence[Disturbance] = ()) -> list[RankResult]:
    """Train a run folder on ranks of the pool; return the result of each rank."""
    return shared_pool().play(ranks, train_on, str(folder), overrides, list(during))


def trained(folder: Path, ranks: int, *overrides: str, during: Sequence[Disturbance] = ()) -> Path:
    """Train to the end and return the folder; fail if a rank fails."""
    results = train(folder, ranks, *overrides, during=during)
    if wrong := [item for item in results if item.code != 0]:
        raise AssertionError("\n".join(f"code {item.code}: {item.error}\n{item.err}" for item in wrong))
    return folder


@contextlib.contextmanager
def signalled(step: int, number: int, rank: int) -> Iterator[None]:
    """Send a signal to one rank while step `step` is computed."""
    compute = Learner.compute

    def computing(self: Learner, at: int, *arguments: Any) -> Any:
        actual = compute(self, at, *arguments)
        if at == step and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), number)
        return actual

    with mock.patch.object(Learner, "compute", computing):
        yield


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a run folder."""
    shutil.copytree(folder, to)
    return to


def cut_back(folder: Path, step: int) -> Path:
    """Cut a run folder back to its checkpoint of `step`, as if the run had been killed directly after it."""
    for note in notes(folder):
        if note.step > step:
            shutil.rmtree(folder / note.name)
    (folder / "train/manifest.json").unlink(missing_ok=True)
    path = folder / "train/metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # One line more and half a line: what a kill leaves behind.
    path.write_bytes(b"".join([line for line in lines if json.loads(line)["step"] <= step + 1]) + lines[-1][:20])
    assert notes(folder)[-1].step == step
    return folder


# ----------------------------------------------------------------------------------------------------- what they left


def opened(folder: Path) -> Batches:
    """Return the batches of a run that has a plan."""
    run = Store(str(folder))
    plan, dataset = read_plan(run), open_dataset(run)
    return Batches(dataset, plan.settings.train, open_order(run, dataset, plan))


def metrics(folder: Path) -> list[StepMetrics]:
    """Return the metrics of every step of a run."""
    return read_metrics(Store(str(folder)))


def notes(folder: Path) -> list[CheckpointMetadata]:
    """Return the metadata of every checkpoint of a run, oldest first."""
    return list_checkpoints(Store(str(folder)))


def sealed(content: dict[str, Any]) -> bytes:
    """Return an edited `checkpoint.json` with the digest of its new content, as its writer would store it."""
    fields = {name: value for name, value in content.items() if name != DIGEST}
    return canonical_json({DIGEST: digest_of(fields), **fields})


def events(folder: Path, kind: str) -> list[Any]:
    """Return the events of a kind."""
    actual: list[Event] = read_events(Store(str(folder)))
    return [event for event in actual if event.kind == kind]


def computed(folder: Path) -> list[dict[str, Any]]:
    """Return the computed figures of a run's steps, without times."""
    return [record.model_dump(exclude={*TIMES}) for record in metrics(folder)]


def state_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the whole state of a checkpoint: weights, optimizer state, compression state."""
    run, note = Store(str(folder)), next(note for note in notes(folder) if note.step == step)
    state = {name: torch.empty(shape) for name, shape in stored_shapes(run, note).items()}
    read_state(run, note, state)
    return state


def assert_same_bits(folder: Path, other: Path) -> None:
    """Assert that two runs computed the same figures and end in the same state, bit for bit."""
    assert computed(folder) == computed(other)
    last, other_last = notes(folder)[-1], notes(other)[-1]
    assert (last.step, last.progress) == (other_last.step, other_last.progress)
    state, other_state = state_at(folder, last.step), state_at(other, last.step)
    assert state.keys() == other_state.keys()
    assert [name for name in state if not torch.equal(state[name], other_state[name])] == []


def deviations(folder: Path, other: Path, steps: int | None = None) -> tuple[float, float]:
    """Return the largest relative deviation of loss (held-out loss included) and gradient norm over the first steps."""
    pairs = list(zip(metrics(folder)[:steps], metrics(other)[:steps], strict=True))
    assert [(a.step, a.tokens, a.learning_rate) for a, _ in pairs] == [
        (b.step, b.tokens, b.learning_rate) for _, b in pairs
    ]
    losses = [abs(a.loss / b.loss - 1) for a, b in pairs]
    losses += [abs(a.heldout_loss / b.heldout_loss - 1) for a, b in pairs if a.heldout_loss is not None]
    return max(losses), max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs)


def assert_equal_up_to_rounding(folder: Path, other: Path) -> None:
    """Assert equal losses within 1e-6 and gradient norms within 1e-5 at every step."""
    loss, norm = deviations(folder, other)
    assert loss <= 1e-6
    assert norm <= 1e-5
