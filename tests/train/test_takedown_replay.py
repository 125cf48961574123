"""Training after a takedown: batches are the old ones less the documents, and the user chooses where it resumes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jobs.cli import main
from jobs.verbs.scaling import measured_run
from pipeline.lineage.training import read_lineage
from pipeline.takedown.certificate import check_certificate
from schemas.errors import ConfigError
from schemas.manifest import RunFile, read_run, write_run
from schemas.storage import Store
from schemas.takedown import descent_of
from schemas.tokens import Dataset
from schemas.versions import attach_run
from tests.support.tiny_runs import assert_same_bits, copied, cut_back, make_run, notes, train, trained
from tests.support.tiny_runs import opened as batches_of
from tests.support.tiny_takedown import certificates, documents_of, forge, opened, spans_of, take_down
from train.checkpoint.folder import CheckpointMetadata
from train.config.settings import load_settings
from train.data.batches import Batches
from train.data.order import make_order
from train.data.stages import append_to_skip_list
from train.dataset_history import read_replays
from train.plan.make_plan import make_plan
from train.plan.plan import open_order, read_plan, write_plan
from train.replay_check import differences
from train.takedown_replay import begin_replay, describe_replay, find_effects, notes_aside, steps_with_documents

Removed = list[dict[str, object]]
STEPS = 20


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A trained run with checkpoints of steps 5, 10, 15 and 20."""
    return trained(make_run(tmp_path_factory.mktemp("old") / "run", {"checkpoint": {"keep": 9}}), 1)


@pytest.fixture(scope="module")
def chosen(old: Path) -> Removed:
    """Two documents that the run first sees after step 10."""
    order = batches_of(old).order
    rows = [row for row in documents_of(opened(old)) if row["stream"].endswith("/train")]
    late = [row for row in rows if (steps := steps_with_documents(order, spans_of([row]))) and 10 < steps[0] <= 15]
    assert len(late) >= 2
    return [late[0], late[-1]]


@pytest.fixture
def new(old: Path, chosen: Removed, tmp_path: Path) -> Path:
    """A copy of the run, the documents taken down."""
    folder = copied(old, tmp_path / "run")
    assert take_down(folder, doc=[row["doc_id"].hex() for row in chosen]) == 0
    return folder


def compared(old: Path, new: Path, documents: Removed, *, mask: bool = False) -> Iterator[str]:
    """Every difference of every step from the old batches less the documents."""
    pair = []
    plan = read_plan(Store(str(old)))
    for folder in (old, new):
        config = plan.settings.train.model_copy(update={"document_mask": mask})
        dataset = opened(folder)
        pair.append(Batches(dataset, config, make_order(dataset, config, plan.stages)))
    tombstone = opened(old).tokenizer.reserved["tombstone"]
    for step in range(plan.steps):
        yield from differences(*pair, spans_of(documents), tombstone, step)


@pytest.mark.parametrize("mask", [False, True])
def test_every_batch_is_the_old_one_less_the_documents(old: Path, new: Path, chosen: Removed, mask: bool) -> None:
    assert list(compared(old, new, chosen, mask=mask)) == []
    # and the old batches held them: the proof is not empty
    assert len(list(compared(old, old, chosen, mask=mask))) > 100


def test_one_other_token_is_found(old: Path, new: Path, chosen: Removed) -> None:
    gone = {row["doc_id"] for row in chosen}
    rows = [row for row in documents_of(opened(old)) if row["stream"] == "web/train" and row["doc_id"] not in gone]
    order = batches_of(old).order
    other = next(
        row for row in rows if steps_with_documents(order, [("web/train", row["start"] + 7, 1)], next_tokens=0)
    )
    number = next(n for n, shard in _begins(opened(new), "web/train") if other["start"] < shard)
    size = opened(new).streams["web/train"][number]

    def swap(data: bytes) -> bytes:
        tokens = np.array(other["tokens"], np.uint16).tobytes()
        assert data.count(tokens) == 1
        changed = np.array([*other["tokens"][:7], 300 + (other["tokens"][7] == 300), *other["tokens"][8:]], np.uint16)
        return data.replace(tokens, changed.tobytes())

    forge(new, f"web/train/{size.number:05d}.tokens", swap)
    found = list(compared(old, new, chosen))
    assert found
    assert {line.rpartition("expected ")[2].split()[0] for line in found} == {"input", "target"}
    assert {line.rpartition("got ")[2] for line in found} == {str(300 + (other["tokens"][7] == 300))}


