"""Downstream tasks by the real harness: a local task over a local file, without a network."""

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jobs.cli import main as penstock
from jobs.verbs import train
from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run, write_run
from schemas.paths import HARNESS_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.train.eval.test_generate import RECIPE
from train.checkpoint.state import find_checkpoint
from train.eval import harness
from train.eval.harness import results_of
from train.eval.harness_results import HarnessResult, describe_results, read_results, write_results
from train.pretrain.__main__ import main as pretrain

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("transformers") is None, reason="lm_eval or transformers is not installed"
)
TASK = """
task: penstock_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 3.0
"""


def a_task(folder: Path) -> list[dict]:
    """Write a task of 12 questions with two choices each, and return the questions."""
    folder.mkdir()
    rows = [
        {"question": "the river", "choices": [" flows", f" stone {number}"], "answer": number % 2}
        for number in range(12)
    ]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "choice.yaml").write_text(TASK.replace("FILE", str(folder / "rows.json")))
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    run = make_tiny_dataset(tmp_path_factory.mktemp("harness") / "run")
    recipe = RECIPE | {"train": RECIPE["train"] | {"steps": 6}, "checkpoint": {"every": 3}}
    recipe["plan"] = RECIPE["plan"] | {"qk_norm": False}  # which Llama does not have
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    assert pretrain([run.uri]) == 0
    return run


@needs_harness
@pytest.mark.slow
def test_a_local_task_without_a_network(run: Store, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from train.export.llama import export_checkpoint

    rows = a_task(tmp_path / "tasks")
    words = ["-m", "jobs.cli", "evaluate", run.uri, "--harness", "penstock_choice"]
    words += ["--harness-tasks", str(tmp_path / "tasks"), "--step", "3"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = read_results(run)
    assert (result.task, result.task_version, result.metric) == ("penstock_choice", "3.0", "acc")
    assert (result.samples, result.available, result.fewshot, result.step) == (12, 12, 0, 3)
    assert result.checkpoint == find_checkpoint(run, 3).name
    assert len(result.checkpoint_digest) == 64
    # By hand: the choice with the larger probability in a text that begins as in training, with transformers alone.
    export_checkpoint(run, tmp_path / "model", 3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    right = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            context = tokenizer(row["question"]).input_ids
            whole = tokenizer(row["question"] + choice).input_ids
            assert context[0] == whole[0] == open_dataset(run).tokenizer.reserved["bos"]
            with torch.no_grad():
                logits = F.log_softmax(model(torch.tensor([whole])).logits[0].float(), -1)
            scores.append(sum(logits[i - 1, whole[i]].item() for i in range(len(context), len(whole))))
        right += scores.index(max(scores)) == row["answer"]
    assert result.value == pytest.approx(right / len(rows))
    assert result.stderr == pytest.approx(math.sqrt(result.value * (1 - result.value) / 11), abs=1e-9)
    assert f"acc        {result.value:.4f} ± {result.stderr:.4f}  12 samples" in done.stdout


@needs_harness
def test_an_unknown_task_is_named_with_its_neighbours(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.main([run.uri, "--tasks", "hellaswagg"]) == 2
    assert "got 'hellaswagg'. Did you mean hellaswag" in capsys.readouterr().err


def test_missing_packages_are_one_sentence(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"got no lm_eval and no transformers\. Install penstock\[harness\]\."):
        harness.measure_tasks(run, ["x"], None, None, [])


@pytest.mark.parametrize(("words", "got"), [([","], "0 task.s. and a limit of None"), (["x", "--limit", "0"], "of 0")])
def test_no_task_and_no_sample_are_one_sentence(
    run: Store, capsys: pytest.CaptureFixture[str], words: list[str], got: str
) -> None:
    assert harness.main([run.uri, "--tasks", *words]) == 2
    assert re.search(f"expected at least one task and a --limit of at least 1, got .*{got}", capsys.readouterr().err)


ANSWER = {
    "results": {
        "group": {"name": "group", "alias": " - group", "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "one": {"acc,strict": 0.25, "acc_stderr,strict": 0.1, "ppl,none": math.inf, "sample_len": 7, "alias": "one"},
    },
    "versions": {"one": 2.0},
    "n-shot": {"one": 5},
    "higher_is_better": {"one": {"acc": True}},
    "n-samples": {"one": {"original": 70, "effective": 7}},
}


def test_results_are_read_by_metric_and_kept(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "version", {"lm_eval": "1", "transformers": "2"}.__getitem__)
    results = list(results_of(ANSWER, find_checkpoint(run, 3), "model"))
    shown = [(item.task, item.metric, item.filter, item.value, item.stderr, item.samples) for item in results]
    assert shown == [
        ("group", "acc", "none", 0.5, None, 0),
        ("one", "acc", "strict", 0.25, 0.1, 7),
        ("one", "ppl", "none", None, None, 7),
    ]
    assert (results[1].available, results[1].fewshot, results[1].higher_is_better) == (70, 5, True)
    store = Store(str(tmp_path))
    (tmp_path / "train").mkdir()
    write_results(store, results)
    with (tmp_path / HARNESS_NAME).open("ab") as file:
        file.write(b'{"task": "cut')
    write_results(store, results[:1])
    assert read_results(store) == [*results, results[0]]
    assert "7 of 70 samples" in describe_results(results)
    (tmp_path / HARNESS_NAME).write_bytes(b'{"task": 3}\n')
    with pytest.raises(ContractError, match="line 1: expected a result of the harness"):
        read_results(store)


def test_averaged_weights_are_measured_and_named(
    run: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = SimpleNamespace(TaskManager=lambda include_path: SimpleNamespace(all_tasks=["one"]))
    lm_eval = SimpleNamespace(simple_evaluate=lambda **unused: ANSWER, tasks=tasks)
    monkeypatch.setitem(sys.modules, "lm_eval", lm_eval)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(harness, "check_harness", lambda: None)
    monkeypatch.setattr(harness, "version", {"lm_eval": "1", "transformers": "2"}.__getitem__)
    monkeypatch.setattr(train, "in_torch", lambda module, *words: harness.main(words))
    # The run has no optim.ema, so its export refuses the average.
    assert penstock(["evaluate", run.uri, "--harness", "one", "--weights", "ema"]) == 2
    assert "--weights ema: expected a checkpoint with averaged weights" in capsys.readouterr().err
    exported: list[dict[str, Any]] = []
    monkeypatch.setattr(harness, "export_checkpoint", lambda *unused, **more: exported.append(more) or note)
    note = find_checkpoint(run, 3)
    assert penstock(["evaluate", run.uri, "--harness", "one", "--weights", "ema"]) == 0
    assert exported == [{"weights": "ema"}]
    assert {item.weights for item in read_results(run)[-3:]} == {"ema"}
    assert f"{note.name}, averaged weights, by lm_eval 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected either --on RUN or --harness TASKS, got neither"),
        (["--on", "x", "--harness", "y"], "got both"),
        (["--on", "x", "--limit", "3"], "expected no --limit with --on"),
        (["--harness", "y", "--sequences", "3"], "expected no --sequences with --harness"),
    ],
)
def test_what_would_be_ignored_is_refused(
    run: Store, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(["evaluate", run.uri, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_line_has_every_field() -> None:
    assert all(info.description for info in HarnessResult.model_fields.values())
