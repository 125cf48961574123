"""Reader of source code: repositories in archives and folders, and rows of The Stack; one file is one document.

An archive is read twice: first its licence files and folders, then its code. A file has the licence that it names, or
that of the nearest folder above it. Offsets count bytes of the archive, decompressed if it is a compressed tar.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.engine.stage import EMPTY_LINES_KEPT, Drop, Row, Split
from pipeline.extract.charset import decode
from pipeline.sources.archives.tar import (
    BLOCK,
    ArchiveMember,
    DecodedBytes,
    TarReader,
    is_tar_header,
    is_unsafe,
)
from pipeline.sources.archives.zip import read_zip
from pipeline.sources.blocks import ByteStream
from pipeline.sources.code.config import ANY_LICENCE, CodeConfig
from pipeline.sources.code.filters import content_problem, path_problem
from pipeline.sources.code.languages import language_of, may_be_code
from pipeline.sources.code.licences import (
    MAX_LICENCE_BYTES,
    combine,
    is_allowed,
    is_licence_file,
    recognize,
    tagged,
)
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows, parse_object, read_lines
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text
from pipeline.sources.rows import date_of, field_of, meta_of
from pipeline.sources.tables.jsonl_parquet import read_parquet

ROWS = re.compile(r"\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE)
PARQUET = re.compile(r"\.(?:parquet|pq)$", re.IGNORECASE)
ZIP = re.compile(r"\.zip$", re.IGNORECASE)
ARCHIVE_SUFFIX = re.compile(r"\.(?:zip|tgz|tzst|tbz2?|tar(?:\.(?:gz|zst|bz2))?)$", re.IGNORECASE)
MAX_LICENCE_FILES = 100_000
"""Maximum number of licence files of an archive that are read."""
_TEXT_FIELDS = ("content", "text", "code")
_PATHS = ("path", "max_stars_repo_path", "max_issues_repo_path", "file_path", "filename")
_REPOSITORIES = ("repo_name", "max_stars_repo_name", "repository_name", "repo", "max_issues_repo_name")
_COMMITS = ("max_stars_repo_head_hexsha", "revision_id", "commit", "max_issues_repo_head_hexsha")
_LICENCES = (
    "max_stars_repo_licenses",
    "detected_licenses",
    "licenses",
    "license",
    "licence",
    "max_issues_repo_licenses",
)
_STARS = ("max_stars_count", "star_events_count", "stars", "stars_count")
_LANGUAGE_NAMES = ("lang", "language", "programming_language")
_GITHUB = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CODING = re.compile(rb"(?:[^\n]*\n)?[^\n]{0,80}coding[:=][ \t]*([\w.-]{1,40})")
"""The charset in a comment on one of the first two lines, as Python, Ruby and Emacs read it."""


def open_code(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of an archive, of a folder as an archive, or of a file with one source file in each row."""
    is_archive = is_packed(stream)
    if ROWS.search(split.name) and not is_archive:
        return read_lines(split, stream, config, _parse)
    if PARQUET.search(split.name) and not is_archive:
        return read_parquet(split, stream, _columns, lambda value: _row_of(value, config))
    archive = _Archive(stream, is_zip=ZIP.search(split.name) is not None and not is_archive)
    return account_bytes(_items(split, archive, config), split, archive.size)


def is_packed(stream: ByteStream) -> bool:
    """Return True if a file is a tar archive by its first bytes, as a folder is whose name looks like that of a file.

    The stream is moved to its start.
    """
    stream.seek(0)
    head = stream.read(BLOCK)
    stream.seek(0)
    return is_tar_header(head)


def is_loose(name: str) -> bool:
    """Return True if a file of this name is a source file itself, and not an archive or a file with rows."""
    return not any(pattern.search(name) for pattern in (ROWS, PARQUET, ARCHIVE_SUFFIX))


class _Archive:
    """An archive that is read several times from its start."""

    def __init__(self, stream: ByteStream, is_zip: bool):
        self._stream, self._is_zip = stream, is_zip
        self._decoded: DecodedBytes | None = None
        self.commit: str | None = None
        """The commit that a tar archive names, once its start has been read."""

    def members(self, max_bytes: int, wanted: Callable[[str, int], bool]) -> Iterator[ArchiveMember]:
        """Yield the members of the archive from its start on."""
        self._stream.seek(0)
        if self._is_zip:
            yield from read_zip(self._stream, max_bytes, wanted)
            return
        self._decoded = DecodedBytes(FrameReader(self._stream, None))
        reader = TarReader(self._decoded, max_bytes, wanted)
        for member in reader:
            self.commit = reader.commit
            yield member

    def size(self) -> int:
        """Return the size of the archive, decompressed if it is a compressed tar, after all members were read."""
        return self._decoded.position if self._decoded is not None else self._stream.seek(0, 2)


