"""The digest of the code that writes parts and stored frames, so that a resumed step does not mix results of two codes.

A bug that is fixed between a kill and the resume changes the digest. The parts that the old code completed are then
written again.
"""

import hashlib
import platform
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from importlib.resources.abc import Traversable

PACKAGES = ("pipeline", "schemas")
"""The packages that decide the bytes of a part. The function of a `[[stage]]` is in the name of the version already."""
SUFFIXES = (".py", ".toml", ".json", ".cpp", ".h")
"""Endings of the files that count: code, the sources of the native module, and the tables that code reads."""
DIGITS = 16
EXTRAS = ("data", "formats", "pii")
"""The extras of this package whose libraries data steps use."""
NEEDED = re.compile(r"""(?P<name>[\w.-]+)(?:.*\bextra\s*==\s*["'](?P<extra>[^"']+))?""")
"""A line of the requirements of a package."""


@cache
def code_digest() -> str:
    """Return the first 16 hex digits of the SHA-256 over the source files, computed once a process in about 30 ms."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for name, data in _sources(files(package), package):
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:DIGITS]


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each source file of a package, which may be in an archive, sorted by name."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(SUFFIXES):
            yield f"{name}/{entry.name}", entry.read_bytes()


@cache
def libraries_digest() -> str:
    """Return the digest of what parts depend on besides our code: Python, the kind of processor, and libraries.

    These are the installed versions of all libraries that data steps use, with those that they need. Computed once a
    process in about 0.2 s.
    """
    versions: dict[str, str] = {}
    waiting = [*_needed("penstock", EXTRAS)]
    while waiting:
        name = waiting.pop()
        if name not in versions:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:  # an extra, or a package for other systems
                versions[name] = ""
            else:
                waiting += _needed(name, ())
    known = [platform.python_version(), platform.machine(), *sorted(f"{name} {own}" for name, own in versions.items())]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:DIGITS]


def _needed(name: str, extras: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the packages that an installed package needs, with some of its extras."""
    for match in filter(None, map(NEEDED.match, requires(name) or ())):
        if match["extra"] is None or match["extra"] in extras:
            yield match["name"]
