"""`penstock.open` and `penstock.run`: the rows of a run, its dataset, and its answers.

What a run holds is read here by the API and by the commands: both must answer the same.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

import penstock
from jobs.cli import main
from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run
from schemas.overrides import parse_value
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.lineage_run import next_version
from tests.support.report_run import whole_run
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import Settings
from train.plan.make_plan import make_plan
from train.plan.plan import write_plan

TINY = {
    "plan": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffw": 64},
    "train": {"seq_len": 32, "global_batch": 4, "steps": 5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> penstock.Run:
    """A run of 53 records, without a plan."""
    return penstock.open(whole_run(tmp_path_factory.mktemp("run")).uri)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> penstock.Run:
    """A dataset with a plan of five steps."""
    store = make_tiny_dataset(tmp_path_factory.mktemp("planned"))
    write_plan(store, make_plan(store, open_dataset(store), Settings.model_validate(TINY)))
    return penstock.open(store.uri)


def test_conditions_select_the_documents_that_show_prints(
    run: penstock.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = "drop_rule = near_duplicate"
    rows = run.documents.where(condition)
    assert main(["show", run.uri, "--where", condition, "--limit", "100"]) == 0
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("document ")]
    assert [row["doc_id"] for row in rows] == printed
    assert rows.count() == len(printed) == 3


def test_quotes_and_a_second_condition(run: penstock.Run) -> None:
    dropped = run.documents.where("drop_rule is not null").where("drop_stage = 'dedup'")
    assert dropped.count() == 7
    assert set(dropped.to_pandas()["drop_rule"]) == {"exact_duplicate", "near_duplicate"}


def test_every_record_is_in_documents(run: penstock.Run) -> None:
    assert run.documents.count() == run.counts("documents").rows_in == 53
    assert run.documents.where("drop_stage is null").count() == run.counts("clean").rows_kept


def test_selected_columns_and_text(run: penstock.Run) -> None:
    kept = run.documents.where("drop_stage is null").select("doc_id", "text")
    stored = {row["doc_id"]: row["text"] for row in run.table("text").select("doc_id", "text")}
    rows = kept.to_arrow().to_pylist()
    assert {row["doc_id"]: row["text"] for row in rows} == {row["doc_id"]: stored[row["doc_id"]] for row in rows}
    assert all(row["text"] for row in rows)


def test_conditions_may_name_columns_that_are_not_selected(run: penstock.Run) -> None:
    rows = run.documents.where("text is not null").where("drop_stage is null")
    kept = run.counts("clean").rows_kept
    assert rows.count() == rows.select("doc_id", "title").count() == rows.select("url").to_arrow().num_rows == kept
    assert run.documents.where("title contains 'no such title'").count() == 0
    assert rows.select("url", "doc_id", "url").limit(1).to_arrow().column_names == ["url", "doc_id"]


def test_limits_read_no_more_than_they_need(run: penstock.Run) -> None:
    assert run.documents.limit(7).count() == 7
    assert run.documents.limit(7).limit(9).count() == 7
    assert run.documents.limit(0).to_arrow().num_rows == 0
    first = next(iter(run.documents))
    assert [first] == run.documents.limit(1).to_arrow().to_pylist()


def test_rows_are_json(run: penstock.Run) -> None:
    frame = run.table("clean").to_pandas()
    assert json.loads(frame.to_json(orient="records", date_format="iso"))[0]["doc_id"] == frame["doc_id"][0]
    assert len(frame["doc_id"][0]) == 32


def test_columns_have_a_meaning(run: penstock.Run) -> None:
    assert run.documents.schema.field("num_chars").metadata[b"unit"] == b"code points"


def test_the_counts_of_the_dataset_are_those_of_the_manifest(planned: penstock.Run) -> None:
    dataset = open_dataset(planned.store)
    assert planned.tokens.digest == dataset.manifest.digest
    assert planned.tokens.num_tokens().keys() == {"books", "web"}
    assert planned.tokens.num_tokens("heldout") == dataset.num_tokens("heldout")


def test_torch_samples_are_those_of_the_plan(planned: penstock.Run) -> None:
    samples = planned.tokens.torch_dataset()
    assert len(samples) == 20
    assert samples[0]["inputs"].tolist()[1:] == samples[0]["targets"].tolist()[:-1]


def test_an_earlier_version_has_its_own_samples(planned: penstock.Run, tmp_path: Path) -> None:
    folder = shutil.copytree(planned.uri, tmp_path / "run")
    tables = read_run(Store(str(folder))).tables
    manifest = folder / "tokens" / tables["tokens"] / "manifest.json"
    values = json.loads(manifest.read_bytes())
    values["run"]["lineage"]["tokenizer"] = tables["tokenizer"]
    manifest.write_text(json.dumps(values))
    earlier = next_version(Store(str(folder)), "tokens", lambda content: content["figures"].update(bait=1))
    samples = penstock.open(f"{folder}@{earlier[:12]}").tokens.torch_dataset()
    expected = planned.tokens.torch_dataset()
    again = pickle.loads(pickle.dumps(samples))
    assert [row["inputs"].tolist() for row in again] == [row["inputs"].tolist() for row in expected]
    with pytest.raises(ContractError, match="expected dataset"):
        penstock.open(folder).tokens.torch_dataset()


@pytest.mark.parametrize("stage", [5, -1, 1])
def test_a_stage_that_the_plan_lacks(planned: penstock.Run, stage: int) -> None:
    with pytest.raises(ConfigError, match=f"expected a stage from 0 to 0 of the plan, got {stage}"):
        planned.tokens.torch_dataset(stage)


def test_a_step_and_its_documents_name_each_other(planned: penstock.Run) -> None:
    answer = planned.trace(step=3)
    seen = answer.parts[0].place
    found = planned.trace(doc=seen.doc_id)
    assert 3 in [appearance.step for appearance in found.documents[0][0].place.appearances]
    assert planned.trace(url=seen.url).num_documents == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.documents.where("langage = de"), "did you mean 'language'?"),
        (lambda run: run.documents.select("urll"), "did you mean 'url'?"),
        (lambda run: run.table("cleen"), "did you mean 'clean'?"),
        (lambda run: run.table("scores"), "expected a table of the run, got 'scores'"),
        (lambda run: run.table("tokens"), "expected a table of rows, got 'tokens'"),
        (lambda run: run.documents.limit(-1), "expected a number of rows of at least 0, got -1"),
        (lambda run: run.trace(), "expected one of step, url, doc, domain, contains, got none of them"),
        (lambda run: run.trace(step=1, url="x"), "got step, url"),
        (lambda run: run.whatif({"quality.min_words": object()}), "expected a number, text, list or dictionary"),
        (lambda run: run.tokens.num_tokens("held"), "expected the split 'train' or 'heldout', got 'held'"),
        (lambda run: run.export("out", format="parquett"), "got 'parquett' (did you mean 'parquet'?)"),
        (lambda run: run.export(Path("out")), "expected a run folder, got a folder without a recipe"),
        (lambda run: penstock.open(Path("no_such_folder")), "expected a run folder, got a folder without run.json"),
        (lambda run: penstock.run(Path("no_such.toml"), Path("out")), "recipe no_such.toml: expected a readable"),
        (lambda run: penstock.open("no_such_folder"), "expected a run folder, got a folder without run.json"),
    ],
)
def test_mistakes_are_explained(run: penstock.Run, call: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call(run)  # type: ignore[operator]
    assert message in str(error.value)


def test_a_missing_plan_is_reported_before_a_sample_is_read(tmp_path: Path) -> None:
    unplanned = penstock.open(make_tiny_dataset(tmp_path).uri)
    with pytest.raises(ContractError, match=r"expected a plan, got no train/plan\.json"):
        unplanned.tokens.torch_dataset()


def test_settings_become_toml() -> None:
    settings = {
        "source.paths": ["a b.warc", 'c"d', Path("e/f.warc")],
        "quality.min_words": 30,
        "dedup.verify": "estimate",
        "models.offline": True,
        "quality.by_language": {"de": {"min_words": 30}},
    }
    assert penstock.runs.overrides(settings) == [
        'source.paths=["a b.warc", "c\\"d", "e/f.warc"]',
        "quality.min_words=30",
        'dedup.verify="estimate"',
        "models.offline=true",
        'quality.by_language={"de" = {"min_words" = 30}}',
    ]


@pytest.mark.parametrize("text", ["[\U0001f600]", "\x7f", 'a "quoted" \\ text\n\t\u2028', "é", "nan", "[x]"])
def test_a_text_is_the_same_as_a_setting(text: str) -> None:
    for value in (text, [text], {text: text}, {"a": [{"b": text}]}):
        (override,) = penstock.runs.overrides({"section.key": value})
        assert parse_value(override.partition("=")[2]) == value


def test_numbers_are_the_same_as_settings() -> None:
    for value in (0, -3, 10**30, 0.1, 1e-7, 1e22, 5e-324, np.float64(0.1)):
        (override,) = penstock.runs.overrides({"section.key": value})
        assert parse_value(override.partition("=")[2]) == value


def test_opening_a_run_imports_neither_spark_nor_torch(run: penstock.Run) -> None:
    code = (
        "import sys, penstock\n"
        f"run = penstock.open({run.uri!r})\n"
        "print(run.documents.where('drop_rule is null').count(), run.table('clean').limit(1).count())\n"
        "assert not {'pyspark', 'torch'} & sys.modules.keys(), 'heavy imports'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(run.counts("clean").rows_kept), "1"]


@pytest.mark.spark
def test_a_prediction_is_that_of_the_command(finished: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run = penstock.open(finished.uri)
    predicted = run.whatif({"quality.min_words": 300})
    assert predicted.before == run.counts("clean").rows_kept
    assert predicted.after < predicted.before
    assert predicted.changed == {"quality.min_words": (None, 300)}
    assert "quality.min_words: 50 (default of the dialect datatrove) -> 300" in str(predicted)
    assert predicted.to_json()["settings"] == list(predicted.settings)
    assert sum(cell["documents"] for cell in predicted.to_json()["cells"]) == run.counts("verdicts").rows_in


@pytest.mark.spark
def test_an_earlier_version_is_exported_with_its_own_recipe(finished: Store, run_at, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.root, tmp_path / "run"))
    before = penstock.open(folder)
    address = f"{folder}@{before.tables['clean'].manifest.digest[:12]}"
    kept = before.counts("clean").rows_kept
    run_at(2, ["quality.min_words=150"], folder, "clean")
    later = penstock.open(folder).counts("clean").rows_kept
    earlier = penstock.open(address)
    earlier.export(tmp_path / "out", format="huggingface-dataset")
    assert pq.read_table(tmp_path / "out" / "data").num_rows == kept
    assert "min_words" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    predicted = earlier.whatif({"quality.min_words": 150})
    assert (predicted.before, predicted.after) == (kept, later)
    assert later < kept
    assert "min_words = 150" not in write_report_of(address, tmp_path)
    assert "min_words = 150" in write_report_of(str(folder), tmp_path)


def write_report_of(address: str, folder: Path) -> str:
    """The text of the report of a run or version."""
    assert main(["report", address, "--out", str(folder / "report.html")]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.spark
def test_a_run_that_ends_before_its_first_table_leaves_the_recipe_of_its_tables(
    finished: Store, run_at, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished.root, tmp_path / "run"))
    before = read_run(Store(str(folder)))
    with mock.patch("pipeline.run.build_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_at(2, ["quality.min_words=150"], folder)
    assert read_run(Store(str(folder))) == before
    run_at(2, ["quality.min_words=150"], folder, "documents")  # complete: nothing of the recipe is in a table yet
    assert read_run(Store(str(folder))) == before
    run_at(2, ["train.seq_len=128"], folder)  # the whole recipe, whose tables are those of before
    assert read_run(Store(str(folder))).recipe["train"] == {"seq_len": 128}
    run_at(2, ["quality.min_words=150"], folder, "verdicts")
    assert read_run(Store(str(folder))).recipe["quality"]["min_words"] == 150


@pytest.mark.dist
def test_ranks_start_whatever_files_lie_in_the_current_folder(planned: penstock.Run, tmp_path: Path) -> None:
    for name in ("train", "pipeline", "schemas", "jobs", "tokens"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n", encoding="utf-8")
    script = tmp_path / "bin" / "penstock-rank"  # as pip writes the entry point
    script.parent.mkdir()
    script.write_text("import sys\nfrom train.pretrain.__main__ import run_rank\nsys.exit(run_rank())\n")
    root = Path(penstock.__file__).parents[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | {
        "PYTHONPATH": str(root)
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, "-P", *torchrun, str(script), planned.uri, "--set", "train.steps=2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained: 2 steps" in done.stdout + done.stderr
