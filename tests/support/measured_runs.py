"""Runs whose losses are given and not trained: a tiny dataset, a plan for it, and metrics that follow curves."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.manifest import RUN_NAME, read_run, write_run
from schemas.paths import METRICS_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.mix.measured import MeasuredRun, measured_run
from train.monitor.metrics import HeldoutMetrics, StepMetrics
from train.plan.make_plan import make_plan
from train.plan.plan import write_plan

Curve = Callable[[int], float]
"""Loss of a source after a step, 1 = first."""
STEPS = 100
RECIPE: dict[str, dict[str, Any]] = {
    "plan": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "d_ffw": 64},
    "train": {"seq_len": 32, "global_batch": 2, "steps": STEPS, "eval_every": 5, "eval_sequences": 4},
    "optim": {"learning_rate": 1e-3, "warmup_steps": 4},
}
"""100 steps of 64 tokens."""


def run_of(
    folder: Path,
    curves: Mapping[str, Curve],
    held_out: set[str] | None = None,
    documents: Mapping[str, int] | None = None,
    **changes: dict[str, Any],
) -> Store:
    """A run folder with a source for each curve; `held_out` names those whose held-out loss is measured (None: all)."""
    run = Store(str(folder))
    if not run.exists(RUN_NAME):
        make_tiny_dataset(folder, dict(documents or dict.fromkeys(curves, 40)))
    recipe = {name: section | changes.get(name, {}) for name, section in RECIPE.items()}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    plan = make_plan(run, open_dataset(run), load_settings(recipe, [], "test"))
    write_plan(run, plan)
    counts = plan.stages[0].counts
    names = set(curves) if held_out is None else held_out
    lines = [_step(step, curves, names, counts, plan.settings.train.eval_every) for step in range(1, plan.steps + 1)]
    run.write_atomic(METRICS_NAME, b"".join(line.line() + b"\n" for line in lines))
    return run


def measured(folder: Path, curves: Mapping[str, Curve], **more: Any) -> MeasuredRun:
    """`run_of`, read."""
    return measured_run(run_of(folder, curves, **more))


def _step(
    step: int, curves: Mapping[str, Curve], names: set[str], counts: Mapping[str, int], every: int
) -> StepMetrics:
    losses = {name: curve(step) for name, curve in curves.items() if name in counts}
    heldout = {name: HeldoutMetrics(loss=curves[name](step), perplexity=None) for name in names}
    tokens = {name: 64 * counts[name] // sum(counts.values()) for name in losses}
    return StepMetrics(
        step=step,
        stage=1,
        loss=sum(losses.values()) / len(losses),
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=64,
        tokens_per_second=1.0,
        step_seconds=1.0,
        data_seconds=0.0,
        losses=losses,
        source_tokens=tokens,
        heldout=heldout if every and step % every == 0 else {},
    )
