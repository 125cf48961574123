"""The files of a model in a folder of Hugging Face: its configuration and its weights, which may be several files.

Only JSON and safetensors are read, which hold no code. Nothing here imports torch, so that a plan can read a shape.
"""

import json
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, ContractError
from schemas.paths import is_below
from schemas.storage import MAX_JSON_BYTES

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights that can run code when they are read."""


def json_bytes(value: object) -> bytes:
    """Return a value as the bytes of an indented JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ContractError if there is none."""
    check_file(path, MAX_JSON_BYTES)
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{path}: expected a JSON file, got one that cannot be read ({error}). Download the folder again."
        ) from error
    if not isinstance(value, dict):
        raise ContractError(f"{path}: expected a JSON object, got another value. Download the folder again.")
    return value


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise ContractError if there is no file, or one that is too large. Reading a pipe would never end."""
    if not path.is_file() or (max_bytes is not None and path.stat().st_size > max_bytes):
        most = "" if max_bytes is None else f" of at most {max_bytes} bytes"
        raise ContractError(
            f"{path}: expected a file{most}, got none, a larger one, or a pipe or folder. Download the folder again."
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights.

    Raises ContractError if the index names one outside of the folder, ConfigError if the weights are pickled or if the
    folder has two sets of them.
    """
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists() and any((folder / name).exists() for name in PICKLES):
            raise ConfigError(
                f"{folder}: expected weights in {WEIGHTS}, got {PICKLES[0]}, which can run code when it is read. "
                "Convert the weights to safetensors."
            )
        return [folder / WEIGHTS]
    places = read_json(folder / INDEX).get("weight_map")
    names: list[Any] = [*places.values()] if isinstance(places, dict) else [places]
    for name in names:
        if not isinstance(name, str) or not is_below(name):
            raise ContractError(
                f"{folder / INDEX}: expected the names of files in the folder in `weight_map`, got {name!r:.100}. "
                "Download the folder again."
            )
    if (folder / WEIGHTS).exists() and {*names} != {WEIGHTS}:
        raise ConfigError(
            f"{folder}: expected one set of weights, got {WEIGHTS} and the files of {INDEX}. Remove the one that is "
            "not of the model."
        )
    return [folder / name for name in sorted(set(names))]
