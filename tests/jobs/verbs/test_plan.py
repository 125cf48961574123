"""`penstock plan` on the datasets of several runs: plan, training, trace, lineage, and a takedown from one of them."""

import json
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import RECIPE, metrics
from train.parallel.ranks import open_ranks
from train.plan.plan import read_plan
from train.pretrain.loop import train

STEPS = 8


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs and the folder of a third, not made yet."""
    recipe = {name: dict(section) for name, section in RECIPE.items()} | {"source": {"paths": ["x"]}}
    recipe["train"] |= {"steps": STEPS, "weights": {"web": 1, "books": 1, "news": 2}}
    for name, sources in (("first", {"web": 60, "books": 20}), ("second", {"web": 40, "news": 30})):
        run = make_tiny_dataset(tmp_path / name, sources, suffix=name)
        write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return [tmp_path / name for name in ("first", "second", "next")]


def plan(runs: list[Path], *more: str) -> int:
    first, second, following = map(str, runs)
    return main(["plan", following, "--dataset", first, "--dataset", second, *more])


def answers(capsys: pytest.CaptureFixture[str], *command: str) -> dict:
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_on_the_datasets_of_two_runs(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--dry-run") == 0
    assert not runs[2].exists()
    assert plan(runs) == 0
    assert "union of first (" in (printed := capsys.readouterr().err)
    assert "no document is in two of them" in printed
    union = open_dataset(Store(str(runs[2])))
    assert read_plan(Store(str(runs[2]))).dataset == union.digest
    assert plan(runs, "--quiet") == 0  # again: the same dataset
    assert plan([runs[1], runs[0], runs[2]]) == 2
    assert "expected a new run folder or one on dataset" in capsys.readouterr().err
    with open_ranks() as ranks:
        assert train(Store(str(runs[2])), [], ranks) == 0
    seen = [line.source_tokens for line in metrics(runs[2])]
    total = {name: sum(line.get(name, 0) for line in seen) for name in ("web", "books", "news")}
    assert total["news"] == total["web"] + total["books"]
    step = answers(capsys, "trace", str(runs[2]), "--step", "3")
    splits = {part["split"] for part in step["parts"]}
    assert splits <= {f"{name}.warc.gz" for name in ("webfirst", "booksfirst", "websecond", "newssecond")}
    assert len(splits) > 1
    assert main(["verify", str(runs[2])]) == 0


def test_lineage_and_trace_lead_to_each_member(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--quiet") == 0
    capsys.readouterr()
    assert main(["lineage", str(runs[2])]) == 0
    text = capsys.readouterr().out
    for run in runs:
        assert open_dataset(Store(str(run))).digest[:12] in text
    found = [
        answers(capsys, "trace", str(runs[2]), "--url", f"http://www.site2.co.uk/{name}/2?q=1")
        for name in ("news", "books", "web")
    ]
    assert [{document["split"] for document in each["documents"]} for each in found] == [
        {"newssecond.warc.gz"},
        {"booksfirst.warc.gz"},
        {"webfirst.warc.gz", "websecond.warc.gz"},
    ]


def test_a_takedown_from_a_member(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--quiet") == 0
    assert main(["takedown", str(runs[2]), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 2
    assert "got a union of the datasets of" in capsys.readouterr().err
    assert main(["takedown", str(runs[1]), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 0
    capsys.readouterr()
    assert main(["trace", str(runs[2]), "--step", "1"]) == 2
    assert "got a version that takedown" in capsys.readouterr().err
    following = runs[2].with_name("after")
    assert plan([*runs[:2], following], "--quiet") == 0
    before = answers(capsys, "trace", str(following), "--url", "http://www.site3.co.uk/news/3?q=1")
    assert before["num_documents"] == 1
    assert main(["trace", str(following), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 1  # no such document
