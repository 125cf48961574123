"""Training stages, ranges of optimizer steps with their own sequence length, batch and mixture; and the skip list.

The skip list holds the global sample indices that training leaves out, in a file that only ever grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.paths import is_below
from schemas.storage import Store
from train.config.train import TrainConfig

MASKS_VERSION = 2
"""Version of the objectives' inputs and targets; a run with another version cannot be resumed."""

MAX_BLOCK = 1 << 16
"""Maximum length of a block [samples]. The schedule of a block is tabulated once per process (0.1 s)."""


class StagePlan(BaseModel):
    """A training stage of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    first_step: int = Field(ge=0)
    """First optimizer step of the stage, from 0: the number of steps before it."""
    num_steps: int = Field(ge=0)
    """Number of optimizer steps of the stage."""
    seq_len: int = Field(ge=1)
    """Number of dataset tokens in a sequence."""
    global_batch: int = Field(ge=1)
    """Sequences per optimizer step."""
    counts: dict[str, Annotated[int, Field(ge=0)]]
    """Samples of each source in a block, the period of the mixture; sources are in ascending order."""

    @field_validator("counts")
    @classmethod
    def _check_block(cls, counts: dict[str, int]) -> dict[str, int]:
        if not 0 < (block := sum(counts.values())) <= MAX_BLOCK:
            raise ValueError(f"expected 1 to {MAX_BLOCK} samples in a block, got {block}")
        return counts

    @property
    def end(self) -> int:
        """The step after the last step of the stage."""
        return self.first_step + self.num_steps

    @property
    def num_samples(self) -> int:
        """Number of samples that the stage uses."""
        return self.num_steps * self.global_batch

    @property
    def num_tokens(self) -> int:
        """Number of dataset tokens that the stage uses."""
        return self.num_samples * self.seq_len


def stage_position(stages: Sequence[StagePlan], step: int) -> tuple[int, int]:
    """Return the index of the training stage after `step` updates, and how many samples of the stage were used."""
    number = max(i for i, stage in enumerate(stages) if stage.first_step <= step)
    return number, (step - stages[number].first_step) * stages[number].global_batch


def stage_name(config: TrainConfig, number: int) -> str:
    """Return the name of the recipe section that sets training stage `number` (0 = first)."""
    return f"train.stages[{number}]" if config.stages else "train"


def stage_lengths(config: TrainConfig) -> list[int]:
    """Return the sequence length of every training stage; without `train.stages` there is a single stage."""
    return [stage.seq_len or config.seq_len for stage in config.stages] or [config.seq_len]


def stage_weights(config: TrainConfig) -> list[dict[str, float]]:
    """Return the weights of the sources in every training stage; empty = in proportion to their tokens."""
    return [stage.weights or config.weights for stage in config.stages] or [config.weights]


def chosen_sources(config: TrainConfig) -> list[tuple[str, dict[str, float]]]:
    """Return, for every training stage, the setting that names its sources, with its values; empty = all sources."""
    return [
        ("train.epochs", config.epochs) if config.epochs else (f"{stage_name(config, number)}.weights", weights)
        for number, weights in enumerate(stage_weights(config))
    ]


def resolve_stages(
    config: TrainConfig, counts: Sequence[Mapping[str, int]], global_batch: int, tokens: int
) -> tuple[StagePlan, ...]:
    """Return the training stages with their ranges of optimizer steps.

    `counts`: for every stage, the samples of each source in a block of the mixture. `global_batch`: used by stages that
    do not set it. `tokens`: number of tokens in the run, if neither `train.steps` nor the last stage's tokens are set.
    With `train.steps`, the last stage has the remaining steps. With `train.epochs`, the run has at most these tokens.
    Raises ConfigError if a stage would have no step, or if both `train.steps` and the last stage's tokens are set.
    """
    lengths = stage_lengths(config)
    tokens_of_stages = [stage.tokens for stage in config.stages] or [None]
    if config.steps is not None and tokens_of_stages[-1] is not None:
        last = stage_name(config, len(tokens_of_stages) - 1)
        raise ConfigError(
            f"train.steps: expected the run's length in a single setting, got {config.steps} steps and "
            f"{tokens_of_stages[-1]} tokens in {last}. Remove train.steps, or {last}.tokens."
        )
    plans: list[StagePlan] = []
    for number, (seq_len, own) in enumerate(zip(lengths, tokens_of_stages, strict=True)):
        batch = (config.stages[number].global_batch if config.stages else None) or global_batch
        first = plans[-1].end if plans else 0
        left = tokens - sum(plan.num_tokens for plan in plans)
        steps = round((left if own is None else own) / (batch * seq_len))
        if own is None and config.epochs:
            steps = left // (batch * seq_len)
        if own is None and config.steps is not None:
            steps = config.steps - first
        # A run without stages has at least one step, for any number of tokens.
        steps = steps if config.stages or config.epochs or steps > 0 else 1
        if steps < 1 and left <= 0 and config.steps is None:
            raise ConfigError(
                f"{stage_name(config, number)}: expected tokens left for this stage, got "
                f"{tokens - left:,} of the run's {tokens:,} tokens used by earlier stages. Lower `tokens` of earlier "
                "entries in train.stages."
            )
        if steps < 1:
            got = f"{left if own is None else own} tokens. Raise `tokens` of this entry in train.stages"
            if own is None and config.steps is not None:
                got = f"{max(0, steps)} steps left of train.steps = {config.steps}. Raise train.steps"
            elif own is None and config.epochs:
                got = f"{max(0, left)} tokens left of train.epochs. Lower train.global_batch, raise train.epochs"
            raise ConfigError(
                f"{stage_name(config, number)}: expected at least a step of {batch} x {seq_len} tokens, got {got}, or "
                "lower `tokens` of earlier entries."
            )
        plan = StagePlan(
            first_step=first, num_steps=steps, seq_len=seq_len, global_batch=batch, counts=dict(counts[number])
        )
        plans.append(plan)
    return tuple(plans)


def num_spans(config: TrainConfig, seq_len: int) -> tuple[int, int]:
    """Return, for objective = span, how many tokens are cut out of a row and in how many spans; both are at least 1.

    Source, also of the rounding: Raffel et al. 2019, arXiv 1910.10683, section 3.1.4. Every row of this length has the
    same counts.
    """
    noise = min(max(round(seq_len * config.mask_share), 1), seq_len - 1)
    return noise, min(max(round(noise / config.mean_span), 1), noise, seq_len - noise)


def row_length(config: TrainConfig, seq_len: int | None = None) -> int:
    """Return how many positions the model has for a row of `seq_len` dataset tokens (None = `train.seq_len`).

    Only objective = span has more positions than tokens, because it adds sentinels.

    Raises ConfigError if a row of this length has more spans than there are sentinels.
    """
    seq_len = config.seq_len if seq_len is None else seq_len
    if config.objective != "span":
        return seq_len
    if seq_len < 2:
        raise ConfigError(
            f"train.seq_len: expected at least 2 tokens for objective = span, got {seq_len}. Raise train.seq_len."
        )
    _, spans = num_spans(config, seq_len)
    if spans >= 100:
        raise ConfigError(
            f"train.mean_span: expected at most 99 spans per sequence, one for each sentinel but the last, got "
            f"{spans} in {seq_len} tokens. Raise train.mean_span, or lower train.mask_share or train.seq_len."
        )
    return seq_len + 2 * spans


# The skip list: global sample indices that training leaves out, in a file that only ever grows.
#
# A global index is the number of the stage << 40 | the index in the stage. The samples after a skipped one move up, the
# stage uses one more sample at its end, and later stages begin after that; nothing else changes. A checkpoint stores
# the length and the digest of its skip list, so that an edited list, or one that skips samples already used, is
# rejected.

Ints = NDArray[np.int64]

STAGE_BITS = 40
"""The global index of a sample is (index of its stage << STAGE_BITS) | index of the sample in that stage."""


@dataclass(frozen=True)
class SkipList:
    """The global indices of skipped samples, in the order in which they were appended."""

    indices: tuple[int, ...] = ()

    @cached_property
    def _sorted(self) -> Ints:
        return np.unique(np.array(self.indices, np.int64))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the indices in their order."""
        return digest_of(list(self.indices))

    def of_stage(self, stage: int) -> "SkipList":
        """Return the skipped samples of a stage as ascending indices in the stage."""
        first = stage << STAGE_BITS
        begin, end = np.searchsorted(self._sorted, [first, first + (1 << STAGE_BITS)])
        return SkipList(tuple((self._sorted[begin:end] - first).tolist()))

    @property
    def last_stage(self) -> int:
        """The last stage with a skipped sample; 0 if there is none."""
        return int(self._sorted[-1]) >> STAGE_BITS if len(self._sorted) else 0

    def index_of_used(self, number: Ints) -> Ints:
        """Return the index in a stage of the `number`-th sample that is not skipped (0 = first)."""
        # There are _sorted[k] - k samples that are not skipped before the k-th skipped index.
        used_before = self._sorted - np.arange(len(self._sorted))
        return number + np.searchsorted(used_before, number, side="right")

    def number_of(self, index: Ints) -> Ints:
        """Return, for each index in a stage, how many samples before it are not skipped; -1 for a skipped index."""
        before = np.searchsorted(self._sorted, index, side="left")
        return np.where(np.isin(index, self._sorted), -1, index - before)

    def check_continues(self, length: int, digest: str, used: int, stage: int = 0) -> None:
        """Raise ContractError unless this skip list starts with the checkpoint's skip list and only adds unused
        samples.

        `length` and `digest` describe the skip list stored with the checkpoint. The checkpoint was written after `used`
        samples of stage `stage`.
        """
        known = SkipList(self.indices[:length])
        if len(self.indices) < length or known.digest != digest:
            raise ContractError(
                f"skip list: expected the checkpoint's {length} entries with digest {digest[:12]} first, got "
                f"{len(self.indices)} entries that do not begin with those (digest {known.digest[:12]}). "
                "Restore the file that train.skip_file names (default train/skips.txt); only append to it."
            )
        reached = (stage << STAGE_BITS) + int(known.of_stage(stage).index_of_used(np.array([used]))[0])
        # An index added in a completed stage is rejected too: it would shift the samples of later stages.
        late = [index for index in self.indices[length:] if index < reached]
        if late:
            raise ContractError(
                f"skip list: expected new entries from sample {reached} on, got {late[:5]}, which the checkpoint has "
                "already used. Remove these entries from the file that train.skip_file names (default train/skips.txt)."
            )


