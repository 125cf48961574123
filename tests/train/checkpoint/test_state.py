"""Checkpoint state in one process: bitwise round trips, complete and absent checkpoints, and every error."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from tests.support.tiny_runs import sealed
from train.checkpoint.folder import (
    CheckpointMetadata,
    Identity,
    Layout,
    StateFile,
    TrainerState,
    check_identity,
    keep_newest,
    list_checkpoints,
    local_path,
    remove_checkpoint,
    remove_incomplete,
    steps_kept,
)
from train.checkpoint.save import write_checkpoint
from train.checkpoint.state import layout_of, read_state, stored_shapes
from train.config.layout import AXES, LayoutConfig
from train.config.train import CheckpointConfig
from train.monitor.guard import GuardState
from train.parallel.ranks import Ranks

IDENTITY = Identity(
    dataset="d1",
    tokenizer="t1",
    order="o1",
    settings={"shape.num_layers": 1, "train.seed": 3, "optim.learning_rate": 0.001},
    skip_list="s1",
    skip_length=0,
    code_version="0.1.0",
)
ONE = dict.fromkeys(AXES, 1)
LAYOUT = Layout(ranks=1, axes=ONE, settings={"micro_batch": 4}, threads=1, device="cpu", kernels="torch 2")
EVERY_FLOAT = (0.1, 1 / 3, 5e-324, -0.0, 1e308, math.inf, -math.inf)
EVERY_FINITE = tuple(value for value in EVERY_FLOAT if math.isfinite(value))


def ranks_of_world() -> Ranks:
    """Return the ranks of the open process group."""
    known = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "local_size": dist.get_world_size(),
        "device": torch.device("cpu"),
        "control": dist.new_group(backend="gloo", timeout=timedelta(seconds=120)),
    }
    return Ranks(**{field.name: known.get(field.name) for field in fields(Ranks)})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks_of_world()
    dist.destroy_process_group()


def note(step: int, **fields: object) -> CheckpointMetadata:
    return CheckpointMetadata.model_validate({"step": step, "identity": IDENTITY, "layout": LAYOUT} | fields)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return every kind of tensor that a state may hold."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(7, 5, generator=random),
        "model.half": torch.randn(4, 4, generator=random).bfloat16(),
        "model.turned": torch.randn(3, 6, generator=random).T,
        "exp_avg.weight": torch.randn(7, 5, generator=random).double(),
        "step.weight": torch.tensor(float(seed + 3)),
        "rows.weight": torch.randint(1 << 62, (3,), generator=random),
        "empty.weight": torch.empty(0, 5),
    }


def same_bits(item: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return item.keys() == other.keys() and all(
        item[name].dtype == other[name].dtype and torch.equal(item[name], other[name]) for name in item
    )


def path_of(run: Store, step: int, name: str = "__0_0.distcp") -> Path:
    return Path(run.path(f"train/checkpoints/step-{step:06d}/{name}"))


# ------------------------------------------------------------------------------------------------------ state and back


def test_round_trip_is_bitwise(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    written = write_checkpoint(run, note(7), state, ranks)
    folder = tmp_path / "train/checkpoints/step-000007"
    assert {name: file.size for name, file in written.files.items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != METADATA_NAME
    }
    assert sorted(written.files) == [".metadata", "__0_0.distcp"]
    assert written.size == sum(path.stat().st_size for path in folder.iterdir() if path.name != METADATA_NAME)
    assert {name: file.sha256 for name, file in written.files.items()} == {
        name: run.sha256(f"{written.name}/{name}") for name in written.files
    }
    assert list_checkpoints(run) == [written]
    other = tensors(seed=1)
    assert not same_bits(state, other)
    held = dict(other)
    read_state(run, written, other, ranks)
    assert same_bits(state, other)
    assert all(other[name] is held[name] for name in held)
    assert stored_shapes(run, written) == {name: value.shape for name, value in state.items()}


def test_without_a_process_group_and_in_part(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    written = write_checkpoint(run, note(1), state, ranks)
    some = {"model.half": torch.zeros(4, 4).bfloat16()}
    read_state(run, written, some)
    assert torch.equal(some["model.half"], state["model.half"])
    with pytest.raises(ContractError, match=r"expected every tensor of the model, got .*model\.other"):
        read_state(run, written, {"model.other": torch.zeros(2)})
    with pytest.raises(ContractError, match=r"Size mismatch .*\[7, 5\].*\[5, 7\].* for model\.weight"):
        read_state(run, written, {"model.weight": torch.zeros(5, 7)}, ranks)


def test_resume_does_not_depend_on_the_generators_of_torch(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    written = write_checkpoint(run, note(1), state, ranks)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any("rng" in name for name in stored_shapes(run, written))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    read_state(run, written, tensors(1), ranks)
    assert torch.equal(torch.get_rng_state(), before)


# ----------------------------------------------------------------------------------------------------- what the note is


def test_progress_comes_back_exactly(tmp_path: Path, ranks: Ranks) -> None:
    heldout = tuple(enumerate(EVERY_FLOAT))
    guard = GuardState(non_finite=2, skipped=3, losses=EVERY_FINITE, rewinds=1, best_heldout=0.1, since_best=4)
    progress = TrainerState(heldout=heldout, guard=guard, loss_scale=65536.0, finite_steps=7)
    written = write_checkpoint(Store(str(tmp_path)), note(1, progress=progress), tensors(), ranks)
    (actual,) = list_checkpoints(Store(str(tmp_path)))
    assert actual == written
    assert actual.progress == progress
    assert [math.copysign(1, value) for _, value in actual.progress.heldout] == [1, 1, 1, -1, 1, 1, -1]
    assert [math.copysign(1, value) for value in actual.progress.guard.losses] == [1, 1, 1, -1, 1]
    undefined = CheckpointMetadata.model_validate_json(
        note(2, progress=TrainerState(loss_scale=math.nan)).model_dump_json()
    )
    assert math.isnan(undefined.progress.loss_scale or 0.0)
    assert note(3).progress == TrainerState()


def test_layout_holds_every_setting_that_shows_in_the_last_bits() -> None:
    config = LayoutConfig(tensor=2, micro_batch=3, compile=False)
    layout = layout_of(config, ONE | {"tensor": 2, "shard": 2}, 1, "cpu")
    assert layout.ranks == 4
    assert layout.kernels.startswith(f"torch {torch.__version__}, ")
    content = {"compress", "compress_rank", "compress_share"}
    assert layout.axes.keys() | layout.settings.keys() | content == LayoutConfig.model_fields.keys()
    assert layout.differences(layout) == []
    other = layout_of(LayoutConfig(tensor=2, micro_batch=4, compile=True), ONE | {"tensor": 2}, 2, "cpu")
    assert layout.differences(other) == [
        "ranks 4, now 2",
        "shard 2, now 1",
        "micro_batch 3, now 4",
        "compile False, now True",
        "threads 1, now 2",
    ]


def edit(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Return an edit of `checkpoint.json` that gives it the digest of its new content."""
    return lambda data: sealed(json.loads(data.replace(old, new)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-9], "got JSON: Invalid JSON"),
        (edit(b'"step":4', b'"step":"four"'), "got step: Input should be a valid integer"),
        (edit(b'"code_version"', b'"codes"'), r"got identity\.code_version: Field required"),
        (lambda data: data.replace(b'"step":4', b'"step":5'), "content with digest"),
        (edit(b'"step":4', b'"step":5'), "the step in the folder's name, got that of step 5"),
    ],
)
def test_a_note_that_is_damaged_or_of_another_version(tmp_path: Path, ranks: Ranks, change, message: str) -> None:
    run = Store(str(tmp_path))
    write_checkpoint(run, note(4), tensors(), ranks)
    path = path_of(run, 4, METADATA_NAME)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ContractError, match=rf"step-000004/checkpoint\.json: expected .*{message}"):
        list_checkpoints(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "d2"}, "dataset: expected d1, got d2"),
        ({"tokenizer": "t2"}, "tokenizer: expected t1, got t2"),
        ({"order": "o2"}, "order: expected o1, got o2"),
        (
            {"settings": IDENTITY.settings | {"optim.learning_rate": 0.003}},
            "optim.learning_rate: expected 0.001, got 0.003",
        ),
        ({"settings": IDENTITY.settings | {"shape.new": 1}}, "shape.new: expected None, got 1"),
    ],
)
def test_another_identity_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_identity(note(4), IDENTITY.model_copy(update=change))
    expected = "step-000004: expected the run that this checkpoint belongs to, got other values in this run"
    assert f"{expected}\n  {message}\n" in str(caught.value)


