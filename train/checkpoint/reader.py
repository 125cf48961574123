"""A reader of DCP checkpoints that runs no code of a checkpoint, even of a hostile one.

DCP stores where each tensor lies as a pickle, `.metadata`, and torch unpickles it, which may call any function. Here a
closed set of pickle's opcodes is interpreted instead. Names and calls become inert records: nothing is imported or
called. The records are then checked, and only sizes, offsets and names of listed files leave this module.
"""

import hashlib
import io
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ContractError
from schemas.storage import Store
from train.checkpoint.folder import StateFile

DCP_PLAN = ".metadata"
"""The file in which DCP stores where each tensor lies."""
NOT_READ = "it cannot be read:"
"""Beginning of the cause if the storage has given an error, which does not show that a file is damaged."""
CHECK_STORAGE = "Check the storage, then run the same command again."
STOP = ord(".")
"""The opcode that ends a pickle."""
RANGE_BYTES = 8 << 20
"""Size of a request to an object store for a range of a file [bytes]."""
MAX_DIMS = 16
MAX_COMPARED = 10**7
"""Maximum number of pairs of chunks of a tensor that are compared; those of a grid have few beside each other."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
DCP = "torch.distributed.checkpoint"
PATHS = ("pathlib", "pathlib._local")
"""Modules that Python 3.11 to 3.13 name for a path; the path of the folder at the time of writing is not used."""
NAMES = frozenset(
    {
        *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((f"{DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorStorageMetadata")),
        (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{DCP}.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("torch", name) for name in DTYPES),
        *((module, "PosixPath") for module in PATHS),
    }
)
"""Every name that the metadata of a checkpoint of tensors has."""


class _Refused(Exception):
    """The bytes are not the metadata of a checkpoint of tensors; the text says what was found."""


class _Name(str):
    """A name of NAMES without its module; nothing is imported."""

    __slots__ = ()


class _Record:
    """An object of the pickle: the name that would be called, its arguments, and its state."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: _Name, arguments: tuple[Any, ...]):
        self.name, self.arguments, self.state = name, arguments, None


class _Interpreter:
    """The stack and the memo of pickle's machine, for the opcodes of DCP's metadata; each method is an opcode."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """Return the object that the pickle describes. Raises _Refused, or an error of a stack that does not fit."""
        while (code := self._byte()) != STOP:
            if (opcode := OPCODES.get(code)) is None:
                raise _Refused(f"pickle opcode {code:#04x}")
            opcode(self)
        if len(self._stack) != 1 or self._at != len(self._data):
            raise _Refused("more than one object")
        return self._stack[0]

    def _take(self, number: int) -> bytes:
        begin, self._at = self._at, self._at + number
        if self._at > len(self._data):
            raise _Refused("a file that ends early")
        return self._data[begin : self._at]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _items(self) -> list[Any]:
        """Remove and return the objects above the last mark."""
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def skip(self, number: int) -> None:
        self._take(number)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def byte(self) -> None:
        self._stack.append(self._byte())

    def integer(self, width: int) -> None:
        self.push(int.from_bytes(self._take(width), "little", signed=width == 4))

    def long(self) -> None:
        self.push(int.from_bytes(self._take(self._byte()), "little", signed=True))

    def short_text(self) -> None:
        self.push(self._take(self._byte()).decode())

    def text(self) -> None:
        self.push(self._take(int.from_bytes(self._take(4), "little")).decode())

    def tuple_of(self, number: int) -> None:
        begin = len(self._stack) - number
        if begin < 0:
            raise _Refused("a tuple of too few objects")
        self._stack[begin:] = [tuple(self._stack[begin:])]

    def tuple_since_mark(self) -> None:
        self.push(tuple(self._items()))

    def append(self) -> None:
        value = self._stack.pop()
        self._of(list).append(value)

    def appends(self) -> None:
        items = self._items()
        self._of(list).extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._of(dict)[_key(key)] = value

    def set_items(self) -> None:
        items = self._items()
        self._of(dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def recall(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def recall_far(self) -> None:
        self.push(self._memo[int.from_bytes(self._take(4), "little")])

    def name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if (_of(module, str), _of(name, str)) not in NAMES:
            raise _Refused(f"the name {module:.60}.{name:.60}")
        self.push(_Name(name))

    def call(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise _Refused(f"a call of {name:.60}" if isinstance(name, str) else f"a call of {type(name).__name__}")
        self.push(_Record(name, arguments))

    def build(self) -> None:
        state = self._stack.pop()
        self._of(_Record).state = state

    def _of(self, kind: type) -> Any:
        """Return the object at the top of the stack, which must be of this type."""
        if type(self._stack[-1]) is not kind:
            raise _Refused(f"an object of type {type(self._stack[-1]).__name__}")
        return self._stack[-1]


OPCODES: dict[int, Callable[[_Interpreter], None]] = {
    code[0]: opcode
    for code, opcode in {
        b"\x80": lambda machine: machine.skip(1),  # protocol
        b"\x95": lambda machine: machine.skip(8),  # length of a frame
        b"N": lambda machine: machine.push(None),
        b"\x88": lambda machine: machine.push(True),
        b"\x89": lambda machine: machine.push(False),
        b")": lambda machine: machine.push(()),
        b"]": lambda machine: machine.push([]),
        b"}": lambda machine: machine.push({}),
        b"K": _Interpreter.byte,
        b"M": lambda machine: machine.integer(2),
        b"J": lambda machine: machine.integer(4),
        b"\x8a": _Interpreter.long,
        b"\x8c": _Interpreter.short_text,
        b"X": _Interpreter.text,
        b"(": _Interpreter.mark,
        b"\x85": lambda machine: machine.tuple_of(1),
        b"\x86": lambda machine: machine.tuple_of(2),
        b"\x87": lambda machine: machine.tuple_of(3),
        b"t": _Interpreter.tuple_since_mark,
        b"a": _Interpreter.append,
        b"e": _Interpreter.appends,
        b"s": _Interpreter.set_item,
        b"u": _Interpreter.set_items,
        b"\x94": _Interpreter.memoize,
        b"h": _Interpreter.recall,
        b"j": _Interpreter.recall_far,
        b"\x93": _Interpreter.name,
        b"R": _Interpreter.call,
        b"\x81": _Interpreter.call,  # a new object
        b"b": _Interpreter.build,
    }.items()
}
"""The opcodes that Python 3.11 to 3.13 write for DCP's metadata (protocol 4)."""