def _begins(dataset: Dataset, stream: str) -> Iterator[tuple[int, int]]:
    end = 0
    for shard in dataset.streams[stream]:
        end += shard.num_tokens
        yield shard.number, end


def test_steps_and_checkpoints_that_saw_them_are_named(old: Path, new: Path, chosen: Removed) -> None:
    effects = certificates(new)[0].effects
    batches, seen = batches_of(old), []
    for step in range(STEPS):  # the plain way: which batches have other tokens without the documents
        if list(compared_step(old, chosen, batches, step)):
            seen.append(step + 1)
    assert effects.steps == seen
    assert [(model.step, model.saw) for model in effects.models] == [
        (step, step >= seen[0]) for step in (0, 5, 10, 15, 20) if step in {note.step for note in notes(old)}
    ]
    assert effects.last_clean == 10


def test_a_packed_row_is_not_reported_for_the_document_after_its_last(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"train": {"packing": "best_fit", "steps": 60}})
    run, dataset = Store(str(folder)), opened(folder)
    plan = make_plan(run, dataset, load_settings(read_run(run).recipe, [], run.uri))
    write_plan(run, plan)
    order = open_order(run, dataset, plan)
    batches, tombstone = Batches(dataset, plan.settings.train, order), dataset.tokenizer.reserved["tombstone"]
    rows = [row for row in documents_of(dataset) if row["stream"] == "web/train"][:8]
    actual = [find_effects(run, dataset, spans_of([row])).steps for row in rows]
    assert actual == [
        [step + 1 for step in range(60) if any(differences(batches, batches, spans_of([row]), tombstone, step))]
        for row in rows
    ]
    assert actual != [steps_with_documents(order, spans_of([row]), next_tokens=1) for row in rows]