def test_a_changed_training_stage_is_named_by_its_settings() -> None:
    """The order of the samples follows from it and is not named."""
    stage = {"first_step": 0, "num_steps": 60, "seq_len": 64, "global_batch": 4, "counts": {"web": 1}}
    longer = stage | {"num_steps": 100, "counts": {"web": 3, "books": 1}}
    before, after = (IDENTITY.settings | {"train.stages": [one]} for one in (stage, longer))
    checkpoint = note(4).model_copy(update={"identity": IDENTITY.model_copy(update={"settings": before})})
    with pytest.raises(ContractError) as caught:
        check_identity(checkpoint, IDENTITY.model_copy(update={"settings": after, "order": "o2"}))
    assert str(caught.value).splitlines()[1:] == [
        "  train.steps: expected 60, got 100",
        "  train.weights: expected {'web': 1}, got {'web': 3, 'books': 1}",
        "Undo the change, or train with it in a new run folder: `penstock plan NEW --dataset RUN`.",
    ]
    second = IDENTITY.settings | {"train.stages": [stage, longer]}
    with pytest.raises(ContractError, match=r"\n  train\.stages: expected 1 stage\(s\), got 2\n"):
        check_identity(checkpoint, IDENTITY.model_copy(update={"settings": second}))


def test_a_grown_skip_list_and_other_code_are_not_judged_here() -> None:
    change = {"skip_list": "s2", "skip_length": 3, "code_version": "0.2.0"}
    check_identity(note(4), IDENTITY.model_copy(update=change))


