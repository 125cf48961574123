"""Storage through pyarrow.fs: one class for local folders, s3://, gs://, abfs:// and hdfs://, with atomic small writes.

Local writes are fsynced and renamed; on S3 and Google Cloud Storage the single PUT that closes the stream is atomic.
Endpoint, region and credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …).
"""

import base64
import errno
import hashlib
import json
import os
import posixpath
import re
import shlex
import stat
import uuid
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from schemas.errors import ConfigError, ContractError, describe_storage_error
from schemas.secrets import HOW_TO_PASS, secret_in, shown_uri, without_secrets

READ_BYTES = 1 << 20
WHOLE_BYTES = 128 << 20
"""Maximum size of a remote file of a table that is read in one request and kept in memory [bytes]."""
MAX_FILE_BYTES, MAX_JSON_BYTES = 4 << 30, 1 << 30
"""Maximum size of a local file of a run that is read as a whole, and of a JSON file [bytes]. A manifest has about 1 kB
for each part, and a log of training as much for each step: a million parts, and 4 million steps."""
_CHECKED: dict[str, Any] = {}
"""The files that this process has compared with their manifests: path → what would differ if the file had changed."""
MAX_CHECKED = 1 << 16
BUCKETS = ("s3", "gs", "gcs", "abfs", "abfss")
"""Schemes whose paths start with a bucket."""
AZURE = ("abfs", "abfss")
VISIBLE = ("abfs", "hdfs")
"""Names of filesystems, as pyarrow has them, on which a file can be seen while it is written."""
AZURE_ACCOUNT, AZURE_KEY = "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"
"""Environment variables of an account and its key, as Azure's tools name them. pyarrow reads the other credentials."""
AZURE_PLACE = re.compile(r"(?:[\w$-]+@)?[a-z0-9]+\.(?:dfs|blob)\.core\.windows\.net", re.ASCII)
AZURE_OPTION = re.compile(
    r"(?:blob|dfs)_storage_authority="
    r"(?:\.(?:blob|dfs)\.core\.(?:windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)|127\.0\.0\.1:[1-6]\d{0,4})"
    r"|(?!\w*authority)\w+=[\w-]*",
    re.ASCII,
)
"""Forms of the container and account in a URI, and of one of its options. The hosts are Azure's, or this machine: a URI
may be a stranger's, and a login or a signature that another host gets is valid for every account, or at Azure."""
CLEAR_TEXT = "enable_tls=false"
ANONYMOUS = "credential_kind=anonymous"
GOOGLE = ("gs://", "gcs://")
OPTIONS = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=60", "gcs": "retry_limit_seconds=60"}
"""Default options by scheme, which options in a URI override. With S3, a small file is sent in one request, so that an
interrupt cannot leave an empty file. With Google Cloud Storage, an unreachable store fails after a minute instead of
fifteen."""
STALL_SECONDS = 20.0
"""S3: time without a byte after which a request is made again [s]. Without it, pyarrow waits for ever."""
CONNECT_SECONDS = 10.0
"""S3: maximum time to connect [s]."""
ATTEMPTS = 6
"""S3: how often a request is made that fails or is answered with 503, with a growing time between."""
URI_SAFE = "/%:@!$&'()*+,;=~"
AWS_ERROR = re.compile(r"(?:(?:key '(?P<key>.*?)' in )?bucket '(?P<bucket>[^']*)'[^\n]*?: )?AWS Error (?P<aws>[^\n]+)")
GOOGLE_ERROR = re.compile(r"google::cloud::Status\((?P<google>[^\n]{1,300})")
AZURE_ERROR = re.compile(r"(?:Azure Error: \[(?P<code>[^\]\n]*)\] |N\d+Azure[^\s:]*: )(?P<azure>[^\n]{1,300})")
"""pyarrow's message for an error of Azure: of a request, or of the library of Azure, as for want of credentials."""


