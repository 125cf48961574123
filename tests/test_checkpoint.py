"""Checkpoints in one process: bitwise round trips, what exists and what does not, and every refusal."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from train.checkpoint import (
    NOTE_NAME,
    Identity,
    Layout,
    Note,
    check_identity,
    keep_newest,
    local_path,
    read_state,
    remove_halves,
    standing_notes,
    training_state,
    write_checkpoint,
)
from train.config import TrainConfig
from train.model import Transformer, build_model
from train.optim import gradient_norm, make_optimizer, update
from train.parallel import set_initial_weights, sharded_model
from train.ranks import Ranks, open_ranks
from train.shape import ModelShape

TINY = ModelShape(vocab_size=50, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_ffw=24, tie_embeddings=True)
IDENTITY = Identity(
    dataset="d1",
    tokenizer="t1",
    order="o1",
    settings={"shape.num_layers": 1, "train.seed": 3, "train.learning_rate": 0.001},
    skip_list="s1",
    skip_length=0,
)
LAYOUT = Layout(ranks=1, micro_batch=4, threads=1, device="cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with open_ranks() as ranks:
        yield ranks


def note(step: int) -> Note:
    return Note(step=step, identity=IDENTITY, layout=LAYOUT, files={})


def trained(ranks: Ranks, seed: int = 0) -> tuple[Transformer, torch.optim.AdamW]:
    """A sharded model after one update, so that no moment is zero."""
    model = sharded_model(TINY, TrainConfig(), ranks)
    set_initial_weights(model, seed)
    optimizer = make_optimizer(model, TrainConfig())
    torch.autograd.backward(model(torch.arange(12).view(2, 6)).square().sum())
    update(model, optimizer, gradient_norm(model), 1.0, 1e-3)
    return model, optimizer


def plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in state.items()}


def test_round_trip_is_bitwise(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    state = training_state(*trained(ranks))
    assert len(state) == 3 * len(list(build_model(TINY).parameters()))
    written = write_checkpoint(run, note(7), state, ranks)
    folder = tmp_path / "train/checkpoints/step-000007"
    assert written.files == {p.name: p.stat().st_size for p in folder.iterdir() if p.name != NOTE_NAME}
    assert standing_notes(run) == [written]
    other = training_state(*trained(ranks, seed=1))
    assert not torch.equal(other["model.embedding.weight"].full_tensor(), state["model.embedding.weight"].full_tensor())
    read_state(run, written, other, ranks)
    expected, found = plain(state), plain(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(expected[name].abs().sum() > 0 for name in expected)


def test_weights_alone_into_a_model_that_is_not_sharded(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    model, optimizer = trained(ranks)
    expected = plain(training_state(model, optimizer))
    written = write_checkpoint(run, note(1), training_state(model, optimizer), ranks)
    bare = build_model(TINY).to_empty(device="cpu")
    read_state(run, written, training_state(bare, None), ranks)
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in bare.named_parameters())


def test_without_its_note_a_checkpoint_does_not_exist(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    state = training_state(*trained(ranks))
    assert standing_notes(run) == []
    first = write_checkpoint(run, note(1), state, ranks)
    write_checkpoint(run, note(2), state, ranks)
    (tmp_path / "train/checkpoints/step-000002" / NOTE_NAME).unlink()
    (tmp_path / "train/checkpoints/other").mkdir()
    assert standing_notes(run) == [first]
    assert remove_halves(run) == ["step-000002"]
    assert sorted(path.name for path in (tmp_path / "train/checkpoints").iterdir()) == ["other", "step-000001"]
    (tmp_path / "train/checkpoints/step-000002").mkdir()
    (tmp_path / "train/checkpoints/step-000002/__7_0.distcp").write_bytes(b"left by more ranks")
    again = write_checkpoint(run, note(2), state, ranks)
    assert "__7_0.distcp" not in again.files


def test_keep_newest(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    state = training_state(*trained(ranks))
    for step in (900_000, 1_000_000, 5):
        write_checkpoint(run, note(step), state, ranks)
    assert [standing.step for standing in standing_notes(run)] == [5, 900_000, 1_000_000]
    keep_newest(run, 2)
    assert sorted(path.name for path in (tmp_path / "train/checkpoints").iterdir()) == ["step-1000000", "step-900000"]
    keep_newest(run, 3)
    assert [standing.step for standing in standing_notes(run)] == [900_000, 1_000_000]


def test_a_cut_file_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    state = training_state(*trained(ranks))
    written = write_checkpoint(run, note(3), state, ranks)
    path = tmp_path / written.name / "__0_0.distcp"
    size = path.stat().st_size
    with open(path, "r+b") as stream:
        stream.truncate(size - 1)
    with pytest.raises(ContractError, match=rf"__0_0\.distcp {size - 1}, not {size}"):
        read_state(run, written, state, ranks)
    path.unlink()
    with pytest.raises(ContractError, match=rf"__0_0\.distcp None, not {size}"):
        read_state(run, written, state, ranks)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    state = training_state(*trained(ranks))
    first = write_checkpoint(run, note(1), state, ranks)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(ContractError, match=r"step-000002: promised a checkpoint, found .*File too large"):
            write_checkpoint(run, note(2), state, ranks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert standing_notes(run) == [first]
    assert remove_halves(run) == ["step-000002"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "d2"}, "dataset: promised d1, found d2"),
        ({"tokenizer": "t2"}, "tokenizer: promised t1, found t2"),
        ({"order": "o2"}, "order: promised o1, found o2"),
        (
            {"settings": IDENTITY.settings | {"train.learning_rate": 0.003}},
            "train.learning_rate: promised 0.001, found 0.003",
        ),
        ({"settings": IDENTITY.settings | {"shape.new": 1}}, "shape.new: promised None, found 1"),
    ],
)
def test_another_identity_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_identity(note(4), IDENTITY.model_copy(update=change))
    assert f"step-000004: the run is no longer the one this checkpoint belongs to\n  {message}\n" in str(caught.value)


def test_the_same_identity_passes_and_a_grown_skip_list_is_not_judged_here() -> None:
    check_identity(note(4), IDENTITY.model_copy(update={"skip_list": "s2", "skip_length": 3}))


def test_every_difference_is_named() -> None:
    found = IDENTITY.model_copy(update={"dataset": "d2", "settings": {"train.seed": 4}})
    with pytest.raises(ContractError) as caught:
        check_identity(note(4), found)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "dataset",
        "shape.num_layers",
        "train.learning_rate",
        "train.seed",
    ]


def test_plan_digest_is_over_the_settings() -> None:
    same = IDENTITY.model_copy(update={"dataset": "d2", "settings": dict(reversed(IDENTITY.settings.items()))})
    assert same.plan == IDENTITY.plan
    assert IDENTITY.model_copy(update={"settings": {"train.seed": 4}}).plan != IDENTITY.plan


def test_a_remote_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="found s3://bucket/run"):
        local_path(Store("s3://bucket/run?region=eu-west-1"), "train")
