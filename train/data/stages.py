"""The stages of a run: ranges of steps, each with its sequence length, batch and mixture of sources."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from schemas.errors import ConfigError
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
            f"train.steps: promised the run's length in one place, found {config.steps} steps and {wanted[-1]} tokens "
            f"in {stage_name(config, len(wanted) - 1)}; leave one of them out"
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
                f"{stage_name(config, number)}: promised tokens behind the stages before it, found that they take "
                f"{tokens - left:,} of {tokens:,}; give them less"
            )
        if steps < 1:
            raise ConfigError(
                f"{stage_name(config, number)}: promised at least a step of {batch} x {seq_len} tokens, found "
                f"{left if own is None else own} tokens; give it more, or the stages before it less"
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
        raise ConfigError(f"train.seq_len: promised at least 2 tokens for objective = span, found {seq_len}; raise it")
    _, spans = num_spans(config, seq_len)
    if spans >= 100:
        raise ConfigError(
            f"train.mean_span: promised at most 99 spans in a row, one for each sentinel but the last, found {spans} "
            f"in {seq_len} tokens; raise it, or lower train.mask_share or train.seq_len"
        )
    return seq_len + 2 * spans
