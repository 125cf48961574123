"""The splits of a source: the files that its paths and patterns match, found before a run starts.

A split's name is the path of its file below the longest folder of the pattern without a wildcard, so moving a crawl
changes no name and no doc_id. Its identity (size and modification time) shows if the file changed. The SHA-256 of a
file is computed while the file is read.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pyarrow.fs as pafs

from pipeline.engine.stage import Split
from pipeline.sources.archives.folders import FolderArchive, folder_identity, list_folder
from pipeline.sources.common_crawl.download import RemoteStream
from pipeline.sources.common_crawl.listing import crawl_splits, open_crawl_file
from pipeline.sources.config import AUTO, SourceConfig
from pipeline.sources.formats import FORMATS, ignored_settings
from pipeline.sources.tables.hf_folder import files_of, is_dataset_folder
from schemas.config import Recipe, suggest_name
from schemas.errors import ConfigError
from schemas.storage import resolve_uri

# In a URI a question mark starts the options of the filesystem.
LOCAL_MAGIC, URI_MAGIC = re.compile(r"[*?\[]"), re.compile(r"[*\[]")
HF = "hf"
CRAWL = re.compile(r"CC-MAIN-\d{4}-\d{2}(?!\d)")
MAX_MATCHES = 100_000
"""Maximum number of files and folders that a pattern of a format of repositories matches; each is a split."""
MAX_OWN_PARTS = 256
"""Maximum number of files of a source up to which each of them has a part of its own."""
SHARED_FILES, SHARED_BYTES = 1000, 64 << 20
"""Maximum number of files, and of their bytes as stored, that share a part if a source has more files than that."""
WAT = re.compile(r"\.wat(?:\.(?:gz|zst))?$", re.IGNORECASE)
TOKEN = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]|.")


class _InputFile(NamedTuple):
    name: str
    uri: str
    info: pafs.FileInfo
    format: str | None = None
    """The format of the file; None: the name of the file shows it."""


_Place = tuple[str | int, ...]


def splits_of(recipe: Recipe) -> list[Split]:
    """Return the files of all sources of a recipe. Their parts are numbered source by source.

    Raises ConfigError for the first source whose files cannot be read; see `find_splits`.
    """
    splits: list[Split] = []
    num_parts = 0
    for name, own in recipe.by_source().items():
        try:
            found = find_splits(own.section("source", SourceConfig))
        except ConfigError as error:
            if not recipe.has_several_sources:
                raise
            raise ConfigError(f"[[source]] {name}: {error}") from error
        prefix = f"{name}/" if recipe.has_several_sources else ""
        numbers = part_numbers(found)
        own_parts = numbers[-1] + found[-1].num_ranges
        splits += [
            replace(split, ordinal=num_parts + number, key=f"{prefix}{split.name}")
            for split, number in zip(found, numbers, strict=True)
        ]
        num_parts += own_parts
    return splits


def part_numbers(splits: Sequence[Split]) -> list[int]:
    """Return the number, from 0 on, of the part that each file of a source is read into, in order.

    A large file has a part for each of its ranges; the number is that of the first. A part costs a task in every step,
    and two files in each of its tables. So in a source of more than MAX_OWN_PARTS files, consecutive files of the same
    format share a part within the limits SHARED_FILES and SHARED_BYTES.
    """
    most = SHARED_FILES if len(splits) > MAX_OWN_PARTS else 1
    numbers: list[int] = []
    number, files, size, last = -1, 0, 0, ""
    for split in splits:
        is_full = files == most or size + split.size > SHARED_BYTES
        if not files or is_full or split.num_ranges > 1 or split.format != last:
            number, files, size, last = number + 1, 0, 0, split.format
        files, size = files + 1, size + split.size
        numbers.append(number)
        if split.num_ranges > 1:
            number, files = number + split.num_ranges - 1, 0
    return numbers


def files_by_part(splits: Sequence[Split]) -> list[tuple[Split, ...]]:
    """Return the files of each part of a run, in order."""
    return [tuple(files) for _, files in groupby(splits, key=lambda split: split.ordinal)]


def find_splits(config: SourceConfig) -> list[Split]:
    """Return the files that source.paths names or matches, or those of source.crawl, as splits sorted by name.

    Raises ConfigError if the format is unknown, a pattern matches nothing, a file cannot be read, two files have the
    same name, or a file has two names. The message lists every such path.
    """
    if config.format not in (AUTO, *FORMATS):
        raise ConfigError(
            f"source.format: expected {AUTO} or the name of a format, got {config.format!r}"
            f"{suggest_name(config.format, (AUTO, *FORMATS))}. Correct source.format."
        )
    if config.crawl is not None:
        if ignored := [*ignored_settings(config, ("warc",))]:
            raise ConfigError(f"source.crawl: {ignored[0]}")
        return crawl_splits(config)
    problems: list[str] = []
    files: dict[str, _InputFile] = {}
    packs = FORMATS[config.format].packs if config.format in FORMATS else None
    for path in config.paths:
        try:
            matched = _match_dataset(path, config) or (_match(path) if packs is None else _match_level(path))
            for file in matched:
                if other := files.get(file.name):
                    problems.append(_same_name(other, file))
                files[file.name] = file
        except ConfigError as error:
            problems.append(f"expected files at {_shown(path)}, got {error}")
        except UnicodeDecodeError as error:
            problems.append(f"expected names in UTF-8 at {_shown(path)}, got {error.object!r:.200}. Rename the file.")
        except (OSError, ValueError, re.error) as error:
            problems.append(f"expected files at {_shown(path)}, got {error}. Correct the path.")
    splits: list[Split] = []
    places: dict[_Place, _InputFile] = {}
    companions = _companions(config, problems)
    for ordinal, name in enumerate(sorted(files)):
        file = files[name]
        try:
            if WAT.search(name):
                raise ValueError("a WAT file, which has no text. Use `penstock links` for its links.")
            size, identity, place = _check_readable(file, packs)
            format_name = config.format if config.format != AUTO else file.format or _format_of(name)
            if (problem := FORMATS[format_name].problem(file.uri, config)) is not None:
                raise ValueError(problem)
        except ValueError as error:
            problems.append(f"expected a file at {file.uri}, got {error}")
            continue
        except OSError as error:
            problems.append(f"expected a file at {file.uri}, got {error}. Make it readable.")
            continue
        if (first := places.setdefault(place, file)) is not file:
            problems.append(_read_twice(first, file))
        needs = FORMATS[format_name].needs
        needed = [other for other in companions.get(format_name, ()) if needs(name, other.name, config)]
        splits.append(_split(ordinal, file, (format_name, size, identity), needed, config))
    problems += () if problems else ignored_settings(config, {split.format for split in splits})
    if problems:
        raise ConfigError("\n  ".join([f"source.paths: {len(problems)} problem(s); nothing was started", *problems]))
    return splits


def _same_name(first: _InputFile, second: _InputFile) -> str:
    """Return the problem of two paths that give files of one name, or the same file."""
    if first.uri == second.uri:
        return _read_twice(first, second)
    return f"expected one file of the name {first.name!r}, got {first.uri} and {second.uri}. Rename one."


def _read_twice(first: _InputFile, second: _InputFile) -> str:
    """Return the problem of two patterns that match one file, or of two links to one file."""
    both = (first.name, second.name) if first.uri == second.uri else (first.uri, second.uri)
    names = f" ({' and '.join(both)})" if both[0] != both[1] else ""
    return f"expected each file once, got {first.uri} twice{names}. Narrow the patterns."


def _shown(path: str) -> str:
    """Return a path without what may be secret: the user and the options of a URI."""
    return re.sub("://[^/]*@", "://", path.partition("?")[0]) if "://" in path else path


def _split(
    ordinal: int,
    file: _InputFile,
    facts: tuple[str, int, str],
    companions: Sequence[_InputFile],
    config: SourceConfig,
) -> Split:
    """Return the split of a file. `facts`: format, size [bytes] and identity."""
    (format_name, size, identity), name = facts, file.name
    if companions:
        described = ";".join(f"{other.name}:{other.info.size}:{other.info.mtime_ns or 0}" for other in companions)
        identity += f":{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    if config.snapshot is not None:  # Ids derive from names, and two crawls may use the same file names.
        name = f"{config.snapshot}/{name}"
    crawl = CRAWL.search(name)
    snapshot = config.snapshot or (crawl.group() if crawl else None)
    split = Split(ordinal, name, file.uri, size, identity, config.name, format_name, snapshot, name)
    is_folder = file.info.type == pafs.FileType.Directory
    ranges = 1 if is_folder else num_ranges(split, companions, config)
    return replace(split, companions=tuple(other.uri for other in companions), num_ranges=ranges)


def num_ranges(split: Split, companions: Sequence[Any], config: SourceConfig) -> int:
    """Return the number of ranges that a file is divided into: 1 unless it is large and its format allows it."""
    is_divided = config.part_bytes and not companions and FORMATS[split.format].starts(split.name) is not None
    return max(1, -(-split.size // config.part_bytes)) if is_divided else 1


def _companions(config: SourceConfig, problems: list[str]) -> dict[str, list[_InputFile]]:
    """Return the other files that the readers of formats need, sorted by name, by format; add what is wrong."""
    found: dict[str, list[_InputFile]] = {}
    for name, file_format in FORMATS.items():
        for path in file_format.companions(config):
            try:
                files = list(_match(path))
                for file in files:
                    _check_readable(file, None)
                found.setdefault(name, []).extend(files)
            except ValueError as error:
                ending = "" if str(error).endswith(".") else ". Correct the path."
                problems.append(f"expected files at {_shown(path)}, got {error}{ending}")
            except (OSError, re.error) as error:
                problems.append(f"expected files at {_shown(path)}, got {error}. Correct the path.")
    return {name: sorted(files, key=lambda file: file.name) for name, files in found.items()}


def _match_dataset(path: str, config: SourceConfig) -> list[_InputFile]:
    """Return the files of a Hugging Face dataset folder; empty if the path names no such folder.

    Raises ConfigError if the source has the format `hf` and the path is no local folder, or the folder has no files.
    """
    is_wanted = config.format == HF
    if not is_wanted and (config.format != AUTO or "://" in path or not is_dataset_folder(path)):
        return []
    if not os.path.isdir(path):
        raise ConfigError("no local folder. Name the folder of a dataset.")
    folder = os.path.abspath(path)
    fs = pafs.LocalFileSystem()
    names = files_of(folder, config)
    return [_InputFile(name, f"{folder}/{name}", fs.get_file_info(f"{folder}/{name}"), HF) for name in names]


def find_files(paths: Sequence[str]) -> list[Split]:
    """Return the files that paths name or match, sorted by name, without a format.

    Raises ConfigError for paths without a readable file; the message lists all of them.
    """
    problems: list[str] = []
    files: dict[str, Split] = {}
    for path in paths:
        try:
            for file in _match(path):
                size, identity, _ = _check_readable(file, None)
                files[file.uri] = Split(0, file.name, file.uri, size, identity, "", "")
        except (OSError, ValueError, re.error, ConfigError) as error:
            problems.append(f"expected files at {_shown(path)}, got {error}")
    if problems:
        raise ConfigError("\n  ".join([f"files: {len(problems)} problem(s); nothing was started", *problems]))
    ordered = sorted(files.values(), key=lambda split: (split.name, split.uri))
    return [replace(split, ordinal=ordinal) for ordinal, split in enumerate(ordered)]


def _match(path: str) -> Iterator[_InputFile]:
    """Yield the file at a path, or every file that a pattern matches.

    Raises ValueError if a pattern matches no file, OSError if the pattern's folder cannot be listed.
    """
    is_uri = "://" in path
    location, question, options = path.partition("?") if is_uri else (os.path.abspath(path), "", "")
    parts = location.split("/")
    magic = URI_MAGIC if is_uri else LOCAL_MAGIC
    first = next((index for index, part in enumerate(parts) if magic.search(part)), None)
    if first is None or (not is_uri and os.path.lexists(path)):
        fs, plain = resolve_uri(path if is_uri else location)
        yield _InputFile(
            unquote(parts[-1]) if is_uri else parts[-1], path if is_uri else location, fs.get_file_info(plain)
        )
        return
    folder = "/".join(parts[:first])
    fs, root = resolve_uri(f"{folder}{question}{options}" if is_uri else folder or "/")
    names = re.compile(_translate([unquote(part) if is_uri else part for part in parts[first:]]))
    matched = False
    deep = len(parts) - first > 1 or parts[-1] == "**"
    for info in fs.get_file_info(pafs.FileSelector(root, recursive=deep)):
        name = info.path[len(root.rstrip("/")) + 1 :]
        if info.type != pafs.FileType.Directory and names.fullmatch(name):
            matched = True
            yield _InputFile(name, f"{folder}/{quote(name) if is_uri else name}{question}{options}", info)
    if not matched:
        raise ValueError("no file that matches this pattern")


def _match_level(path: str) -> Iterator[_InputFile]:
    """Yield the files and folders that a pattern matches; `**` at its end matches one level, as `*` does.

    Raises ValueError and OSError as `_match` does.
    """
    is_uri = "://" in path
    location, question, options = path.partition("?") if is_uri else (os.path.abspath(path), "", "")
    parts = location.rstrip("/").split("/")
    parts[-1] = "*" if parts[-1] == "**" else parts[-1]
    magic = URI_MAGIC if is_uri else LOCAL_MAGIC
    first = next((index for index, part in enumerate(parts) if magic.search(part)), None)
    if first is None or (not is_uri and os.path.lexists(path)):
        yield from _match(path.rstrip("/"))
        return
    if "**" in parts:
        raise ValueError("`**` before the end of a pattern. Name each level, such as repositories/*/*")
    folder = "/".join(parts[:first])
    fs, root = resolve_uri(f"{folder}{question}{options}" if is_uri else folder or "/")
    found = [("", root, None)]
    for part in parts[first:]:
        names = re.compile(_translate_name(unquote(part) if is_uri else part))
        found = [
            (f"{prefix}/{info.base_name}".lstrip("/"), info.path, info)
            for prefix, place, above in found
            if above is None or above.type == pafs.FileType.Directory
            for info in fs.get_file_info(pafs.FileSelector(place))
            if names.fullmatch(info.base_name)
        ]
        if len(found) > MAX_MATCHES:
            raise ValueError(f"more than {MAX_MATCHES:,} files and folders. Name their folder, or pack them")
    if not found:
        raise ValueError("no file that matches this pattern")
    for name, _, info in found:
        yield _InputFile(name, f"{folder}/{quote(name) if is_uri else name}{question}{options}", info)


def _translate(parts: list[str]) -> str:
    """Return the regular expression of a glob pattern. As in a shell, wildcards match no name with a leading dot."""
    folders = "".join(r"(?:(?!\.)[^/]+/)*" if part == "**" else f"{_translate_name(part)}/" for part in parts[:-1])
    return folders + (r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+" if parts[-1] == "**" else _translate_name(parts[-1]))


def _translate_name(part: str) -> str:
    expression = r"(?!\.)" if part[:1] in ("*", "?", "[") else ""
    for token in TOKEN.findall(part):
        if token.startswith("*"):
            expression += "[^/]*"
        elif token == "?":
            expression += "[^/]"
        elif token.startswith("[") and len(token) > 2:
            inside = re.sub(r"[\\\[&~|]", r"\\\g<0>", token[1:-1])
            expression += f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        else:
            expression += re.escape(token)
    return expression


def _format_of(name: str) -> str:
    for file_format in FORMATS.values():
        if file_format.suffixes.search(name):
            return file_format.name
    *others, last = FORMATS
    raise ValueError(f"a name whose suffix fits no known format. Set source.format to {', '.join(others)} or {last}.")


def _check_readable(file: _InputFile, packs: Callable[[str], bool] | None) -> tuple[int, str, _Place]:
    """Return the size, identity and place of a file, or of a folder if the format reads folders as archives.

    Raises ValueError unless the path is that of such a file, OSError if it cannot be read.
    """
    kind = file.info.type
    if packs is not None and (kind == pafs.FileType.Directory or (kind == pafs.FileType.File and packs(file.name))):
        size, identity = folder_identity(list_folder(*resolve_uri(file.uri)))
        return size, identity, _place(file, identity)
    if kind == pafs.FileType.NotFound:
        raise ValueError("no such file. Correct the path.")
    if kind == pafs.FileType.Directory:
        raise ValueError("a folder. Name its files, such as FOLDER/*.warc.gz.")
    if kind != pafs.FileType.File:
        raise ValueError("something that is not a regular file, such as a device. Correct the path.")
    identity = f"{file.info.size}:{file.info.mtime_ns or 0}"
    if "://" in file.uri:
        return int(file.info.size), identity, _place(file, identity)
    with open(file.uri, "rb") as stream:
        stream.read(1)
        return int(file.info.size), identity, _place(file, identity, stream.fileno())


def _place(file: _InputFile, identity: str, opened: int | None = None) -> _Place:
    """Return a value that two names of one file share; `opened`: its descriptor if it is open.

    On a local disk these are the device and the inode. Filesystems that number files badly are no reason to refuse two
    files, so their sizes and times have to agree as well.
    """
    scheme, mark, _ = file.uri.partition("://")
    if mark and scheme != "file":
        return scheme, file.info.path
    status = os.stat(file.info.path if opened is None else opened)
    return status.st_dev, status.st_ino, identity


# The byte stream of a split. Before reading, an input file is identified by name, size and time. Its digest is computed
# while it is read, so that it is read only once. Readers may seek: each byte is hashed when it is first read in order,
# and `finish` reads and hashes the rest.

READ_BYTES = 1 << 20
CATCH_UP_BYTES = 16 << 20
"""Maximum number of bytes before the first record of a range that are read only to be hashed."""


class HashedStream:
    """A seekable file object that computes the SHA-256 of the file's content, or of a range, while it is read."""

    def __init__(self, inner: Any, begin: int = 0, end: int | None = None):
        """`begin`, `end`: the bytes that are hashed; None: up to the end of the file. Any byte may be read."""
        self._inner = inner
        self._digest = hashlib.sha256()
        self._begin, self._end = begin, end
        self._hashed = begin
        self._position = int(inner.tell())
        self._size: int | None = None
        self._problem: OSError | None = None
        self.closed = False
        self.on_read: Callable[[], None] | None = None
        """Called whenever bytes were read: a sign of progress."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes from the current position, or all bytes up to the end if `size` is negative."""
        if self._begin == self._hashed < self._position <= self._begin + CATCH_UP_BYTES:
            self._catch_up()
        data = self._read(-1 if size is None else size)
        start, self._position = self._position, self._position + len(data)
        if data:
            self.see_progress()
        self._hash(data, start)
        return data

    def _read(self, size: int) -> bytes:
        try:
            data: bytes = self._inner.read(size) if size >= 0 else self._inner.read()
        except OSError as error:
            self._problem = error
            raise
        return data

    def check(self) -> None:
        """Raise the error of the storage if a read had one: pyarrow and decoders take it for damage of the file."""
        if self._problem is not None:
            raise self._problem

    def _hash(self, data: bytes, start: int) -> None:
        end = start + len(data) if self._end is None else min(start + len(data), self._end)
        if start <= self._hashed < end:
            self._digest.update(memoryview(data)[self._hashed - start : end - start])
            self._hashed = end

    def _catch_up(self) -> None:
        """Read and hash the bytes between the begin of the range and the current position.

        The reader begins with a record after the begin. Without these bytes, all others would be read twice.
        """
        self._inner.seek(self._begin)
        self._hash(self._read(self._position - self._begin), self._begin)
        self._inner.seek(self._position)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it; a position after the end of the file becomes its end.

        Offsets in a file's data may be larger than any that the filesystem accepts.
        """
        if whence == 0 and offset > self._hashed:
            if self._size is None:
                self._inner.seek(0, 2)
                self._size = int(self._inner.tell())
            offset = min(offset, max(self._size, self._hashed))
        self._inner.seek(offset, whence)
        self._position = int(self._inner.tell())
        return self._position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def readable(self) -> bool:
        """Return True; pyarrow calls this."""
        return True

    def seekable(self) -> bool:
        """Return True; pyarrow calls this."""
        return True

    def see_progress(self) -> None:
        """Call `on_read`, which also a file on a server does while it waits."""
        if self.on_read is not None:
            self.on_read()

    @property
    def transfers(self) -> Mapping[str, int]:
        """Counts of the requests that a file on a server took; empty for other files."""
        return getattr(self._inner, "transfers", {})

    @property
    def known_size(self) -> int:
        """Size of a file of a crawl as its server gave it, or the bytes that were read if it gave none [bytes]."""
        facts = getattr(self._inner, "facts", None)
        return self._hashed if facts is None or facts.size is None else int(facts.size)

    def digest_so_far(self) -> tuple[str, int]:
        """Return the SHA-256 (hex) and the number of the bytes that were hashed."""
        return self._digest.hexdigest(), self._hashed - self._begin

    def finish(self) -> tuple[str, int]:
        """Read the bytes that have not been read. Return the SHA-256 (hex) and size [bytes] of the file or range.

        Raises OSError if any read of the file had an error of the storage.
        """
        self.check()
        self.seek(self._hashed)
        while (left := READ_BYTES if self._end is None else min(READ_BYTES, self._end - self._hashed)) > 0:
            if not self.read(left):
                break
        return self.digest_so_far()

    def close(self) -> None:
        """Close the underlying file."""
        self.closed = True
        self._inner.close()


def open_stream(split: Split) -> HashedStream:
    """Open the split's file, or its folder as an archive, which is hashed while it is read; of a range only its bytes.

    Raises OSError if it does not exist; a file of Common Crawl raises UnreachableFileError when it is read.
    """
    if split.is_crawl:
        inner = open_crawl_file(split.uri)
        stream = HashedStream(inner)
        if isinstance(inner, RemoteStream):
            inner.on_wait = stream.see_progress
        return stream
    fs, path = resolve_uri(split.uri)
    if split.span is not None:
        return HashedStream(fs.open_input_file(path), split.span.begin, split.span.end)
    packs = FORMATS[split.format].packs if split.format else None
    if packs is not None and (packs(split.name) or fs.get_file_info(path).type == pafs.FileType.Directory):
        return HashedStream(FolderArchive(fs, path))
    return HashedStream(fs.open_input_file(path))