def test_runs_on_the_same_tables_are_named_and_change_nothing_of_them(
    old: Path, chosen: Removed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ids = copied(old, tmp_path / "run"), [row["doc_id"].hex() for row in chosen]
    attach_run(Store(str(folder / "ladder/small")), Store(str(folder)))
    shutil.copytree(folder / "train", folder / "ladder/small/train")
    with pytest.raises(
        ConfigError, match=rf"expected a run with its own tables for `takedown`, got .*tokens of {folder}"
    ):
        take_down(folder / "ladder/small", doc=ids)
    assert take_down(folder, doc=ids) == 0
    effects = certificates(folder)[0].effects
    (other,) = effects.others
    assert (other.run, other.steps) == ("ladder/small", effects.steps)
    assert {*other.tables} == {"tokens", "tokenizer"}
    assert [(f"ladder/small/{m.checkpoint}", m.saw) for m in effects.models] == [
        (m.checkpoint, m.saw) for m in other.models
    ]
    assert "ladder/small uses the tables" in capsys.readouterr().out
    certificate = certificates(folder)[0]
    assert check_certificate(Store(str(folder)), certificate).problems == []
    branch = Store(str(folder / "ladder/small"))  # with a dataset of its own, as an ablation has one
    ways = read_run(branch).tables
    write_run(branch, RunFile(tables=ways | {"tokens": "v-0000000000e0"}))
    (found,) = check_certificate(Store(str(folder)), certificate).problems
    assert found.startswith("ladder/small: expected no tables made from this run, got a run with its own tokens")


def test_a_run_elsewhere_on_what_is_left_is_measured_traced_and_resumed(new: Path, tmp_path: Path) -> None:
    """The certificates are in the run that holds the dataset, not in the one that is trained on it."""
    other = tmp_path / "other"
    attach_run(Store(str(other)), Store(str(new)))
    trained(other, 1, "train.steps=4", "checkpoint.every=2")
    run = Store(str(other))
    assert measured_run(run, "other").loss > 0
    assert main(["trace", str(other), "--step", "2", "--brief"]) == 0
    cut_back(other, 2)
    trained(other, 1, "checkpoint.every=2")
    assert [note.step for note in notes(other)] == [2, 4]
    assert find_effects(run, opened(other), []).steps == []


def compared_step(old: Path, chosen: Removed, batches: Batches, step: int) -> Iterator[str]:
    tombstone = opened(old).tokenizer.reserved["tombstone"]
    return differences(batches, batches, spans_of(chosen), tombstone, step)


def test_training_from_the_last_clean_checkpoint_is_training_without_them(
    old: Path, new: Path, chosen: Removed, tmp_path: Path
) -> None:
    # A run that has never seen the documents: the same plan on the new dataset from the beginning.
    fresh = copied(new, tmp_path / "fresh")
    shutil.rmtree(fresh / "train/checkpoints")
    plan = read_plan(Store(str(old)))
    write_plan(Store(str(fresh)), plan.model_copy(update={"dataset": opened(new).digest}))
    trained(fresh, 1)
    replay = begin_replay(Store(str(new)), "clean")
    assert (replay.from_step, replay.clean, replay.before) == (10, True, opened(old).digest)
    assert [name[-2:] for name in replay.set_aside] == ["15", "20"]
    assert "saw none of the removed documents" in describe_replay(replay)
    trained(new, 1)
    assert_same_bits(new, fresh)
    assert [note.identity.dataset == opened(new).digest for note in notes(new) if note.step > 0] == [
        *[False] * 2,
        *[True] * 2,
    ]
    assert sorted(path.name for path in (new / "train/replaced").glob("*/*")) == ["step-000015", "step-000020"]
    assert read_replays(Store(str(new))) == [replay]


def test_a_dry_run_describes_the_replay_and_changes_nothing(new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in new.rglob("*") if path.is_file()}
    assert main(["train", str(new), "--dry-run", "--replay-from", "clean"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "nothing is started or moved; it would be training again from checkpoint of step 10, which saw none of the "
        "removed documents"
    )
    assert "2 later checkpoint(s) set aside" in out
    assert {path: path.read_bytes() for path in new.rglob("*") if path.is_file()} == before


def test_an_interrupted_replay_resumes(new: Path) -> None:
    run = Store(str(new))
    with (
        mock.patch("train.takedown_replay.write_plan", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        begin_replay(run, "clean")
    assert begin_replay(run, "clean").from_step == 10
    trained(new, 1)
    again = begin_replay(run, "15")  # a checkpoint that the replay has written
    assert (again.from_step, again.clean, len(again.set_aside)) == (15, True, 1)
    assert begin_replay(run, "clean").from_step == 15
    trained(new, 1)


def test_a_kill_between_the_checkpoints_set_aside_is_refused_until_ended(new: Path) -> None:
    run, move = Store(str(new)), Store.move

    def once(store: Store, source: str, goal: str) -> None:
        move(store, source, goal)
        raise KeyboardInterrupt

    with mock.patch.object(Store, "move", once), pytest.raises(KeyboardInterrupt):
        begin_replay(run, "clean")
    answer = train(new, 1)[0]
    assert "ContractError" in answer.error
    assert begin_replay(run, "clean").from_step == 10
    trained(new, 1)


def test_another_choice_after_a_kill_replaces_the_first(new: Path) -> None:
    """The first choice, of a clean checkpoint, was stored and one checkpoint moved; nothing was trained after it."""
    run, move = Store(str(new)), Store.move

    def once(store: Store, source: str, goal: str) -> None:
        move(store, source, goal)
        raise KeyboardInterrupt

    with mock.patch.object(Store, "move", once), pytest.raises(KeyboardInterrupt):
        begin_replay(run, "clean")
    assert begin_replay(run, "15").clean is False
    trained(new, 1)
    moved = ["train/checkpoints/step-000020"]
    assert [(one.from_step, one.clean, one.set_aside) for one in read_replays(run)] == [(15, False, moved)]
    replay = begin_replay(run, "20")
    assert (replay.from_step, replay.clean) == (20, False)  # trained after step 15, which has seen them
    assert [own.step for own in notes_aside_of(run)] == [20]


def notes_aside_of(run: Store) -> list[CheckpointMetadata]:
    """The metadata of the checkpoints that replays have set aside."""
    return [note for _, note in notes_aside(run)]


def test_nothing_continues_undeclared(old: Path, new: Path) -> None:
    run, before, after = Store(str(new)), opened(old).digest, opened(new).digest
    answer = train(new, 1)[0]  # the existing plan is for the old dataset
    assert before in answer.error
    assert after in answer.error
    write_plan(run, read_plan(Store(str(old))).model_copy(update={"dataset": after}))
    answer = train(new, 1)[0]
    assert f"step-000020: expected dataset {before}, got {after}" in answer.error
    assert "--replay-from clean" in answer.error
    # The certificate no longer says that the new version comes of the old one.
    name = next(path for path in (new / "takedowns").glob("*.json"))
    name.write_text(name.read_text().replace(before, "0" * 64))
    answer = train(new, 1)[0]
    assert before in answer.error
    assert "Restore the certificate" in answer.error


def test_a_dataset_that_only_claims_to_come_of_another_is_refused(old: Path, new: Path) -> None:
    # Positions kept, a parent named, but one token of another document differs: a new digest, which no certificate has.
    begin_replay(Store(str(new)), "clean")
    forge_only_manifest(new)
    answer = train(new, 1)[0]
    assert "ContractError" in answer.error
    assert opened(new).digest in answer.error


def forge_only_manifest(folder: Path) -> None:
    version = read_run(Store(str(folder))).tables["tokens"]
    path = folder / "tokens" / version / "manifest.json"
    raw = json.loads(path.read_text())
    raw["content"]["files"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(raw))


def test_a_checkpoint_that_saw_them_continues_only_by_choice(new: Path) -> None:
    replay = begin_replay(Store(str(new)), "15")
    assert (replay.from_step, replay.clean) == (15, False)
    assert "HAS SEEN" in describe_replay(replay)
    trained(new, 1)


def test_checkpoints_after_one_that_saw_them_have_seen_them_too(new: Path, old: Path, capsys) -> None:
    """A replay from step 15 writes step 20 on the new dataset, but its weights come from the removed documents."""
    run = Store(str(new))
    begin_replay(run, "15")
    trained(new, 1)
    replay = begin_replay(run, "20")
    assert (replay.from_step, replay.clean) == (20, False)
    assert "HAS SEEN" in describe_replay(replay)
    order = batches_of(new).order
    rows = [row for row in documents_of(opened(new)) if row["stream"] == "web/train" and row["url"]]
    last = next(row for row in rows if (seen := steps_with_documents(order, spans_of([row]))) and seen[0] > 15)
    capsys.readouterr()
    assert take_down(new, doc=[last["doc_id"].hex()]) == 0  # seen later than all before: step 15 holds none of it
    lines = capsys.readouterr().out.splitlines()
    assert "  train/checkpoints/step-000015: has seen documents of an earlier takedown" in lines
    assert "last clean checkpoint: step 10" in lines
    assert begin_replay(run, "clean").from_step == 10
    trained(new, 1)
    replay = begin_replay(run, "clean")  # all that came after step 10 is without both documents
    assert (replay.from_step, replay.clean) == (20, True)
    assert [one.clean for one in read_replays(run)] == [False, False, True, True]
    assert read_lineage(run, verify=True).breaks == ()


def test_a_new_start_after_such_a_checkpoint_has_seen_nothing(new: Path) -> None:
    """The checkpoints of a replay from step 15 are removed by hand, and training begins at step 0 on what is left."""
    run = Store(str(new))
    begin_replay(run, "15")
    trained(new, 1)
    shutil.rmtree(new / "train/checkpoints")
    trained(new, 1)
    trained(new, 1)  # a resumed training is no other start
    assert [(one.from_step, one.clean) for one in read_replays(run)] == [(15, False), (0, True)]
    replay = begin_replay(run, "clean")
    assert (replay.from_step, replay.clean) == (20, True)
    assert read_lineage(run, verify=True).breaks == ()


def test_a_second_takedown_of_a_replayed_run(new: Path, old: Path) -> None:
    run = Store(str(new))
    begin_replay(run, "clean")
    trained(new, 1)
    order = batches_of(new).order
    rows = [row for row in documents_of(opened(new)) if row["stream"] == "web/train" and row["url"]]
    one = next(row for row in rows if (seen := steps_with_documents(order, spans_of([row]))) and 5 < seen[0] <= 10)
    assert take_down(new, doc=[one["doc_id"].hex()]) == 0
    replay = begin_replay(run, "clean")
    assert (replay.from_step, len(replay.takedowns)) == (5, 1)
    trained(new, 1)
    descent = descent_of(opened(new).manifest)
    assert descent is not None
    assert descent.origin == opened(old).digest


def test_two_takedowns_before_a_replay_are_both_reported_and_both_undone(new: Path, old: Path) -> None:
    """The plan is still that of the dataset before both of them; what its steps saw is reported nevertheless."""
    run, order = Store(str(new)), batches_of(old).order
    rows = [row for row in documents_of(opened(new)) if row["stream"] == "web/train" and row["url"]]
    one = next(row for row in rows if (seen := steps_with_documents(order, spans_of([row]))) and 5 < seen[0] <= 10)
    assert take_down(new, doc=[one["doc_id"].hex()]) == 0
    second = certificates(new)
    effects = next(found.effects for found in second if found.effects.last_clean == 5)
    assert effects.steps == steps_with_documents(order, spans_of([one]))
    assert [(model.step, model.saw) for model in effects.models] == [(5, False), (10, True), (15, True), (20, True)]
    replay = begin_replay(run, "clean")
    assert (replay.from_step, replay.clean, len(replay.takedowns)) == (5, True, 2)
    trained(new, 1)
    third = next(row for row in rows if row["doc_id"] != one["doc_id"] and steps_with_documents(order, spans_of([row])))
    assert take_down(new, doc=[third["doc_id"].hex()]) == 0
    last = next(found for found in certificates(new) if found not in second)
    names = [model.checkpoint for model in last.effects.models]
    aside = f"train/replaced/{opened(old).digest[:12]}/step-0000"
    assert names[-3:] == [f"{aside}10", f"{aside}15", f"{aside}20"]  # they are still there, and have seen it
    first = steps_with_documents(order, spans_of([third]))[0]
    assert all(model.saw == (model.step >= first) for model in last.effects.models)


@pytest.mark.parametrize("grown", [True, False])
def test_replaced_checkpoints_are_judged_by_the_samples_that_they_were_trained_on(old, new, grown: bool) -> None:
    """After the replay, the skip list leaves out steps 11 to 15 of the old training, or the plan has another order."""
    run, before = Store(str(new)), batches_of(old).order
    begin_replay(run, "clean")
    if grown:
        append_to_skip_list(run, "skips.txt", [int(i) for s in range(10, 15) for i in before.samples(s).index], "x")
        trained(new, 1, 'train.skip_file="skips.txt"')
    else:
        shutil.rmtree(new / "train/checkpoints")
        (new / "train/plan.json").unlink()
        trained(new, 1, "train.seed=9", "train.steps=3")
    after = batches_of(new).order
    rows = [row for row in documents_of(opened(new)) if row["stream"].endswith("/train") and row["url"]]
    row = next(
        row
        for row in rows
        if (read := steps_with_documents(before, spans_of([row])))
        and read[0] in (range(11, 16) if grown else range(1, 16))
        and not steps_with_documents(after, spans_of([row]))
    )
    effects = find_effects(run, opened(new), spans_of([row]))
    aside = {model.step: model.saw for model in effects.models if model.checkpoint.startswith("train/replaced/")}
    assert aside == {15: True, 20: True}
    assert not any(model.saw for model in effects.models if model.checkpoint.startswith("train/checkpoints/"))


def test_checkpoints_of_other_positions_are_not_called_clean(
    old: Path, chosen: Removed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(old, tmp_path / "run")
    assert take_down(folder, doc=[chosen[0]["doc_id"].hex()], compact=True) == 0
    capsys.readouterr()
    assert take_down(folder, doc=[chosen[1]["doc_id"].hex()]) == 0
    effects = certificates(folder)[0].effects
    if effects.steps:  # of the first takedown
        effects = certificates(folder)[1].effects
    assert (effects.steps, effects.last_clean) == ([], None)
    assert {model.saw for model in effects.models} == {True}
    out = capsys.readouterr().out
    assert "train/checkpoints/step-000005: may have seen them" in out
    assert "last clean checkpoint: none, train from step 0" in out


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("7", r"expected clean, 0 or the step of a checkpoint \(.*5, 10, 15, 20\), got '7'"),
        ("latest", "got 'latest'"),
        ("-5", "got '-5'"),
    ],
)
def test_other_choices_are_refused_before_anything_is_written(new: Path, choice: str, said: str) -> None:
    before = {path: path.read_bytes() for path in new.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=said):
        begin_replay(Store(str(new)), choice)
    assert {path: path.read_bytes() for path in new.rglob("*") if path.is_file()} == before


def test_no_replay_without_a_takedown(old: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got dataset \w{12}, which no takedown has changed\. Train without"):
        begin_replay(Store(str(old)), "clean")
    with pytest.raises(ConfigError, match=r"expected a run that has been trained, got .* without train/plan\.json"):
        begin_replay(Store(str(make_run(tmp_path / "run"))), "clean")


def test_no_replay_on_nothing(old: Path, tmp_path: Path) -> None:
    folder = copied(old, tmp_path / "run")
    assert take_down(folder, doc=[row["doc_id"].hex() for row in documents_of(opened(folder))]) == 0
    with pytest.raises(ConfigError, match="expected at least one document to train on, got 0: all documents"):
        begin_replay(Store(str(folder)), "clean")


def test_compacted_positions_end_the_old_checkpoints(old: Path, chosen: Removed, tmp_path: Path, capsys) -> None:
    folder = copied(old, tmp_path / "run")
    assert take_down(folder, doc=[row["doc_id"].hex() for row in chosen], compact=True) == 0
    assert "existing checkpoints cannot resume on the new dataset" in capsys.readouterr().out
    run, dataset = Store(str(folder)), opened(folder)
    with pytest.raises(ConfigError, match="takedowns that keep every token position"):
        begin_replay(run, "clean")
    write_plan(run, make_plan(run, dataset, load_settings(read_run(run).recipe, [], run.uri)))
    assert f"takedown {certificates(folder)[0].id} has moved positions" in train(folder, 1)[0].error
    shutil.rmtree(folder / "train/checkpoints")
    trained(folder, 1)


def test_a_run_that_another_takedown_overtook_names_both(old: Path, chosen: Removed, tmp_path: Path) -> None:
    """Without a takedown between them, two datasets stay two."""
    folder = copied(old, tmp_path / "run")
    version = read_run(Store(str(folder))).tables["tokens"]
    path = folder / "tokens" / version / "manifest.json"
    raw = json.loads(path.read_text())
    raw["content"]["config"] = {"tokens": {"seed": 1}}
    path.write_text(json.dumps(raw))
    run, dataset = Store(str(folder)), opened(folder)
    write_plan(run, read_plan(Store(str(old))).model_copy(update={"dataset": dataset.digest}))
    error = train(folder, 1)[0].error
    assert f"dataset: expected {opened(old).digest}, got {dataset.digest}" in error
