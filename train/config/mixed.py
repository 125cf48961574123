"""A mix that a run follows: its shares as settings, the copy that is kept beside the plan, and what contradicts it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError
from schemas.mix import read_mix
from schemas.storage import Store
from schemas.tokens import Dataset

WEIGHTS, MIX = "train.weights", "train.mix"


def mix_overrides(path: str, dataset: Dataset, overrides: Sequence[str] = ()) -> list[str]:
    """What the mix in a file says of a dataset's sources, as `section.key=value`: shares, and the digest of the file.

    Raises ConfigError if the file is no mix, is for other sources, or if `overrides` give shares as well.
    """
    if found := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]:
        raise ConfigError(
            f"--mix {path}: promised shares in one place, found --set {' and '.join(found)} too; leave one out"
        )
    parts = read_mix(path).of(set(dataset.num_tokens()), f"mix {path}, for dataset {dataset.digest[:12]}")
    shares = ", ".join(f"{json.dumps(name)} = {part.share!r}" for name, part in sorted(parts.items()))
    return [f"{WEIGHTS}={{{shares}}}", f'{MIX}="{_digest(path)}"']


def keep_mix(run: Store, path: str) -> str:
    """Copy a mix beside the plan that follows it; returns where it is, relative to the run.

    The name holds the digest, so a plan that is made again by another mix overwrites none.
    """
    name = kept_name(_digest(path))
    run.write_atomic(name, Path(path).read_bytes())
    return name


def kept_name(digest: str) -> str:
    """Where the mix of a digest is kept, relative to the run."""
    return f"train/mix-{digest[:12]}.toml"


def check_kept(settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError if overrides change the shares of a plan that follows a mix, `settings` being the plan's."""
    mix = settings.get("train", {}).get("mix")
    if mix and (found := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]):
        raise ConfigError(
            f"--set {' and '.join(found)}: promised the shares of mix {mix[:12]}, which the plan follows; plan again "
            "without --mix, or with another"
        )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
