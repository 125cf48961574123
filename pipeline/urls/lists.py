"""Readers of lists of domains and URLs, in the form of UT1.

UT1 (https://dsi.ut-capitole.fr/blacklists/) has a folder for each category, with the files `domains` and `urls`.
"""

import io
import re
import tarfile
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from hashlib import blake2s
from pathlib import Path

import pyarrow as pa

from pipeline.urls.address import MAX_DOMAIN_BYTES, MAX_ENTRY_BYTES, entry_of, key_of
from schemas.errors import ConfigError

FILES = ("domains", "urls")
SHOWN_LINES = 5
_PLAIN = re.compile(rb"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\Z")


def parts_of(path: str) -> list[str]:
    """Return the files of a list: `domains` and `urls` of a folder, or the path itself."""
    if Path(path).is_dir():
        return [f"{path.rstrip('/')}/{name}" for name in FILES if (Path(path) / name).is_file()] or [path]
    return [path]


def read_list(path: str, category: str, where: str) -> tuple[bytes, int]:
    """Return the keys (8 bytes each) of the entries of a file or archive, and the length of the longest URL [bytes].

    Raises ConfigError for a file that cannot be read, for one without an entry, and, with their numbers, for lines that
    are neither a domain nor a URL.
    """
    keys, longest = array("Q"), 0
    try:
        for name, lines in _files(path, category, where):
            longest = max(longest, _read_entries(lines, keys, f"{where}: {name}"))
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"{where}: expected a readable list, got {path} ({error}). Correct the path.") from error
    if not keys:
        raise ConfigError(f"{where}: expected a list of domains or URLs, got {path} without one. Correct the path.")
    return keys.tobytes(), longest


def _files(path: str, category: str, where: str) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield name and lines of each file of a list. An archive of several categories has a folder for each."""
    if not re.search(r"\.(tar(\.\w+)?|tgz)\Z", path):
        with pa.input_stream(path, compression="detect") as stream:
            yield path, io.BufferedReader(stream)
        return
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile() and Path(member.name).name in FILES]
        folders = sorted({Path(member.name).parent.name for member in members})
        if len(folders) > 1 and category not in folders:
            raise ConfigError(
                f"{where}: expected a folder {category} in {path}, got {', '.join(folders)}. Name it like its folder."
            )
        for member in members:
            content = archive.extractfile(member)
            if content is not None and (len(folders) == 1 or Path(member.name).parent.name == category):
                yield f"{path}:{member.name}", content


def _read_entries(lines: Iterable[bytes], keys: "array[int]", where: str) -> int:
    """Append the key of each entry of a file; return the length of its longest entry with a path [bytes], or 0."""
    longest, damaged, num_damaged = 0, list[str](), 0
    for number, line in enumerate(lines, 1):
        entry = line.removeprefix(BOM_UTF8).strip().lower()
        if _PLAIN.match(entry) and len(entry) <= MAX_DOMAIN_BYTES:
            keys.append(int.from_bytes(blake2s(entry, digest_size=8).digest(), "little"))
            continue
        if not entry or entry.startswith(b"#"):
            continue
        other = _other_entry(entry)
        if other is None:
            num_damaged += 1
            damaged += [str(number)] if num_damaged <= SHOWN_LINES else []
            continue
        keys.append(key_of(other))
        longest = max(longest, len(other) if b"/" in other else 0)
    if damaged:
        more = f" and {num_damaged - SHOWN_LINES} more" if num_damaged > SHOWN_LINES else ""
        raise ConfigError(
            f"{where}:{damaged[0]}: expected a domain or a URL of at most {MAX_ENTRY_BYTES} bytes on each line, got "
            f"others in lines {', '.join(damaged)}{more}. Correct or remove these lines."
        )
    return longest


def _other_entry(line: bytes) -> bytes | None:
    """Return the entry of a line that is not a plain domain; None if there is none."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if any(char.isspace() for char in text) else entry_of(text)