class _Repositories:
    """The licences in an archive by folder, and how its paths begin with the name of a repository."""

    def __init__(self, split: Split, depth: int | None):
        self.name = ARCHIVE_SUFFIX.sub("", posixpath.basename(split.name))
        is_folder = self.name == posixpath.basename(split.name)
        self._depth = 0 if depth is None and is_folder else depth
        self._has_files_on_top = False
        self._found: dict[str, dict[str, str | None]] = {}
        self._licences: dict[str, str | None] = {}
        self._num_files = 0

    def note(self, member: ArchiveMember) -> None:
        """Note the folder of a member, and its licence if it is a licence file."""
        self._has_files_on_top |= bool(member.name) and "/" not in member.name.removeprefix("./")
        is_link = member.drop is not None and member.drop.rule == "not_a_file"
        if is_licence_file(member.name) and not is_link and self._num_files < MAX_LICENCE_FILES:
            self._num_files += 1
            folder = posixpath.dirname(posixpath.normpath(member.name))
            # The licence of the folder above does not hold where there is another one that cannot be read.
            licence = recognize(member.data.decode("utf-8", "replace")) if member.data is not None else None
            self._found.setdefault(folder, {})[member.name] = licence

    def finish(self) -> None:
        """Decide the licence of each folder that has licence files."""
        self._licences = {folder: combine(files) for folder, files in self._found.items()}

    def split_path(self, path: str) -> tuple[str, str]:
        """Return the repository of a file, and its path in the repository."""
        depth = self._depth if self._depth is not None else int(not self._has_files_on_top)
        parts = posixpath.normpath(path).split("/")
        if depth == 0 or len(parts) <= depth:
            return self.name, "/".join(parts)
        return "/".join(parts[:depth]), "/".join(parts[depth:])

    def licence_of(self, path: str) -> str | None:
        """Return the licence of the nearest folder above a file that has licence files and is in its repository."""
        inside = self.split_path(path)[1]
        folder = posixpath.dirname(posixpath.normpath(path))
        top = posixpath.normpath(path).removesuffix(inside).rstrip("/")
        while folder not in self._licences and folder != top and folder:
            folder = posixpath.dirname(folder)
        return self._licences.get(folder)


def _items(split: Split, archive: _Archive, config: SourceConfig) -> Iterator[SourceItem]:
    options = config.code
    repositories = _Repositories(split, options.repository_depth)
    licence_files = archive.members(
        MAX_LICENCE_BYTES, lambda name, size: is_licence_file(name) and size <= MAX_LICENCE_BYTES
    )
    for member in licence_files:
        repositories.note(member)
    repositories.finish()
    files = archive.members(
        min(options.max_file_bytes, config.max_record_bytes),
        lambda name, size: may_be_code(name) and path_problem(name, options) is None,
    )
    for member in files:
        yield SourceItem(member.start, *_member_row(member, repositories, archive.commit, config))


def _member_row(
    member: ArchiveMember, repositories: _Repositories, commit: str | None, config: SourceConfig
) -> tuple[Row, Drop | None]:
    if not member.name:
        return new_row("gap"), member.drop or Drop("unsafe_path")
    path = encodable(member.name)
    if is_unsafe(member.name):
        return new_row("code", path), Drop("unsafe_path")
    repository, inside = repositories.split_path(path)
    # The URL must not depend on other members of the archive: a member that is read again has the same.
    row = new_row("code", f"{repositories.name}/{posixpath.normpath(path)}")
    fields: dict[str, Any] = {"repository": repository, "path": inside, "commit": commit}
    drop = member.drop or path_problem(inside, config.code)
    if drop is None and member.data is None:
        drop = Drop("unknown_language")
    if drop is not None:
        row["meta"], row["_meta"] = meta_of(fields, set(), config)
        return row, drop
    data = member.data or b""
    row["page_bytes"] = len(data)
    text = decode_code(data)
    if text is None:
        return row, Drop("binary_file")
    return row, _set_file(row, text, fields, repositories.licence_of(path), config)


