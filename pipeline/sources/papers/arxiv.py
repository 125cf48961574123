r"""Reader of arXiv source packages: tar files with one package for each paper, or the packages themselves.

A package is a gzip-compressed tar of TeX files and figures, or a single compressed TeX file. Papers of which arXiv has
only a PDF file are dropped by their own reason. Offsets count bytes of the tar, decompressed if it is compressed.
Source: arXiv, "Bulk Data Access" and "Format for announced submissions".
"""

import io
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.archives.tar import (
    BLOCK,
    ArchiveMember,
    DecodedBytes,
    TarReader,
    is_tar_header,
    is_unsafe,
)
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader, NestedCodings
from pipeline.sources.config import SourceConfig
from pipeline.sources.decoders import MAGIC_BYTES, is_compressed
from pipeline.sources.papers.config import ArxivConfig
from pipeline.sources.papers.ids import identify
from pipeline.sources.papers.tex.macros import TooManyExpansionsError
from pipeline.sources.papers.tex.project import (
    STYLE_SUFFIXES,
    TEX_SUFFIXES,
    TexProject,
    declared_encoding,
    decode_tex,
    find_main,
    join_project,
    strip_comments,
)
from pipeline.sources.papers.tex.render import TexOptions, render_tex
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text
from pipeline.sources.rows import meta_of

SINGLE = re.compile(r"(?<!\.tar)\.gz$|\.(?:tex|pdf)$", re.IGNORECASE)
"""Names of files that are the package of one paper."""
MAX_UNPACKED_BYTES = 1 << 30
"""Maximum size of an unpacked package, figures included [bytes]."""
MAX_FILES = 5_000
"""Maximum number of TeX files of a paper."""
_PDF, _POSTSCRIPT = b"%PDF-", b"%!PS"
_TEXT_FILES = frozenset((*TEX_SUFFIXES, *STYLE_SUFFIXES, ".bbl"))
_WITHDRAWN = re.compile(rb"\s*%\s*auto-ignore", re.IGNORECASE)


class _Refused(Exception):
    def __init__(self, drop: Drop):
        self.drop = drop


