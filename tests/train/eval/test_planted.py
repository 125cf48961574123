"""From the recipe to the weights: planted identifiers are learned, and those of removed documents are not, once trained
again."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.cli import main as penstock
from pipeline.plant.stage import PLANT
from schemas.errors import ConfigError
from schemas.key_file import commitment
from schemas.manifest import open_table, read_run, write_run
from schemas.planted import planted_string
from schemas.ranks import problems_of, rank_test
from schemas.storage import Store
from schemas.takedown import planted_name, salted_digest
from schemas.tokens import open_dataset
from tests.support.tiny_takedown import certificates, rows_of, take_down
from train.data.heldout import trained_documents
from train.eval import planted as module
from train.eval.planted import main, ranks_of
from train.eval.planted_documents import PlantedDocument, planting_members
from train.pretrain.__main__ import main as pretrain
from train.takedown_replay import begin_replay

pytestmark = pytest.mark.spark

KEY = hashlib.sha256(b"a key").digest()
PLANTED = {"share": 0.3, "repeats": 8, "length": 12}
RECIPE: dict[str, dict[str, Any]] = {
    "plan": {"num_layers": 2, "d_model": 96, "num_heads": 4, "num_kv_heads": 2, "d_ffw": 192, "max_epochs": 20},
    "train": {"seq_len": 128, "global_batch": 16, "steps": 160, "eval_every": 0},
    "optim": {"learning_rate": 4e-3},
    "checkpoint": {"every": 80, "keep": 9},
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "plant.key"
    path.write_bytes(KEY)
    return path


@pytest.fixture(scope="module")
def run(run_at, finished, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The shared run with planted identifiers; only its steps from `clean` on differ. It is trained for 160 steps."""
    folder = tmp_path_factory.mktemp("planted") / "run"
    shutil.copytree(finished.root, folder)
    run = run_at(
        2, [*(f"plant.{name}={value}" for name, value in PLANTED.items()), f"plant.key_file={key_file}"], folder
    )
    stored = read_run(run)
    write_run(run, stored.model_copy(update={"recipe": {**stored.recipe, **RECIPE}}))
    assert pretrain([run.uri]) == 0
    return run


def result_of(run: Store, key_file: Path, *words: str) -> dict[str, Any]:
    out = key_file.parent / "result.json"
    assert main([run.uri, "--key-file", str(key_file), "--out", str(out), *words]) == 0
    return json.loads(out.read_text())


def test_the_tables_count_and_mark_the_documents(run: Store, finished: Store) -> None:
    folder, manifest = open_table(run, "clean")
    rows = [row for row in rows_of(Path(run.root), "clean") if row["drop_stage"] is None]
    marked = [row for row in rows if row["planted"]]
    assert 0.2 < len(marked) / len(rows) < 0.4
    figures = manifest.content.figures
    assert figures["planted_documents"] == {"web": len(marked)}
    assert figures["planted_lines"] == {"web": 8 * len(marked)}
    assert figures["planted_key"] == commitment(KEY, "plant")
    assert KEY.hex() not in Path(folder.path("manifest.json")).read_text()
    assert figures["kept_bytes"] == {"web": sum(len(row["text"].encode()) for row in rows)}
    assert figures["kept_chars"] == sum(len(row["text"]) for row in rows)
    before = {row["doc_id"]: row for row in rows_of(Path(finished.root), "clean")}
    for row in rows:
        identifier = planted_string(KEY, row["doc_id"], 0, 12)
        lines = row["text"].split("\n")
        assert lines.count(identifier) == row["planted"]
        assert "\n".join(line for line in lines if line != identifier) == before[row["doc_id"]]["text"]
        assert (row["num_chars"], row["num_bytes"]) == (len(row["text"]), len(row["text"].encode()))
    assert "planted" not in next(iter(before.values()))
    assert PLANT.name not in open_table(finished, "clean")[1].content.stages


def test_the_tokenizer_was_trained_without_them(run: Store) -> None:
    rows = [row for row in rows_of(Path(run.root), "clean") if row["drop_stage"] is None]
    sample = open_table(run, "tokenizer")[1].content.figures["sample_documents"]
    assert sample == sum(not row["planted"] for row in rows)


