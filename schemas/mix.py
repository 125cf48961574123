"""The mix file: the share of each source in training, computed from a run's losses, which pipeline and trainer read.

`mix.toml` names every source of a dataset: `web`, or `web+head` for a quality bucket of a source. Each has its share of
the samples, the share of its documents that is kept, and the evidence. A source includes the documents that an epoch
reads several times, which are in streams of their own, such as `web+x3`.
"""

import json
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.tokens import split_copies

FORMAT = 1


class _MixBlock(BaseModel):
    """The base class of all parts of `mix.toml`: they are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SourceMix(_MixBlock):
    """The share of one source in the training samples, its effect on the source's tokens, and the evidence for it."""

    share: float = Field(ge=0, le=1)
    """Share of the training samples; the sum over all sources is 1. The trainer reads it."""
    repeat: float = Field(ge=0)
    """Epochs of the source that this share implies in a run of `evidence.run_tokens` tokens: passes over its unique
    tokens, those counted N times that an epoch reads N times."""
    keep: float = Field(1.0, gt=0, le=1)
    """Share of the training documents that the pipeline keeps, chosen by hash; all held-out documents are kept."""
    wanted_tokens: int | None = Field(None, ge=1)
    """Training tokens in an epoch that the share suggested by the losses requires, if none is repeated too often.
    None = there are enough. The pipeline reports how many of them exist."""
    why: str
    """The evidence as text."""
    evidence: dict[str, float] = {}
    """The figures of the evidence: losses [nats/token], tokens, epochs."""


class Mix(_MixBlock):
    """The content of `mix.toml`."""

    format: int = FORMAT
    """Version of the file format."""
    dataset: str
    """Digest of the dataset that the losses were measured on."""
    plan: str
    """Digest of the plan of the run that measured the losses."""
    reference: str
    """A description of the reference that the losses were compared with."""
    sources: dict[str, SourceMix] = Field(min_length=1)
    """The share and further values of each source, by its name."""

    def of(self, names: set[str], where: str) -> dict[str, SourceMix]:
        """Return the mix of each source. Raises ConfigError unless the sources of this mix are those of a dataset.

        `names`: the sources of its streams, such as `web` and `web+x3`.
        """
        names = {split_copies(name)[0] for name in names}
        if unknown := sorted(self.sources.keys() - names):
            hints = ", ".join(f"{name!r}{suggest_name(name, names)}" for name in unknown)
            raise ConfigError(
                f"{where}: expected sources of the dataset, got {hints}. Correct the names under [sources]."
            )
        if lacking := sorted(names - self.sources.keys()):
            raise ConfigError(
                f"{where}: expected every source of the dataset, got no {', '.join(lacking)}. Add them under [sources]."
            )
        return self.sources


def read_mix(path: str) -> Mix:
    """Return the content of a mix file. Raises ConfigError if the file cannot be read or is not a valid mix."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"mix {path}: expected a readable file, got an error: {error.strerror}. Write it with "
            "`penstock mix suggest RUN`."
        ) from error
    return parse_mix(data, path)


def parse_mix(data: bytes, where: str) -> Mix:
    """Return the mix in the bytes of a mix file. Raises ConfigError if the bytes are not a valid mix."""
    try:
        mix = Mix.model_validate(tomllib.loads(data.decode("utf-8-sig")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"mix {where}: expected a valid mix.toml, got an error: {error}. Write it with `penstock mix suggest RUN`."
        ) from error
    if mix.format != FORMAT:
        raise ConfigError(
            f"mix {where}: expected format {FORMAT}, got {mix.format}. Write it again with `penstock mix suggest RUN`."
        )
    total = sum(source.share for source in mix.sources.values())
    if abs(total - 1) > 1e-6:
        raise ConfigError(
            f"mix {where}: expected shares that add up to 1, got {total:.6f}. Correct `share` of each source."
        )
    return mix


def mix_toml(mix: Mix) -> str:
    """Return a mix as the text of a mix file."""
    lines = [f"{name} = {_value(value)}" for name, value in mix.model_dump(exclude={"sources"}).items()]
    for name, source in mix.sources.items():
        lines += ["", f"[sources.{_value(name)}]"]
        values = source.model_dump(exclude_none=True, exclude={"evidence"})
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
        lines += [f"evidence.{key} = {_value(value)}" for key, value in source.evidence.items()]
    return "\n".join(lines) + "\n"


def _value(value: str | float) -> str:
    """Return a string or number as TOML."""
    if not isinstance(value, str):
        return repr(value)
    # A JSON string is valid TOML except for the delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
