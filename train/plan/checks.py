"""What is checked of a run before a rank starts: settings that nothing would use, and a layout for so many ranks."""

from schemas.errors import ConfigError
from schemas.tokens import Dataset
from train.config.settings import AUTO, Settings
from train.data.order import heldout_streams
from train.data.stages import row_length
from train.model.shape import ModelShape
from train.parallel.layout import axes_of, check_layout, data_ranks
from train.plan.plan import Plan

MIN_BLOCKS_HEAD = 16
"""Least width of a head that a CUDA device's kernel takes with documents as blocks."""


def listeners(settings: Settings) -> list[str]:
    """The settings by which held-out losses have a say in the weights."""
    asked = {
        "optim.schedule = plateau": settings.optim.schedule == "plateau",
        f"guard.patience = {settings.guard.patience}": settings.guard.patience is not None,
    }
    return [name for name, given in asked.items() if given]


def check_used(settings: Settings, dataset: Dataset) -> None:
    """Raises ConfigError that names every setting which another section would leave without effect."""
    train, optim, problems = settings.train, settings.optim, []
    for name in listeners(settings):
        if not train.eval_every:
            problems.append(f"{name}: promised held-out losses, found train.eval_every = 0; raise it, or leave it out")
        elif not heldout_streams(dataset, train.seq_len):
            problems.append(f"{name}: promised held-out losses, found no held-out row of {train.seq_len} tokens")
    for name in ("initial_loss_scale", "loss_scale_steps"):
        if train.precision not in ("fp16", AUTO) and name in optim.model_fields_set:
            problems.append(f"optim.{name}: promised train.precision = fp16, found {train.precision}; leave it out")
    if problems:
        raise ConfigError("\n".join(problems))


def check_blocks(shape: ModelShape, settings: Settings, kind: str) -> None:
    """Raises ConfigError if documents would be masked in fp32 by a kernel of a CUDA device, which is for 16 bits."""
    layout, train = settings.layout, settings.train
    blocks = train.document_mask and shape.positions == "rope" and shape.head_dim >= MIN_BLOCKS_HEAD
    by_keys = layout.context > 1 and layout.context_by == "keys"
    if kind == "cuda" and train.precision == "fp32" and blocks and not by_keys:
        raise ConfigError(
            "train.precision: expected 16 bits for train.document_mask on a CUDA device, got fp32. Set "
            'train.precision = "bf16", or train.document_mask = false.'
        )


def check_ranks(plan: Plan, world_size: int) -> None:
    """Raises ConfigError if a plan cannot be trained by so many ranks."""
    settings = plan.settings
    # Held-out rows are as long as [train] says, whatever its stages say.
    measured = [row_length(settings.train)] if settings.train.eval_every else []
    for stage in plan.stages:
        lengths = [row_length(settings.train, stage.seq_len), *measured]
        check_layout(plan.shape, settings, world_size, lengths, stage.global_batch)
        groups = data_ranks(axes_of(settings.layout, world_size))
        if groups > stage.global_batch:
            raise ConfigError(
                f"train.global_batch: promised a sequence for each of {groups} groups of ranks, found "
                f"{stage.global_batch}; raise it, or start fewer ranks"
            )
    if settings.layout.compress != "none" and world_size == 1:
        raise ConfigError(
            f"layout.compress = {settings.layout.compress}: promised gradients that travel between replicas, found one "
            "rank; start more ranks"
        )
