"""The results of downstream tasks: the lines of harness.jsonl.

Every metric of a task is a line, with all that a comparison needs: versions of task and package, number of samples,
standard error and the digest of the checkpoint. The file is only appended to.
"""

import json
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.paths import HARNESS_NAME
from schemas.storage import Store
from train.monitor.log_files import Journal


class HarnessResult(BaseModel):
    """One line of harness.jsonl: one metric of one task."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    task: str
    """Name of the task or group in the harness."""
    task_version: str
    """Version of the task, as the harness has it."""
    metric: str
    """Name of the metric, such as acc or acc_norm."""
    filter: str
    """Filter of the answers that the metric is computed from; `none` = no filter."""
    value: float | None
    """The metric; None = not finite."""
    stderr: float | None
    """Standard error of the metric over the samples; None = the harness computes none."""
    higher_is_better: bool | None
    """Whether a larger value is better; None = unknown."""
    samples: int
    """Number of samples that were measured."""
    available: int
    """Number of samples that the task has; more than `samples` with --limit."""
    fewshot: int | None
    """Number of examples before each question; None = unknown."""
    step: int
    """Step of the checkpoint."""
    weights: str
    """Weights of the checkpoint that were measured: `model` = those of the last update, `ema` = their average."""
    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    checkpoint_digest: str
    """SHA-256 of the checkpoint's metadata, which has the digests of all of its files."""
    harness: str
    """Version of lm_eval."""
    transformers: str
    """Version of transformers."""
    at: str
    """Time of the measurement, UTC, ISO 8601."""


def write_results(run: Store, results: Sequence[HarnessResult]) -> None:
    """Append results to harness.jsonl of a run."""
    journal = Journal(run, HARNESS_NAME)
    try:
        for result in results:
            journal.append(result.model_dump_json().encode())
        journal.sync()
    finally:
        journal.close()


def read_results(run: Store) -> list[HarnessResult]:
    """Return the lines of harness.jsonl, in order; incomplete lines of killed processes are ignored.

    Raises ContractError if a line is JSON but not a result.
    """
    if not run.exists(HARNESS_NAME):
        return []
    run.size(HARNESS_NAME)  # raises for a folder or a pipe, which could not be read
    results = []
    for number, line in enumerate(run.read_bytes(HARNESS_NAME).split(b"\n"), start=1):
        try:
            results.append(HarnessResult.model_validate(json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            continue
        except ValidationError as error:
            raise ContractError(
                f"{run.uri}/{HARNESS_NAME}, line {number}: expected a result of the harness, got an entry that is not "
                f"valid ({error}). Restore the file from a backup."
            ) from error
    return results


def describe_results(results: Sequence[HarnessResult]) -> str:
    """Return results as lines of text, the checkpoint first."""
    if not results:
        return "the harness returned no metric"
    first = results[0]
    averaged = ", averaged weights," if first.weights == "ema" else ""
    lines = [f"{first.checkpoint}{averaged} by lm_eval {first.harness}, transformers {first.transformers}"]
    width = max(len(f"{item.task} v{item.task_version}") for item in results)
    for item in results:
        value = "not finite" if item.value is None else f"{item.value:.4f}"
        error = "" if item.stderr is None else f" ± {item.stderr:.4f}"
        of_all = "" if item.samples == item.available else f" of {item.available:,}"
        name = f"{item.task} v{item.task_version}"
        lines.append(f"  {name:<{width}}  {item.metric:<10} {value}{error}  {item.samples:,}{of_all} samples")
    return "\n".join(lines)
