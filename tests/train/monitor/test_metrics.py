"""Metrics: each step once after a resume or a rewind, in lines, scalars and a table; figures computed by hand."""

import errno
import io
import json
import math
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from schemas.errors import ContractError
from schemas.paths import METRICS_NAME
from schemas.storage import Store
from train.monitor import log_files as metrics_log
from train.monitor import metrics, progress
from train.monitor.log_files import TABLE_NAME, TENSORBOARD_NAME, Journal, MetricsLog, Scalars, metrics_schema
from train.monitor.metrics import (
    HeldoutMetrics,
    StepMetrics,
    flops_utilisation,
    heldout_by_source,
    last_metrics,
    lines_backwards,
    metrics_after,
    metrics_backwards,
    metrics_by_source,
    read_metrics,
)
from train.monitor.progress import ProgressPrinter

SOURCES = ("web", "code.py")
NAN, INF = math.nan, math.inf


def record(step: int, **values) -> StepMetrics:
    given = {
        "step": step,
        "stage": 1,
        "loss": 0.1 + 1 / step,
        "grad_norm": 1 / 3,
        "learning_rate": 1e-3,
        "tokens": 1000,
        "tokens_per_second": 500.0,
        "step_seconds": 2.0,
        "data_seconds": 0.25,
    }
    return StepMetrics(**(given | values))


FULL = record(
    7,
    stage=2,
    mfu=0.3,
    bytes_sent=10,
    bytes_plain=1000,
    checkpoint_stall=0.5,
    memory=1 << 40,
    accuracy=0.25,
    heldout_loss=2.5,
    heldout_accuracy=0.5,
    losses={"web": 1 / 3, "code.py": 0.1},
    source_tokens={"web": 600, "code.py": 400},
    heldout={"web": HeldoutMetrics(loss=2.0, perplexity=math.exp(2.0), bits_per_byte=0.7, accuracy=0.5)},
)
SKIPPED = record(8, loss=NAN, grad_norm=INF, skipped=True, loss_scale=65536.0, losses={"web": 1.5, "code.py": INF})


