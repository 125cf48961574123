"""The stages of a run: ranges of steps, each with its sequence length, batch and mixture of sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from train.config.train import TrainConfig

MASKS_VERSION = 2
"""Version of what objectives hide and ask for; a run whose masks would be others does not go on."""


class StagePlan(BaseModel):
    """One stage as a plan fixes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    first_step: int
    """Steps before the stage."""
    num_steps: int
    """Steps of the stage."""
    seq_len: int
    """Tokens of the stream in a sequence."""
    global_batch: int
    """Sequences per step."""
    counts: dict[str, int]
    """Samples of each source in a block of the mixture, by source in ascending order."""

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.first_step + self.num_steps

    @property
    def num_samples(self) -> int:
        """Samples that the stage uses."""
        return self.num_steps * self.global_batch

    @property
    def num_tokens(self) -> int:
        """Tokens that the stage uses."""
        return self.num_samples * self.seq_len


def stage_name(config: TrainConfig, number: int) -> str:
    """Where the settings of a stage stand in the recipe."""
    return f"train.stages[{number}]" if config.stages else "train"


def stage_lengths(config: TrainConfig) -> list[int]:
    """The sequence length of every stage; one stage if none are given."""
    return [stage.seq_len or config.seq_len for stage in config.stages] or [config.seq_len]


def stage_weights(config: TrainConfig) -> list[dict[str, float]]:
    """The weights of every stage; empty = by tokens."""
    return [stage.weights or config.weights for stage in config.stages] or [config.weights]


def resolve_stages(
    config: TrainConfig, counts: Sequence[Mapping[str, int]], global_batch: int, tokens: int
) -> tuple[StagePlan, ...]:
    """The stages in steps: `counts` is the mixture of each, `tokens` what the run is to use if the settings leave it.

    `global_batch` is that of stages without their own. With `train.steps` the last stage takes the steps that are
    left. Raises ConfigError if a stage would have no step, or if the settings say twice how long the run is.
    """
    lengths = stage_lengths(config)
    wanted = [stage.tokens for stage in config.stages] or [None]
    if config.steps is not None and wanted[-1] is not None:
        raise ConfigError(
            f"train.steps: expected the run's length in one place, got {config.steps} steps and {wanted[-1]} tokens "
            f"in {stage_name(config, len(wanted) - 1)}. Leave one of them out."
        )
    plans: list[StagePlan] = []
    for number, (seq_len, own) in enumerate(zip(lengths, wanted, strict=True)):
        batch = (config.stages[number].global_batch if config.stages else None) or global_batch
        first = plans[-1].end if plans else 0
        left = tokens - sum(plan.num_tokens for plan in plans)
        steps = round((left if own is None else own) / (batch * seq_len))
        if own is None and config.steps is not None:
            steps = config.steps - first
        # A run without settings is one step at least, however few tokens there are.
        steps = steps if config.stages or steps > 0 else 1
        if steps < 1 and left <= 0 and config.steps is None:
            raise ConfigError(
                f"{stage_name(config, number)}: expected tokens behind the stages before it, got that they take "
                f"{tokens - left:,} of {tokens:,}. Give them less."
            )
        if steps < 1:
            raise ConfigError(
                f"{stage_name(config, number)}: expected at least a step of {batch} x {seq_len} tokens, got "
                f"{left if own is None else own} tokens. Give it more, or the stages before it less."
            )
        plan = StagePlan(
            first_step=first, num_steps=steps, seq_len=seq_len, global_batch=batch, counts=dict(counts[number])
        )
        plans.append(plan)
    return tuple(plans)


def num_spans(config: TrainConfig, seq_len: int) -> tuple[int, int]:
    """Tokens of a row that are cut out, and the spans they form; at least one, and never the whole row.

    Source: Raffel et al. 2019, arXiv 1910.10683, section 3.1.4; counts rounded as there, so they are always the same.
    """
    noise = min(max(round(seq_len * config.mask_share), 1), seq_len - 1)
    return noise, min(max(round(noise / config.mean_span), 1), noise, seq_len - noise)


def row_length(config: TrainConfig, seq_len: int | None = None) -> int:
    """Positions of a row in the model, of which seq_len are tokens of the stream; None = `train.seq_len`.

    Raises ConfigError if a row of this length has more spans than there are sentinels.
    """
    seq_len = config.seq_len if seq_len is None else seq_len
    if config.objective != "span":
        return seq_len
    if seq_len < 2:
        raise ConfigError(f"train.seq_len: expected at least 2 tokens for objective = span, got {seq_len}. Raise it.")
    _, spans = num_spans(config, seq_len)
    if spans >= 100:
        raise ConfigError(
            f"train.mean_span: expected at most 99 spans in a row, one for each sentinel but the last, got {spans} "
            f"in {seq_len} tokens. Raise it, or lower train.mask_share or train.seq_len."
        )
    return seq_len + 2 * spans


