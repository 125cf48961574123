"""The files of a crawl of Common Crawl by its name: the list that the crawl publishes, and the choice of some of them.

A file is named by its path in the bucket, wherever it is read from: by HTTPS, from S3 or from a mirror. Files of Common
Crawl do not change, so the path is the identity too. Their sizes are not asked for, which would be a request for each
of 90,000 files: the size of a split is an estimate, with which progress is shown.
"""

import hashlib
import os
import re
import threading
import zlib
from contextlib import closing
from typing import Any

import pyarrow as pa

from pipeline.engine.stage import Split
from pipeline.sources.common_crawl.download import (
    IMPATIENCE,
    PATIENCE,
    Download,
    FileFacts,
    RemoteStream,
    fetch_range,
)
from pipeline.sources.common_crawl.requests import UnreachableFileError, is_near, remote_file
from pipeline.sources.config import SourceConfig
from schemas.errors import ConfigError
from schemas.ids import is_in_share, shuffle_key
from schemas.storage import resolve_uri

HTTPS, S3, S3_REGION = "https://data.commoncrawl.org", "s3://commoncrawl", "us-east-1"
MEAN_BYTES = {"warc": 1_000_000_000, "wet": 120_000_000}
"""Assumed size of a file by its kind [bytes]. It is the same for every file and mirror, so that tables are, too."""
MAX_LIST_BYTES = 256 << 20
"""Maximum size of a list of files, as stored and decompressed [bytes]."""
SAFE_PATH = re.compile(r"(?:crawl-data|cc-index)/[A-Za-z0-9._+=/-]{1,1000}")
"""Pattern of the paths of a list. A list may come from a mirror, and its paths are joined to folders."""
INDEX_SUBSET = "/subset=warc/"
"""Part of the paths of the index files that list records of the archives; others list redirects and robots.txt."""


def crawl_root(config: SourceConfig) -> str:
    """Return the address, without a slash at its end, below which the files of a crawl are read."""
    if config.mirror:
        place = config.mirror if "://" in config.mirror else os.path.abspath(config.mirror)
        return place.rstrip("/")
    if config.access == "auto":
        return S3 if is_near(S3_REGION) else HTTPS
    return S3 if config.access == "s3" else HTTPS


def crawl_splits(config: SourceConfig) -> list[Split]:
    """Return the chosen files of source.crawl as splits, sorted by name.

    Raises ConfigError if the list of files cannot be read, or no file is chosen.
    """
    root, crawl = crawl_root(config), config.crawl or ""
    paths = choose(read_list(root, list_path(crawl, config.kind), crawl), config)
    if not paths:
        raise ConfigError(
            f"source.share: expected at least one file of {crawl}, got none of its files below {config.share}. Raise "
            "it, or set source.files."
        )
    names_version = f"#{hashlib.sha256(config.where.encode()).hexdigest()[:16]}" if config.where else ""
    return [
        Split(
            ordinal=ordinal,
            name=path,
            uri=f"{root}/{path}",
            size=MEAN_BYTES[config.kind],
            identity=f"{path}{names_version}",
            source=config.name,
            format="warc",
            snapshot=crawl,
            key=path,
            is_crawl=True,
        )
        for ordinal, path in enumerate(paths)
    ]


def list_path(crawl: str, kind: str) -> str:
    """Return the path of the list of the files of a crawl."""
    series, year, number = crawl.rsplit("-", 2)
    folder = f"{series}/{year}/{number}" if series == "CC-NEWS" else crawl
    return f"crawl-data/{folder}/{kind}.paths.gz"


def index_files(config: SourceConfig) -> list[str]:
    """Return the addresses of the Parquet files of the index of a crawl."""
    root, crawl = crawl_root(config), config.crawl or ""
    paths = read_list(root, f"crawl-data/{crawl}/cc-index-table.paths.gz", crawl)
    return [f"{root}/{path}" for path in paths if INDEX_SUBSET in path]


