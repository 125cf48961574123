"""Figures of ranks and results of tasks in the report: by hand from a few lines, without markup of hostile ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page import write_report
from pipeline.report.training_files import END_BYTES, ranks_view, read_lines, task_rows
from schemas.errors import ContractError
from schemas.paths import HARNESS_NAME, RANKS_NAME
from schemas.storage import Store
from tests.support.report_run import add_training, make_run, words_of

SCRIPT = "<script>alert(1)</script>"


def line(step: int, rank: int, compute: float, **more: Any) -> dict[str, Any]:
    """Return a line of a rank: a step takes 2 s."""
    figures = {"step": step, "steps": 10, "rank": rank, "host": f"host-{rank}", "device": "cpu", "step_seconds": 2.0}
    return figures | {"compute_seconds": compute, "data_seconds": 0.1, "blocked_seconds": 1.0} | more


def written(run: Store, name: str, lines: list[dict[str, Any]], end: str = "") -> Store:
    run.write_atomic(name, ("".join(json.dumps(item) + "\n" for item in lines) + end).encode())
    return run


def test_the_last_window_by_hand_and_the_map_of_all(tmp_path: Path) -> None:
    lines = [line(10, rank, 1.0) for rank in range(3)]
    # Step 20 was computed again after a resume: the later lines count.
    lines += [line(20, rank, 9.0) for rank in range(3)]
    lines += [line(20, 0, 0.4), line(20, 1, 0.5, sent={"all_gather": 3000, "all_reduce": 72}), line(20, 2, 0.625)]
    view = ranks_view(written(Store(str(tmp_path)), RANKS_NAME, lines, '{"step": 30, "ra'))
    assert view is not None
    assert (view.step, view.steps, view.num_ranks, view.windows) == (20, 10, 3, 2)
    rows = {row.name: (row.smallest, row.median, row.largest, row.where) for row in view.rows}
    assert rows["Waiting for rows, share of a step"] == ("5.0 %", "5.0 %", "5.0 %", "")
    assert rows["Waiting for other ranks or a core, share of a step"][1] == "50.0 %"
    assert rows["Own computation, sampled"][3] == "rank 2 on host-2"
    assert "GPU utilization" not in rows
    assert rows["Bytes sent in a step"][0] == rows["Bytes sent in a step"][2] == "3.07 kB"
    # 0.625 is 1.25 times the median: half of the way to the darkest cell, which is at 1.5.
    assert [[dark for dark, _ in row.cells] for row in view.map_rows] == [[0, 0], [0, 0], [0, pytest.approx(0.5)]]
    assert view.map_rows[2].cells[1][1] == "rank 2, up to step 20: 1.25 × the median"


def test_without_ranks_or_with_one_there_is_no_map(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert ranks_view(run) is None
    view = ranks_view(written(run, RANKS_NAME, [line(10, 0, 1.0, cpu_share=1.5)]))
    assert view is not None
    assert view.map_rows == ()
    assert ("CPU time over wall time", "150.0 %") in [(row.name, row.median) for row in view.rows]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    lines = [line(step, 0, 1.0, host="h" * 1000) for step in range(10, 60_000, 10)]
    run = written(Store(str(tmp_path)), RANKS_NAME, lines)
    assert run.size(RANKS_NAME) > END_BYTES
    read = read_lines(run, RANKS_NAME, ("step",), END_BYTES)
    assert 0 < len(read) < len(lines)
    assert read[-1] == lines[-1]


@pytest.mark.parametrize("text", ["[1]\n", '{"step": 1}\n', '{"step": null, "steps": 1, "rank": 0}\n'])
def test_a_line_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    run = Store(str(tmp_path))
    run.write_atomic(RANKS_NAME, text.encode())
    with pytest.raises(ContractError, match=r"ranks\.jsonl: expected lines with the fields step, steps, rank"):
        ranks_view(run)


def result(task: str, step: int, value: float | None, **more: Any) -> dict[str, Any]:
    figures = {"task": task, "task_version": "2.0", "metric": "acc", "filter": "none", "value": value, "stderr": 0.01}
    figures |= {"samples": 100, "available": 400, "fewshot": 0, "step": step, "checkpoint_digest": "ab" * 32}
    return figures | {"harness": "0.4", "transformers": "5", "at": "2026-01-02T03:04:05+00:00"} | more


def test_the_latest_result_of_a_task_and_step_is_shown(tmp_path: Path) -> None:
    lines = [result("b", 5, 0.5), result("a", 9, None, stderr=None), result("a", 5, 0.1), result("a", 5, 0.25)]
    lines += [result("b", 5, 0.75, weights="ema")]
    *rows, averaged = task_rows(written(Store(str(tmp_path)), HARNESS_NAME, lines))
    assert (averaged.metric, averaged.value) == ("acc, averaged weights", "0.7500 ± 0.0100")
    assert [(row.task, row.step, row.value, row.samples) for row in rows] == [
        ("a v2.0", 5, "0.2500 ± 0.0100", "100 of 400"),
        ("a v2.0", 9, "not finite", "100 of 400"),
        ("b v2.0", 5, "0.5000 ± 0.0100", "100 of 400"),
    ]
    assert (rows[0].checkpoint, rows[0].at) == ("ab" * 6, "2026-01-02 03:04:05")


def test_the_page_shows_ranks_tasks_and_accuracy_without_markup_from_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_training(run)
    text = run.read_bytes("train/metrics.jsonl").decode().splitlines()
    steps = [json.loads(item) | {"accuracy": 0.25, "heldout_accuracy": 0.5} for item in text[:-1]]
    written(run, "train/metrics.jsonl", steps)
    written(run, RANKS_NAME, [line(10, 0, 1.0), line(10, 1, 3.0, host=SCRIPT)])
    written(run, HARNESS_NAME, [result(SCRIPT, 5, 0.5, task_version=SCRIPT)])
    slow = {"kind": "straggler", "step": 10, "at": "2026-01-02T03:04:05", "steps": 10, "rank": 1, "host": SCRIPT}
    slow |= {"cause": "compute", "factor": 3.0, "share": 2 / 3}
    run.write_atomic("train/events.jsonl", (json.dumps(slow) + "\n").encode())
    page = Path(write_report(run, None)).read_text()
    assert SCRIPT not in page
    words = words_of(page)
    assert "2 ranks in the 10 steps up to step 10" in words
    assert f"rank 1 on {SCRIPT} computes 3.0 times as long as the median; the others wait for it in 67 %" in words
    assert "Token accuracy share of tokens ranked first" in words
    assert f"{SCRIPT} v{SCRIPT} acc 0.5000 ± 0.0100 100 of 400" in words
