"""The results of tasks on their way to the driver: one small answer for each task, and counts that Spark adds up.

The counts of a part, such as histograms by language, can be a hundred kilobytes. They travel as rows of one count each,
and are added up before they reach the driver. So what the driver gets of a part is its files and its row counts.
"""

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.engine.failures import FailureCounts
from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import INPUT_FILES, PartResult, PartResults, TaskResult, WrittenPart
from schemas.manifest import Counts

SUMMED = "summed"
"""Key of a task's result with counts by name, which may be nested. They are added up over all tasks."""
ERRORS = "errors"
"""Name of the counts of errors, which have an example; see `FailureCounts.errors`."""
RESULTS = pa.schema(
    [
        pa.field("ordinal", pa.int64()),
        pa.field("answer", pa.string()),
        pa.field("figure", pa.string()),
        pa.field("count", pa.int64()),
        pa.field("example", pa.string()),
    ]
)
"""A row with an answer has the number of its task; one with a count has the names that lead to it, as a JSON list."""
RESULTS_DDL = "ordinal long, answer string, figure string, count long, example string"
MAX_UNADDED = 64
"""Maximum number of tasks whose counts are added up by the driver. A small run is spared a shuffle."""
NO_DOCUMENT = "~"
"""In place of the id of a document in an example: after every id in the order of texts."""
MICROSECONDS = 1_000_000


@dataclass
class TaskResults:
    """The results of tasks: the answers in the order of the tasks, and the sums of their counts."""

    answers: list[TaskResult]
    summed: dict[str, Any] = field(default_factory=dict)


def result_rows(ordinal: int, answer: TaskResult) -> pa.RecordBatch:
    """Return the rows (RESULTS) of the result of task number `ordinal`: its answer, and one for each count."""
    rows: list[tuple[Any, ...]] = [(ordinal, _json({k: v for k, v in answer.items() if k != SUMMED}), None, None, None)]
    rows += [(None, None, _json(path), count, None) for path, count in _flat(answer.get(SUMMED, {}))]
    for kind, error in answer.get(SUMMED, {}).get(ERRORS, {}).items():
        example = [error["document"] or NO_DOCUMENT, error["message"]]
        rows.append((None, None, _json((ERRORS, kind)), error["count"], _json(example)))
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(zip(*rows), RESULTS.types)], schema=RESULTS
    )


def gather(rows: Iterable[Any]) -> TaskResults:
    """Return the results that rows (RESULTS) describe. The answers are in the order of their tasks."""
    answers: dict[int, TaskResult] = {}
    counts: dict[str, int | None] = {}
    examples: dict[str, str] = {}
    for row in rows:
        figure, count, example = row["figure"], row["count"], row["example"]
        if figure is None:
            answers[row["ordinal"]] = json.loads(row["answer"])
            continue
        before = counts.get(figure)
        counts[figure] = count if before is None else before + count
        if example is not None:
            examples[figure] = min(example, examples.get(figure, example))
    return TaskResults([answers[ordinal] for ordinal in sorted(answers)], _nested(counts, examples))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _flat(counts: Mapping[str, Any], names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Yield each count with the names that lead to it. The names that lead to an empty mapping have None.

    Raises TypeError for a value that is not a whole number: sums of others depend on their order.
    """
    for name, value in counts.items():
        path = (*names, name)
        if path == (ERRORS,):
            continue
        if not isinstance(value, Mapping):
            yield path, operator.index(value)
        elif value:
            yield from _flat(value, path)
        else:
            yield path, None


def _nested(counts: Mapping[str, int | None], examples: Mapping[str, str]) -> dict[str, Any]:
    summed: dict[str, Any] = {}
    for figure in sorted(counts):
        *names, last = json.loads(figure)
        block = summed
        for name in names:
            block = block.setdefault(name, {})
        if names == [ERRORS]:
            document, message = json.loads(examples[figure])
            document = "" if document == NO_DOCUMENT else document
            block[last] = {"count": counts[figure], "document": document, "message": message}
        elif counts[figure] is None:
            block.setdefault(last, {})
        else:
            block[last] = counts[figure]
    return summed


def answer_of_part(result: PartResult, source: str | None) -> TaskResult:
    """Return the result of a task that wrote a part. `source`: that of the part, if the run has several sources."""
    dropped = {reason: count for reason, count in result.counts.dropped.items() if count}
    kept, dropped_chars = result.figures.get("kept_chars", 0), result.figures.get("dropped_chars", {})
    rows = {"rows_in": result.counts.rows_in, "rows_kept": result.counts.rows_kept}
    of_source = {**rows, "dropped": dropped, "kept_chars": kept, "dropped_chars": dropped_chars}
    return {
        "files": {table: written.to_json() for table, written in result.files.items()},
        "rows": result.counts.rows_in,  # for the display of progress
        INPUT_FILES: [dict(source) for source in result.sources],
        "code": result.code,
        "redone": result.redone,
        "resumed": result.resumed,
        "work": work_of(result),
        SUMMED: {
            **rows,
            "dropped": result.counts.dropped,
            "figures": result.figures,
            ERRORS: result.failures.errors,
            "calls": result.failures.calls,
            "cpu_microseconds": _microseconds(result.cpu_seconds),
            "cpu": {
                stage: {"microseconds": _microseconds(spent["seconds"]), "rows": spent["rows"]}
                for stage, spent in result.cpu.items()
            },
            "ends": result.ends,
            "transfers": result.transfers,
            "by_source": {} if source is None else {source: of_source},
        },
    }


def results_of_parts(results: TaskResults) -> PartResults:
    """Return the results of the tasks of a step that wrote parts; see `answer_of_part`."""
    parts = [
        WrittenPart(
            {table: WrittenFile(**written) for table, written in answer["files"].items()},
            answer[INPUT_FILES],
            answer["work"],
        )
        for answer in results.answers
    ]
    summed = results.summed
    if not parts:
        return PartResults(parts)
    cpu = {
        stage: {"seconds": spent["microseconds"] / MICROSECONDS, "rows": spent["rows"]}
        for stage, spent in summed["cpu"].items()
    }
    return PartResults(
        parts,
        Counts(rows_in=summed["rows_in"], rows_kept=summed["rows_kept"], dropped=summed["dropped"]),
        summed["figures"],
        FailureCounts(summed.get(ERRORS, {}), summed["calls"]),
        summed["cpu_microseconds"] / MICROSECONDS,
        cpu,
        summed["ends"],
        summed["transfers"],
        summed["by_source"],
    )


def results_of_one(result: PartResult) -> PartResults:
    """Return the results of a step that wrote one part, whose figures may be values of any kind."""
    part = WrittenPart(result.files, result.sources, work_of(result))
    cpu = {stage: dict(spent) for stage, spent in result.cpu.items()}
    return PartResults(
        [part], result.counts, dict(result.figures), result.failures, result.cpu_seconds, cpu, dict(result.ends)
    )


def work_of(result: PartResult) -> dict[str, float]:
    """Return what a part took, by column of `pipeline.engine.part_times.PART_TIMES`."""
    return {
        "rows": result.counts.rows_in,
        "kept": result.counts.rows_kept,
        "wall_seconds": round(result.wall_seconds, 3),
        "cpu_seconds": round(result.cpu_seconds, 3),
        "requests": result.transfers.get("requests", 0),
        "waited_seconds": result.transfers.get("waited_seconds", 0),
    }


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)