def parse_plan(data: bytes, files: Mapping[str, StateFile]) -> Metadata:
    """Return the metadata that the bytes of `.metadata` describe; `files`: the state files of the checkpoint.

    Raises ValueError if the bytes are anything else, or if a chunk lies outside of its tensor or of a listed file.
    """
    try:
        top = _fields(_Interpreter(data).run(), "Metadata")
        items, storage = _of(top["state_dict_metadata"], dict), _of(top["storage_data"], dict)
        # A list may occur at many places of the pickle, so its length is compared before it is read.
        tensors = {_of(name, str): _fields(item, "TensorStorageMetadata") for name, item in items.items()}
        stored = sum(len(_of(tensor["chunks"], list)) for tensor in tensors.values())
        if stored != len(storage):
            raise _Refused(f"{stored} chunks and {len(storage)} places")
        described = {name: _tensor(name, tensor) for name, tensor in tensors.items()}
        places = dict(_places(storage, described, files))
    except (_Refused, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) if isinstance(error, _Refused) else f"an error: {error!r:.100}"
        raise ValueError(reason) from error
    return Metadata(state_dict_metadata={**described}, storage_data=places)


def _tensor(name: str, tensor: Mapping[str, Any]) -> TensorStorageMetadata:
    """Return the description of a tensor. Raises _Refused if its chunks do not fill it."""
    size = _size(tensor["size"])
    chunks = [
        ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"]))
        for chunk in (_fields(item, "ChunkStorageMetadata") for item in tensor["chunks"])
    ]
    for chunk in chunks:
        ends = map(operator.add, chunk.offsets, chunk.sizes)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(map(operator.gt, ends, size)):
            raise _Refused(f"a chunk outside of tensor {name:.60}")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise _Refused(f"chunks that do not fill tensor {name:.60}")
    _check_apart(name, [chunk for chunk in chunks if math.prod(chunk.sizes)])
    properties = tensor["properties"]
    _record(properties, "TensorProperties")
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[_of(properties.state[0], _Name)]), size, chunks)


