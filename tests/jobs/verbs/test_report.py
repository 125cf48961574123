"""`penstock report`: files that it writes, and arguments that it refuses before it reads anything."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import main
from tests.support.paths import ROOT
from tests.support.report_run import make_run


def test_one_run_and_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", "clean")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a"]) == 0
    assert main(["report", "a", "--out", "own.html"]) == 0
    assert main(["report", "a", "b"]) == 0
    assert main(["report", "a", "b", "--out", f"{tmp_path}/both.html"]) == 0
    names = ("a/report.html", "own.html", "compare.html", "both.html")
    assert capsys.readouterr().out == "".join(f"report: {tmp_path}/{name}\n" for name in names)
    assert "penstock show a --where" in (tmp_path / "own.html").read_text()
    assert (tmp_path / "own.html").read_bytes() == (tmp_path / "a/report.html").read_bytes()
    assert (tmp_path / "compare.html").read_bytes() == (tmp_path / "both.html").read_bytes()


def test_an_earlier_version_has_a_report_with_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    assert main(["report", f"{tmp_path}/a@00000000", "--out", f"{tmp_path}/x.html"]) == 2
    assert "00000000" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "--live"], "report --live: expected one run, got a second run too. Leave out --live."),
        (
            ["a", "--live", "--truth", "t", "--out", "o"],
            "expected one run, got --out and --truth too. Leave out --live.",
        ),
        (["a", "--port", "80"], "report --port: expected --live with it, got --port 80 alone. Add --live."),
        (["a", "--live", "--port", "70000"], "report --port: expected 0 to 65535, got 70000. Give a valid port."),
        (["a", "b", "--truth", "t"], "report --truth: expected one run, got a and b. Name one run."),
        (["a", "--out", "no/such/folder.html"], "report --out: expected a file in an existing folder, got no/such/"),
        (["a", "--out", "."], "report --out: expected a file in an existing folder, got .. Correct the path."),
        (["no-such-run"], "expected a run folder, got no run.json. Run `penstock run RECIPE --out"),
        (
            ["no-such-run", "--live"],
            "expected a run folder, got no progress.json and no run.json. Start `penstock run`",
        ),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_live_page_ends_with_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "documents")
    command = [sys.executable, "-m", "jobs.cli", "report", str(tmp_path / "a"), "--live"]
    live = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert live.stdout is not None
    assert live.stdout.readline().startswith("live: http://127.0.0.1:")
    assert live.stdout.readline() == "Ctrl+C closes the page; the run continues.\n"
    live.send_signal(signal.SIGINT)
    assert live.communicate(timeout=60)[0] == "live page closed\n"
    assert live.returncode == 0
