"""A folder of files as one stream: the tar archive that GNU tar would write of it, with sorted names and no dates.

So a repository in a folder is one split, is read by the reader of archives, and has a digest that does not depend on
where the folder is. No link is followed. Folders of version control systems are left out.
"""

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow.fs as pafs

from pipeline.sources.archives.tar import BLOCK

LEFT_OUT = frozenset((".git", ".hg", ".svn", ".bzr", "CVS"))
MAX_FOLDER_FILES = 1_000_000
"""Maximum number of files in a folder."""
_KINDS = {stat.S_IFREG: b"0", stat.S_IFLNK: b"2", stat.S_IFCHR: b"3", stat.S_IFBLK: b"4", stat.S_IFIFO: b"6"}
_MAX_OCTAL = 8**11


class FolderFile(NamedTuple):
    """A file in a folder."""

    name: bytes
    """Its path below the folder, with `/`."""
    path: str
    size: int
    time: int
    """Time of its last change [ns]; it is part of the identity of the folder, not of its content."""
    kind: bytes = b"0"
    """The type of a tar member: `0` for files, `2` for links, other numbers for devices and pipes."""


def list_folder(fs: pafs.FileSystem, path: str) -> list[FolderFile]:
    """Return the files in a folder and below, sorted by name; if `path` is that of a file, this one.

    Raises OSError if the folder cannot be listed or has more than MAX_FOLDER_FILES files.
    """
    info = fs.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [FolderFile(info.base_name.encode(), path, int(info.size), int(info.mtime_ns or 0))]
    files: list[FolderFile] = []
    for file in _walk(path) if isinstance(fs, pafs.LocalFileSystem) else _select(fs, path):
        files.append(file)
        if len(files) > MAX_FOLDER_FILES:
            raise OSError(f"a folder of more than {MAX_FOLDER_FILES:,} files; name its subfolders")
    return sorted(files)


def _walk(root: str) -> Iterator[FolderFile]:
    folders = [(os.fsencode(root), b"")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if os.fsdecode(entry.name) not in LEFT_OUT:
                        folders.append((entry.path, prefix + entry.name + b"/"))
                    continue
                info = entry.stat(follow_symlinks=False)
                kind = _KINDS.get(stat.S_IFMT(info.st_mode), b"6")
                size = info.st_size if kind == b"0" else 0
                yield FolderFile(prefix + entry.name, os.fsdecode(entry.path), size, info.st_mtime_ns, kind)


def _select(fs: pafs.FileSystem, root: str) -> Iterator[FolderFile]:
    start = len(root.rstrip("/")) + 1
    for info in fs.get_file_info(pafs.FileSelector(root, recursive=True)):
        name = info.path[start:]
        if info.type == pafs.FileType.File and LEFT_OUT.isdisjoint(name.split("/")[:-1]):
            yield FolderFile(name.encode(), info.path, int(info.size), int(info.mtime_ns or 0))


def folder_identity(files: list[FolderFile]) -> tuple[int, str]:
    """Return the size of a folder's archive [bytes], and a text that changes if a file of the folder changes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"%b\0%d\0%d\0%b\n" % (file.name, file.size, file.time, file.kind))
    size = sum(len(_header(file)) + _padded(file.size) for file in files) + 2 * BLOCK
    return size, f"{size}:{digest.hexdigest()[:32]}"


class FolderArchive:
    """The tar archive of a folder as a file object, whose bytes are made when they are read."""

    def __init__(self, fs: pafs.FileSystem, path: str):
        self._fs = fs
        self._files = list_folder(fs, path)
        self._starts = [0]
        for file in self._files:
            self._starts.append(self._starts[-1] + len(_header(file)) + _padded(file.size))
        self._size = self._starts[-1] + 2 * BLOCK
        self._position = 0
        self._open: tuple[int, Any] | None = None

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, fewer at the end. Raises OSError if a file changed after it was listed."""
        end = self._size if size < 0 else min(self._size, self._position + size)
        parts = []
        while self._position < end:
            part = self._part(end - self._position)
            self._position += len(part)
            parts.append(part)
        return b"".join(parts)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _part(self, size: int) -> bytes:
        index = bisect_right(self._starts, self._position) - 1
        if index >= len(self._files):
            return bytes(size)
        file = self._files[index]
        offset, header = self._position - self._starts[index], _header(file)
        if offset < len(header):
            return header[offset : offset + size]
        offset -= len(header)
        if offset >= file.size:
            return bytes(min(size, _padded(file.size) - offset))
        data = self._stream(index, offset).read(min(size, file.size - offset))
        if not data:
            raise OSError(f"{file.path}: expected {file.size} bytes, got {offset}; the file changed while it was read")
        return bytes(data)

    def _stream(self, index: int, offset: int) -> Any:
        if self._open is None or self._open[0] != index:
            self.close()
            self._open = index, self._fs.open_input_file(self._files[index].path)
        stream = self._open[1]
        if stream.tell() != offset:
            stream.seek(offset)
        return stream


def _header(file: FolderFile) -> bytes:
    """Return the tar header of a file; one with a long name has a header for the name in front."""
    if len(file.name) <= 100:
        return _block(file.name, file.size, file.kind)
    name = file.name + b"\0"
    return (
        _block(b"././@LongLink", len(name), b"L")
        + name.ljust(_padded(len(name)), b"\0")
        + _block(file.name[:100], file.size, file.kind)
    )


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size if size < _MAX_OCTAL else b"\x80" + size.to_bytes(11, "big")
    fields = (name.ljust(100, b"\0"), b"0000644\0", b"0000000\0" * 2, digits, b"00000000000\0")
    start = b"".join(fields)
    rest = (kind + bytes(100) + b"ustar  \0").ljust(BLOCK - 156, b"\0")
    checksum = sum(start) + 8 * 32 + sum(rest)
    return start + b"%06o\0 " % checksum + rest


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
