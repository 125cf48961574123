"""Training in the report: the figures of every rank, and the results on downstream tasks.

Only the end of the file of ranks is read: with a thousand ranks it grows by megabytes an hour.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.facts import number
from schemas.errors import ContractError
from schemas.paths import HARNESS_NAME, RANKS_NAME
from schemas.storage import Store
from schemas.text import format_bytes, format_duration

END_BYTES = 4 << 20
"""Bytes at the end of the file of ranks that are read."""
MAX_WINDOWS, MAX_RANKS = 40, 256
"""Maximum number of columns and rows of the map of ranks; beyond MAX_RANKS, the slowest are shown."""
SLOW = 1.5
"""A cell of the map is at its darkest from this factor on."""


@dataclass(frozen=True)
class RankRow:
    """One figure of the ranks in the last window."""

    name: str
    smallest: str
    median: str
    largest: str
    where: str
    """The rank with the largest value."""


@dataclass(frozen=True)
class RankMapRow:
    """A rank in the map: its own computation over that of the median rank, by window."""

    rank: int
    host: str
    cells: tuple[tuple[float, str], ...]
    """Darkness (0 to 1) and tooltip of each window; the darkness of a window without the rank is 0."""


@dataclass(frozen=True)
class RanksView:
    """The figures of ranks that the report shows."""

    step: int
    """Last step of the last window."""
    steps: int
    num_ranks: int
    rows: tuple[RankRow, ...]
    map_rows: tuple[RankMapRow, ...]
    """Empty if there is only one rank."""
    windows: int


def read_lines(run: Store, name: str, required: Sequence[str], end: int | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects of a file's lines, without incomplete ones; an absent file has none.

    `required`: fields of each line. `end`: bytes at the end of the file that are read; None = all. Raises ContractError
    for a line that is JSON, and has not these fields.
    """
    if not run.exists(name):
        return []
    size = run.size(name)
    start = 0 if end is None else max(0, size - end)
    with run.open_unchecked(name) as stream:
        stream.seek(start)
        lines = bytes(stream.read(size - start)).split(b"\n")
    found: list[dict[str, Any]] = []
    for line in lines[1 if start else 0 :]:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the unfinished line of a process that was killed
        if not isinstance(values, dict) or not all(isinstance(values.get(key), int | float | str) for key in required):
            raise ContractError(
                f"{run.uri}/{name}: expected lines with the fields {', '.join(required)}, got {str(values)[:100]}. "
                "Restore the file from a backup, or remove it."
            )
        found.append(values)
    return found


def ranks_view(run: Store) -> RanksView | None:
    """Return the figures of the ranks of a run; None if it has none."""
    required = ("step", "steps", "rank", "host", "step_seconds", "compute_seconds", "data_seconds")
    lines = read_lines(run, RANKS_NAME, required, END_BYTES)
    windows: dict[int, dict[int, dict[str, Any]]] = {}
    for line in lines:
        windows.setdefault(_whole(line["step"]), {})[_whole(line["rank"])] = line  # the last line of a rank counts
    if not windows:
        return None
    last = max(windows)
    members = [windows[last][rank] for rank in sorted(windows[last])]
    shown = [windows[step] for step in sorted(windows)[-MAX_WINDOWS:]]
    return RanksView(
        step=last,
        steps=_whole(members[0]["steps"]),
        num_ranks=len(members),
        rows=tuple(row for figure in FIGURES if (row := _row(figure, members)) is not None),
        map_rows=tuple(_map_rows(shown, members)) if len(members) > 1 else (),
        windows=len(shown),
    )


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 1 << 53 else 0


def _share_of_step(key: str) -> Callable[[Mapping[str, Any]], Any]:
    def share(line: Mapping[str, Any]) -> float | None:
        value, seconds = line.get(key), line["step_seconds"]
        numbers = isinstance(value, int | float) and isinstance(seconds, int | float) and seconds > 0
        return value / seconds if numbers else None

    return share


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