def decode_code(data: bytes) -> str | None:
    """Return the text of a source file with line feeds as its line ends; None if the bytes are no text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") and len(data) % 2 == 0:
        text = data.decode("utf-16", "replace")
    elif b"\0" in data:
        return None
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            declared = _CODING.match(data)
            text = decode(data, declared[1].decode() if declared is not None else None).text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _set_file(
    row: Row, text: str, fields: dict[str, Any], licence: str | None, config: SourceConfig, language: str | None = None
) -> Drop | None:
    """Set licence, meta and text of the row of a source file, or return the Drop that it has."""
    options = config.code
    language = language or language_of(fields["path"] or "", lambda size: text[:size])
    licence = tagged(text) or licence
    fields["language"] = language
    row["licence"] = encodable(licence) if licence else None
    row["meta"], row["_meta"] = meta_of(fields, set(), config)
    if language is None:
        return Drop("unknown_language")
    if options.languages is not None and language not in options.languages:
        return Drop("other_language")
    if (drop := licence_problem(licence, options)) is not None:
        return drop
    if not text.strip():
        return Drop("empty_page")
    if (drop := content_problem(text, language, options)) is not None:
        return drop
    size = row["page_bytes"]
    drop = set_text(row, text, config)
    row[EMPTY_LINES_KEPT] = True
    row["page_bytes"] = size if size is not None else row["page_bytes"]
    return drop


def licence_problem(licence: str | None, config: CodeConfig) -> Drop | None:
    """Return the Drop of a file with this licence; None if the file may be kept."""
    if ANY_LICENCE in config.licences:
        return None
    if licence is None:
        return Drop("unknown_licence")
    return None if is_allowed(licence, frozenset(config.licences)) else Drop("other_licence")


# Rows with one source file each, as in The Stack.


def _parse(line: bytes, config: SourceConfig) -> tuple[Row, Drop | None]:
    value = parse_object(line)
    return _row_of(value, config) if value is not None else (new_row("row"), Drop("bad_line"))


def _columns(names: list[str]) -> list[str]:
    """Return the columns of a Parquet file that hold text of one kind; names that occur twice are left out."""
    return [name for name in names if names.count(name) == 1]


def _row_of(value: Mapping[str, Any], config: SourceConfig) -> tuple[Row, Drop | None]:
    names = (config.text_field,) if "text_field" in config.model_fields_set else _TEXT_FIELDS
    text = next((text for name in names if isinstance(text := field_of(value, name), str)), None)
    path, repository = _first(value, _PATHS), _first(value, _REPOSITORIES)
    commit = _first(value, _COMMITS)
    row = new_row("code", _url(repository, path, commit) or _first(value, (config.url_field, config.id_field)))
    fields: dict[str, Any] = {"repository": repository, "path": path, "commit": commit, "language": None}
    fields["stars"] = next((value[name] for name in _STARS if isinstance(value.get(name), int | float)), None)
    if config.date_field is not None:
        row["date"] = date_of(field_of(value, config.date_field))
    if text is None:
        row["meta"], row["_meta"] = meta_of(fields, set(), config)
        return row, Drop("no_text_field")
    size = len(text)
    if size > config.code.max_file_bytes:
        return row, Drop("record_too_large", float(size), float(config.code.max_file_bytes))
    row["page_bytes"] = len(text.encode("utf-8", "replace"))
    if path and (drop := path_problem(path, config.code)) is not None:
        return row, drop
    text = encodable(text).replace("\r\n", "\n").replace("\r", "\n")
    named = language_of(path, lambda head: text[:head]) if path else None
    language = named or _first(value, _LANGUAGE_NAMES)
    return row, _set_file(row, text, fields, _licence_of(value, config), config, language)


def _licence_of(value: Mapping[str, Any], config: SourceConfig) -> str | None:
    """Return the licence of a row; a list of several applies as a whole."""
    names = (config.licence_field,) if config.licence_field else _LICENCES
    found = next((licence for name in names if (licence := field_of(value, name))), None)
    listed = found if isinstance(found, list | tuple) else [found]
    texts = list(dict.fromkeys(name.strip() for name in listed if isinstance(name, str) and name.strip()))[:50]
    return " AND ".join(f"({name})" if " " in name and len(texts) > 1 else name for name in texts) or None


def _url(repository: str | None, path: str | None, commit: str | None) -> str | None:
    if repository is None or path is None:
        return None
    if commit and _GITHUB.fullmatch(repository) and _COMMIT.fullmatch(commit):
        return f"https://github.com/{repository}/blob/{commit}/{path}"
    return f"{repository}/{path}"


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((encodable(str(text)) for name in names if isinstance(text := field_of(value, name), str | int)), None)