def write(run: Store, after: int, *records: StepMetrics) -> None:
    log = MetricsLog(run, SOURCES, after)
    for item in records:
        log.write(item)
    log.sync()
    log.close()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / TENSORBOARD_NAME), {"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def full_disk(journal: Journal) -> Journal:
    """Return the journal on a disk that accepts no bytes."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    journal._file, before = open("/dev/full", "r+b", buffering=0), journal._file  # noqa: SIM115
    journal.before = before
    return journal


# ------------------------------------------------------------------------------------------------- one step


@pytest.mark.parametrize("step", [record(1), FULL, SKIPPED], ids=["plain", "full", "skipped"])
def test_a_step_is_its_line(step: StepMetrics) -> None:
    assert StepMetrics.model_validate_json(step.line()) == step
    assert StepMetrics.model_validate(json.loads(step.line(), parse_constant=lambda name: pytest.fail(name))) == step


def test_a_skipped_step_has_null_figures() -> None:
    line = json.loads(SKIPPED.line())
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)
    assert line["losses"] == {"web": 1.5}
    assert "heldout_loss" not in line
    assert record(3, loss=2.0, grad_norm=INF, skipped=True).loss == 2.0


@pytest.mark.parametrize("bad", [{"loss": NAN}, {"grad_norm": INF}, {"loss": None}])
def test_a_step_that_is_not_finite_must_be_skipped(bad: dict) -> None:
    with pytest.raises(ValidationError, match=r"step 3: expected finite loss and grad_norm unless it is skipped"):
        record(3, **bad)


def test_only_losses_may_be_infinite() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        record(3, learning_rate=NAN)


def test_means_by_source() -> None:
    losses, tokens = metrics_by_source(["web", "books", "code"], [6.0, 0.0, 5.0], [4.0, 0.0, 2.0])
    assert (losses, tokens) == ({"web": 1.5, "code": 2.5}, {"web": 4, "code": 2})
    assert sum(losses[name] * tokens[name] for name in tokens) == 11.0


def test_heldout_figures_by_hand() -> None:
    # 8 targets of ln 2 each for 4 bytes: 2 bits a byte.
    actual = heldout_by_source(["a", "b", "c"], [8 * math.log(2), 3.0, 9.0], [8, 2, 0], [4, 0, 7], [6, 0, 0])
    assert actual.keys() == {"a", "b"}
    assert tuple(dict(actual["a"]).values()) == pytest.approx((math.log(2), 2.0, 2.0, 0.75), rel=1e-15)
    assert actual["b"] == HeldoutMetrics(loss=1.5, perplexity=math.exp(1.5), accuracy=0.0)
    assert heldout_by_source(["a"], [800.0], [1], None)["a"] == HeldoutMetrics(loss=800.0, perplexity=None)
    assert heldout_by_source(["a"], [INF], [1], [5])["a"] == HeldoutMetrics(loss=None, perplexity=None)


def test_utilisation_by_hand() -> None:
    # 1,000 positions a second of 6 GFLOP are 6 TFLOP/s, of 2 devices with 10 TFLOP/s each.
    assert flops_utilisation(1000.0, 6e9, 2, 1e13) == 0.3
    assert flops_utilisation(1000.0, 6e9, 2, None) is None


def test_wait_share() -> None:
    assert record(1).wait_share == 0.125
    assert record(1, step_seconds=0.0).wait_share == 0.0


# ------------------------------------------------------------------------------------------------- the journal


def test_each_step_is_written_once_after_a_resume(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert read_metrics(run) == []
    first, second = [record(step) for step in (1, 2, 3, 4)], [record(3, heldout_loss=2.5), record(4)]
    write(run, 0, *first)
    with open(tmp_path / METRICS_NAME, "ab") as stream:
        stream.write(b'{"step": 5, "lo')
    assert read_metrics(run) == first
    write(run, 2, *second)
    assert read_metrics(run) == first[:2] + second
    lines = [json.loads(line) for line in (tmp_path / METRICS_NAME).read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("heldout_loss") for line in lines] == [None, None, 2.5, None]
    assert pq.read_table(tmp_path / TABLE_NAME)["heldout_loss"].to_pylist() == [None, None, 2.5, None]
    write(run, 0)
    assert read_metrics(run) == []
    assert pq.read_table(tmp_path / TABLE_NAME).num_rows == 0


def test_a_rewind_drops_what_it_undoes_everywhere(tmp_path: Path) -> None:
    log = MetricsLog(Store(str(tmp_path)), SOURCES, 0)
    for step in (1, 2, 3):
        log.write(record(step))
    log.sync()
    log.write(record(4))
    assert log.after(2) == [record(3), record(4)]
    log.rewind(2)
    log.write(record(3, loss=9.0))
    log.close()
    assert read_metrics(Store(str(tmp_path))) == [record(1), record(2), record(3, loss=9.0)]
    assert pq.read_table(tmp_path / TABLE_NAME)["loss"].to_pylist() == [1.1, 0.6, 9.0]
    assert scalars(tmp_path)["loss"] == pytest.approx({1: 1.1, 2: 0.6, 3: 9.0})


def test_a_line_that_is_no_step_is_refused(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    run.write_atomic(METRICS_NAME, record(1).line() + b'\n{"step": 2}\n')
    with pytest.raises(ContractError, match=r"metrics.jsonl, line 2: expected the metrics of a step"):
        read_metrics(run)


def test_last_metrics(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    with pytest.raises(ContractError, match="expected step 3 in the last line, got none"):
        last_metrics(run, 3)
    write(run, 0, record(1), record(2))
    assert last_metrics(run, 2) == record(2)
    with pytest.raises(ContractError, match="expected step 3 in the last line, got step 2"):
        last_metrics(run, 3)


class CountedReads:
    """A filesystem that counts the bytes that are read from its files."""

    def __init__(self, fs: Any):
        self._fs, self.num_bytes = fs, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def open_input_file(self, path: str) -> Iterator[Any]:
        with self._fs.open_input_file(path) as file:
            yield SimpleNamespace(read_at=lambda size, begin: self._counted(file.read_at(size, begin)))

    def _counted(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        return data


def test_the_end_of_a_long_file_is_read_in_blocks(tmp_path: Path) -> None:
    """A file of 255 MB: the window of a spike, the end and a resume read less than 1 MB of it."""
    line = record(1, losses={"web": 1 / 3, "code.py": 0.1}, source_tokens={"web": 600, "code.py": 400}).line() + b"\n"
    repeats, run = 255_000_000 // len(line), Store(str(tmp_path))
    last = [record(step, losses={"web": 1 / step}) for step in range(repeats + 1, repeats + 201)]
    path = tmp_path / METRICS_NAME
    path.parent.mkdir()
    with path.open("wb") as file:
        for _ in range(repeats // 10_000):
            file.write(line * 10_000)
        file.write(b"".join(step.line() + b"\n" for step in last) + b'{"step": 3, "unfini')
    reads = run.fs = CountedReads(run.fs)
    assert path.stat().st_size > 250_000_000
    assert [step for _, step in islice(metrics_backwards(run), 128)][::-1] == last[-128:]
    assert metrics_after(run, last[-3].step) == last[-2:]
    assert last_metrics(run, last[-1].step) == last[-1]
    assert 0 < reads.num_bytes < 1_000_000


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_lines_backwards_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(metrics, "BLOCK_BYTES", block)
    run = Store(str(tmp_path))
    assert list(lines_backwards(run, "none")) == []
    for text, expected in (
        (b"", []),
        (b"half", []),
        (b"one\n", [(0, b"one")]),
        (b"\none\n", [(1, b"one"), (0, b"")]),
        (b"one\ntwo\n\nhalf", [(8, b""), (4, b"two"), (0, b"one")]),
    ):
        run.write_atomic("a", text)
        assert list(lines_backwards(run, "a")) == expected
    monkeypatch.setattr(metrics, "MAX_LINE_BYTES", 200)
    run.write_atomic("a", b"x" * 1000 + b"\n")
    with pytest.raises(ContractError, match="a: expected lines of at most 200 bytes, got a longer one"):
        list(lines_backwards(run, "a"))


def test_a_resume_reads_the_table_in_place_of_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Store(str(tmp_path))
    steps = [record(step, losses={"web": 1 / step}) for step in range(1, 9)]
    write(run, 0, *steps)
    whole = (tmp_path / TABLE_NAME).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "read_metrics", None)
        write(run, 5, *steps[5:])
    assert (tmp_path / TABLE_NAME).read_bytes() == whole
    # A table of another attempt of these steps is not used, nor a damaged one, nor one that ends earlier.
    other = [step.model_copy(update={"step_seconds": 0.25}) for step in steps]
    write(Store(str(tmp_path / "other")), 0, *other)
    write(Store(str(tmp_path / "short")), 0, *steps[:3])
    for table in (b"PAR1", *((tmp_path / name / TABLE_NAME).read_bytes() for name in ("other", "short"))):
        run.write_atomic(TABLE_NAME, table)
        write(run, 5, *steps[5:])
        assert (tmp_path / TABLE_NAME).read_bytes() == whole
        assert read_metrics(run) == steps


def test_a_full_disk_keeps_lines_waiting_and_a_checkpoint_from_being_ahead(tmp_path: Path, capsys) -> None:
    log = MetricsLog(Store(str(tmp_path)), SOURCES, 0)
    log.write(record(1))
    journal = full_disk(log._journal)
    for step in (2, 3):
        log.write(record(step))
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    results = capsys.readouterr().err.splitlines()
    assert len(results) == 1
    assert results[0].endswith("the disk is full; 1 line(s) kept in memory until it can be written")
    journal._file = journal.before
    log.write(record(4))
    log.close()
    assert [step.step for step in read_metrics(Store(str(tmp_path)))] == [1, 2, 3, 4]


def test_lines_that_are_lost_are_counted(tmp_path: Path, capsys) -> None:
    journal = full_disk(Journal(Store(str(tmp_path)), "a"))
    journal.append(b"one", durable=True)
    journal.append(b"two")
    journal.close()
    assert [line.rpartition("; ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "1 line(s) kept in memory until it can be written",
        "2 line(s) lost",
    ]


def test_another_error_of_the_disk_ends_the_run(tmp_path: Path) -> None:
    journal = Journal(Store(str(tmp_path)), "a")
    journal._file.close()
    journal._file = open(tmp_path / "a", "rb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="not open for writing"):
        journal.append(b"x")


# ------------------------------------------------------------------------------------------------- scalars and table


def test_scalars(tmp_path: Path) -> None:
    write(Store(str(tmp_path)), 0, FULL, SKIPPED)
    actual = scalars(tmp_path)
    assert actual["loss"] == pytest.approx({7: 0.1 + 1 / 7})
    assert actual["loss/web"] == pytest.approx({7: 1 / 3, 8: 1.5})
    assert actual["loss/code.py"] == pytest.approx({7: 0.1})
    assert actual["tokens/code.py"] == {7: 400}
    assert actual["heldout/web/perplexity"] == pytest.approx({7: math.exp(2)})
    assert actual["heldout/web/bits_per_byte"] == pytest.approx({7: 0.7})
    assert actual["data/wait_share"] == {7: 0.125, 8: 0.125}
    assert actual["skipped"] == {7: 0, 8: 1}
    assert "step" not in actual


def test_the_table(tmp_path: Path) -> None:
    write(Store(str(tmp_path)), 0, FULL, SKIPPED)
    table = pq.read_table(tmp_path / TABLE_NAME)
    assert table.schema.equals(metrics_schema(SOURCES), check_metadata=True)
    assert table.column_names[:4] == ["step", "stage", "loss", "grad_norm"]
    figures = ("loss", "perplexity", "bits_per_byte", "accuracy")
    assert table.column_names[-12:] == [
        *("loss.web", "loss.code.py", "tokens.web", "tokens.code.py"),
        *(f"heldout.{source}.{name}" for source in SOURCES for name in figures),
    ]
    assert all(field.metadata[b"description"] for field in table.schema)
    rows = table.to_pylist()
    assert [row["loss"] for row in rows] == [0.1 + 1 / 7, None]
    assert [row["skipped"] for row in rows] == [False, True]
    assert [row["loss.code.py"] for row in rows] == [0.1, None]
    assert [row["memory"] for row in rows] == [1 << 40, None]
    assert [row["heldout.web.perplexity"] for row in rows] == [math.exp(2.0), None]
    assert {str(kind) for kind in table.schema.types} == {"int64", "double", "bool"}


def test_pandas_reads_the_table_as_it_is(tmp_path: Path) -> None:
    import pandas

    write(Store(str(tmp_path)), 0, FULL, SKIPPED)
    frame = pandas.read_parquet(tmp_path / TABLE_NAME)
    assert frame.loc[~frame.skipped, "loss.web"].tolist() == [1 / 3]
    assert frame["tokens.web"].sum() == 600


def test_the_table_does_not_depend_on_the_number_of_writes(tmp_path: Path) -> None:
    steps = [record(step, losses={"web": 1 / step}) for step in range(1, 50)]
    log = MetricsLog(Store(str(tmp_path / "many")), SOURCES, 0)
    for step in steps:
        log.write(step)
        if step.step % 7 == 0:
            log.sync()
            assert pq.read_metadata(tmp_path / "many" / TABLE_NAME).num_rows == step.step
    log.close()
    write(Store(str(tmp_path / "one")), 0, *steps)
    assert (tmp_path / "many" / TABLE_NAME).read_bytes() == (tmp_path / "one" / TABLE_NAME).read_bytes()


def test_a_source_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(Store(str(tmp_path)), SOURCES, 0)
    with pytest.raises(ContractError, match=r"step 3: expected metrics of the run's sources, got \['loss.books'\]"):
        log.write(record(3, losses={"books": 1.0}))
    log.close()


def test_scalars_and_table_may_fail_on_a_full_disk_and_the_run_continues(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = MetricsLog(Store(str(tmp_path)), SOURCES, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Scalars, "write", refuse)
        patch.setattr(metrics_log, "write_table", refuse)
        for step in (1, 2):
            log.write(record(step))
            log.sync()
    results = [line.partition(str(tmp_path))[2] for line in capsys.readouterr().err.splitlines()]
    assert results == [
        "/train/tensorboard: the disk is full; no more scalars until the run is started again",
        "/train/metrics.parquet: the disk is full; written again at the next checkpoint",
    ]
    log.close()
    assert pq.read_table(tmp_path / TABLE_NAME).num_rows == len(read_metrics(Store(str(tmp_path)))) == 2


# ------------------------------------------------------------------------------------------------- the progress line


class Clock:
    """A clock that advances only when the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_progress_lines_of_a_log_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    time = Clock(monkeypatch)
    shown = ProgressPrinter(steps=4000, log_every=2)
    for step, seconds, values, mark in (
        (9, 60.0, {"step_seconds": 6.0}, ""),  # Everything is set up in the first step.
        (10, 2.0, {"mfu": 0.25}, ""),
        (11, 2.0, {"heldout_loss": 3.0}, ""),
        (13, 3.0, {"mfu": 0.5, "step_seconds": 1.0}, "spike"),
        (15, 3.0, {"loss": NAN, "skipped": True}, ""),
        (17, 3.0, {}, ""),
    ):
        time.now += seconds
        shown.show(record(step, **values), mark)
    time.now += 7.0
    shown.show(record(4000))
    shown.close()
    assert capsys.readouterr().out.splitlines() == [
        # 2,000 tokens in 6 + 2 s, of which 0.5 s were waited; 3,990 steps of 2 s by the clock are 2:13:00.
        "step 10/4,000  loss 0.2000  250 tokens/s  MFU 6.2 %  data 6.2 %  2:13:00 left",
        "step 11/4,000  loss 0.1909  held-out 3.0000  500 tokens/s  data 12.5 %  2:12:58 left",
        "step 13/4,000  loss 0.1769  1,000 tokens/s  MFU 50.0 %  data 25.0 %  2:35:03 left  <- spike",
        "step 15/4,000  loss not finite  500 tokens/s  data 12.5 %  2:46:02 left  <- skipped",
        "step 4,000/4,000  loss 0.1003  500 tokens/s  data 12.5 %  0:00:00 left",
    ]


def test_the_time_left_goes_by_the_last_hundred_steps(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    time = Clock(monkeypatch)
    shown = ProgressPrinter(steps=1000, log_every=200)
    for step in range(1, 201):
        time.now += 50.0 if step <= 100 else 1.0
        shown.show(record(step))
    assert capsys.readouterr().out.splitlines()[0].endswith("0:13:20 left")
    shown = ProgressPrinter(steps=1000, log_every=1)
    time.now += 4.0
    shown.show(record(1))
    assert capsys.readouterr().out.splitlines()[0].endswith("1:06:36 left")


def test_training_continues_when_nobody_reads_its_output_any_more() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        shown = ProgressPrinter(steps=100, log_every=1, stream=stream)
        shown.print_line("first")
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)  # as `penstock train run | head -1` does
        for step in (1, 2):
            shown.show(record(step))
        print("trained", file=stream, flush=True)


def test_a_terminal_sees_a_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    time, stream = Clock(monkeypatch), io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    shown = ProgressPrinter(steps=100, log_every=100, stream=stream)
    for step, seconds in ((1, 0.5), (2, 0.5), (3, 0.5), (4, 5.0)):
        time.now += seconds
        shown.show(record(step))
    shown.print_line("checkpoint")
    shown.close()
    first, second, third, kept = stream.getvalue().split("\r\x1b[K")
    assert first == ""
    assert second.startswith("step 2/100  loss 0.6000")
    assert third.startswith("step 4/100")
    assert max(len(second), len(third)) < 80
    assert kept == "checkpoint\n"
    shown = ProgressPrinter(steps=100, log_every=100, stream=io.StringIO())
    time.now += 5.0
    shown.show(record(1))
    assert shown._stream.getvalue() == ""


def test_a_real_terminal_has_its_own_width() -> None:
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 33, 0, 0))
    with open(follower, "w") as stream:
        assert progress._columns(stream) == 33
    os.close(leader)


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe"])
@pytest.mark.parametrize("name", ["train/metrics.jsonl", "train/events.jsonl", "train/quarantine.jsonl"])
def test_a_log_of_a_foreign_run_is_no_way_to_another_file(tmp_path: Path, name: str, kind: str) -> None:
    """Logs are appended to and truncated, which would destroy a file that a link leads to."""
    victim, log = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("TOKEN=abc")
    log.parent.mkdir(parents=True)
    {
        "symbolic link": lambda: log.symlink_to(victim),
        "hard link": lambda: log.hardlink_to(victim),
        "pipe": lambda: os.mkfifo(log),
    }[kind]()
    with pytest.raises(ContractError, match=f"{name}: expected a file of the run to write to, got"):
        Journal(Store(str(tmp_path / "run")), name).append(b"line")
    assert victim.read_text() == "TOKEN=abc"
