"""Held-out losses across runs: the trainer's own numbers, documents that were seen, tokenizers, and plain errors."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, ContractError
from schemas.manifest import RunFile, read_run, write_run
from schemas.storage import Store
from schemas.takedown import salted_digest
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset, replace_token
from tests.support.tiny_runs import RECIPE, copied, make_run, metrics, trained
from train import ancestors
from train.ancestors import EarlierData
from train.checkpoint.state import read_model
from train.data.heldout import heldout_documents, row_starts, trained_documents
from train.data.rows import IGNORED
from train.eval import evaluate

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = make_run(tmp_path_factory.mktemp("evaluate") / "run", {"train": {"steps": 6, "eval_every": 6}})
    return trained(folder, 1)


def other_run(folder: Path, documents: dict[str, int], recipe: dict[str, dict[str, Any]] = RECIPE) -> Path:
    """A run on another dataset of the same tokenizer; documents of the same number are the same in both."""
    made = make_tiny_dataset(folder, documents)
    write_run(made, RunFile(tables=read_run(made).tables, recipe=recipe))
    return folder


def measured(runs: list[Path], on: list[Path], number: int = 5) -> list[evaluate.Measurement]:
    return list(evaluate.evaluate([str(run) for run in runs], [str(one) for one in on], number, (), None))


def test_on_its_own_dataset_it_is_the_trainers_held_out_loss(run: Path) -> None:
    (found,) = measured([run], [run])
    last = metrics(run)[-1]
    assert found.sources.keys() == last.heldout.keys() == {"web", "books"}
    for name, one in found.sources.items():
        assert one.loss == pytest.approx(last.heldout[name].loss, rel=1e-6)
        assert one.bits_per_byte == pytest.approx(last.heldout[name].bits_per_byte, rel=1e-6)
    assert (found.left_out, found.left_out_targets) == (0, 0)
    assert found.trained_on == found.on == open_dataset(Store(str(run))).digest


def test_a_document_that_the_run_was_trained_on_is_left_out(run: Path, tmp_path: Path) -> None:
    # Of the 4 documents that 40 hold out, one is training text of the run with 60.
    other = other_run(tmp_path / "other", {"web": 40})
    dataset, trained_there = open_dataset(Store(str(other))), open_dataset(Store(str(run)))
    documents = heldout_documents(dataset, 32, 10_000)
    seen = trained_documents([one.doc_id for one in documents], trained_there)
    assert (len(documents), len(seen)) == (4, 1)
    (found,) = measured([run], [other], 10_000)
    assert (found.documents, found.left_out) == (len(documents), len(seen))
    rows = sum(len(starts) for starts in row_starts(dataset, 32, 10_000).values())
    assert found.sources["web"].targets + found.left_out_targets == 32 * rows
    # By hand: every target of a row is a token of one document, and those of a seen document are removed.
    expected = sum(
        min(one.end, int(start) + 33) - max(one.first, int(start) + 1)
        for start in row_starts(dataset, 32, 10_000)["web"]
        for one in documents
        if one.doc_id in seen and max(one.first, int(start) + 1) < min(one.end, int(start) + 33)
    )
    assert found.left_out_targets == expected


def test_a_document_that_the_weights_before_a_training_have_read_is_left_out(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder = copied(run, tmp_path / "first"), tmp_path
    for number, name in ((40, "second"), (30, "third")):
        train = RECIPE["train"] | {"steps": 1, "eval_every": 0, "init_from": str(first)}
        other_run(folder / name, {"web": number}, RECIPE | {"plan": {}, "train": train})
        first = trained(folder / name, 1)
    datasets = {name: open_dataset(Store(str(folder / name))) for name in ("first", "second", "third")}

    def seen(name: str, earlier: str) -> set[bytes]:
        held = [own.doc_id for own in heldout_documents(datasets[name], 32, 10_000)]
        return trained_documents(held, datasets[earlier])

    # Of the 4 documents that 40 hold out, and of the 3 of 30, the first run was trained on one, no other run on any.
    (removed,) = seen("second", "first")
    assert (len(seen("third", "first")), len(seen("third", "second"))) == (1, 0)
    for name in ("second", "third"):
        assert [own.left_out for own in measured([folder / name], [folder / name], 10_000)] == [1]
    assert "NOT KNOWN" not in caplog.text
    # What a takedown has removed there since then is in its certificate alone.
    traces = [SimpleNamespace(document=salted_digest("salt", "document", removed))]
    takedowns = [SimpleNamespace(salt="salt", documents=traces)]
    earlier = EarlierData([(Store(str(folder)), datasets["first"])])
    assert earlier.removed({removed, bytes(16)}) == set()
    monkeypatch.setattr(ancestors, "takedowns_at_same_positions", lambda dataset: takedowns)
    assert earlier.removed({removed, bytes(16)}) == {removed}
    monkeypatch.undo()
    shutil.rmtree(folder / "first")
    assert [own.left_out for own in measured([folder / "second"], [folder / "second"], 10_000)] == [0]
    assert f"NOT KNOWN whether step 6 of {folder / 'first'} " in caplog.text
    assert ", was trained on held-out documents. If so, its losses are too low." in caplog.text


def test_all_runs_are_asked_about_the_same_tokens(run: Path, tmp_path: Path) -> None:
    other = trained(other_run(tmp_path / "other", {"web": 160}), 1, "train.steps=2")
    found = measured([run, other], [run, other], 10_000)
    assert [(Path(one.run), one.on) for one in found] == [
        (folder, open_dataset(Store(str(on))).digest) for folder in (run, other) for on in (run, other)
    ]
    asked = [{name: one.targets for name, one in found[number].sources.items()} for number in range(4)]
    assert asked[0] == asked[2]
    assert asked[1] == asked[3]
    # What the run with 160 was trained on is no question to the run with 60 either: two of its own six are left out.
    assert [one.left_out for one in found] == [2, 0, 2, 0]


def test_each_run_is_read_with_its_own_document_mask(run: Path, tmp_path: Path) -> None:
    changes = {"steps": 6, "eval_every": 6, "document_mask": False}
    other = trained(make_run(tmp_path / "other", {"train": changes}), 1)
    for runs in ([run, other], [other, run]):
        for name, one in zip(runs, measured(runs, [run]), strict=True):
            losses = {source: own.loss for source, own in metrics(name)[-1].heldout.items()}
            assert {source: own.loss for source, own in one.sources.items()} == pytest.approx(losses, rel=1e-6)


def test_other_masked_shares_are_refused(tmp_path: Path) -> None:
    runs = [tmp_path / "low", tmp_path / "high"]
    for folder, share in zip(runs, (0.15, 0.3), strict=True):
        changes = {"steps": 1, "eval_every": 0, "objective": "mlm", "mask_share": share}
        trained(make_run(folder, {"train": changes}), 1)
    with pytest.raises(ConfigError, match=r"equal .*train.mask_share, got .*low: 32, mlm, 0.15; .*high: 32, mlm, 0.3"):
        measured(runs, runs[:1])


def test_a_model_that_has_diverged_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(*arguments: object) -> torch.nn.Module:
        model = read_model(*arguments)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return model

    monkeypatch.setattr(evaluate, "read_model", diverged)
    with pytest.raises(ContractError, match="expected held-out losses, got nan, because the model has diverged"):
        measured([run], [run])


def test_a_heldout_shard_whose_checksums_were_fitted_is_refused(run: Path, tmp_path: Path) -> None:
    other = other_run(tmp_path / "other", {"web": 160})
    expected = replace_token(Store(str(other)), "web/heldout")
    with pytest.raises(ContractError, match=rf"web/heldout/.*: expected SHA-256 {expected}.*, got SHA-256 \w{{64}}"):
        measured([run], [other])


def test_targets_of_a_hidden_document_are_taken_out_where_they_stand() -> None:
    rows = evaluate.Rows(torch.zeros((2, 4), dtype=torch.int64), torch.arange(8).view(2, 4), None, torch.zeros(2))
    heldout = evaluate.HeldoutRows(("web",), rows)
    # Tokens 3 to 5: row 0 reads 0 to 3 and predicts 1 to 4, row 1 reads 4 to 7 and predicts 5 to 8.
    hidden = [evaluate.HeldoutDocument(b"", "web", 3, 6), evaluate.HeldoutDocument(b"", "books", 0, 9)]
    starts = {"web": torch.tensor([0, 4]).numpy()}
    left = evaluate.mask_documents(heldout, hidden, starts, ahead=1).rows.targets_BT
    assert left.tolist() == [[0, 1, IGNORED, IGNORED], [IGNORED, 5, 6, 7]]
    left = evaluate.mask_documents(heldout, hidden, starts, ahead=0).rows.targets_BT
    assert left.tolist() == [[0, 1, 2, IGNORED], [IGNORED, IGNORED, 6, 7]]
    assert rows.targets_BT.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_another_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_tiny_dataset(other, vocab_size=600)
    with pytest.raises(
        ContractError,
        match=r"other: expected the tokenizer contract of .*run .*: set tokenizer.model to one file for both runs",
    ):
        measured([run], [other])


def test_what_was_trained_on_has_to_be_known(run: Path, tmp_path: Path) -> None:
    changed = other_run(tmp_path / "changed", {"web": 160})
    (changed / "train").symlink_to(run / "train")
    expected = r"expected dataset \w{12}, on which the checkpoint was trained, got the run's dataset \w{12}"
    with pytest.raises(ContractError, match=expected):
        measured([changed], [run])


def test_rows_too_long_for_what_is_held_out_are_refused(run: Path, tmp_path: Path) -> None:
    other = other_run(tmp_path / "other", {"web": 1})
    tokens = open_dataset(Store(str(other))).num_tokens("heldout")["web"]
    with pytest.raises(ConfigError, match=r"got none. Run the recipe with a larger tokens"):
        evaluate.make_exam(open_dataset(Store(str(other))), _longer(run, tokens), 5)


def _longer(run: Path, seq_len: int) -> list[evaluate.EvaluatedCheckpoint]:
    one = evaluate.open_candidate(str(run), None)
    stages = [stage | {"seq_len": seq_len} for stage in one.note.identity.settings["train.stages"]]
    settings = one.note.identity.settings | {"train.stages": stages}
    identity = one.note.identity.model_copy(update={"settings": settings})
    return [
        evaluate.EvaluatedCheckpoint(one.name, one.run, one.dataset, one.note.model_copy(update={"identity": identity}))
    ]


def test_the_command_writes_what_it_prints(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.txt"
    first = heldout_documents(open_dataset(Store(str(run))), 32, 5)[0]
    ids.write_text(f"{first.doc_id.hex()}\n")
    out = str(tmp_path / "found.json")
    assert evaluate.main([str(run), "--on", str(run), "--out", out, "--leave-out", str(ids)]) == 0
    (found,) = json.loads(Path(out).read_text())
    assert found["left_out"] == 1
    printed = capsys.readouterr().out
    assert (
        f"web          {found['sources']['web']['nats'] / found['sources']['web']['targets']:.4f} nats/token" in printed
    )
    losses = found["sources"].values()
    targets = sum(loss["targets"] for loss in losses)
    assert f"all          {sum(loss['nats'] for loss in losses) / targets:.4f} nats/token" in printed
    assert f"  {targets:,} targets\n  left out: 1 of" in printed
    ids.write_text("zebra\n")
    assert evaluate.main([str(run), "--on", str(run), "--leave-out", str(ids)]) == 2
    assert "expected a file with one document id in hex per line, got" in capsys.readouterr().err
    assert evaluate.main([str(run), "--on", str(run), "--sequences", "0"]) == 2
    assert evaluate.main([str(tmp_path / "none"), "--on", str(run)]) == 2
