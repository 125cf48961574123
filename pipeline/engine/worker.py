"""The fused pass: each row runs through consecutive per-document stages in one worker, which may drop it.

If a stage raises an error on a row, the row is dropped as `failed`, and its field `_failure` describes the error. A row
that ends every process in which it runs alone is dropped as `crashed`; see `pipeline.engine.guard`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pipeline.engine.failures import CALLS, FAILURE, Failure, place_of
from pipeline.engine.isolation import Crashed
from pipeline.engine.part import CRASHED, FAILED, set_verdict
from pipeline.engine.spark import worker_path
from pipeline.engine.stage import CPU, Drop, PerDocument, Row, RowStep
from schemas.config import Recipe
from schemas.errors import ContractError, PenstockError

ModelPaths = Mapping[str, Mapping[str, str]]
"""Paths of model files by stage and name."""


def local_models(models: ModelPaths) -> dict[str, dict[str, str]]:
    """Return the paths of the models on this worker."""
    return {stage: {name: worker_path(path) for name, path in paths.items()} for stage, paths in models.items()}


class FusedStages:
    """Consecutive per-document stages as one function of a row, with their models loaded once."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths):
        """`models` are paths on this worker, as `local_models` returns them."""
        self._stages: list[tuple[PerDocument, Callable[[Row], Drop | None], frozenset[str]]] = [
            (stage, stage.make(recipe[stage.name], models.get(stage.name, {})), frozenset(stage.reasons))
            for stage in stages
        ]

    def __call__(self, row: Row) -> Row:
        """Run the stages on a row and return the row. If a stage drops the row, its `drop_` columns are set.

        After the drop of a stage that ends the row, only stages with `after_drops` run, if the row has a text. The CPU
        time of each stage is in the row's field CPU. It is that of this thread: the clock of a process counts in steps
        of 4 ms once it has had a limit of CPU time.
        """
        times: dict[str, float] = row.setdefault(CPU, {})
        has_ended = False
        for stage, function, reasons in self._stages:
            if has_ended and not (stage.after_drops and row.get("text") is not None):
                continue
            if stage.max_failed_share is not None:
                row.setdefault(CALLS, []).append(stage.name)
            started = time.thread_time()
            try:
                drop = function(row)
            except (PenstockError, MemoryError):
                # A setting or a file is wrong, such as a model of another kind: this record did not cause it. A record
                # without memory is tried alone.
                raise
            except Exception as error:
                place, message = stage.describe(error, row) if stage.describe is not None else (place_of(error), "")
                row[FAILURE] = Failure(stage.name, type(error).__name__, place, message)
                set_verdict(row, stage.name, Drop(FAILED))
                break
            finally:
                times[stage.name] = times.get(stage.name, 0.0) + time.thread_time() - started
            if drop is None:
                continue
            if drop.rule not in reasons:
                raise ContractError(
                    f"stage {stage.name}: expected a drop for one of {sorted(reasons)}, got {drop.rule!r}. "
                    "Declare the reason in the stage's `reasons`."
                )
            set_verdict(row, stage.name, drop)
            has_ended = has_ended or stage.ends
        return row


def run_rows(rows: Iterable[tuple[Row, Drop | None]], measure: RowStep, stages: tuple[str, str]) -> Iterator[Row]:
    """Run rows through the stages and yield each row. A dropped row has the `drop_` columns.

    `rows` yields (row, drop). A row that has a drop already is not processed; its drop is recorded as one of the stage
    `stages[0]`. If `measure` raises Crashed on a row, a drop of the stage `stages[1]` is recorded.
    """
    for row, drop in rows:
        if drop is not None:
            set_verdict(row, stages[0], drop)
            yield row
            continue
        try:
            yield measure(row)
        except Crashed:
            set_verdict(row, stages[1], Drop(CRASHED))
            yield row