class CheckedPath(str):
    """The path of a file of a table, relative to its version folder, with the size and SHA-256 that its manifest names.

    `Store.open_input` compares both with the file.
    """

    __slots__ = ("num_bytes", "sha256")
    num_bytes: int
    """Size of the file [bytes]."""
    sha256: str
    """SHA-256 (hex) of the file."""

    def __new__(cls, path: str, num_bytes: int, sha256: str) -> "CheckedPath":
        self = super().__new__(cls, path)
        self.num_bytes, self.sha256 = num_bytes, sha256
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedPath, (str(self), self.num_bytes, self.sha256)


def is_utf8(name: str) -> bool:
    """Return True if a name has no bytes beside UTF-8, for which Python has lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Store:
    """A folder on a local or remote filesystem. The names of files are paths relative to this folder.

    Raises ConfigError if the URI is empty, not valid or not UTF-8, or has an unsupported scheme.
    """

    def __init__(self, uri: str):
        if not uri:  # a variable of a shell that is not set
            raise ConfigError("expected a folder, got an empty text. Write `.` for the current folder.")
        if not is_utf8(uri):
            raise ConfigError(f"{uri}: expected a name in UTF-8, got other bytes. Rename the folder.")
        location, mark, options = uri.partition("?") if "://" in uri else (os.path.abspath(uri), "", "")
        self.uri = re.sub("(?<=[^/:])/+$", "", location)
        self.address = f"{self.uri}{mark}{options}"
        """The URI with the options of its filesystem, if there are any."""
        self.fs, self.root = resolve_uri(self.address)
        self.is_local = isinstance(self.fs, pafs.LocalFileSystem)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.address,)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def child(self, name: str) -> "Store":
        """Return the store of a sub-folder; `../` in the name leads to a parent."""
        scheme, mark, rest = self.uri.rpartition("://")
        child = Store.__new__(Store)  # keeps the connections of this store
        child.uri = f"{scheme}{mark}{posixpath.normpath(f'{rest}/{quote(name) if mark else name}')}"
        child.address = f"{child.uri}{self.address[len(self.uri) :]}"
        child.fs, child.is_local = self.fs, self.is_local
        child.root = posixpath.normpath(f"{self.root}/{name}")
        return child

    def path(self, name: str) -> str:
        """Return the path of a file on this filesystem."""
        if "../" in name:  # object stores have no parent folders, and the folder before a `../` need not exist
            return posixpath.normpath(f"{self.root}/{name}")
        return f"{self.root}/{name}" if name else self.root

    def check_bucket(self) -> None:
        """Raise ConfigError if the bucket of this folder does not exist."""
        bucket = self.root.partition("/")[0]
        if bucket and not self.is_local and self.fs.get_file_info(bucket).type == pafs.FileType.NotFound:
            raise ConfigError(f"{self.uri}: expected a folder of a bucket, got no bucket {bucket}. Create the bucket.")

    def exists(self, name: str) -> bool:
        """Return True if a file or folder of this name exists."""
        return bool(self.fs.get_file_info(self.path(name)).type != pafs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Return the size of a file [bytes]. Raises ContractError if the file does not exist."""
        info = self.fs.get_file_info(self.path(name))
        if info.type != pafs.FileType.File:
            raise ContractError(
                f"{self.uri}/{name}: expected a file that a manifest names, got no file. Restore it from a backup."
            )
        return int(info.size)

    def open_input(self, path: CheckedPath) -> Any:
        """Open a file of a table for random access (pyarrow.NativeFile), if it is the file that its manifest names.

        The first time that a process opens a file, the whole file is read to compare its SHA-256. A remote file of up
        to WHOLE_BYTES is then kept in memory, so that it is read once. Raises ContractError if the file is missing,
        damaged or not a regular file.
        """
        name = self.path(path)
        if self.is_local:
            known: Any = _regular_file(name)
            if known is None or known[0] != path.num_bytes:
                raise self._damaged(path, "no such file" if known is None else f"a file of {known[0]} bytes")
            if _CHECKED.get(name) != (known, path.sha256):
                self._compare(path, self.sha256(path))
                _remember(name, (known, path.sha256))
            return pa.memory_map(name)
        file = self._open_remote(path)
        if _CHECKED.get(self.uri + name) == path.sha256:
            return file
        if path.num_bytes > WHOLE_BYTES:
            self._compare(path, self.sha256(path))
        else:
            content = file.read_buffer()
            file = pa.BufferReader(content)
            self._compare(path, hashlib.sha256(content).hexdigest())
        _remember(self.uri + name, path.sha256)
        return file

    def open_unchecked(self, name: str) -> Any:
        """Open a random-access file (pyarrow.NativeFile) that no manifest names, or that was verified before.

        A local file is memory-mapped. Raises ContractError if it is a pipe, a device or a folder.
        """
        self._check_regular(name)
        if self.is_local:
            return pa.memory_map(self.path(name))
        return self.fs.open_input_file(self.path(name))

    def _open_remote(self, path: CheckedPath) -> Any:
        try:
            file = self.fs.open_input_file(self.path(path))
        except FileNotFoundError as error:
            raise self._damaged(path, "no such file") from error
        if (size := file.size()) != path.num_bytes:
            raise self._damaged(path, f"a file of {size} bytes")
        return file

    def _compare(self, path: CheckedPath, sha256: str) -> None:
        if sha256 != path.sha256:
            raise self._damaged(path, f"SHA-256 {sha256}")

    def _damaged(self, path: CheckedPath, found: str) -> ContractError:
        what = f"SHA-256 {path.sha256}" if found.startswith("SHA-256") else f"a file of {path.num_bytes} bytes"
        return ContractError(
            f"{self.uri}/{path}: expected {what} as the manifest names it, got {found}. " + self.repair_fix
        )

    @property
    def repair_fix(self) -> str:
        """The last sentence of an error on a damaged file of a table, whose version folder this is."""
        return f"Run `penstock repair {shlex.quote(self.child('../..').uri)}`, which builds damaged files again."

    def open_output(self, name: str) -> Any:
        """Open an output stream, and create missing parent folders.

        The file survives a power loss only after `close` of the stream and `sync(name)`.
        """
        self.make_parent(name)
        return self.fs.open_output_stream(self.path(name), compression=None)

    def make_parent(self, name: str) -> None:
        """Create the parent folder of a local file, with its parents, and make their names durable."""
        if self.is_local:
            parent = Path(self.path(name)).parent
            missing = [*takewhile(lambda folder: not folder.exists(), (parent, *parent.parents))]
            parent.mkdir(parents=True, exist_ok=True)
            for folder in reversed(missing):
                _fsync(str(folder.parent))

    def sync(self, name: str) -> None:
        """Flush a closed local file, or the names in a local folder, to the disk; then the same of its own name."""
        if self.is_local:
            _fsync(self.path(name))
            _fsync(os.path.dirname(self.path(name)))

    def read_bytes(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the whole content of a small file.

        Raises FileNotFoundError if there is none, and ContractError if it is a pipe, a device or a folder, a local file
        of more than `max_bytes`, or not the file that the manifest names.
        """
        self._check_regular(name, max_bytes)
        with self.fs.open_input_stream(self.path(name), compression=None) as stream:
            data = bytes(stream.read())
        if isinstance(name, CheckedPath):
            self._compare(name, hashlib.sha256(data).hexdigest())
        return data

    def _check_regular(self, name: str, max_bytes: int | None = None) -> None:
        """Raise ContractError if a local file is a pipe, which would block a reader, or anything else but a file.

        `max_bytes`: its maximum size; None = any size.
        """
        if not self.is_local or not os.path.exists(self.path(name)):
            return
        state = _regular_file(self.path(name))
        if state is None:
            raise ContractError(
                f"{self.uri}/{name}: expected a regular file, got a folder, pipe or device. Restore it from a backup."
            )
        if max_bytes is not None and state[0] > max_bytes:
            raise ContractError(
                f"{self.uri}/{name}: expected a file of at most {max_bytes} bytes, got one of {state[0]} bytes. "
                "Restore it from a backup."
            )

    def read_json(self, name: str) -> Any:
        """Return the JSON value of a small file. Raises ContractError if the file is missing or is not JSON."""
        try:
            return json.loads(self.read_bytes(name, MAX_JSON_BYTES))
        except FileNotFoundError as error:
            raise ContractError(
                f"{self.uri}/{name}: expected a JSON file, got no such file. Restore it from a backup."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ContractError(
                f"{self.uri}/{name}: expected a JSON file, got one that cannot be parsed ({error}). "
                "Restore it from a backup."
            ) from error

    def write_atomic(self, name: str, data: bytes) -> None:
        """Write a small file atomically: a reader sees either the old or the whole new content.

        On HDFS, a reader may find no file for some milliseconds: the old one is removed, then the new one is renamed.
        On Azure, the new one is copied over the old one.
        """
        self.make_parent(name)
        final = self.path(name)
        partial = f"{final}.{uuid.uuid4().hex[:8]}.partial"
        if not self.is_local:
            content = memoryview(data)  # raises on a wrong type before a stream is opened, whose close writes a file
            is_visible = self.fs.type_name in VISIBLE
            with self.fs.open_output_stream(partial if is_visible else final, compression=None) as stream:
                stream.write(content)
            if is_visible:
                self._move(partial, final)
            return
        try:
            with open(partial, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, final)
        except IsADirectoryError as error:
            raise ContractError(f"{final}: expected a file to replace, got a folder. Remove the folder.") from error
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
        _fsync(os.path.dirname(final))

    def open_own(self, name: str, flags: int) -> int:
        """Open or create a file of a local run for writing in place, and return its file descriptor.

        `flags` are further ones of `os.open`. Raises ContractError for a link, a file with several names, a pipe or a
        folder: a run may come from a stranger, and such a name may lead to any file of the user.
        """
        self.make_parent(name)
        return open_own(self.path(name), flags)

    def sha256(self, name: str) -> str:
        """Return the SHA-256 (hex) of a file.

        Raises FileNotFoundError if there is none, and ContractError if it is a pipe, a device or a folder.
        """
        self._check_regular(name)
        digest = hashlib.sha256()
        with self.fs.open_input_stream(self.path(name), compression=None) as stream:
            for block in iter(lambda: stream.read(READ_BYTES), b""):
                digest.update(block)
        return digest.hexdigest()

    def delete(self, name: str) -> None:
        """Remove a file; a missing file is not an error."""
        if self.exists(name):
            self.fs.delete_file(self.path(name))

    def delete_folder(self, name: str = "") -> None:
        """Remove a folder with all files below it; the empty name is this folder."""
        if self.uri.startswith(GOOGLE):  # it has no folders, and `delete_dir` fails for want of an object of that name
            self.fs.delete_dir_contents(self.path(name), missing_dir_ok=True)
        else:
            self.fs.delete_dir(self.path(name))

    def move(self, name: str, new: str) -> None:
        """Rename a file; an existing file of the new name is replaced. An object store copies and then deletes it."""
        self.make_parent(new)
        if self.is_local:
            os.replace(self.path(name), self.path(new))
            for folder in {os.path.dirname(self.path(new)), os.path.dirname(self.path(name))}:
                _fsync(folder)
        else:
            self._move(self.path(name), self.path(new))

    def _move(self, path: str, new: str) -> None:
        if isinstance(self.fs, pafs.AzureFileSystem):  # an account without a hierarchical namespace cannot rename
            self.fs.copy_file(path, new)
            self.fs.delete_file(path)
        else:
            self.fs.move(path, new)

    def names(self) -> list[str]:
        """Return the names of the files in this folder, not of those in its subfolders. A missing folder has none."""
        infos = self.fs.get_file_info(pafs.FileSelector(self.root, allow_not_found=True))
        return [info.base_name for info in infos if info.type == pafs.FileType.File]

    def walk(self) -> Iterator[str]:
        """Yield the name of every file below this folder.

        A local link to a folder elsewhere, such as on another disk, is followed. It is not if it leads back into this
        folder or to one above it, if another link leads to the same folder, or if it is itself below a link.
        """
        if self.is_local:
            yield from _walk_local(self.root.rstrip("/"))
            return
        selector = pafs.FileSelector(self.root, recursive=True, allow_not_found=True)
        for info in self.fs.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield info.path[len(self.root) + 1 :]


def _walk_local(root: str) -> Iterator[str]:
    """Do the same as `Store.walk` for a local folder, which need not exist."""
    top = os.path.realpath(root)
    waiting, linked = [root], set[str]()
    while waiting:
        start = waiting.pop(0)
        for folder, folders, names in os.walk(start, onerror=_raise_unless_missing):
            files = (f"{folder}/{name}" for name in sorted(names))
            yield from (path[len(root) + 1 :] for path in files if os.path.isfile(path))
            folders.sort()
            for path in (f"{folder}/{name}" for name in folders) if start == root else ():
                place = os.path.realpath(path)
                is_apart = os.path.commonpath([top, place]) not in (top, place)
                if os.path.islink(path) and is_apart and place not in linked:
                    linked.add(place)
                    waiting.append(path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _regular_file(path: str) -> tuple[int, ...] | None:
    """Return size, times and number of a local file, which change with it; None if it is not a regular file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (
        (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
        if stat.S_ISREG(found.st_mode)
        else None
    )


def _remember(name: str, state: Any) -> None:
    if len(_CHECKED) >= MAX_CHECKED:
        _CHECKED.clear()
    _CHECKED[name] = state


def resolve_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the filesystem of a local path or URI, and the path on this filesystem.

    Raises ConfigError if the URI is not valid, has an unknown scheme, or contains secrets.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return pafs.LocalFileSystem(), uri
    location, _, options = rest.partition("?")
    authority, slash, path = location.partition("/")
    shown = shown_uri(uri)
    if scheme in BUCKETS and not authority:
        form = "CONTAINER@ACCOUNT.dfs.core.windows.net" if scheme in AZURE else "BUCKET"
        raise ConfigError(f"{shown}: expected a bucket after {scheme}://, got none. Write {scheme}://{form}/FOLDER.")
    if scheme == "s3" and "@" in authority:  # the URI is stored with the run
        raise ConfigError(
            f"{shown}: expected no secrets in a URI, got a key before the bucket. Remove the key from the URI, "
            "and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
        )
    if (what := secret_in(uri)) is not None:
        raise ConfigError(f"{shown}: expected no secrets in a URI, got {what}. {HOW_TO_PASS}.")
    if scheme in BUCKETS and (odd := {"", ".", ".."}.intersection(path.rstrip("/").split("/") if path else ())):
        segments = " and ".join(f"/{part}/" for part in sorted(odd))
        raise ConfigError(
            f"{shown}: expected a path without empty, `.` or `..` segments, got {segments} in it. Remove such segments."
        )
    if scheme in AZURE:
        _check_azure(shown, authority, [*filter(None, options.split("&"))])
    defaults = OPTIONS.get(scheme, "")
    own = [options, *([defaults] if defaults.partition("=")[0] not in options else [])]
    try:
        # Characters that a URI must encode may occur unencoded.
        plain = re.sub("%(?![0-9A-Fa-f]{2})", "%25", quote(f"{slash}{path}", safe=URI_SAFE))
        fs, root = pafs.FileSystem.from_uri(f"{scheme}://{authority}{plain}?{'&'.join(filter(None, own))}".rstrip("?"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"{shown}: expected a URI that pyarrow.fs can open (s3://, gs://, abfs://, hdfs://), got "
            f"{_first_line(error)}. "
            "Correct the URI, or the endpoint and credentials in the environment."
        ) from error
    if isinstance(fs, pafs.S3FileSystem):
        fs = _with_time_limits(fs)
    elif isinstance(fs, pafs.AzureFileSystem):
        fs = _with_account_key(fs, shown)
    return fs, root if root == "/" else root.rstrip("/")


def _with_time_limits(fs: pafs.S3FileSystem) -> pafs.S3FileSystem:
    """Return the same filesystem with limits of time, which its URI cannot set.

    Credentials stay those of the environment, so that the filesystem renews the ones that expire.
    """
    _, (options, *_) = fs.__reduce__()
    kept = {name: value for name, value in options.items() if name not in ("access_key", "secret_key", "session_token")}
    limits = {"connect_timeout": CONNECT_SECONDS, "request_timeout": STALL_SECONDS}
    return pafs.S3FileSystem(**kept | limits, retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))


def _check_azure(shown: str, authority: str, options: list[str]) -> None:
    """Raise ConfigError if a URI of Azure names another host, or one to which credentials would go in clear text."""
    if not (AZURE_PLACE.fullmatch(authority) and all(map(AZURE_OPTION.fullmatch, options))):
        raise ConfigError(
            f"{shown}: expected CONTAINER@ACCOUNT.dfs.core.windows.net and, for a server on this machine, options such "
            f"as blob_storage_authority=127.0.0.1:10000, got {authority!r} and {'&'.join(options)!r}. Correct the URI."
        )
    local = [option for option in options if "authority=127." in option]
    if CLEAR_TEXT in options and len(local) < 2:
        raise ConfigError(
            f"{shown}: expected {CLEAR_TEXT} only where blob_storage_authority and dfs_storage_authority are on this "
            f"machine, got {'&'.join(options)!r}. Remove {CLEAR_TEXT}."
        )
    if local and not os.environ.get(AZURE_KEY) and ANONYMOUS not in options:
        raise ConfigError(
            f"{shown}: expected the account and key of a server on this machine, got no {AZURE_KEY}. "
            f"Set {AZURE_ACCOUNT} and {AZURE_KEY}."
        )


def _with_account_key(fs: pafs.AzureFileSystem, shown: str) -> pafs.AzureFileSystem:
    """Return the same filesystem with the key of its account, if the environment has it.

    Raises ConfigError if the key is not in base64.
    """
    _, (options,) = fs.__reduce__()
    account = options["account_name"]
    key = os.environ.get(AZURE_KEY) if account == os.environ.get(AZURE_ACCOUNT) else None
    if not key:
        return fs
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        raise ConfigError(
            f"{shown}: expected a key in base64 in {AZURE_KEY}, got another text. Copy the key of the account again."
        ) from None
    places = {name: value for name, value in options.items() if name.endswith(("_authority", "_scheme"))}
    return pafs.AzureFileSystem(account, account_key=key, **places)


def describe_remote_error(error: BaseException) -> str | None:
    """Return the message for an object store's error, raised here or on a Spark worker; None for any other error."""
    if match := AWS_ERROR.search(str(error)):
        where = f"s3://{match['bucket']}/{match['key'] or ''}" if match["bucket"] else "the object store"
        reason = re.sub(r" \(Request ID: [^)]*\)", "", match["aws"]).strip()
        return (
            f"{where}: expected an object store that answers, got {reason}. Check bucket, endpoint and credentials, "
            "then run the same command again."
        )
    if match := GOOGLE_ERROR.search(str(error)):
        return (
            f"gs://: expected an object store that answers, got {match['google']}. Check bucket and credentials, "
            "then run the same command again."
        )
    if match := AZURE_ERROR.search(str(error)):
        reason = without_secrets(": ".join(filter(None, (match["code"], match["azure"].strip().rstrip(".")))))
        return (
            f"abfs://: expected an object store that answers, got {reason}. Check account, container and credentials, "
            "then run the same command again."
        )
    return None


def describe_error_of_storage(error: BaseException) -> str | None:
    """Return the message for an error of a disk or of an object store that the user can fix; None for any other."""
    own = describe_storage_error(error) if isinstance(error, OSError) else None
    return describe_remote_error(error) or own


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_own(path: str, flags: int) -> int:
    """Do the same as `Store.open_own` for a path whose folder exists."""
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not_own(path, "a link, folder or pipe") from error
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink <= 1:
        return file
    os.close(file)
    raise _not_own(path, "a file with several names" if stat.S_ISREG(facts.st_mode) else "a pipe or device")


def _not_own(path: str, what: str) -> ContractError:
    return ContractError(f"{path}: expected a file of the run to write to, got {what}. Delete it.")
