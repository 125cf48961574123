"""The problems of a layout as one error."""

from collections.abc import Sequence

from schemas.errors import ConfigError
from train.config.settings import Settings
from train.model.shape import ModelShape
from train.parallel.layout import layout_problems


def check_layout(
    shape: ModelShape, settings: Settings, world_size: int, seq_lens: Sequence[int], global_batch: int
) -> None:
    """Raise ConfigError, with one line for each problem, unless model, sequences and batch fit the layout."""
    if problems := [*layout_problems(shape, settings, world_size, seq_lens, global_batch)]:
        raise ConfigError("\n".join(problems))
