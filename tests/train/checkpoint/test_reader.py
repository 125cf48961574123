"""A checkpoint that a stranger wrote runs no code: pickles of every kind, in each file that torch reads."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Size
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ContractError
from schemas.storage import Store
from tests.support.tiny_runs import copied, cut_back, make_run, notes, sealed
from train.checkpoint import reader as reader_module
from train.checkpoint.folder import StateFile
from train.checkpoint.reader import DCP_PLAN, DTYPES, CheckpointReader, parse_plan
from train.checkpoint.state import read_model, stored_shapes
from train.eval import evaluate, generate
from train.export import llama
from train.pretrain.__main__ import main as pretrain


class Payload:
    """Unpickling it creates a file, as an attack would run a command."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, of which step 4 is the last."""
    changes = {"train": {"steps": 4, "eval_every": 0}, "optim": {"warmup_steps": 2}, "checkpoint": {"every": 2}}
    folder = make_run(tmp_path_factory.mktemp("foreign") / "run", changes)
    assert pretrain([str(folder)]) == 0
    return folder


def replace_file(run: Path, name: str, data: bytes) -> Path:
    """Replace a state file of the newest checkpoint, with its own digest in the metadata; return its path."""
    folder = run / notes(run)[-1].name
    (folder / name).write_bytes(data)
    note = json.loads((folder / METADATA_NAME).read_bytes())
    note["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / METADATA_NAME).write_bytes(sealed(note))
    return folder / name


def tensor_file(run: Path) -> str:
    return next(name for name in notes(run)[-1].files if name != DCP_PLAN)


VERBS: dict[str, Callable[[Path, Path], int]] = {
    "generate": lambda run, out: generate.main([str(run), "--prompt", "bebu"]),
    "evaluate": lambda run, out: evaluate.main([str(run), "--on", str(run)]),
    "export": lambda run, out: llama.main([str(run), "--out", str(out)]),
    "train": lambda run, out: pretrain([str(run)]),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("where", ["plan", "state of the plan", "tensors"])
def test_no_verb_runs_the_code_of_a_checkpoint(
    run: Path, tmp_path: Path, verb: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, marker = copied(run, tmp_path / "run"), tmp_path / "marker"
    if verb == "train":
        cut_back(foreign, 2)
    folder = foreign / notes(foreign)[-1].name
    if where == "tensors":
        name = tensor_file(foreign)
        payload = io.BytesIO()
        torch.save({"payload": Payload(marker)}, payload)
        data = payload.getvalue() * (1 + (folder / name).stat().st_size // len(payload.getvalue()))
        changed = FileSystemReader(folder).read_metadata()
        for key in changed.storage_data:
            changed.storage_data[key] = _StorageInfo(name, 0, len(payload.getvalue()))
        replace_file(foreign, DCP_PLAN, pickle.dumps(changed, 4))
    elif where == "plan":
        name, data = DCP_PLAN, pickle.dumps(Payload(marker))
    else:
        changed = FileSystemReader(folder).read_metadata()
        changed.planner_data["payload"] = Payload(marker)
        name, data = DCP_PLAN, pickle.dumps(changed, 4)
    damaged = replace_file(foreign, name, data)
    capsys.readouterr()
    assert VERBS[verb](foreign, tmp_path / "out") == 2
    assert not marker.exists()
    printed = capsys.readouterr().err
    assert f"{damaged.parent}" in printed
    assert "Use a checkpoint that `penstock train` wrote, or remove its folder." in printed
    assert "Traceback" not in printed
    assert "weights_only" not in printed
    # The attack is real: it runs where torch's own reader unpickles.
    if where != "tensors":
        pickle.loads(data)
    else:
        torch.load(io.BytesIO(payload.getvalue()), weights_only=False)
    assert marker.exists()


def test_objects_that_torch_would_unpickle_are_refused(run: Path, tmp_path: Path) -> None:
    """DCP loads an entry that is no tensor with weights_only=False."""
    foreign, marker = copied(run, tmp_path / "run"), tmp_path / "marker"
    note = notes(foreign)[-1]
    folder = foreign / note.name
    payload = io.BytesIO()
    torch.save(Payload(marker), payload)
    name = tensor_file(foreign)
    replace_file(foreign, name, payload.getvalue())
    changed = FileSystemReader(folder).read_metadata()
    changed.state_dict_metadata = {item: BytesStorageMetadata() for item in changed.state_dict_metadata}
    changed.storage_data = {
        MetadataIndex(item): _StorageInfo(name, 0, len(payload.getvalue())) for item in changed.state_dict_metadata
    }
    replace_file(foreign, DCP_PLAN, pickle.dumps(changed, 4))
    with pytest.raises(ContractError, match=r"got the name .*BytesStorageMetadata"):
        read_model(Store(str(foreign)), notes(foreign)[-1], torch.device("cpu"))
    assert not marker.exists()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_numbers_of_another_kind_are_refused(run: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    foreign = copied(run, tmp_path / "run")
    changed = FileSystemReader(foreign / notes(foreign)[-1].name).read_metadata()
    item = changed.state_dict_metadata["model.embedding.weight"]
    assert isinstance(item, TensorStorageMetadata)
    item.properties.dtype = dtype
    replace_file(foreign, DCP_PLAN, pickle.dumps(changed, 4))
    with pytest.raises(ContractError, match=f"expected model.embedding.weight as torch.float32, got {dtype}"):
        read_model(Store(str(foreign)), notes(foreign)[-1], torch.device("cpu"))


def test_a_script_archive_is_refused(run: Path, tmp_path: Path) -> None:
    foreign = copied(run, tmp_path / "run")
    name = tensor_file(foreign)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("archive/constants.pkl", pickle.dumps(Payload(tmp_path / "marker")))
        members.writestr("archive/data.pkl", pickle.dumps(Payload(tmp_path / "marker")))
    folder = foreign / notes(foreign)[-1].name
    changed = FileSystemReader(folder).read_metadata()
    size = len(archive.getvalue())
    for number, key in enumerate(changed.storage_data):
        changed.storage_data[key] = _StorageInfo(name, number * size, size)
    replace_file(foreign, name, archive.getvalue() * len(changed.storage_data))
    replace_file(foreign, DCP_PLAN, pickle.dumps(changed, 4))
    with pytest.raises(ContractError, match=r"expected files of tensors, got an error: \w+ while reading __0_0.distcp"):
        read_model(Store(str(foreign)), notes(foreign)[-1], torch.device("cpu"))
    assert not (tmp_path / "marker").exists()


def test_the_plan_is_the_one_that_torch_reads(run: Path) -> None:
    note = notes(run)[-1]
    plan = CheckpointReader(Store(str(run / note.name)), note.files).read_metadata()
    expected = FileSystemReader(run / note.name).read_metadata()
    assert plan.state_dict_metadata == expected.state_dict_metadata
    assert plan.storage_data == expected.storage_data
    assert stored_shapes(Store(str(run)), note) == {
        name: item.size
        for name, item in expected.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


# ------------------------------------------------------------------------------------------------- plans made by hand

FILES = {"__0_0.distcp": StateFile(size=1000, sha256="0"), DCP_PLAN: StateFile(size=9, sha256="1")}
Place = tuple[str, int, int]


def plan_bytes(
    size: tuple[int, ...] = (4, 2),
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((0, 0), (2, 2)), ((2, 0), (2, 2))),
    places: tuple[Place, ...] = (("__0_0.distcp", 0, 500), ("__0_0.distcp", 500, 500)),
    **fields: Any,
) -> bytes:
    """Return the plan of a tensor `w` of two chunks, as DCP writes it."""
    tensor = TensorStorageMetadata(
        fields.get("properties", TensorProperties(dtype=torch.bfloat16)),
        Size(size),
        [ChunkStorageMetadata(Size(offsets), Size(sizes)) for offsets, sizes in chunks],
    )
    storage = {
        MetadataIndex("w", offsets, number): _StorageInfo(*place)
        for number, ((offsets, _), place) in enumerate(zip(chunks, places, strict=False))
    }
    meta = StorageMeta(Path("/tmp/run"), "id")
    return pickle.dumps(Metadata({"w": tensor}, {"w": ("w",)}, fields.get("storage", storage), meta), 4)


def test_a_plan_by_hand() -> None:
    plan = parse_plan(plan_bytes(), FILES)
    assert plan.state_dict_metadata["w"] == TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16),
        Size([4, 2]),
        [ChunkStorageMetadata(Size([0, 0]), Size([2, 2])), ChunkStorageMetadata(Size([2, 0]), Size([2, 2]))],
    )
    assert plan.storage_data[MetadataIndex("w", [2, 0])] == _StorageInfo("__0_0.distcp", 500, 500)
    assert (plan.planner_data, plan.storage_meta) == (None, None)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read(name: str) -> None:
    dtype = getattr(torch, name)
    plan = parse_plan(plan_bytes(properties=TensorProperties(dtype=dtype)), FILES)
    item = plan.state_dict_metadata["w"]
    assert isinstance(item, TensorStorageMetadata)
    assert item.properties.dtype is dtype


def test_chunks_of_a_grid_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [((row, column), (1, 4)) for row in range(500) for column in range(0, 40, 4)]
    places = tuple(("__0_0.distcp", number, 1) for number in range(len(rows)))
    files = FILES | {"__0_0.distcp": StateFile(size=len(rows), sha256="0")}
    mixed = plan_bytes((500, 40), tuple(sorted(rows, key=lambda row: row[0][1] * 7 % 11)), places)
    assert len(parse_plan(mixed, files).storage_data) == 5000
    monkeypatch.setattr(reader_module, "MAX_COMPARED", 1000)
    with pytest.raises(ValueError, match="that overlap"):
        parse_plan(mixed, files)


LIST = [0]
LIST.append(LIST)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (plan_bytes(places=(("../../../victim", 0, 5), ("__0_0.distcp", 500, 500))), "the file '../../../victim'"),
        (plan_bytes(places=(("/etc/passwd", 0, 5), ("__0_0.distcp", 500, 500))), "the file '/etc/passwd'"),
        (plan_bytes(places=((DCP_PLAN, 0, 5), ("__0_0.distcp", 500, 500))), "the file '.metadata'"),
        (plan_bytes(places=(("__0_0.distcp", 0, 500), ("__0_0.distcp", 501, 500))), "a chunk beyond the end of __0_0"),
        (plan_bytes(places=(("__0_0.distcp", -1, 500), ("__0_0.distcp", 0, 500))), "the negative number -1"),
        (plan_bytes(places=(("__0_0.distcp", 0, 500),)), "2 chunks and 1 places"),
        (plan_bytes(chunks=(((0, 0), (2, 2)), ((1, 0), (2, 2)))), "chunks of tensor w that overlap"),
        (plan_bytes(chunks=(((0, 0), (4, 1)), ((1, 0), (2, 2)))), "chunks of tensor w that overlap"),
        (
            plan_bytes(places=(("__0_0.distcp", 0, 500), ("__0_0.distcp", 499, 500))),
            "two chunks in the same bytes of __0",
        ),
        (plan_bytes(size=(5, 2)), "chunks that do not fill tensor w"),
        (plan_bytes(chunks=(((0, 0), (2, 2)), ((3, 0), (2, 2)))), "a chunk outside of tensor w"),
        (plan_bytes(chunks=(((0, 0), (2, 2)), ((2,), (2,)))), "a chunk outside of tensor w"),
        (plan_bytes(chunks=(((0, 0), (4, 1)), ((0, 0), (4, 1)))), "2 chunks and 1 places"),
        (plan_bytes(size=(1,) * 17, chunks=(((0,) * 17, (1,) * 17),)), "a tensor of 17 dimensions"),
        (pickle.dumps({"a": 1}, 4), "dict for Metadata"),
        (pickle.dumps(LIST, 4), "list for Metadata"),
        (pickle.dumps(print, 4), "the name builtins.print"),
        (pickle.dumps(print, 0), "pickle opcode 0x63"),
        (b"", "an error: IndexError"),
        (b".", "more than one object"),
        (b"\x80\x04\x8c\x05a.", "a file that ends early"),
        (b"\x80\x04(((((t.", "tuple for Metadata"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", "pickle opcode 0x72"),  # a memo of 2^32 entries
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "pickle opcode 0x8b"),  # an integer of 2^31 bytes
        (b"\x80\x04Nh\x00.", "an error: IndexError"),
        (b"\x80\x04P1\n.", "pickle opcode 0x50"),  # a persistent id
        (b"\x80\x04\x82\x01.", "pickle opcode 0x82"),  # a registered extension
        (b"\x80\x04(ios\nsystem\n.", "pickle opcode 0x69"),
        (b"\x80\x04]" * 100_000 + b".", "more than one object"),
        (b"\x80\x04N" + b"\x85" * 300_000 + b".", "tuple for Metadata"),
        (b"\x80\x04)b.", "an error: IndexError"),
        (b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N\x81.", "a call of Size"),
        (b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}b.", "an object of type _Name"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_any_other_plan_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        parse_plan(data, FILES)


def test_one_long_list_at_many_places_is_refused_before_it_is_read() -> None:
    """Each place costs the file two bytes and the reader a million chunks."""
    chunks = [ChunkStorageMetadata(Size([0]), Size([1]))] * 100_000
    tensors = {f"{n}": TensorStorageMetadata(TensorProperties(), Size([1]), chunks) for n in range(2_000)}
    with pytest.raises(ValueError, match="200000000 chunks and 0 places"):
        parse_plan(pickle.dumps(Metadata({**tensors}, None, {}), 4), FILES)


@pytest.fixture(scope="module")
def real_plan(run: Path) -> tuple[bytes, dict[str, StateFile]]:
    note = notes(run)[-1]
    return (run / note.name / DCP_PLAN).read_bytes(), note.files


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8) | st.sampled_from([b"R", b"\x93", b"b", b"\x81", b"r\xff\xff\xff\xff", b"i"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EDITS)
@example([("replace", 0.0, b"\x80\x05")])
def test_a_damaged_plan_is_read_or_refused(
    real_plan: tuple[bytes, dict[str, StateFile]], edits: list[tuple[str, float, bytes]]
) -> None:
    data, files = real_plan
    for kind, place, given_bytes in edits:
        at, number = int(place * max(len(data), 1)), len(given_bytes)
        rest = {
            "replace": given_bytes + data[at + number :],
            "insert": given_bytes + data[at:],
            "delete": data[at + number :],
            "repeat": data[max(at - 20 * number, 0) :],
        }
        data = data[:at] + rest[kind]
    try:
        plan = parse_plan(data, files)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    # What is returned is only what a reader may use.
    for info in plan.storage_data.values():
        assert info.relative_path in files
        assert 0 <= info.offset <= info.offset + info.length <= files[info.relative_path].size
        assert info.transform_descriptors is None
    assert all(type(item) is TensorStorageMetadata for item in plan.state_dict_metadata.values())


def test_a_plan_that_is_not_listed_is_refused(run: Path, tmp_path: Path) -> None:
    foreign = copied(run, tmp_path / "run")
    folder = foreign / notes(foreign)[-1].name
    stored = json.loads((folder / METADATA_NAME).read_bytes())
    del stored["files"][DCP_PLAN]
    (folder / METADATA_NAME).write_bytes(sealed(stored))
    with pytest.raises(ContractError, match=r"got a file whose size checkpoint.json does not have"):
        stored_shapes(Store(str(foreign)), notes(foreign)[-1])


def test_files_that_are_not_listed_are_not_read(run: Path, tmp_path: Path) -> None:
    foreign = copied(run, tmp_path / "run")
    folder = foreign / notes(foreign)[-1].name
    for name in ("__0.metadata", "__9_0.distcp", "extra.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "marker")))
    assert VERBS["generate"](foreign, tmp_path) == 0
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(foreign)


def _doubled(times: int) -> bytes:
    """Opcodes that leave a tuple of tuples on the stack, of which each holds the one before it twice."""
    return b"K\x01" + b"".join(b"\x94h" + bytes([number]) + b"\x86" for number in range(times))


@pytest.mark.parametrize(
    "pickled",
    [
        b"}" + _doubled(200) + b"Ns.",
        b"}(" + _doubled(200) + b"Nu.",
        b"\x8c\x01a" + _doubled(200) + b"\x93.",
        _doubled(200) + b"\x8c\x01a\x93.",
        _doubled(200) + b")R.",
    ],
)
def test_objects_that_are_exponential_to_hash_or_to_print_are_refused(pickled: bytes) -> None:
    with pytest.raises(ValueError, match="tuple"):
        parse_plan(b"\x80\x04" + pickled, {})


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_in_place_of_a_state_file_is_refused_at_once(run: Path, tmp_path: Path, kind: str) -> None:
    """Its size is right, and reading it would never end."""
    folder = copied(run, tmp_path / "run")
    checkpoint = sorted((folder / "train/checkpoints").iterdir())[-1]
    note = checkpoint / METADATA_NAME
    values = json.loads(note.read_text())
    values["files"]["extra.bin"] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    note.write_bytes(sealed(values))
    os.mkfifo(checkpoint / "extra.bin") if kind == "pipe" else (checkpoint / "extra.bin").mkdir()
    with pytest.raises(ContractError, match=r"extra\.bin: expected a file, got a pipe, device or folder"):
        read_model(Store(str(folder)), notes(folder)[-1], torch.device("cpu"))