def test_every_difference_is_named() -> None:
    actual = IDENTITY.model_copy(update={"dataset": "d2", "settings": {"train.seed": 4, "train.more": 1}})
    with pytest.raises(ContractError) as caught:
        check_identity(note(4), actual)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]] == [
        *("dataset", "optim.learning_rate", "shape.num_layers", "train.more", "train.seed")
    ]


def test_plan_digest_is_over_the_settings() -> None:
    same = IDENTITY.model_copy(update={"dataset": "d2", "settings": dict(reversed(IDENTITY.settings.items()))})
    assert same.plan == IDENTITY.plan
    assert IDENTITY.model_copy(update={"settings": {"train.seed": 4}}).plan != IDENTITY.plan


# ----------------------------------------------------------------------------------------- which stand, which are kept


def test_without_its_note_a_checkpoint_does_not_exist(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    assert list_checkpoints(run) == []
    assert remove_incomplete(run) == []
    first = write_checkpoint(run, note(1), state, ranks)
    write_checkpoint(run, note(2), state, ranks)
    path_of(run, 2, METADATA_NAME).unlink()
    (tmp_path / "train/checkpoints/other").mkdir()
    assert list_checkpoints(run) == [first]
    assert remove_incomplete(run) == ["step-000002"]
    assert sorted(path.name for path in (tmp_path / "train/checkpoints").iterdir()) == ["other", "step-000001"]
    path_of(run, 2).parent.mkdir()
    path_of(run, 2, "__7_0.distcp").write_bytes(b"left by more ranks")
    again = write_checkpoint(run, note(2), state, ranks)
    assert "__7_0.distcp" not in again.files
    assert not path_of(run, 2, "__7_0.distcp").exists()


def test_an_existing_checkpoint_of_a_step_is_replaced(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    first = write_checkpoint(run, note(2), tensors(), ranks)
    second = write_checkpoint(run, note(2), tensors(1), ranks)
    assert first.files["__0_0.distcp"].sha256 != second.files["__0_0.distcp"].sha256
    assert list_checkpoints(run) == [second]
    actual = tensors(2)
    read_state(run, second, actual)
    assert same_bits(actual, tensors(1))


def test_the_note_goes_before_the_files(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Store(str(tmp_path))
    write_checkpoint(run, note(2), tensors(), ranks)

    def killed(folder: Path) -> None:
        assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(run, 2)
    assert list_checkpoints(run) == []
    assert remove_incomplete(run) == ["step-000002"]
    remove_checkpoint(run, 2)


@pytest.mark.parametrize(
    ("keep", "keep_every", "expected"),
    [
        (1, None, {0, 1_000_000}),
        (2, None, {0, 900_000, 1_000_000}),
        (1, 200, {0, 200, 400, 900_000, 1_000_000}),
        (3, 400, {0, 400, 500, 900_000, 1_000_000}),
        (9, None, {0, 100, 200, 300, 400, 500, 900_000, 1_000_000}),
    ],
)
def test_retention(tmp_path: Path, keep: int, keep_every: int | None, expected: set[int]) -> None:
    steps = [900_000, 1_000_000, 0, 100, 200, 300, 400, 500]
    config = CheckpointConfig(every=100, keep=keep, keep_every=keep_every)
    assert steps_kept(steps, config) == expected
    assert steps_kept([], config) == set()
    run = Store(str(tmp_path))
    for step in steps:
        run.write_atomic(f"{note(step).name}/{METADATA_NAME}", note(step).to_bytes())
        path_of(run, step).write_bytes(b"state")
    assert keep_newest(run, config) == sorted({*steps} - expected)
    assert {kept.step for kept in list_checkpoints(run)} == expected
    assert remove_incomplete(run) == []


@pytest.mark.parametrize(("every", "keep_every"), [(0, 100), (200, 300), (200, 100)])
def test_keep_every_that_no_checkpoint_meets_is_refused(every: int, keep_every: int) -> None:
    with pytest.raises(ValueError, match=f"keep_every: expected a multiple of every = {every}, got {keep_every}"):
        CheckpointConfig(every=every, keep_every=keep_every)


# ------------------------------------------------------------------------------------------------------------ integrity


def test_a_changed_byte_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    written = write_checkpoint(run, note(3), state, ranks)
    for name in written.files:
        path = path_of(run, 3, name)
        data = path.read_bytes()
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
        expected, actual = written.files[name].sha256, run.sha256(f"{written.name}/{name}")
        with pytest.raises(ContractError, match=rf"{name}: expected SHA-256 {expected}, got {actual}\n"):
            read_state(run, written, tensors(1), ranks)
        path.write_bytes(data)
    read_state(run, written, state, ranks)


def test_a_cut_and_a_lost_file_are_refused_together(tmp_path: Path, ranks: Ranks) -> None:
    run, state = Store(str(tmp_path)), tensors()
    written = write_checkpoint(run, note(3), state, ranks)
    size = written.files["__0_0.distcp"].size
    os.truncate(path_of(run, 3), size - 1)
    path_of(run, 3, ".metadata").unlink()
    with pytest.raises(ContractError) as caught:
        read_state(run, written, state)
    assert str(caught.value).splitlines()[1:3] == [
        f"  .metadata: expected {written.files['.metadata'].size} bytes, got No such file or directory",
        f"  __0_0.distcp: expected {size} bytes, got {size - 1}",
    ]


@pytest.mark.parametrize(("which", "after"), [("__0_0.distcp", 0), (".metadata", 0), (".metadata", 1)])
def test_an_error_of_the_storage_is_no_damage(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, which: str, after: int
) -> None:
    """Who follows the advice for a damaged checkpoint removes it."""
    run = Store(str(tmp_path))
    written = write_checkpoint(run, note(1), tensors(), ranks)
    left, opened = after, Store._check_regular

    def check(self: Store, name: str, *arguments: int | None) -> None:
        nonlocal left
        if name == which:
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "Input/output error")
        opened(self, name, *arguments)

    monkeypatch.setattr(Store, "_check_regular", check)
    with pytest.raises(ContractError) as caught:
        read_state(run, written, tensors())
    message = str(caught.value)
    assert f"{which}: it cannot be read: [Errno 5] Input/output error" in message
    assert message.endswith("Check the storage, then run the same command again.")
    assert "emove" not in message


def test_an_error_while_tensors_are_read_is_no_damage(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Store(str(tmp_path))
    written = write_checkpoint(run, note(1), tensors(), ranks)
    monkeypatch.setattr(FileSystemReader, "read_data", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(ContractError, match=r"__0_0.distcp: it cannot be read: .*error\. Check the storage, then run"):
        read_state(run, written, tensors())


def test_a_checkpoint_may_be_copied_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    written = write_checkpoint(Store(str(tmp_path / "a")), note(3), tensors(), ranks)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    run, actual = Store(str(tmp_path / "b")), tensors(1)
    assert list_checkpoints(run) == [written]
    read_state(run, written, actual)
    assert same_bits(actual, tensors())


def test_a_remote_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="got s3://bucket/run"):
        local_path(Store("s3://bucket/run?region=eu-west-1"), "train")


def test_the_note_as_others_read_it(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    written = write_checkpoint(run, note(3), tensors(), ranks)
    raw = json.loads(path_of(run, 3, METADATA_NAME).read_bytes())
    assert sorted(raw) == ["digest", "files", "identity", "layout", "progress", "step"]
    assert sorted(raw["identity"]) == sorted(Identity.model_fields)
    assert raw["files"]["__0_0.distcp"] == written.files["__0_0.distcp"].model_dump()
    assert isinstance(written.files["__0_0.distcp"], StateFile)


def test_a_checkpoint_of_an_older_version_has_the_same_offloading() -> None:
    older = LAYOUT.model_copy(update={"settings": {"micro_batch": 4, "offload": True}})
    newer = LAYOUT.model_copy(update={"settings": {"micro_batch": 4, "offload": "all", "offload_dir": None}})
    assert older.differences(newer) == []
    other = newer.model_copy(update={"settings": newer.settings | {"offload": "none", "offload_dir": "/nvme"}})
    assert older.differences(other) == ["offload_dir None, now /nvme", "offload all, now none"]


@pytest.mark.parametrize("threads", [0, -1, 200_000])
def test_a_number_of_threads_that_no_machine_has_is_refused(threads: int) -> None:
    """A stranger's checkpoint names it, and a run that resumes takes it over."""
    with pytest.raises(ValidationError, match="threads"):
        Layout.model_validate(LAYOUT.model_dump() | {"threads": threads})
    with pytest.raises(ValidationError, match="skipped"):
        GuardState.model_validate({"skipped": 1 << 70})
