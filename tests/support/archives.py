"""Archives in memory, for tests of their readers."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Mapping

MIT = (
    "MIT License\n\nCopyright (c) 2020 A\n\nPermission is hereby granted, free of charge, to any person obtaining a "
    "copy of this software ...\n\nThe above copyright notice and this permission notice shall be included in all "
    "copies.\n"
)


def tar(files: Mapping[str, bytes | str], **options) -> bytes:
    """A tar archive of these files."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", **options) as archive:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def tar_of(*infos: tarfile.TarInfo) -> bytes:
    """A tar archive of members without content, such as links."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for info in infos:
            archive.addfile(info)
    return sink.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A link, device or pipe."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(files: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive of these files."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return sink.getvalue()


def package(files: Mapping[str, bytes | str]) -> bytes:
    """The package of a paper as arXiv stores it: a gzip-compressed tar."""
    return gzip.compress(tar(files), mtime=0)
