"""The rehearsal of a GPU day: options, limits of time, lines and table; and, slow, the whole of it on a CPU."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_peers
from bench import gpu_rehearsal as rehearsal
from bench.gpu_calls import best_variant
from bench.gpu_table import number, rendered
from bench.train_gpu import (
    TINY_CASES,
    VARIANTS,
    Deadline,
    Variant,
    batches_for,
    compilations,
    count_from_here,
    dataset_for,
    measure_cases,
    planned,
)
from bench.train_parts import largest_gaps, measure_parts, seen_pairs
from tests.support.paths import ROOT
from train.data.rows import Rows
from train.model.loss import compiled_functions
from train.parallel.ranks import open_ranks

CASE = TINY_CASES[0]


# -------------------------------------------------------------------------------------------------------------- parent


def test_options() -> None:
    assert rehearsal.parsed([]).call == [1, 2, 3, 4, 5, 6]
    options = rehearsal.parsed(["--call", "2", "4", "--device", "cpu", "--tiny", "--out", "here"])
    assert (options.call, options.device, options.out) == ([2, 4], "cpu", Path("here"))


@pytest.mark.parametrize("wrong", [["--call", "7"], ["--tiny"], ["--device", "tpu"]])
def test_options_that_cannot_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        rehearsal.parsed(wrong)
    assert error.value.code == 2
    if wrong == ["--tiny"]:
        assert "--tiny: expected --device cpu, got auto" in capsys.readouterr().err


def test_compiled_kernels_lie_in_the_folder_before_torch_is_imported(tmp_path: Path) -> None:
    found = rehearsal.environment(tmp_path, "cpu")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert rehearsal.environment(tmp_path, "auto").get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    done = subprocess.run(
        [sys.executable, "-c", "import bench.gpu_rehearsal, sys; print('torch' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_a_call_that_does_not_end_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, pid = tmp_path / "call-3.jsonl", tmp_path / "pid"
    program = f'echo \'{{"check": "first"}}\' > {line}; sleep 60 & echo $! > {pid}; printf \'{{"cut\' >> {line}; wait'
    monkeypatch.setattr(rehearsal, "command_of", lambda *unused: ["bash", "-c", program])
    begin = time.monotonic()
    assert not rehearsal.run_call(3, tmp_path, "cpu", 2.0)
    assert time.monotonic() - begin < 30
    state = Path(f"/proc/{int(pid.read_text())}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of a killed call is alive")
    first, last = rehearsal.read_lines(tmp_path)
    assert first == {"call": 3, "check": "first"}
    assert last["error"] == "expected an end within 2 s, got none. Read the lines before it."
    assert rehearsal.failures([first, last]) == [f"call 3: {last['error']}"]


def test_the_exit_code_is_that_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "command_of", lambda number, *unused: ["bash", "-c", f"exit {number - 1}"])
    assert rehearsal.main(["--call", "1", "--out", str(tmp_path)]) == 0
    assert rehearsal.main(["--call", "1", "2", "--out", str(tmp_path)]) == 1
    assert rehearsal.main(["--table", "--out", str(tmp_path)]) == 0


# --------------------------------------------------------------------------------------------------------------- table


def test_the_table() -> None:
    case = {"case": "124M", "variant": "fp8 compile", "rows": 512, "seq_len": 1024, "tokens_per_second": 612345.6}
    case |= {"mfu": 0.4567, "peak_bytes": 3 * 2**30, "planned_bytes": 4 * 2**30, "step_seconds": 0.9, "graphs": 3}
    case |= {"planned_seconds": 0.6, "loader_stall": 0.0123, "recompilations": 0, "target": 5.5e5}
    lines = [
        {"machine": "H200", "cores": 16, "python": "3.12.1", "torch": "2.11.0", "device": "h200"},
        case,
        case | {"variant": "bf16 eager", "mfu": None, "peak_bytes": None, "planned_seconds": None},
        {"check": "resume", "equal": True, "loss_apart": 0.0},
        {"case": "1B", "variant": "bf16", "left_out": "the time of the call was over"},
        {"case": "1B", "variant": "fp8", "error": "OutOfMemoryError: 80 GiB"},
    ]
    text = rendered(lines)
    assert text.splitlines()[0] == "H200, 16 cores, Python 3.12.1, torch 2.11.0"
    cells = next(line for line in text.splitlines() if "fp8 compile" in line).split()
    assert cells[3:] == ["512", "x", "1024", "612,346", "550,000", "45.7%", "3.00", "4.00", *cells[-6:]]
    assert cells[-6:] == ["0.900", "0.600", "1.50", "1.23%", "3", "0"]
    cells = next(line for line in text.splitlines() if "bf16 eager" in line).split()
    assert cells[8:10] == ["-", "-"]
    assert "  resume: equal True, loss_apart 0" in text
    assert "Left out\n  1B bf16: the time of the call was over" in text
    assert "Failed\n  1B fp8: OutOfMemoryError: 80 GiB" in text
    assert (number(None), number(1234.5)) == ("-", "1,234")


# ------------------------------------------------------------------------------------------------------------ deadline


def test_a_deadline_leaves_out_what_would_pass_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    deadline = Deadline(100.0)
    assert deadline.has_room
    with deadline.measuring():
        clock[0] = 40.0
    with deadline.measuring():
        clock[0] = 60.0
    assert deadline.has_room  # 60 + 40 <= 100
    clock[0] = 60.5
    assert not deadline.has_room


def test_what_a_deadline_leaves_out_has_a_line() -> None:
    lines: list[dict[str, object]] = []
    with open_ranks() as ranks:
        measure_cases(TINY_CASES[:2], VARIANTS[:1], ranks, lines.append, Deadline(-1.0))
    assert [(line["case"], line["left_out"]) for line in lines] == [
        (case.name, "the time of the call was over") for case in TINY_CASES[:2]
    ]


# --------------------------------------------------------------------------------------------------------------- cases


def test_steps_are_measured_and_a_failure_is_a_line() -> None:
    lines: list[dict[str, object]] = []
    eager = Variant(compile=False)
    with open_ranks() as ranks:
        measure_cases([CASE], [eager, Variant("int3")], ranks, lines.append, Deadline())
    assert lines[0]["variant"] == "bf16 eager documents"
    assert lines[0]["tokens_per_second"] == pytest.approx(CASE.tokens / lines[0]["step_seconds"])
    assert (lines[0]["graphs"], lines[0]["recompilations"]) == (0, 0)
    assert (lines[0]["mfu"] is None) == (not torch.cuda.is_available())
    assert lines[0]["planned_bytes"] == planned(CASE, eager)["planned_bytes"] > 12 * lines[0]["parameters"]
    assert "int3" in str(lines[1]["error"])


def test_documents_have_the_lengths_of_the_web(tmp_path: Path) -> None:
    rows = batches_for(dataset_for(tmp_path, CASE), CASE, Variant()).batch(0)
    assert rows.documents_BT is not None
    assert rows.inputs_BT.shape == (CASE.rows, CASE.seq_len)
    counts = [len(row.unique()) for row in rows.documents_BT]
    assert 1 < sum(counts) / len(counts) < 6  # 64 tokens, documents of 35 in the median


def test_compilations_are_counted_in_either_version_of_torch() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    count_from_here()
    layers = [Layer() for _ in range(3)]
    for layer in layers:
        layer.compile(backend="eager", dynamic=False)
    for size in (2, 2, 3):
        for layer in layers:
            layer(torch.zeros(size, 4))
    assert compilations() == (2, 1)
    count_from_here()
    assert compilations() == (0, 0)


def test_pairs_that_are_seen() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    sources = torch.zeros(2, dtype=torch.int64)
    assert seen_pairs(Rows(ids, ids, None, sources)) == 20
    documents = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 2]], dtype=torch.int32)
    assert seen_pairs(Rows(ids, ids, documents, sources)) == 6 + 1 + 1 + 3 + 1


def test_parts_add_up_to_a_step(tmp_path: Path) -> None:
    eager = Variant(compile=False)
    with open_ranks() as ranks:
        lines = measure_parts(CASE, eager, ranks, batches_for(dataset_for(tmp_path, CASE), CASE, eager))
    assert [line["part"] for line in lines] == ["loss", "attention", "optimizer", "layers without attention"]
    assert [line["times"] for line in lines] == [2, 4, 1, 1]
    assert all(line["seconds"] > 0 for line in lines)
    assert all((line["gap_seconds"] is None) == (not torch.cuda.is_available()) for line in lines)


def test_the_largest_gaps_come_first() -> None:
    seconds = {"a": 1.0, "b": 4.0, "c": 2.0, "d": 3.0}
    lines = [{"part": name, "step_seconds": value, "gap_seconds": None} for name, value in seconds.items()]
    assert [line["part"] for line in largest_gaps(lines)] == ["b", "d", "c"]
    lines = [line | {"gap_seconds": 5.0 - line["step_seconds"]} for line in lines]
    assert [line["part"] for line in largest_gaps(lines)] == ["a", "c", "d"]


def test_the_best_variant_is_the_fastest_with_documents(tmp_path: Path) -> None:
    assert best_variant(tmp_path) == VARIANTS[0]
    rates = {"bf16 compile documents": 5.0, "fp8 compile documents": 7.0, "bf16 compile": 9.0}
    lines = [json.dumps({"variant": name, "tokens_per_second": rate}) for name, rate in rates.items()]
    (tmp_path / "call-2.jsonl").write_text("\n".join([*lines, '{"variant": "bf16 eager", "error": "x"}']))
    assert best_variant(tmp_path) == Variant("fp8")


# --------------------------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("name", ["plain torch", "missing"])
def test_a_peer_computes_the_same_or_is_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(gpu_peers.MODULES, "missing", "no_such_module")
    monkeypatch.setattr(torch, "compile", lambda model, **unused: model)
    compiled_functions.cache_clear()
    lines: list[dict[str, Any]] = []
    with open_ranks() as ranks:
        case = replace(CASE, shape=CASE.shape.model_copy(update={"tie_embeddings": False}))
        gpu_peers.compare(case, False, [name], ranks, lines.append)
    compiled_functions.cache_clear()  # other tests of this process count what is compiled
    assert [line["peer"] for line in lines] == ["penstock", name]
    assert "error" not in lines[1]
    assert ("left_out" in lines[1]) == (name == "missing")
    assert lines[1].get("losses_apart", 0.0) < 1e-2


@pytest.mark.slow
def test_the_whole_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.gpu_rehearsal",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = rehearsal.read_lines(tmp_path)
    assert rehearsal.failures(lines) == []
    assert {line["call"] for line in lines if "machine" in line} == {1, 2, 3, 4, 5, 6}
    assert [line["variant"] for line in lines if line["call"] == 2 and "variant" in line] == [v.name for v in VARIANTS]
    assert len([line for line in lines if line["call"] == 3 and "variant" in line]) == 2 * len(VARIANTS)
    fp32, bf16, fp8 = (line for line in lines if "run" in line)
    assert fp32["losses"][0] == pytest.approx(bf16["losses"][0], abs=1e-2)
    assert bf16["from_fp32"] < 1e-2
    assert fp8["from_fp32"] < 5e-2
    for line in (bf16, fp8):
        assert (line["graphs"], line["recompilations"]) == (3, 0)
    (resumed,) = (line for line in lines if line.get("check") == "resume after kill -9")
    assert resumed["equal"]
    peers = [line for line in lines if line.get("peer") == "plain torch"]
    assert [line["losses_apart"] < 1e-2 for line in peers] == [True]
    assert (tmp_path / "profile.json.gz").stat().st_size > 1000
    assert (tmp_path / "kernels.txt").stat().st_size > 1000
    assert "Largest gaps to the roofline" in done.stdout