def read_list(root: str, path: str, crawl: str) -> list[str]:
    """Return the paths that a gzip-compressed list has, sorted. Raises ConfigError if it cannot be read or is none."""
    uri = f"{root}/{path}"
    try:
        text = _decompress(_read_small(uri)).decode()
    except UnreachableFileError as error:
        if error.status in (403, 404):
            raise ConfigError(
                f"source.crawl: expected the name of a crawl that is published, got {crawl!r}, which has no {uri} "
                f"({error.cause}). Choose one of https://index.commoncrawl.org/collinfo.json, or correct source.mirror."
            ) from error
        raise ConfigError(
            f"source.crawl: expected an answer from {root}, got {error.cause}. Check the network, or name a copy with "
            "source.mirror."
        ) from error
    except (ValueError, zlib.error) as error:
        raise ConfigError(
            f"{uri}: expected a compressed list of paths, got {str(error) or 'other bytes'}. Correct source.mirror."
        ) from error
    paths = sorted({line.strip() for line in text.splitlines() if line.strip()})
    if wrong := next((each for each in paths if not _is_safe(each)), None if paths else ""):
        raise ConfigError(f"{uri}: expected paths such as crawl-data/…, got {wrong!r:.120}. Correct source.mirror.")
    if not paths:
        raise ConfigError(f"{uri}: expected a list of paths, got none. Choose another crawl.")
    return paths


def _is_safe(path: str) -> bool:
    return SAFE_PATH.fullmatch(path) is not None and {"", ".", ".."}.isdisjoint(path.split("/"))


def _decompress(data: bytes) -> bytes:
    decoder = zlib.decompressobj(31)
    text = decoder.decompress(data, MAX_LIST_BYTES)
    if not decoder.eof:
        raise ValueError("a list that is cut or too long")
    return text


def _read_small(uri: str) -> bytes:
    """Return the content of a small file. Raises UnreachableFileError, or ValueError beyond MAX_LIST_BYTES."""
    file = remote_file(uri)
    if file is None:
        return _read_local(uri, 0, None)
    data = bytearray()
    with closing(Download(file, FileFacts(), IMPATIENCE, threading.Event()).blocks(0, None)) as blocks:
        for block in blocks:
            data += block
            if len(data) > MAX_LIST_BYTES:
                raise ValueError("a list that is too long")
    return bytes(data)


def choose(paths: list[str], config: SourceConfig) -> list[str]:
    """Return the files that source.files or source.share chooses, sorted by name.

    Each path has a hash, uniform on [0, 1). The files are those with the smallest hashes, so a larger choice has all
    files of a smaller one.
    """
    keys = {path: shuffle_key(0, path.encode()) for path in paths}
    if config.share is not None:
        return [path for path in paths if is_in_share(keys[path], config.share)]
    ranked = sorted(paths, key=lambda path: (keys[path], path))
    return sorted(ranked[: config.files] if config.files is not None else ranked)


# Reading a file of a crawl: by a stream of its own from a server, by pyarrow.fs from any other place.


class _MissingFile:
    """A file that does not exist, as a file object: an error is raised when it is read, as for a file on a server."""

    def __init__(self, error: UnreachableFileError):
        self._error = error

    def read(self, size: int = -1, /) -> bytes:
        raise self._error

    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise self._error

    def size(self) -> int:
        raise self._error

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        return None


def open_crawl_file(uri: str) -> Any:
    """Open a file as a seekable file object, whose methods raise UnreachableFileError."""
    file = remote_file(uri)
    if file is not None:
        return RemoteStream(file, PATIENCE)
    fs, path = resolve_uri(uri)
    try:
        return fs.open_input_file(path)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        return _MissingFile(_unreachable(uri, error))


def read_crawl_range(uri: str, offset: int, length: int) -> bytes:
    """Return a range of a file; fewer bytes if the file ends before. Raises UnreachableFileError."""
    file = remote_file(uri)
    if file is not None:
        return fetch_range(file, offset, offset + length, IMPATIENCE)
    return _read_local(uri, offset, length)


def _read_local(uri: str, offset: int, length: int | None) -> bytes:
    fs, path = resolve_uri(uri)
    try:
        with fs.open_input_file(path) as stream:
            stream.seek(min(offset, stream.size()))
            return bytes(stream.read() if length is None else stream.read(length))
    except (OSError, pa.ArrowException) as error:
        raise _unreachable(uri, error) from error


def _unreachable(uri: str, error: Exception) -> UnreachableFileError:
    if isinstance(error, FileNotFoundError):
        return UnreachableFileError(uri, "no such file", 404)
    reason = str(error).partition("\n")[0]
    return UnreachableFileError(uri, f"{reason:.200}", 403 if isinstance(error, PermissionError) else None)
