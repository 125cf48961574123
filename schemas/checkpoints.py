"""The metadata of a run's checkpoints as JSON objects, for readers that do not import the trainer."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from schemas.errors import REMOVE_CHECKPOINT, ContractError, reading
from schemas.storage import Store

CHECKPOINTS = "train/checkpoints"
METADATA_NAME = "checkpoint.json"
METADATA = re.compile(rf"step-(\d{{6,}})/{re.escape(METADATA_NAME)}")
"""Path of the metadata of a checkpoint, below CHECKPOINTS; other folders, such as copies, are not checkpoints."""


def read_checkpoints(run: Store) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and metadata of each complete checkpoint, by name. A checkpoint is complete if it has metadata.

    Raises ContractError if the metadata has no step, or another one than the name of its folder.
    """
    folder = run.child(CHECKPOINTS)
    for name in sorted(folder.walk()):
        if not (match := METADATA.fullmatch(name)):
            continue
        metadata, where = folder.read_json(name), f"{folder.uri}/{name}"
        with reading(where, "checkpoint metadata", REMOVE_CHECKPOINT):
            step = int(metadata["step"])
        if step != int(match[1]):
            raise ContractError(
                f"{where}: expected the metadata of the step in the folder's name, got that of step {step}. "
                f"{REMOVE_CHECKPOINT}"
            )
        yield where, metadata
