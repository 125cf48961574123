"""What a run tells: each step once after a resume, a line that was cut off dropped, the progress line's figures."""

import json
from pathlib import Path

import pytest

from schemas.errors import ContractError
from schemas.storage import Store
from train import metrics
from train.metrics import METRICS_NAME, MetricsLog, Progress, StepMetrics, last_metrics, read_metrics


def record(step: int, heldout_loss: float | None = None, tokens: int = 1000) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=0.1 + 1 / step,
        grad_norm=1 / 3,
        learning_rate=1e-3,
        tokens=tokens,
        tokens_per_second=5.0,
        data_seconds=0.25,
        heldout_loss=heldout_loss,
    )


def write(run: Store, after: int, *records: StepMetrics) -> None:
    log = MetricsLog(run, after)
    for item in records:
        log.write(item)
    log.sync()
    log.close()


def test_each_step_stands_once_after_a_resume(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert read_metrics(run) == []
    first, second = [record(step) for step in (1, 2, 3, 4)], [record(3, 2.5), record(4)]
    write(run, 0, *first)
    with open(tmp_path / METRICS_NAME, "ab") as stream:
        stream.write(b'{"step": 5, "lo')
    assert read_metrics(run) == first
    write(run, 2, *second)
    assert read_metrics(run) == first[:2] + second
    lines = [json.loads(line) for line in (tmp_path / METRICS_NAME).read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("heldout_loss") for line in lines] == [None, None, 2.5, None]
    write(run, 0)
    assert read_metrics(run) == []


def test_last_metrics(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    with pytest.raises(ContractError, match="promised a last line for step 3, found none"):
        last_metrics(run, 3)
    write(run, 0, record(1), record(2))
    assert last_metrics(run, 2) == record(2)
    with pytest.raises(ContractError, match="promised a last line for step 3, found step 2"):
        last_metrics(run, 3)


def test_progress_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    progress = Progress(steps=4000, after_step=8, log_every=2, peak_rate=4000.0)
    for step, heldout_loss in ((9, None), (10, None), (11, 3.0), (12, None)):
        clock[0] += 2.0
        progress.show(record(step, heldout_loss))
    clock[0] += 0.5
    progress.show(record(4000))
    assert capsys.readouterr().out.splitlines() == [
        # 2,000 tokens in 4 s are 500 a second, an eighth of the peak; 3,990 steps of 2 s are 2:13:00.
        "step 10/4,000  loss 0.2000  500 tokens/s  MFU 12.5%  2:13:00 left",
        "step 11/4,000  loss 0.1909  held-out 3.0000  500 tokens/s  MFU 12.5%  2:12:58 left",
        "step 12/4,000  loss 0.1833  500 tokens/s  MFU 12.5%  2:12:56 left",
        "step 4,000/4,000  loss 0.1003  2,000 tokens/s  MFU 50.0%  0:00 left",
    ]


def test_progress_without_a_known_peak(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(steps=1, after_step=0, log_every=10, peak_rate=None).show(record(1))
    assert "MFU" not in capsys.readouterr().out
