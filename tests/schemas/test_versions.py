"""Versions by digest, and dvc.yaml."""

import argparse
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli import main
from jobs.recipe import read_recipe, stored_recipe
from jobs.run_all import RunOptions
from jobs.verbs import dvc as versions
from jobs.verbs.dvc import (
    FIRST_LINE,
    damaged_files,
    deciding_settings,
    dvc_command,
    dvc_stages,
    fixed_folder,
    run_and_repair,
)
from schemas.errors import ConfigError, ContractError
from schemas.manifest import TableVersion, open_table, read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import (
    PinnedRun,
    address_to_read,
    attach_run,
    list_versions,
    open_run,
    pinned_tables,
    replaced_input,
    warn_of_replaced_tables,
)
from tests.pipeline.inspect.test_diff import write_manifest_lineage
from tests.support.lineage_run import edit, join_dataset, next_version
from tests.support.report_run import make_run
from tests.support.s3_server import server

__all__ = ["server"]  # a fixture


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """The synthetic crawl with one dataset."""
    run = make_run(tmp_path / "run")
    join_dataset(run)
    write_manifest_lineage(run)
    return run


@pytest.fixture
def digests(run: Store) -> list[str]:
    """Digests of two datasets of the run; the second is current."""
    first = next_version(run, "tokens", lambda content: content["figures"].update(chunk_tokens=512))
    return [first, open_table(run, "tokens")[1].digest]


# ----------------------------------------------------------------------------------------------------------- by digest


def test_a_digest_opens_its_dataset(run: Store, digests: list[str]) -> None:
    assert [open_dataset(open_run(f"{run.uri}@{digest[:12]}")).digest for digest in digests] == digests
    assert [open_dataset(open_run(f"{run.uri}@{digest}")).chunk_tokens for digest in digests] == [256, 512]
    assert list(list_versions(run, "tokens")) == ["v-000000000ae8", "v-0000000071a9"]
    pinned = open_run(f"{run.uri}@{digests[0]}")
    assert read_run(pinned).tables == dict.fromkeys(
        ("tokens", "tokenizer", "clean", "documents", "text", "dedup", "verdicts", "clusters"), "v-0000000071a9"
    )


def test_the_current_version_and_a_plain_folder_are_the_run_itself(run: Store, digests: list[str]) -> None:
    assert not isinstance(open_run(f"{run.uri}@{digests[1][:12]}"), PinnedRun)
    assert not isinstance(open_run(run.uri), PinnedRun)
    assert open_run("s3://key:secret@host/bucket/run".replace("s3://", "")).uri.endswith("key:secret@host/bucket/run")


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run@abcdef")
    assert open_run(run.uri).uri == run.uri


def test_any_table_can_be_addressed(run: Store) -> None:
    digest = open_table(run, "dedup")[1].digest
    next_version(run, "dedup", lambda content: content["figures"].update(bait=1))
    assert read_run(open_run(f"{run.uri}@{digest[:10]}")).tables == dict.fromkeys(
        ("dedup", "documents", "text", "verdicts", "clusters"), "v-0000000071a9"
    )


def test_a_version_is_only_read(run: Store, digests: list[str]) -> None:
    pinned = open_run(f"{run.uri}@{digests[0]}")
    with pytest.raises(
        ContractError, match=r"train/plan\.json: expected a run folder to write to, got an earlier version of one"
    ):
        pinned.write_atomic("train/plan.json", b"{}")
    again = pickle.loads(pickle.dumps(pinned))
    assert (type(again), again.uri, again.tables) == (PinnedRun, run.uri, pinned.tables)
    assert open_dataset(again).digest == digests[0]


