"""Downstream tasks: a checkpoint, exported for `transformers`, measured by the Evaluation Harness (package lm_eval)."""

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, PenstockError
from schemas.ids import digest_of
from schemas.logs import print_error, printable_output
from schemas.storage import Store
from train.checkpoint.folder import CheckpointMetadata
from train.checkpoint.state import STORED_WEIGHTS, default_device
from train.eval.harness_results import HarnessResult, describe_results, write_results
from train.export.llama import export_checkpoint
from train.monitor.metrics import finite


def check_harness() -> None:
    """Raise ConfigError if a package of the harness is not installed."""
    missing = [name for name in ("lm_eval", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--harness: expected the packages lm_eval and transformers, got no {' and no '.join(missing)}. Install "
            "penstock[harness]."
        )


def measure_tasks(
    run: Store,
    tasks: Sequence[str],
    step: int | None,
    limit: int | None,
    folders: Sequence[str],
    weights: str = STORED_WEIGHTS[0],
) -> list[HarnessResult]:
    """Return the results of a checkpoint on tasks of the harness.

    `step`: step of the checkpoint; None = the last. `limit`: samples of each task; None = all. `folders`: folders with
    the files of more tasks. `weights`: of STORED_WEIGHTS. Raises ConfigError for an unknown task, or a model that
    cannot be exported.
    """
    if not tasks or (limit is not None and limit < 1):
        raise ConfigError(
            f"--harness: expected at least one task and a --limit of at least 1, got {len(tasks)} task(s) and a limit "
            f"of {limit}. Correct the one that is wrong."
        )
    check_harness()
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=list(folders) or None)
    for name in tasks:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f" Did you mean {', '.join(near)}?" if near else " Add its folder with --harness-tasks."
            raise ConfigError(f"--harness: expected names of tasks of lm_eval, got {name!r}.{hint}")
    with tempfile.TemporaryDirectory(prefix="penstock-harness-") as folder:
        note = export_checkpoint(run, Path(folder) / "model", step, weights=weights)
        # float32 as in `penstock evaluate`: differences of checkpoints are then not those of rounding.
        model = {"pretrained": f"{folder}/model", "dtype": "float32"}
        answer = lm_eval.simple_evaluate(
            model="hf",
            model_args=model,
            tasks=list(tasks),
            limit=limit,
            device=default_device().type,
            task_manager=manager,
            log_samples=False,
        )
    return list(results_of(answer or {}, note, weights))


def results_of(answer: Mapping[str, Any], note: CheckpointMetadata, weights: str) -> Iterator[HarnessResult]:
    """Yield a line for each metric in the answer of `simple_evaluate`. `weights`: of STORED_WEIGHTS."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    digest = digest_of(note.model_dump(mode="json"))
    for task, values in sorted(answer.get("results", {}).items()):
        samples = answer.get("n-samples", {}).get(task, {})
        for key, value in sorted(values.items()):
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{name}")
            yield HarnessResult(
                task=task,
                task_version=str(answer.get("versions", {}).get(task)),
                metric=metric,
                filter=name,
                value=finite(float(value)),
                stderr=finite(float(stderr)) if isinstance(stderr, int | float) else None,
                higher_is_better=answer.get("higher_is_better", {}).get(task, {}).get(metric),
                samples=int(samples.get("effective", values.get("sample_len", 0))),
                available=int(samples.get("original", values.get("sample_len", 0))),
                fewshot=answer.get("n-shot", {}).get(task),
                step=note.step,
                weights=weights,
                checkpoint=note.name,
                checkpoint_digest=digest,
                harness=version("lm_eval"),
                transformers=version("transformers"),
                at=now,
            )


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, append the results to the run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.harness", description=__doc__)
    parser.add_argument("run", help="run folder with a checkpoint")
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--folder", action="append", default=[], help="folder with files of more tasks")
    parser.add_argument("--limit", type=int, help="samples of each task; default: all")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument(
        "--weights", choices=STORED_WEIGHTS, default=STORED_WEIGHTS[0], help="those of the last update, or averaged"
    )
    arguments = parser.parse_args(argv)
    run, tasks = Store(arguments.run), [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    try:
        results = measure_tasks(run, tasks, arguments.step, arguments.limit, arguments.folder, arguments.weights)
        write_results(run, results)
        print(describe_results(results))
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
