"""A version that a takedown has replaced and kept: it can be looked at, and nothing is made from it any more."""

import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.union import write_union
from schemas.versions import attach_run
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, opened, take_down

FIXTURE = ROOT / "tests" / "fixtures" / "runs" / "0.1.0"
"""A run with every table and a checkpoint."""
USES = (
    "plan {attached} --quiet",
    "plan {new} --dataset {run}@{old}",
    "plan {new} --dataset {attached}",
    "plan {new} --dataset {run} --dataset {attached}",
    "train {attached} --dry-run",
    "export {attached} --format megatron --out {new}",
    "export {attached} --format jsonl --out {new}",
    "export {run}@{old} --table clean --format jsonl --out {new}",
    "export {run}@{old} --format parquet --out {new}",
)
LOOKS = (
    "show {run}@{old} --url {url} --text",
    "show {attached} --url {url}",
    "diff {run}@{old} {run}",
    "lineage {attached}",
    "verify {run}@{old} --paranoid",
    "trace {attached} --step 1",
    "trace {attached} --url {url}",
    "report {attached}",
)


def places(tmp_path: Path, keep_old: bool) -> dict[str, str]:
    """Take a page down from a run whose dataset another run uses; return what the commands name."""
    run, attached = tmp_path / "run", tmp_path / "attached"
    shutil.copytree(FIXTURE, run)
    attach_run(Store(str(attached)), Store(str(run)), ("tokens", "tokenizer"))
    assert main(["plan", str(attached), "--quiet"]) == 0
    old, url = opened(run).digest[:12], documents_of(opened(run))[0]["url"]
    assert take_down(run, url=[url], keep_old=keep_old) == 0
    named = {"run": run, "attached": attached, "new": tmp_path / "new", "old": old, "url": url}
    return {name: str(value) for name, value in named.items()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return places(tmp_path_factory.mktemp("kept"), keep_old=True)


@pytest.fixture(scope="module")
def deleted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return places(tmp_path_factory.mktemp("deleted"), keep_old=False)


def refusal(words: str, named: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([word.format(**named) for word in words.split()]) == 2
    error = capsys.readouterr().err
    assert not Path(named["new"]).exists()
    return error


@pytest.mark.parametrize("words", USES)
def test_nothing_is_made_from_it(words: str, kept: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (certificate,) = certificates(Path(kept["run"]))
    error = refusal(words, kept, capsys)
    assert "expected a table, got a version that takedown " in error
    assert f"takedown {certificate.id} has replaced by v-" in error
    assert error.rstrip().endswith("Plan a new run on the current dataset: `penstock plan NEW_RUN --dataset RUN`.")


def test_the_sentence_is_that_of_a_deleted_version(
    kept: dict[str, str], deleted: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with_files, without = (refusal(USES[0], named, capsys) for named in (kept, deleted))
    assert with_files.replace(kept["run"], "RUN") == without.replace(deleted["run"], "RUN")


@pytest.mark.parametrize("words", LOOKS)
def test_it_can_be_looked_at(words: str, kept: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(**kept) for word in words.split()]) == 0, capsys.readouterr().err


def test_a_union_with_a_replaced_member(tmp_path: Path) -> None:
    first, second = (make_tiny_dataset(tmp_path / name, {"web": 20}, suffix=name) for name in ("first", "second"))
    union = Store(str(tmp_path / "union"))
    write_union(union, [first, second])
    before = open_dataset(union).digest
    assert (
        take_down(tmp_path / "second", doc=[documents_of(open_dataset(second))[3]["doc_id"].hex()], keep_old=True) == 0
    )
    with pytest.raises(ContractError, match=r"/v-0000000071a9: expected a table, got a version that takedown"):
        open_dataset(union)
    assert open_dataset(union, even_replaced=True).digest == before
    write_union(Store(str(tmp_path / "again")), [first, second])


def test_a_second_takedown_while_another_run_uses_the_kept_version(tmp_path: Path) -> None:
    """Its certificate names the checkpoints of that run too."""
    run = make_tiny_dataset(tmp_path / "run", {"web": 20})
    attach_run(run.child("ladder/small"), run)
    one, two = (row["doc_id"].hex() for row in documents_of(open_dataset(run))[3:5])
    assert take_down(tmp_path / "run", doc=[one], keep_old=True) == 0
    assert take_down(tmp_path / "run", doc=[two], keep_old=True) == 0
    assert [[other.run for other in own.effects.others] for own in certificates(tmp_path / "run")] == [
        ["ladder/small"],
        ["ladder/small"],
    ]