def test_a_version_has_its_address_and_the_recipe_that_it_was_made_by(run: Store, digests: list[str]) -> None:
    unknown = open_run(f"{run.uri}@{digests[0][:12]}")
    assert read_run(unknown).recipe == {}
    with pytest.raises(ConfigError, match=f"@{digests[0]}: expected a version whose manifest has its recipe"):
        stored_recipe(unknown, [])
    name = "tokens/v-0000000071a9/manifest.json"
    manifest = run.read_json(name)
    manifest["run"]["notes"]["recipe"] = {"quality": {"min_words": 7}}
    run.write_atomic(name, json.dumps(manifest).encode())
    pinned = open_run(f"{run.uri}@{digests[0][:12]}")
    assert address_to_read(pinned) == f"{run.uri}@{digests[0]}"
    for same in (pinned, pickle.loads(pickle.dumps(pinned)), open_run(address_to_read(pinned))):
        assert read_run(same).recipe == {"quality": {"min_words": 7}}
        assert open_dataset(same).digest == digests[0]
    assert address_to_read(run) == run.address


def test_a_version_of_a_run_whose_address_has_options(server: int, run: Store, digests: list[str]) -> None:
    place = Store("s3://bucket/run?region=us-east-1")
    for name in run.walk():
        place.write_atomic(name, run.read_bytes(name))
    pinned = open_run(f"{place.address}@{digests[0][:12]}")
    assert address_to_read(pinned) == f"{place.address}@{digests[0]}"
    assert open_dataset(pinned).digest == digests[0]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("12", "expected a digest after @, 6 to 64 hex digits, got '12'"),
        ("latest", "expected a digest after @, 6 to 64 hex digits, got 'latest'"),
        ("", "expected a digest after @, 6 to 64 hex digits, got ''"),
        ("000000", "expected a version with this digest, got none. Name one of the datasets: {0}, {1}\\."),
    ],
)
def test_a_wrong_digest_is_rejected(run: Store, digests: list[str], suffix: str, expected: str) -> None:
    names = [table.manifest.digest[:12] for table in list_versions(run, "tokens").values()]
    assert sorted(names) == sorted(digest[:12] for digest in digests)
    with pytest.raises(ConfigError, match=expected.format(*names)):
        open_run(f"{run.uri}@{suffix}")


def test_an_ambiguous_digest_is_rejected(run: Store) -> None:
    folder = Path(run.uri) / "tokens"
    shutil.copytree(folder / "v-0000000071a9", folder / "v-000000000c09")
    digest = open_table(run, "tokens")[1].digest
    with pytest.raises(
        ConfigError, match=r"expected one version, got tokens/v-000000000c09, tokens/v-0000000071a9. Give more digits"
    ):
        open_run(f"{run.uri}@{digest[:12]}")


def test_an_altered_manifest_has_lost_its_address(run: Store, digests: list[str]) -> None:
    edit(run, "tokens", lambda content: content["figures"].update(bait=1))
    with pytest.raises(ConfigError, match="expected a version with this digest, got none"):
        open_run(f"{run.uri}@{digests[0][:12]}")


def test_tables_of_two_versions_are_rejected(run: Store) -> None:
    next_version(run, "documents", lambda content: content["figures"].update(bait=1))
    name = "verdicts/v-0000000071a9/manifest.json"
    manifest = run.read_json(name)
    manifest["run"]["lineage"] = {"documents": "v-000000000ae8", "input:x": "1:2"}
    run.write_atomic(name, json.dumps(manifest).encode())
    with pytest.raises(ContractError, match="expected one version of documents in the lineage, got documents/v-"):
        pinned_tables(run, "tokens", "v-0000000071a9")


# ----------------------------------------------------------------------------------------------------------------- DVC

RECIPE = '[source]\npaths = ["crawl/*.warc.gz", "s3://bucket/more/*.warc.gz"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a recipe."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_dvc(out: str = "run", *overrides: str) -> dict[str, Any]:
    """Write dvc.yaml and return its stages."""
    assert dvc_command(argparse.Namespace(recipe="recipe.toml", out=out, overrides=list(overrides), stage=None)) == 0
    stages: dict[str, Any] = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    return stages


