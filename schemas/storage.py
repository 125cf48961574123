"""Storage through pyarrow.fs: one class for local folders, s3://, gs:// and hdfs://, with atomic small writes.

Local writes are fsynced and renamed; on an object store the one PUT that closes the stream is the atomic step.
"""

import hashlib
import json
import os
import posixpath
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from schemas.errors import ContractError

READ_BYTES = 1 << 20


class Store:
    """A folder on some filesystem; every path given to it is relative. Pickles by its URI."""

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/") if "://" in uri else os.path.abspath(uri)
        self.fs, self.root = _resolve(self.uri)
        self.is_local = isinstance(self.fs, pafs.LocalFileSystem)

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.uri,)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def child(self, name: str) -> "Store":
        """The store of a sub-folder; `../` leads up."""
        scheme, mark, rest = f"{self.uri}/{name}".rpartition("://")
        return Store(f"{scheme}{mark}{posixpath.normpath(rest)}")

    def path(self, name: str) -> str:
        """The path of a file as the filesystem spells it."""
        if "../" in name:  # object stores know no way up, and a folder that one leads out of need not be there
            return posixpath.normpath(f"{self.root}/{name}")
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        """Whether a file or folder of this name exists."""
        return bool(self.fs.get_file_info(self.path(name)).type != pafs.FileType.NotFound)

    def size(self, name: str) -> int:
        """The size of a file [bytes]. Raises ContractError if there is none."""
        info = self.fs.get_file_info(self.path(name))
        if info.type != pafs.FileType.File:
            raise ContractError(f"{self.uri}/{name}: promised by a manifest, found nothing; restore the file")
        return int(info.size)

    def open_input(self, name: str) -> Any:
        """A random-access file (pyarrow.NativeFile); memory-mapped when the store is local."""
        if self.is_local:
            return pa.memory_map(self.path(name))
        return self.fs.open_input_file(self.path(name))

    def open_output(self, name: str) -> Any:
        """An output stream; parent folders are created. The file is durable after `sync(name)`."""
        self.make_parent(name)
        return self.fs.open_output_stream(self.path(name))

    def make_parent(self, name: str) -> None:
        """Create the folder of a file; object stores need none."""
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)

    def sync(self, name: str) -> None:
        """Flush a closed local file to the disk; object stores have done so."""
        if self.is_local:
            _fsync(self.path(name))

    def read_bytes(self, name: str) -> bytes:
        """The whole content of a small file."""
        with self.fs.open_input_stream(self.path(name), compression=None) as stream:
            return bytes(stream.read())

    def read_json(self, name: str) -> Any:
        """The JSON value of a small file. Raises ContractError if it is not JSON."""
        try:
            return json.loads(self.read_bytes(name))
        except json.JSONDecodeError as error:
            raise ContractError(f"{self.uri}/{name}: promised JSON, found {error}; remove or restore it") from error

    def write_atomic(self, name: str, data: bytes) -> None:
        """Write a small file so that a reader sees either the old or the new content, never a part."""
        self.make_parent(name)
        if not self.is_local:
            with self.fs.open_output_stream(self.path(name)) as stream:
                stream.write(data)
            return
        final = self.path(name)
        partial = f"{final}.{uuid.uuid4().hex[:8]}.partial"
        try:
            with open(partial, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, final)
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
        _fsync(os.path.dirname(final))

    def sha256(self, name: str) -> str:
        """The SHA-256 (hex) of a file, read in blocks."""
        digest = hashlib.sha256()
        with self.fs.open_input_stream(self.path(name), compression=None) as stream:
            for block in iter(lambda: stream.read(READ_BYTES), b""):
                digest.update(block)
        return digest.hexdigest()

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        if self.exists(name):
            self.fs.delete_file(self.path(name))

    def walk(self) -> Iterator[str]:
        """Every file below this folder. Only garbage collection lists folders; readers follow manifests."""
        selector = pafs.FileSelector(self.root, recursive=True, allow_not_found=True)
        for info in self.fs.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield info.path[len(self.root) + 1 :]


def _resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in uri:
        return pafs.LocalFileSystem(), uri
    fs, root = pafs.FileSystem.from_uri(uri)
    return fs, root.rstrip("/")


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
