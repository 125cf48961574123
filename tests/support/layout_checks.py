"""The problems of a layout as one error, as `check_ranks` raises it for a plan."""

from collections.abc import Sequence

from schemas.errors import ConfigError
from train.config.settings import Settings
from train.model.shape import ModelShape
from train.parallel.layout import layout_problems


def check_layout(
    shape: ModelShape, settings: Settings, world_size: int, seq_lens: Sequence[int], global_batch: int
) -> None:
    """Check that model, sequences and batch fit the layout. Raises ConfigError that names every problem."""
    problems = list(layout_problems(shape, settings, world_size, seq_lens, global_batch))
    if problems:
        raise ConfigError(
            f"layout: {len(problems)} problem(s) with {world_size} rank(s); nothing was started\n  "
            + "\n  ".join(problems)
        )