STAGES = ("documents", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens", "train")


def test_the_stages_follow_the_steps(folder: Path) -> None:
    stages = write_dvc("runs/one", "quality.min_words=60", "tokens.seed=2")
    assert list(stages) == ["settings", *STAGES, "report"]
    call = "penstock dvc recipe.toml --out runs/one --set quality.min_words=60 --set tokens.seed=2"
    assert stages["settings"]["cmd"] == [call]
    assert stages["settings"]["deps"] == ["recipe.toml"]
    assert stages["clean"]["cmd"] == [f"{call} --stage clean"]
    assert stages["train"]["cmd"] == [call.replace("dvc", "run"), "penstock train runs/one"]
    assert stages["documents"]["deps"] == ["runs/one/dvc/documents.json", "crawl"]
    assert stages["tokens"]["deps"] == [
        *("runs/one/dvc/tokens.json", "crawl"),
        *("runs/one/clean", "runs/one/tokenizer"),
    ]
    kept = {"cache": False, "persist": True}
    assert stages["documents"]["outs"] == [{"runs/one/documents": kept}, {"runs/one/text": kept}]
    assert stages["train"]["metrics"] == [{"runs/one/train/manifest.json": kept}]
    outs = [path for stage in stages.values() for out in stage["outs"] + stage.get("metrics", []) for path in out]
    assert len(set(outs)) == len(outs)
    written = {"recipe.toml", "crawl", *outs}
    assert all(dep in written for stage in stages.values() for dep in stage["deps"])
    assert sorted(Path("runs/one/dvc").iterdir()) == sorted(Path(f"runs/one/dvc/{name}.json") for name in STAGES)


def test_files_that_the_settings_name_are_followed(folder: Path) -> None:
    Path("earlier").mkdir()
    for name in ("own.ftz", "mix.toml", "law.json", "earlier/run.json"):
        Path(name).write_text("{}")
    stages = write_dvc(
        *("run", "language.model=own.ftz", "tokens.mix=mix.toml", "plan.law=own", "plan.law_file=law.json"),
        "dedup.indexes=['earlier', 's3://bucket/run']",
    )
    followed = {name: [dep for dep in stage["deps"] if not dep.startswith("run/")] for name, stage in stages.items()}
    assert followed["documents"] == ["crawl", "own.ftz"]
    assert followed["verdicts"] == ["crawl", "own.ftz"]
    assert followed["dedup"] == followed["clean"] == ["crawl", "own.ftz", "earlier/run.json"]
    assert followed["tokens"] == ["crawl", "own.ftz", "earlier/run.json", "mix.toml"]
    assert followed["train"] == ["law.json"]


def changed_by(*overrides: str) -> set[str]:
    """Return the stages that other settings would call."""
    usual, other = (deciding_settings(read_recipe("recipe.toml", given)) for given in ((), overrides))
    assert {*usual} == {*other} == {*STAGES}
    return {name for name in usual if usual[name] != other[name]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tokens.seed=1", {"tokens", "train"}),
        ("tokenizer.vocab_size=2000", {"tokenizer", "tokens", "train"}),
        ("train.seq_len=64", {"train"}),
        ("audit.documents=700", {"audit"}),
        ("quality.min_words=60", {"verdicts", "dedup", "audit", "clean", "tokenizer", "tokens", "train"}),
        ("source.paths=['other/*.warc.gz']", {*STAGES}),
        ("language.model=other.ftz", {*STAGES}),
        ("spark.driver_memory=3g", set()),
        ("dedup.partitions=7", set()),
    ],
)
def test_a_setting_calls_the_stages_after_it_and_no_others(folder: Path, override: str, expected: set[str]) -> None:
    assert changed_by(override) == expected


def test_stages_and_their_inputs_follow_the_recipe(folder: Path) -> None:
    stages = write_dvc("run", "audit.documents=0", "tokens.buckets_by=fineweb_terminal_lines", "tokens.bucket_cuts=[9]")
    assert "audit" not in stages
    assert not Path("run/dvc/audit.json").exists()
    assert {"run/documents", "run/verdicts"} <= {*stages["tokens"]["deps"]}


