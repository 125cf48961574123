"""Hugging Face dataset folders: which Parquet and Arrow files of a folder belong to a split.

Folders that `save_to_disk` wrote, copies of a repository and folders of the cache are supported. A file belongs to the
split that its name or a folder names, such as `data/train-00000-of-00005.parquet`, `partial-train/0000.parquet` and
`squad-train.arrow`; files that name no split belong to `train`. Where others name `train`, the numbered files of any
other name, such as `devtest-00000-of-00001.parquet`, are a split of that name.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence

from pipeline.sources.config import SourceConfig
from schemas.config import suggest_name
from schemas.errors import ConfigError

TABLES = (".parquet", ".arrow")
MARKERS = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` or the cache wrote."""
USUAL_SPLITS = ("train", "validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
"""Names of splits that files can have without a file that lists the splits."""
MAX_FILES = 100_000
MAX_INFO_BYTES = 16 << 20
SHARD = re.compile(r"[-_.]\d{3,}(?:-of-\d{3,}(?:-[0-9a-f]{16})?)?$")
UNNAMED = frozenset(("data", "part", "shard"))
"""Names of numbered files that are those of no split; `save_to_disk` writes `data`."""


def is_dataset_folder(folder: str) -> bool:
    """Return True if a local folder looks like a Hugging Face dataset."""
    if not os.path.isdir(folder):
        return False
    names = os.listdir(folder)
    return any(name in names for name in MARKERS) or any(
        name.endswith(".parquet") for name in (os.listdir(f"{folder}/data") if os.path.isdir(f"{folder}/data") else ())
    )


def files_of(folder: str, config: SourceConfig) -> list[str]:
    """Return the files of the split `source.hf.split` as paths below the folder, sorted.

    Raises ConfigError if there are none. Links to folders are not followed.
    """
    settings = config.hf
    files = sorted(_tables(folder))
    if settings.subset is not None:
        files = [name for name in files if settings.subset in name.split("/")[:-1]]
        if not files:
            raise ConfigError(f"no Parquet or Arrow file in a folder {settings.subset}. Correct source.hf.subset.")
    if not files:
        raise ConfigError("no Parquet or Arrow file in this folder. Name the folder of a dataset.")
    known = {*USUAL_SPLITS, *_listed_splits(folder)}
    found = _splits_of(files, known)
    if settings.split == "all":
        return files
    chosen = [name for name in files if found[name] == settings.split]
    if not chosen:
        named = sorted(set(found.values()))
        raise ConfigError(
            f"no file of the split {settings.split!r}{suggest_name(settings.split, named)}. Correct source.hf.split."
        )
    return chosen


def _tables(folder: str) -> Iterator[str]:
    number = 0
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(TABLES) and not name.startswith((".", "cache-")):
                number += 1
                if number > MAX_FILES:
                    raise ConfigError(f"more than {MAX_FILES:,} files. Name the files in source.paths.")
                yield os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")


def _listed_splits(folder: str) -> Sequence[str]:
    """Return the names of the splits that the files of a dataset list."""
    names: list[str] = []
    for path, key in (("dataset_dict.json", "splits"), ("dataset_info.json", "splits")):
        try:
            with open(f"{folder}/{path}", "rb") as file:
                value = json.loads(file.read(MAX_INFO_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        splits = value.get(key) if isinstance(value, dict) else None
        names += [str(name) for name in splits] if isinstance(splits, list | dict) else []
    return names


def _splits_of(files: Sequence[str], known: set[str]) -> dict[str, str]:
    """Return the split of each file."""
    named = {name: _split_of(name, known) for name in files}
    has_train = "train" in named.values()
    return {name: split or (has_train and _shard_name(name)) or "train" for name, split in named.items()}


def _shard_name(path: str) -> str | None:
    """Return the name of a numbered file without its number; None if it has no number, or a name of UNNAMED."""
    stem = path.rpartition("/")[2].rpartition(".")[0]
    name = SHARD.sub("", stem)
    return name if name != stem and name not in UNNAMED else None


def _split_of(path: str, known: set[str]) -> str | None:
    """Return the split of a file: of its own name, else of the innermost folder that names one; None if none does."""
    *folders, name = path.split("/")
    names = [SHARD.sub("", name.rpartition(".")[0]), *reversed(folders)]
    return next((split for each in names if (split := _named_split(each, known)) is not None), None)


def _named_split(name: str, known: set[str]) -> str | None:
    """Return the split that a name consists of, begins or ends with, or else has among its words; None if it has none.

    Words are divided as by Hugging Face: by signs and digits.
    """
    splits = sorted(known, key=lambda split: (-len(split), split))
    for pattern in ("{}", "{}[-_. 0-9].*|.*[-_. 0-9]{}", ".*[-_. 0-9]{}[-_. 0-9].*"):
        for split in splits:
            if re.fullmatch(pattern.replace("{}", re.escape(split)), name, re.IGNORECASE | re.DOTALL):
                return split
    return None