Figure = tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[float], str]]
FIGURES: tuple[Figure, ...] = (
    ("Duration of a step", lambda line: line["step_seconds"], format_duration),
    ("Own computation, sampled", lambda line: line["compute_seconds"], format_duration),
    ("Waiting for rows, share of a step", _share_of_step("data_seconds"), _percent),
    ("Waiting for other ranks or a core, share of a step", _share_of_step("blocked_seconds"), _percent),
    ("CPU time over wall time", lambda line: line.get("cpu_share"), _percent),
    ("GPU utilization", lambda line: line.get("utilization"), _percent),
    ("Largest device memory", lambda line: line.get("memory"), format_bytes),
    ("Largest host memory", lambda line: line.get("host_memory"), format_bytes),
    ("Bytes sent in a step", lambda line: sum(_sent(line).values()) or None, format_bytes),
)
"""Name, value of a line, and format of each figure; a figure without values is left out."""


def _sent(line: Mapping[str, Any]) -> dict[str, float]:
    sent = line.get("sent")
    return {str(kind): size for kind, size in sent.items() if isinstance(size, int)} if isinstance(sent, dict) else {}


def _row(figure: Figure, members: Sequence[Mapping[str, Any]]) -> RankRow | None:
    name, value_of, shown = figure
    values = [(value, line) for line in members if isinstance(value := value_of(line), int | float)]
    if not values:
        return None
    numbers = [value for value, _ in values]
    most, at = max(values, key=lambda item: item[0])
    where = f"rank {_whole(at['rank'])} on {at['host']}" if most > min(numbers) else ""
    return RankRow(name, shown(min(numbers)), shown(statistics.median(numbers)), shown(most), where)


def _map_rows(
    windows: Sequence[Mapping[int, Mapping[str, Any]]], last: Sequence[Mapping[str, Any]]
) -> list[RankMapRow]:
    ratios: list[dict[int, float]] = []
    for window in windows:
        times = {rank: line["compute_seconds"] for rank, line in window.items()}
        times = {rank: value for rank, value in times.items() if isinstance(value, int | float)}
        middle = statistics.median_low(times.values()) if times else 0
        ratios.append({rank: value / middle if middle else 1.0 for rank, value in times.items()})
    chosen = sorted(last, key=lambda line: -max(of.get(_whole(line["rank"]), 0.0) for of in ratios))[:MAX_RANKS]
    rows = []
    for line in sorted(chosen, key=lambda line: _whole(line["rank"])):
        rank, cells = _whole(line["rank"]), []
        for window, of in zip(windows, ratios, strict=True):
            ratio = of.get(rank)
            step = number(_whole(next(iter(window.values()))["step"]))
            note = f"rank {rank}, up to step {step}: " + (
                "no figures" if ratio is None else f"{ratio:.2f} × the median"
            )
            cells.append((min(max(((ratio or 1.0) - 1) / (SLOW - 1), 0.0), 1.0), note))
        rows.append(RankMapRow(rank, str(line["host"]), tuple(cells)))
    return rows


@dataclass(frozen=True)
class TaskRow:
    """A result on a downstream task."""

    task: str
    metric: str
    value: str
    samples: str
    fewshot: str
    step: int
    checkpoint: str
    """First characters of the checkpoint's digest."""
    versions: str
    at: str


def task_rows(run: Store) -> list[TaskRow]:
    """Return the results on downstream tasks, the latest of each task, metric and step, in the order of these."""
    latest: dict[tuple[str, str, str, int], TaskRow] = {}
    for line in read_lines(run, HARNESS_NAME, ("task", "metric", "filter", "step", "samples", "at")):
        value, stderr = line.get("value"), line.get("stderr")
        shown = f"{value:.4f}" if isinstance(value, int | float) else "not finite"
        shown += f" ± {stderr:.4f}" if isinstance(stderr, int | float) else ""
        samples, available = _whole(line["samples"]), _whole(line.get("available"))
        metric = str(line["metric"]) + (f", {line['filter']}" if line["filter"] != "none" else "")
        metric += ", averaged weights" if line.get("weights") == "ema" else ""
        row = TaskRow(
            task=f"{line['task']} v{line.get('task_version')}",
            metric=metric,
            value=shown,
            samples=number(samples) + (f" of {number(available)}" if available > samples else ""),
            fewshot=str(line.get("fewshot") if line.get("fewshot") is not None else "–"),
            step=_whole(line["step"]),
            checkpoint=str(line.get("checkpoint_digest", ""))[:12],
            versions=f"lm_eval {line.get('harness')}, transformers {line.get('transformers')}",
            at=str(line["at"])[:19].replace("T", " "),
        )
        latest[row.task, row.metric, row.fewshot, row.step] = row
    return [latest[key] for key in sorted(latest)]