NO_SKIPS = SkipList()


def read_skip_list(run: Store, name: str) -> SkipList:
    """Return the skip list in `<run>/train/<name>`: one index per line, `#` starts a comment; empty name = empty list.

    Raises ConfigError if the file is missing or outside of that folder, ContractError if a line is not an index.
    """
    if not name:
        return NO_SKIPS
    path = skip_path(name)
    if not run.exists(path):
        raise ConfigError(
            f"train.skip_file: expected a file {run.uri}/{path}, got none. Create the file, or remove train.skip_file."
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


def skip_path(name: str) -> str:
    """Return the path of a skip list relative to the run. Raises ConfigError if it leads out of the train folder."""
    if not is_below(name):
        raise ConfigError(
            f"train.skip_file: expected a file below the run's train folder, got {name!r:.200}. Move the file there."
        )
    return f"train/{name}"


def append_to_skip_list(run: Store, name: str, indices: list[int], reason: str) -> SkipList:
    """Append global sample indices and a one-line reason to `<run>/train/<name>`; return the new list."""
    path = skip_path(name)
    previous = run.read_bytes(path) if run.exists(path) else b""
    if previous and not previous.endswith(b"\n"):
        previous += b"\n"
    comment = " ".join(reason.split())
    run.write_atomic(path, previous + "".join(f"{index}  # {comment}\n" for index in indices).encode())
    return read_skip_list(run, name)
