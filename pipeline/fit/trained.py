"""What is written beside a trained model: what it is, what it learned from, and how it came about."""

import json
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.models import ModelsConfig, add_model
from schemas.ids import file_sha256
from schemas.storage import Store

FORMAT_VERSION = 1


class Clock:
    """When a job started."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()

    def seconds(self) -> float:
        """How long ago that was [s]."""
        return round(time.monotonic() - self._start, 3)


def commit_model(path: Path, content: dict[str, Any], clock: Clock, models: ModelsConfig | None) -> dict[str, Any]:
    """Write the manifest `<stem>.json` beside the model and return it; with `models`, put the model into that store.

    `content` is a function of inputs and settings; `run` says how it came about.
    """
    model = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {
        "content": {"format_version": FORMAT_VERSION, "model": model, **content},
        "run": {"started": clock.started, "wall_seconds": clock.seconds(), "code_version": version("penstock")},
    }
    data = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode()
    Store(str(path.parent)).write_atomic(f"{path.stem}.json", data + b"\n")
    if models is not None:
        add_model(path, path.stem, models, f"{content['kind']} model")
    return manifest