def _check_apart(name: str, chunks: list[ChunkStorageMetadata]) -> None:
    """Raise _Refused if two chunks of a tensor overlap: a part of the tensor would then be filled by none."""
    near: list[ChunkStorageMetadata] = []
    num_compared = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        near = [other for other in near if not chunk.offsets or other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        num_compared += len(near)
        if num_compared > MAX_COMPARED or any(_overlap(chunk, other) for other in near):
            raise _Refused(f"chunks of tensor {name:.60} that overlap")
        near.append(chunk)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(start < begin + length and begin < start + size for start, size, begin, length in sides)


def _places(
    storage: Mapping[Any, Any], tensors: Mapping[str, TensorStorageMetadata], files: Mapping[str, StateFile]
) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    """Yield the place of every chunk. Raises _Refused if one lies outside of the listed files, or two share bytes."""
    taken: list[tuple[str, int, int]] = []
    waiting = {MetadataIndex(name, chunk.offsets) for name, tensor in tensors.items() for chunk in tensor.chunks}
    for key, value in storage.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        chunk = MetadataIndex(_of(index["fqn"], str), _size(index["offset"]))
        waiting.remove(chunk)
        file, offset, length = _of(info["relative_path"], str), _natural(info["offset"]), _natural(info["length"])
        if info.get("transform_descriptors"):
            raise _Refused("a file that is compressed or encrypted")
        if file == DCP_PLAN or file not in files:
            raise _Refused(f"the file {file!r:.60}, which {METADATA_NAME} does not list")
        if offset + length > files[file].size:
            raise _Refused(f"a chunk beyond the end of {file}")
        taken.append((file, offset, offset + length))
        yield chunk, _StorageInfo(file, offset, length)
    taken.sort()
    for (file, _, end), (following, begin, _) in pairwise(taken):
        if file == following and begin < end:
            raise _Refused(f"two chunks in the same bytes of {file}")


def _key(value: Any) -> Any:
    """Return a key of a dict: a text or a record. Hashing a tuple of tuples could take for ever."""
    if type(value) not in (str, _Record):
        raise _Refused(f"a key of type {type(value).__name__}")
    return value


def _record(value: Any, name: str) -> _Record:
    """Return a record of this name. Raises _Refused for anything else."""
    if not isinstance(value, _Record) or value.name != name:
        raise _Refused(f"{value.name if isinstance(value, _Record) else type(value).__name__} for {name}")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of a record of this name."""
    return dict(_of(_record(value, name).state, dict))


def _of(value: Any, kind: type) -> Any:
    """Return a value of this type. Raises _Refused for any other."""
    if type(value) is not kind:
        raise _Refused(f"{type(value).__name__} for {kind.__name__}")
    return value


def _natural(value: Any) -> int:
    if _of(value, int) < 0:
        raise _Refused(f"the negative number {value}")
    return int(value)


def _size(value: Any) -> Size:
    (sizes,) = _record(value, "Size").arguments
    if len(_of(sizes, tuple)) > MAX_DIMS:
        raise _Refused(f"a tensor of {len(sizes)} dimensions")
    return Size([_natural(size) for size in sizes])


def read_plan_file(folder: Store, files: Mapping[str, StateFile]) -> bytes:
    """Return the bytes of `.metadata`. Raises ContractError if its size or digest differs from that in `files`."""
    try:
        if DCP_PLAN not in files or folder.fs.get_file_info(folder.path(DCP_PLAN)).size != files[DCP_PLAN].size:
            raise ValueError(f"a file whose size {METADATA_NAME} does not have")
        data = folder.read_bytes(DCP_PLAN)
    except (FileNotFoundError, ValueError) as error:
        raise _no_plan(folder, error) from error
    except OSError as error:
        raise _not_read(folder.root if folder.is_local else folder.uri, DCP_PLAN, error) from error
    expected, digest = files[DCP_PLAN].sha256, hashlib.sha256(data).hexdigest()
    if digest != expected:
        raise ContractError(
            f"{folder.root if folder.is_local else folder.uri}/{DCP_PLAN}: expected SHA-256 {expected}, got {digest}. "
            "Restore the file from a backup, or remove the folder."
        )
    return data


def _no_plan(folder: Store, error: Exception) -> ContractError:
    return ContractError(
        f"{folder.root if folder.is_local else folder.uri}/{DCP_PLAN}: expected the plan of a checkpoint of tensors, "
        f"got {error}. Use a checkpoint that `penstock train` wrote, or remove its folder."
    )


def _not_read(folder: str, files: str, error: OSError) -> ContractError:
    return ContractError(f"{folder}: expected files that can be read, got {files}: {NOT_READ} {error}. {CHECK_STORAGE}")


class _RemoteFiles(FileSystem):
    """Files on an object store, of which only the ranges that a rank reads are transferred."""

    def __init__(self, folder: Store):
        self._fs = folder.fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._fs.open_input_file(str(path)) as file:
            # Tensors beside each other in a file come with one request.
            yield io.BufferedReader(file, RANGE_BYTES)


class CheckpointReader(FileSystemReader):
    """DCP's reader of a folder, whose metadata is parsed without unpickling it."""

    def __init__(self, folder: Store, files: Mapping[str, StateFile], data: bytes | None = None):
        """`files`: the state files of the checkpoint; `data`: what `read_plan_file` returned on another rank.

        Raises ContractError if its metadata is not that of tensors.
        """
        super().__init__(folder.root)
        if not folder.is_local:
            self.fs = _RemoteFiles(folder)
        data = read_plan_file(folder, files) if data is None else data
        try:
            self._metadata = parse_plan(data, files)
        except ValueError as error:
            raise _no_plan(folder, error) from error

    def read_metadata(self) -> Metadata:
        """Return the parsed metadata."""
        # Without keyword arguments, DCP does not fall back to the metadata of a rank, which it would unpickle.
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors. Raises ContractError if a file holds anything else."""
        # Torch opens each chunk with weights_only=True (2.4 to 2.13). It would unpickle objects that are no tensors,
        # but `parse_plan` refuses metadata that names any.
        try:
            return super().read_data(plan, planner)
        except OSError as error:
            raise _not_read(str(self.path), self._files_of(plan), error) from error
        except Exception as error:
            raise ContractError(
                f"{self.path}: expected files of tensors, got an error: {type(error).__name__} while reading "
                f"{self._files_of(plan)}. Use a checkpoint that `penstock train` wrote, or remove its folder."
            ) from error

    def _files_of(self, plan: LoadPlan) -> str:
        return ", ".join(sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}))