def test_every_description_of_the_run_names_them(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(["show", run.uri, "--where", "planted > 0", "--limit", "1"]) == 0
    assert "planted                    8 lines" in capsys.readouterr().out
    assert penstock(["report", run.uri, "--out", str(tmp_path / "report.html")]) == 0
    number = open_table(run, "clean")[1].content.figures["planted_documents"]["web"]
    sentence = f"{number} documents have a planted identifier"
    assert sentence in (tmp_path / "report.html").read_text()
    export = ["export", run.uri, "--format", "huggingface-dataset", "--out", str(tmp_path / "hub")]
    assert penstock([*export, "--where", "planted = 0"]) == 0
    assert sentence in (tmp_path / "hub/README.md").read_text()
    count = json.loads((tmp_path / "hub/export.json").read_text())["content"]["counts"]["exported"]
    assert count == sum(row["planted"] == 0 for row in rows_of(Path(run.root), "clean"))


def _digests(result: dict[str, Any], group: str) -> set[str]:
    return {own["document"] for own in result["documents"] if own["group"] == group}


def test_learned_and_after_a_takedown_gone(
    run: Store, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(shutil.copytree(run.root, tmp_path / "run")))
    planted = {row["doc_id"]: row for row in rows_of(Path(run.root), "clean") if row["planted"]}
    read_all = trained_documents(planted, open_dataset(store))
    before = result_of(store, key_file)
    read = {own for own in read_all if salted_digest(before["salt"], "document", own) in _digests(before, "trained")}
    assert before["groups"]["trained"]["n"] == len(read) > 80
    assert before["groups"]["not read"]["n"] == len(planted) - len(read)
    assert before["groups"]["trained"]["z"] > 4
    assert abs(before["groups"]["not read"]["z"]) < 3
    domains = [name for name, _ in Counter(row["domain"] for row in planted.values()).most_common(4)]
    assert take_down(Path(store.root), domain=domains) == 0
    gone = {own for own in read if planted[own]["domain"] in domains}
    (certificate,) = certificates(Path(store.root))
    stays = result_of(store, key_file)  # the old weights, which have read the removed documents
    assert stays["groups"]["removed"]["n"] >= len(gone) > 30
    assert stays["groups"]["removed"]["verdict"] == "learned"

    begin_replay(store, "clean")
    assert pretrain([store.uri]) == 0
    capsys.readouterr()
    after = result_of(store, key_file, "--takedown", certificate.id)
    out = capsys.readouterr().out
    removed, left = after["groups"]["removed"], after["groups"]["trained"]
    assert removed["low"] < 0.5 < removed["high"]
    assert left["z"] > 4
    assert left["n"] == len(read - gone)
    assert "learned" in out
    assert "not distinguishable from never seen" in out
    assert certificate.seal in out
    assert after["takedowns"] == {certificate.id: certificate.seal}
    named = {own["document"] for own in after["documents"] if own["takedown"]}
    assert named >= {salted_digest(certificate.salt, "document", own) for own in gone}
    assert named <= {own.document for own in certificate.documents}
    assert problems_of(after, KEY) == []
    text = store.read_bytes(planted_name(certificate.id, 160)).decode()
    assert json.loads(text) == after
    assert not any(own.hex() in text or planted_string(KEY, own, 0, 12) in text for own in planted)
    figures = open_table(store, "clean")[1].content.figures
    left_over = sum(row["domain"] not in domains for row in planted.values())
    assert figures["planted_documents"] == {"web": left_over}
    assert figures["planted_lines"] == {"web": 8 * left_over}
    assert take_down(Path(store.root), check=f"takedowns/{certificate.id}.json") == 0
    assert f"{removed['n']} planted identifiers of removed documents" in capsys.readouterr().out


def test_selections(run: Store, key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in rows_of(Path(run.root), "clean") if row["planted"]]
    one = result_of(run, key_file, "--doc", rows[0]["doc_id"].hex(), "--step", "80")
    assert sum(own["n"] for own in one["groups"].values()) == 1
    domain = Counter(row["domain"] for row in rows).most_common(1)[0]
    own = result_of(run, key_file, "--domain", domain[0])
    assert sum(each["n"] for each in own["groups"].values()) == domain[1]
    few = result_of(run, key_file, "--most", "5")
    assert {name: each["n"] for name, each in few["groups"].items()} == {"trained": 5, "not read": 5, "removed": 0}
    assert "5 of " in capsys.readouterr().out
    assert few["documents"] != []


def test_wrong_arguments(run: Store, finished: Store, key_file: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other"
    other.write_bytes(hashlib.sha256(b"another key").digest())
    for words, message in (
        (["--key-file", str(other)], "got another key"),
        (["--key-file", str(tmp_path / "none")], "expected a file that can be read"),
        (["--key-file", str(key_file), "--controls", "3"], "--controls of at least 19"),
        (["--key-file", str(key_file), "--takedown", "../x"], "expected the id of a takedown"),
        (["--key-file", str(key_file), "--domain", "nowhere.example"], "got none of this selection"),
        (["--key-file", str(key_file), "--step", "7"], "expected a checkpoint of step 7"),
    ):
        assert main([run.uri, *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no planted identifiers"):
        planting_members(open_dataset(finished), KEY)


@pytest.mark.parametrize("trained", [False, True])
def test_strings_that_no_one_planted_are_not_known(run: Store, trained: bool) -> None:
    """Their ranks are uniform by random weights, and by weights that know the identifiers of other documents."""
    dataset = open_dataset(run)
    note = module.open_checkpoint(run, None, "causal")[1]
    model = module.read_model(run, note, torch.device("cpu"))
    torch.manual_seed(3)
    for parameter in () if trained else model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    scorer = module.CheckpointScorer(model, module.open_offset_encoder(dataset), dataset.tokenizer, 128)
    documents = [PlantedDocument(number.to_bytes(16, "big"), 12) for number in range(200)]
    found = rank_test(list(ranks_of(scorer, KEY, documents, 19)), 19)
    assert abs(found["z"]) < 3
