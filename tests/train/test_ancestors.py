"""Training that began from weights which have read a removed document: no checkpoint of it is called clean."""

import json
import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.verbs.takedown import describe_effects, effects_of
from schemas.errors import ConfigError
from schemas.exports import MODEL, read_receipts, write_receipt
from schemas.storage import Store
from schemas.union import write_union
from schemas.versions import DATASET, attach_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import copied, make_run, notes, opened, trained
from tests.support.tiny_takedown import certificates, documents_of, spans_of, take_down
from tests.support.tiny_takedown import opened as dataset_of
from train.erase import find_replaced
from train.export.llama import export_checkpoint
from train.takedown_replay import begin_replay, describe_replay, plan_replay, steps_with_documents

pytestmark = pytest.mark.dist

SHORT = {"train": {"steps": 4, "eval_every": 0}, "checkpoint": {"every": 2, "first": True, "keep": 9}}
NO_SHAPE = dict.fromkeys(("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ffw", "tie_embeddings"))


def after(folder: Path, source: Path, seed: int) -> Path:
    """Train a run that begins from the weights of another one."""
    changes = SHORT | {"plan": NO_SHAPE, "train": SHORT["train"] | {"init_from": str(source), "seed": seed}}
    return trained(make_run(folder, changes), 1)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first`, `second` from its weights, and `third` from those of `second`."""
    folder = tmp_path_factory.mktemp("line")
    trained(make_run(folder / "first", SHORT), 1)
    after(folder / "second", folder / "first", 5)
    after(folder / "third", folder / "second", 7)
    return folder


def read_by(folder: Path) -> dict[str, list[int]]:
    """Return the steps of a run that read each training document."""
    order = opened(folder).order
    rows = [row for row in documents_of(dataset_of(folder)) if row["stream"].endswith("/train")]
    return {row["doc_id"].hex(): steps_with_documents(order, spans_of([row])) for row in rows}


@pytest.fixture(scope="module")
def documents(line: Path) -> tuple[str, str]:
    """A document that only the first run read, and one that none of the runs read."""
    steps = [read_by(line / name) for name in ("first", "second", "third")]
    first = next(own for own, read in steps[0].items() if read and not any(other[own] for other in steps[1:]))
    return first, next(own for own in steps[0] if not any(read[own] for read in steps))


@pytest.fixture
def third(line: Path, tmp_path: Path) -> Path:
    """A copy of the third run."""
    return copied(line / "third", tmp_path / "run")


def test_the_certificate_and_the_verbs_name_the_weights_that_had_read_it(line, documents, third, capsys):
    document, run = documents[0], Store(str(third))
    read, name = {DATASET: dataset_of(third).digest}, notes(third)[-1].name
    write_receipt(run, Store(str(third / "model")), {"format": MODEL}, read, (), checkpoint=name)
    assert main(["trace", str(third), "--doc", document, "--brief"]) == 0
    assert "in no step of the plan; no checkpoint is clean: the weights that" in capsys.readouterr().out
    assert take_down(third, doc=[document]) == 0
    out = capsys.readouterr().out
    (certificate,) = certificates(third)
    effects = certificate.effects
    assert (effects.steps, effects.last_clean, effects.origins_saw) == ([], None, [False, True])
    assert {(model.saw, model.saw_before) for model in effects.models} == {(False, True)}
    assert (
        "step-000004: has seen them, in the weights that its training began from\nlast clean checkpoint: none\n" in out
    )
    assert f"the model began from step 4 of {line / 'first'}" in out
    assert "no checkpoint is clean: `penstock plan` a new run" in out
    assert len(certificate.exports) == 1  # the model of the last checkpoint
    assert take_down(third, check=f"takedowns/{certificate.id}.json") == 0
    assert "whose training had read them\nthe certificate is valid" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"got step 4 of .*/second .*from which this training began and which saw some"
    ):
        plan_replay(run, "clean")
    assert [own.step for own in find_replaced(run)[certificate.id]] == [0, 2, 4]
    replay = begin_replay(run, "2")
    assert (replay.clean, replay.unknown_before) == (False, False)
    trained(third, 1)
    assert take_down(third, doc=[documents[1]]) == 0
    assert {model.saw_earlier for model in certificates_after(third, certificate.id).effects.models[:3]} == {True}


def certificates_after(folder: Path, identifier: str):
    """Return the only certificate but one."""
    return next(own for own in certificates(folder) if own.id != identifier)


def test_what_was_removed_there_before_is_found_by_its_certificate(line, documents, tmp_path):
    folder = copied(line, tmp_path / "line")
    for name in ("second", "third"):
        plan = folder / name / "train/plan.json"
        plan.write_text(plan.read_text().replace(str(line), str(folder)))
    assert take_down(folder / "first", doc=[documents[0]]) == 0
    run = Store(str(folder / "third"))
    for document, saw in zip(documents, (True, False), strict=True):
        assert effects_of(run, frozenset([bytes.fromhex(document)])).origins_saw == [False, saw]


def test_a_clean_line_is_clean_and_a_url_finds_documents_of_other_ids(line, documents, third):
    run = Store(str(third))
    clean = effects_of(run, frozenset([bytes.fromhex(documents[1])]))
    assert (clean.last_clean, {model.may_have_seen for model in clean.models}) == (4, {False})
    url = next(row["url"] for row in documents_of(dataset_of(third)) if row["doc_id"].hex() == documents[0])
    other = frozenset([bytes(15) + b"x"])
    assert effects_of(run, other).origins_saw == [False, False]
    assert effects_of(run, other, [("url", url)]).origins_saw == [False, True]


@pytest.mark.parametrize("gone", ["folder", "checkpoint"])
def test_weights_that_cannot_be_read_are_not_called_clean(line, documents, third, tmp_path, gone, capsys):
    plan = third / "train/plan.json"
    if gone == "checkpoint":
        copied(line / "second", tmp_path / "second")
        shutil.rmtree(tmp_path / "second/train/checkpoints")
    plan.write_text(plan.read_text().replace(str(line / "second"), str(tmp_path / "second")))
    assert take_down(third, doc=[documents[1]]) == 0
    effects = certificates(third)[0].effects
    assert (effects.origins_saw, effects.saw_before, effects.last_clean) == ([None, False], None, None)
    assert "step-000004: not known of the weights that its training began from" in capsys.readouterr().out
    text = " ".join(describe_effects(effects))
    assert "clean checkpoint: not known, since it is not known of the weights before it" in text
    replay = plan_replay(Store(str(third)), "clean")
    assert (replay.from_step, replay.clean, replay.unknown_before) == (4, True, True)
    assert "itself (it is NOT KNOWN whether the weights that it began from did)" in describe_replay(replay)
    assert find_replaced(Store(str(third))) == {}


def test_the_weights_of_a_published_model_are_not_known(line, documents, tmp_path):
    export_checkpoint(Store(str(line / "first")), tmp_path / "model")
    run = after(tmp_path / "run", tmp_path / "model", 5)
    effects = effects_of(Store(str(run)), frozenset([bytes.fromhex(documents[1])]))
    assert (effects.origins_saw, {model.saw_before for model in effects.models}) == ([None], {None})


def test_every_run_of_the_line_has_a_receipt_of_the_runs_after_it(line):
    def named(name: str) -> dict[str, str | None]:
        found = read_receipts(Store(str(line / name)))
        return {Path(own.destination).name: own.checkpoint for own in found if Path(own.destination).parent == line}

    last = "train/checkpoints/step-000004"
    assert [named(name) for name in ("first", "second", "third")] == [
        {"second": last, "third": last},
        {"third": last},
        {},
    ]


def test_a_receipt_leads_to_no_other_storage(line, documents, tmp_path, monkeypatch):
    folder, opened_uris = copied(line / "first", tmp_path / "run"), []

    class Recorded(Store):
        def __init__(self, uri: str):
            opened_uris.append(uri)
            super().__init__(uri)

    (receipt, *_) = (folder / "exports").glob("*.json")
    for destination in ("hdfs://somewhere.invalid/run", "s3://bucket.invalid/run"):
        receipt.write_text(json.dumps(json.loads(receipt.read_text()) | {"destination": destination}))
        monkeypatch.setattr("jobs.verbs.takedown.Store", Recorded)
        effects_of(Store(str(folder)), frozenset([bytes.fromhex(documents[0])]))
    assert [uri for uri in opened_uris if "invalid" in uri] == []
    assert opened_uris, "the other receipts were followed"


def test_a_takedown_names_the_checkpoints_of_runs_elsewhere_on_its_dataset(line, documents, tmp_path, capsys):
    folder, other, both = make_run(tmp_path / "data"), tmp_path / "elsewhere/run", tmp_path / "both"
    attach_run(Store(str(other)), Store(str(folder)), (DATASET, "tokenizer"))
    trained(other, 1, "train.steps=4", "checkpoint.every=2")
    write_union(Store(str(both)), [Store(str(folder)), make_tiny_dataset(tmp_path / "more", suffix="-2")])
    trained(both, 1, "train.steps=2")
    assert take_down(folder, doc=[documents[0]]) == 0
    out, (certificate,) = capsys.readouterr().out, certificates(folder)
    found = {own.run: {model.step: model.saw for model in own.models} for own in certificate.effects.others}
    assert found["../elsewhere/run"] == {2: True, 4: True}
    assert {*found} == {"../elsewhere/run", "../both"}
    assert {"tokens"} <= {*certificate.effects.others[-1].tables}
    assert "../elsewhere/run uses the tables tokenizer, tokens; 2 of its 2 checkpoint(s) have seen them" in out
    assert len(certificate.exports) == 2
    assert take_down(folder, check=f"takedowns/{certificate.id}.json") == 0
    assert f"run {other} was trained on a dataset with removed documents" in capsys.readouterr().out
    assert take_down(folder, remake_exports=True) == 0
    assert take_down(folder, doc=[documents[1]]) == 0  # the dataset of the other runs is gone
    assert len(certificates_after(folder, certificate.id).effects.others) == 0