# The skip list: global sample indices that training passes over, in a file that only ever grows.
#
# A global index is the number of the stage << 40 | the index in the stage. The samples of the stage after a skipped one
# move up, and later stages begin behind them; nothing else changes. A checkpoint carries the length and the digest of
# the list it was trained under, so that a list that was edited, or that skips what was already used, is refused.

Ints = NDArray[np.int64]

STAGE_BITS = 40
"""A global sample index is the number of its stage << STAGE_BITS | its index in the stage."""


@dataclass(frozen=True)
class SkipList:
    """Skipped global sample indices in the order they were appended."""

    indices: tuple[int, ...] = ()

    @cached_property
    def _sorted(self) -> Ints:
        return np.unique(np.array(self.indices, np.int64))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the list in its order."""
        return digest_of(list(self.indices))

    def of_stage(self, stage: int) -> "SkipList":
        """What is skipped in one stage, by index in the stage, in ascending order."""
        first = stage << STAGE_BITS
        begin, end = np.searchsorted(self._sorted, [first, first + (1 << STAGE_BITS)])
        return SkipList(tuple((self._sorted[begin:end] - first).tolist()))

    @property
    def last_stage(self) -> int:
        """The last stage in which something is skipped; 0 if nothing is."""
        return int(self._sorted[-1]) >> STAGE_BITS if len(self._sorted) else 0

    def pass_over(self, number: Ints) -> Ints:
        """The index of the `number`-th sample that is not skipped, in one stage."""
        # Before the k-th skipped index lie _sorted[k] - k samples that are used.
        used_before = self._sorted - np.arange(len(self._sorted))
        return number + np.searchsorted(used_before, number, side="right")

    def number_of(self, index: Ints) -> Ints:
        """How many samples are used before these indices of one stage; -1 where the sample itself is skipped."""
        before = np.searchsorted(self._sorted, index, side="left")
        return np.where(np.isin(index, self._sorted), -1, index - before)

    def check_continues(self, length: int, digest: str, used: int, stage: int = 0) -> None:
        """Raises ContractError unless this is the list a run used so far, plus indices it has not reached.

        `length` and `digest` are those of the list in the checkpoint, which stands in `stage` after `used` of its
        samples. An entry of a stage that is over would move the stages after it, so it is refused too.
        """
        standing = SkipList(self.indices[:length])
        if len(self.indices) < length or standing.digest != digest:
            raise ContractError(
                f"skip list: expected the checkpoint's {length} entries with digest {digest[:12]} at its head, "
                f"found {len(self.indices)} entries, head digest {standing.digest[:12]}. Restore it, it may only grow."
            )
        reached = (stage << STAGE_BITS) + int(standing.of_stage(stage).pass_over(np.array([used]))[0])
        late = [index for index in self.indices[length:] if index < reached]
        if late:
            raise ContractError(
                f"skip list: expected new entries from sample {reached} on, got {late[:5]}, which the checkpoint has "
                "already used. Resume from an earlier checkpoint."
            )


NO_SKIPS = SkipList()


def read_skip_list(run: Store, name: str) -> SkipList:
    """The skip list in `<run>/train/<name>`: one index a line, `#` begins a comment; an empty name means none.

    Raises ConfigError if the file is missing, ContractError if a line is not an index.
    """
    if not name:
        return NO_SKIPS
    path = f"train/{name}"
    if not run.exists(path):
        raise ConfigError(
            f"train.skip_file: expected a file {run.uri}/{path}, got none. Create it, or leave the setting empty."
        )
    indices = []
    for number, line in enumerate(run.read_bytes(path).decode("utf-8", "replace").splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry and not (entry.isascii() and entry.isdigit() and int(entry) < 1 << 63):
            raise ContractError(
                f"{run.uri}/{path}, line {number}: expected a sample index from 0 to 2^63 - 1, got "
                f"{entry!r}. Correct the line."
            )
        if entry:
            indices.append(int(entry))
    return SkipList(tuple(indices))


def append_to_skip_list(run: Store, name: str, indices: list[int], reason: str) -> SkipList:
    """Append global sample indices and a one-line reason to `<run>/train/<name>`; returns the list that now stands."""
    path = f"train/{name}"
    standing = run.read_bytes(path) if run.exists(path) else b""
    if standing and not standing.endswith(b"\n"):
        standing += b"\n"
    comment = " ".join(reason.split())
    run.write_atomic(path, standing + "".join(f"{index}  # {comment}\n" for index in indices).encode())
    return read_skip_list(run, name)
