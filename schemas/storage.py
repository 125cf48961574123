"""Storage through pyarrow.fs: one class for local folders, s3://, gs:// and hdfs://, with atomic small writes.

Local writes are fsynced and renamed; on an object store the one PUT that closes the stream is the atomic step.
Endpoint, region and credentials are those of the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …).
"""

import hashlib
import json
import os
import posixpath
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from schemas.errors import ConfigError, ContractError

READ_BYTES = 1 << 20
BUCKETS = ("s3", "gs", "gcs")
"""Schemes whose paths begin with a bucket."""
OPTIONS = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=60", "gcs": "retry_limit_seconds=60"}
"""Options of a filesystem unless its URI says otherwise: what is small goes out in one request, before which nothing
exists that an interrupt could leave empty; an unreachable store is given up after a minute, not after fifteen."""
URI_SAFE = "/%:@!$&'()*+,;=~"
AWS_ERROR = re.compile(r"(?:(?:key '(?P<key>.*?)' in )?bucket '(?P<bucket>[^']*)'[^\n]*?: )?AWS Error (?P<aws>[^\n]+)")
GOOGLE_ERROR = re.compile(r"google::cloud::Status\((?P<google>[^\n]{1,300})")


class Store:
    """A folder on some filesystem; every path given to it is relative. Pickles by its address.

    Raises ConfigError if the URI names no place, or one of another kind.
    """

    def __init__(self, uri: str):
        place, mark, options = uri.partition("?") if "://" in uri else (os.path.abspath(uri), "", "")
        self.uri = re.sub("(?<=[^/:])/+$", "", place)
        self.address = f"{self.uri}{mark}{options}"
        """The URI with the options of its filesystem, where it has some."""
        self.fs, self.root = resolve_uri(self.address)
        self.is_local = isinstance(self.fs, pafs.LocalFileSystem)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.address,)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def child(self, name: str) -> "Store":
        """The store of a sub-folder; `../` leads up."""
        scheme, mark, rest = self.uri.rpartition("://")
        found = Store.__new__(Store)  # the same connections
        found.uri = f"{scheme}{mark}{posixpath.normpath(f'{rest}/{quote(name) if mark else name}')}"
        found.address = f"{found.uri}{self.address[len(self.uri) :]}"
        found.fs, found.is_local = self.fs, self.is_local
        found.root = posixpath.normpath(f"{self.root}/{name}")
        return found

    def path(self, name: str) -> str:
        """The path of a file as the filesystem spells it."""
        if "../" in name:  # object stores know no way up, and a folder that one leads out of need not be there
            return posixpath.normpath(f"{self.root}/{name}")
        return f"{self.root}/{name}" if name else self.root

    def check_bucket(self) -> None:
        """Raises ConfigError if the folder's bucket does not exist: whatever is asked for would only be missing."""
        bucket = self.root.partition("/")[0]
        if bucket and not self.is_local and self.fs.get_file_info(bucket).type == pafs.FileType.NotFound:
            raise ConfigError(f"{self.uri}: expected a folder of a bucket, got no bucket {bucket}. Create it.")

    def exists(self, name: str) -> bool:
        """Whether a file or folder of this name exists."""
        return bool(self.fs.get_file_info(self.path(name)).type != pafs.FileType.NotFound)

    def size(self, name: str) -> int:
        """The size of a file [bytes]. Raises ContractError if there is none."""
        info = self.fs.get_file_info(self.path(name))
        if info.type != pafs.FileType.File:
            raise ContractError(f"{self.uri}/{name}: expected by a manifest, got nothing. Restore the file.")
        return int(info.size)

    def open_input(self, name: str) -> Any:
        """A random-access file (pyarrow.NativeFile); memory-mapped when the store is local."""
        if self.is_local:
            return pa.memory_map(self.path(name))
        return self.fs.open_input_file(self.path(name))

    def open_output(self, name: str) -> Any:
        """An output stream; parent folders are created. The file is durable after `sync(name)`."""
        self.make_parent(name)
        return self.fs.open_output_stream(self.path(name), compression=None)

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
        except ValueError as error:
            raise ContractError(f"{self.uri}/{name}: expected JSON, got {error}. Remove or restore it.") from error

    def write_atomic(self, name: str, data: bytes) -> None:
        """Write a small file so that a reader sees either the old or the new content, never a part."""
        self.make_parent(name)
        if not self.is_local:
            content = memoryview(data)  # before the stream: closing that one is what puts it there
            with self.fs.open_output_stream(self.path(name), compression=None) as stream:
                stream.write(content)
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


def resolve_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    """The filesystem of a local path or URI, and the path as that filesystem spells it.

    Characters that no URI has may stand for themselves. Raises ConfigError if the URI names no place, one of an unknown
    kind, or secrets, which would be kept with the run.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return pafs.LocalFileSystem(), uri
    place, _, options = rest.partition("?")
    authority, slash, path = place.partition("/")
    shown = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    if scheme in BUCKETS and not authority:
        raise ConfigError(f"{uri}: expected a bucket behind {scheme}://, got none. Write {scheme}://BUCKET/FOLDER.")
    if scheme == "s3" and "@" in authority:
        raise ConfigError(
            f"{shown}: expected no secrets in a URI, got a key before the bucket. Give it by AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or by a profile."
        )
    if scheme in BUCKETS and (odd := {"", ".", ".."}.intersection(path.rstrip("/").split("/") if path else ())):
        found = " and ".join(f"/{part}/" for part in sorted(odd))
        raise ConfigError(f"{shown}: expected a plain path, got {found} in it. Object stores know no such parts.")
    own = [options, *(one for one in [OPTIONS.get(scheme, "")] if one.partition("=")[0] not in options)]
    try:
        plain = re.sub("%(?![0-9A-Fa-f]{2})", "%25", quote(f"{slash}{path}", safe=URI_SAFE))
        fs, root = pafs.FileSystem.from_uri(f"{scheme}://{authority}{plain}?{'&'.join(filter(None, own))}".rstrip("?"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{shown}: expected a place that pyarrow.fs reaches (s3://, gs://, hdfs://), got {_first_line(error)}. "
            "Correct it, or the environment that says how to reach it."
        ) from error
    return fs, root if root == "/" else root.rstrip("/")


def describe_remote_error(error: BaseException) -> str | None:
    """What the user can do about an error of an object store, on this machine or on a worker; None if it is none."""
    if found := AWS_ERROR.search(str(error)):
        where = f"s3://{found['bucket']}/{found['key'] or ''}" if found["bucket"] else "the object store"
        said = re.sub(r" \(Request ID: [^)]*\)", "", found["aws"]).strip()
        return (
            f"{where}: expected an object store that answers, got {said}. Check bucket, endpoint and credentials, "
            "then run the same command again."
        )
    if found := GOOGLE_ERROR.search(str(error)):
        return (
            f"gs://: expected an object store that answers, got {found['google']}. Check bucket and credentials, "
            "then run the same command again."
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
