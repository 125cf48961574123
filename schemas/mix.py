"""The mix: what the losses of a run say of its sources, as a file that the pipeline and the trainer both read.

`mix.toml` names every source of a dataset (`web`, or `web+head` where a source is cut into buckets of quality) with
what to do about it and the evidence for that.
"""

import json
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.config import suggest_name
from schemas.errors import ConfigError

FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SourceMix(_Part):
    """What to do about one source."""

    share: float = Field(ge=0, le=1)
    """Share of the training samples; Σ over the sources = 1. Read by the trainer."""
    repeat: float = Field(ge=0)
    """Passes over its unique tokens that this share means in a run like the one that was measured."""
    keep: float = Field(1.0, gt=0, le=1)
    """Share of its training documents that the pipeline keeps, chosen by hash; held-out ones all stay."""
    wanted_tokens: int | None = Field(None, ge=1)
    """Unique training tokens that the share would need within the bound of repeats; None = there are enough. The
    pipeline says how much of it was found."""
    why: str
    """The evidence in words."""
    evidence: dict[str, float] = {}
    """The numbers behind it: losses [nats/token], tokens, epochs."""


class Mix(_Part):
    """`mix.toml`."""

    format: int = FORMAT
    """Version of this file's format."""
    dataset: str
    """Digest of the dataset that the losses were measured on."""
    plan: str
    """Digest of the plan of the run that they were measured in."""
    reference: str
    """What they were compared with, in words."""
    sources: dict[str, SourceMix] = Field(min_length=1)
    """What to do, by source."""

    def of(self, names: set[str], where: str) -> dict[str, SourceMix]:
        """The parts of these sources. Raises ConfigError if a source has none, or there are others."""
        if unknown := sorted(self.sources.keys() - names):
            hints = ", ".join(f"{name!r}{suggest_name(name, names)}" for name in unknown)
            raise ConfigError(f"{where}: expected sources of the dataset, got {hints}. Correct the names.")
        if lacking := sorted(names - self.sources.keys()):
            raise ConfigError(f"{where}: expected every source of the dataset, got no {', '.join(lacking)}. Add them.")
        return self.sources


def read_mix(path: str) -> Mix:
    """The mix of a file. Raises ConfigError if it cannot be read, or is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"mix {path}: cannot be read: {error.strerror}; `penstock mix suggest RUN` makes one"
        ) from error
    return parse_mix(data, path)


def parse_mix(data: bytes, where: str) -> Mix:
    """The mix in the bytes of a file. Raises ConfigError if it is none."""
    try:
        mix = Mix.model_validate(tomllib.loads(data.decode("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(f"mix {where}: expected a mix, got {error}. `penstock mix suggest RUN` makes one.") from error
    if mix.format != FORMAT:
        raise ConfigError(f"mix {where}: expected format {FORMAT}, got {mix.format}. Make it with this version.")
    total = sum(source.share for source in mix.sources.values())
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"mix {where}: expected shares that add up to 1, got {total:.6f}. Correct them.")
    return mix


def mix_toml(mix: Mix) -> str:
    """The text of a mix file; `read_mix` reads it back equal."""
    lines = [f"{name} = {_value(value)}" for name, value in mix.model_dump(exclude={"sources"}).items()]
    for name, source in mix.sources.items():
        lines += ["", f"[sources.{_value(name)}]"]
        values = source.model_dump(exclude_none=True, exclude={"evidence"})
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
        lines += [f"evidence.{key} = {_value(value)}" for key, value in source.evidence.items()]
    return "\n".join(lines) + "\n"


def _value(value: str | float) -> str:
    """A string or a number in TOML; a JSON string is one but for the delete character."""
    if not isinstance(value, str):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