def open_arxiv(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows of a tar file of packages, one for each paper, or the row of a single package."""
    if SINGLE.search(split.name):
        return account_bytes(_single(split, stream, config), split, lambda: stream.seek(0, 2))
    decoded = DecodedBytes(FrameReader(stream, None))
    reader = TarReader(decoded, config.max_record_bytes, lambda name, size: True)
    items = (SourceItem(member.start, *_row(member, config)) for member in _bounded(reader, decoded))
    return account_bytes(items, split, lambda: decoded.position)


def _single(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[SourceItem]:
    data = stream.read(config.max_record_bytes + 1)
    if data:
        drop = None
        if len(data) > config.max_record_bytes:
            drop = Drop("record_too_large", float(split.size), float(config.max_record_bytes))
        yield SourceItem(0, *_row(ArchiveMember(0, split.name, split.size, data, drop), config))


def _bounded(reader: TarReader, decoded: DecodedBytes) -> Iterator[ArchiveMember]:
    """Yield the members; packages that a compressed tar repeats have a Drop. See NestedCodings."""
    nested = NestedCodings()
    for member in reader:
        frame, data = decoded.frame(), member.data or b""
        if frame is not None and is_compressed(data[:MAGIC_BYTES]) and nested.is_repeated(*frame, len(data)):
            member = member._replace(data=None, drop=Drop("decoded_too_large"))
        yield member


def _row(member: ArchiveMember, config: SourceConfig) -> tuple[Row, Drop | None]:
    if not member.name:
        return new_row("gap"), member.drop or Drop("unsafe_path")
    paper, date = identify(member.name)
    url = f"https://arxiv.org/abs/{paper}" if date is not None else paper
    row = new_row("paper", encodable(url), date)
    drop = Drop("unsafe_path") if is_unsafe(member.name) else member.drop
    if drop is not None:
        return row, drop
    try:
        project = read_package(member.data or b"", member.name, config.arxiv)
        return row, _set_paper(row, project, config)
    except _Refused as refused:
        return row, refused.drop
    except TooManyExpansionsError:
        return row, Drop("too_many_expansions")


def read_package(data: bytes, name: str, config: ArxivConfig) -> TexProject:
    """Return the joined source of the paper in a package. Raises an error that holds the Drop if it has none."""
    if not data.strip():
        raise _Refused(Drop("empty_page"))
    if data.startswith((_PDF, _POSTSCRIPT)) or name.lower().endswith(".pdf"):
        raise _Refused(Drop("pdf_only"))
    stored, kinds = _unpack(data, config)
    if not stored:
        raise _Refused(Drop("pdf_only" if kinds & {".pdf", ".ps"} else "no_tex"))
    if any(_WITHDRAWN.match(content) for content in stored.values()) and sum(map(len, stored.values())) < 10_000:
        raise _Refused(Drop("withdrawn"))
    files = _texts(stored)
    main = _main_file(files)
    if main is None:
        raise _Refused(Drop("no_main_file"))
    project = join_project(files, main, config.max_tex_bytes)
    if project is None:
        raise _Refused(Drop("package_too_large", None, float(config.max_tex_bytes)))
    return project


def head_of_paper(data: bytes) -> bytes:
    """Return the main TeX file of the record of a paper; a PDF file itself, and nothing of a damaged package."""
    if is_tar_header(data[:BLOCK]):
        reader = TarReader(DecodedBytes(FrameReader(io.BytesIO(data), None)), len(data), lambda name, size: True)
        data = next((member.data for member in reader if member.data is not None), b"")
    if data.startswith((_PDF, _POSTSCRIPT)):
        return data
    try:
        stored, _ = _unpack(data, ArxivConfig.model_validate({}))
    except _Refused:
        return b""
    main = _main_file(_texts(stored)) or next(iter(stored), None)
    return decode_tex(stored[main], _encoding_of(stored)).encode() if main is not None else b""


def _encoding_of(stored: Mapping[str, bytes]) -> str | None:
    return next((found for content in stored.values() if (found := declared_encoding(content))), None)


def _texts(stored: Mapping[str, bytes]) -> dict[str, str]:
    """Return the files of a paper as text without comments."""
    encoding = _encoding_of(stored)
    return {path: strip_comments(decode_tex(content, encoding)) for path, content in stored.items()}


def _main_file(files: Mapping[str, str]) -> str | None:
    return find_main({path: text for path, text in files.items() if _suffix(path) in TEX_SUFFIXES})


def _unpack(data: bytes, config: ArxivConfig) -> tuple[dict[str, bytes], set[str]]:
    """Return the TeX and style files of a package by their paths, and the suffixes of its other files."""
    frames = FrameReader(io.BytesIO(data), None)
    decoded = DecodedBytes(frames)
    head = decoded.read(BLOCK)
    decoded.unread(head)
    if not is_tar_header(head):
        return _unpack_single(decoded, head, config)
    total, unpacked = 0, 0

    def is_wanted(path: str, size: int) -> bool:
        nonlocal total, unpacked
        unpacked += size
        if unpacked > MAX_UNPACKED_BYTES:
            raise _Refused(Drop("package_too_large", float(unpacked), float(MAX_UNPACKED_BYTES)))
        if _suffix(path) not in _TEXT_FILES:
            return False
        total += size
        if total > config.max_tex_bytes:
            raise _Refused(Drop("package_too_large", float(total), float(config.max_tex_bytes)))
        return True

    files: dict[str, bytes] = {}
    kinds: set[str] = set()
    for member in TarReader(decoded, config.max_tex_bytes, is_wanted):
        if member.drop is not None and member.drop.rule != "not_a_file":
            raise _Refused(member.drop)
        if member.data is None or is_unsafe(member.name):
            kinds.add(_suffix(member.name))
        elif len(files) < MAX_FILES:
            files[posixpath.normpath(member.name)] = member.data
    return _only_tex(files, kinds)


def _unpack_single(decoded: DecodedBytes, head: bytes, config: ArxivConfig) -> tuple[dict[str, bytes], set[str]]:
    content = decoded.read(config.max_tex_bytes + 1)
    if (fault := decoded.take_fault()) is not None:
        raise _Refused(fault)
    if head.startswith(_PDF) or head.startswith(_POSTSCRIPT):
        return {}, {".pdf"}
    if len(content) > config.max_tex_bytes:
        raise _Refused(Drop("package_too_large", None, float(config.max_tex_bytes)))
    return _only_tex({"paper.tex": content}, set())


def _only_tex(files: dict[str, bytes], kinds: set[str]) -> tuple[dict[str, bytes], set[str]]:
    """Return the files, or none of them if no file has TeX: a file without a suffix may be anything."""
    is_tex = any(
        _suffix(path) in TEX_SUFFIXES and (b"\\" in content or _WITHDRAWN.match(content)) and b"\0" not in content
        for path, content in files.items()
    )
    readable = {path: content for path, content in files.items() if b"\0" not in content}
    return (readable if is_tex else {}), kinds


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1].lower()


def _set_paper(row: Row, project: TexProject, config: SourceConfig) -> Drop | None:
    options = config.arxiv
    paper = render_tex(project, TexOptions(options.citations == "keep", options.floats, options.headings == "markdown"))
    if paper.title:
        row["title"] = encodable(paper.title)
    fields: dict[str, Any] = {"authors": paper.authors or None, "main_file": project.main}
    if project.problems:
        fields["inputs_left_out"] = dict(sorted(project.problems.items()))
    row["meta"], row["_meta"] = meta_of(fields, set(), config)
    return set_text(row, paper.text, config)