# -------------------------------------------------------------------------------------------------- damaged versions


def damage(table: TableVersion) -> Path:
    """Flip a bit of a table's first file; returns the file."""
    path = Path(table.folder.path(table.manifest.paths_of()[0]))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


class Runs:
    """A replacement of `run_recipe` that records the steps it is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[str] = []
        monkeypatch.setattr(versions, "run_recipe", self._run)

    def _run(self, recipe_path: str, out: str, overrides: list[str], until: str, options: RunOptions) -> None:
        self.steps.append(until)


def test_a_whole_version_is_left_as_it_is(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, before = Runs(monkeypatch), sorted(run.walk())
    dvc_command(argparse.Namespace(recipe="recipe.toml", out=run.uri, overrides=[], stage="tokens", verbose=False))
    assert (runs.steps, sorted(run.walk())) == (["tokens"], before)


@pytest.mark.parametrize("removed", [False, True])
def test_a_damaged_version_is_removed_and_made_again(
    run: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], removed: bool
) -> None:
    runs = Runs(monkeypatch)
    table, other = TableVersion(*open_table(run, "tokens")), TableVersion(*open_table(run, "tokenizer"))
    path = damage(table)
    if removed:
        path.unlink()
    assert damaged_files(table) == [str(path)]
    run_and_repair("recipe.toml", run.uri, [], "tokens")
    assert runs.steps == ["tokens", "tokens"]
    assert f"{path}: differs from its manifest. Rebuilding tokens." in capsys.readouterr().err
    assert not table.folder.exists("manifest.json")
    assert not any(table.folder.exists(name) for name in table.manifest.paths_of())
    assert damaged_files(other) == []


@pytest.mark.parametrize("foreign", [False, True])
def test_a_damaged_version_that_cannot_be_made_again_stays(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    runs, holder = Runs(monkeypatch), run
    if foreign:
        holder = Store(str(tmp_path / "other"))
        attach_run(holder, run)
    else:
        run.write_atomic("takedowns/1.json", b"{}")
    damage(TableVersion(*open_table(run, "tokens")))
    why = "it belongs to another run" if foreign else "a rebuild would restore documents that were taken down"
    with pytest.raises(ContractError, match=rf"got another digest or no file. Restore the file .*{why}"):
        run_and_repair("recipe.toml", holder.uri, [], "tokens")
    assert runs.steps == ["tokens"]
    assert open_table(run, "tokens")[1].content.table == "tokens"


# ------------------------------------------------------------------------------------------------------ words and files


def test_a_setting_with_spaces_quotes_and_braces_stays_one_word(folder: Path) -> None:
    command = dvc_stages("recipe.toml", "run", ["source.name=a", "tokens.seed=1"])[0].commands[0]
    assert command[-4:] == ("--set", "source.name=a", "--set", "tokens.seed=1")
    stages = write_dvc("run", "language.languages=['en', 'de']")
    assert "--set 'language.languages=['" in stages["clean"]["cmd"][0]


def test_only_a_file_of_its_own_is_replaced(folder: Path) -> None:
    write_dvc()
    assert Path("dvc.yaml").read_text().startswith(FIRST_LINE)
    write_dvc("other")
    assert "other/clean" in Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text("stages: {}\n")
    with pytest.raises(ConfigError, match=r"dvc\.yaml: expected a file that `penstock dvc` wrote, got another one"):
        write_dvc()


@pytest.mark.parametrize("out", ["s3://bucket/run", "/elsewhere/run", "../run", "."])
def test_a_run_folder_that_dvc_cannot_track_is_rejected(folder: Path, out: str) -> None:
    with pytest.raises(ConfigError, match=r"dvc --out: expected a run folder below .*, got "):
        write_dvc(out)
    assert not Path("dvc.yaml").exists()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("crawl/*.warc.gz", "crawl"),
        ("crawl/2024/**/a.warc", "crawl/2024"),
        ("a.jsonl", "a.jsonl"),
        ("*.jsonl", "."),
        ("/data/x[12]/a", "/data"),
        ("/*", "/"),
    ],
)
def test_the_fixed_part_of_a_pattern(pattern: str, expected: str) -> None:
    assert fixed_folder(pattern) == expected


# ------------------------------------------------------------------------------------- a dataset of other settings


@pytest.mark.parametrize("table", ["documents", "verdicts", "clean", "tokenizer"])
def test_a_dataset_of_earlier_tables_is_reported(run: Store, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replaced_input(run, "tokens") is None
    next_version(run, table, lambda content: content["config"].update(changed={"setting": 1}))
    assert replaced_input(run, "tokens") == table
    new = Store(f"{run.uri}-new")
    attach_run(new, run, ("tokens", "tokenizer"))
    warn_of_replaced_tables([run, new])
    assert capsys.readouterr().err == (
        f"penstock: {run.uri}: the dataset was made with other settings than those in run.json: the table `{table}` "
        "has changed since. `penstock run` makes a dataset with these settings.\n"
    )


@pytest.mark.parametrize("table", ["documents", "tokenizer"])
def test_the_digest_of_a_dataset_of_earlier_tables_names_these(run: Store, table: str) -> None:
    before, digest = read_run(run).tables, open_table(run, "tokens")[1].digest
    assert not isinstance(open_run(f"{run.uri}@{digest[:12]}"), PinnedRun)
    next_version(run, table, lambda content: content["config"].update(changed={"setting": 1}))
    pinned = open_run(f"{run.uri}@{digest[:12]}")
    assert isinstance(pinned, PinnedRun)
    assert {name: before[name] for name in read_run(pinned).tables} == read_run(pinned).tables
    assert table in read_run(pinned).tables
    assert replaced_input(pinned, "tokens") is None


def test_a_paper_about_a_dataset_of_earlier_tables_is_of_these(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its counts of dropped documents would be those of other settings."""
    digest, papers = open_table(run, "tokens")[1].digest[:12], [tmp_path / "before", tmp_path / "after"]
    words = ["--eu", "--draft", "--out"]
    assert main(["summary", run.uri, *words, str(papers[0])]) == 0
    next_version(run, "verdicts", lambda content: content["counts"].update(dropped={}, rows_in=0, rows_kept=0))
    capsys.readouterr()
    assert main(["summary", run.uri, *words, str(papers[1])]) == 2
    error = capsys.readouterr().err
    assert f"the dataset {digest} was made from, got another version of `verdicts`. Run `penstock run`" in error
    assert main(["summary", f"{run.uri}@{digest}", *words, str(papers[1])]) == 0
    assert (papers[0] / "eu.json").read_bytes() == (papers[1] / "eu.json").read_bytes()


def test_a_dataset_whose_step_the_recipe_no_longer_has_is_reported(run: Store) -> None:
    state = read_run(run)
    write_run(run, state.model_copy(update={"tables": {k: v for k, v in state.tables.items() if k != "clean"}}))
    assert replaced_input(run, "tokens") == "clean"


def test_tables_that_the_user_has_removed_are_no_other_settings(run: Store) -> None:
    shutil.rmtree(run.path("clean"))
    assert replaced_input(run, "tokens") is None
    assert replaced_input(Store(f"{run.uri}-none"), "tokens") is None


@pytest.mark.parametrize("words", [("plan",), ("train", "--dry-run")])
def test_plan_and_train_warn_in_one_line(
    run: Store, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    next_version(run, "verdicts", lambda content: content["config"].update(changed={"setting": 1}))
    main([words[0], run.uri, *words[1:]])
    assert capsys.readouterr().err.count("the dataset was made with other settings than those in run.json") == 1
