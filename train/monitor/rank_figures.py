"""The figures of every rank, as lines of ranks.jsonl, and the rule that names a slow rank.

metrics.jsonl has the global batch, in which a slow rank cannot be seen: all ranks wait for it. Here each rank has a
line for each window of `train.ranks_every` steps. The file is only appended to, so a window that is computed again
after a resume or a rewind has two lines for a rank, of which the later one counts.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.paths import RANKS_NAME
from schemas.storage import Store

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
"""Kinds of communication, in the order of `TRAFFIC`."""


class RankFigures(BaseModel):
    """One line of ranks.jsonl: the figures of one rank in a window of steps. Times are means of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    step: int
    """Last step of the window."""
    steps: int
    """Number of steps in the window."""
    rank: int
    """Number of the rank, from 0."""
    host: str
    """Name of the rank's machine."""
    device: str
    """Device of the rank, such as cuda:3."""
    stage: int = 0
    """Pipeline stage of the rank, from 0. Ranks are compared with ranks of the same stage."""
    step_seconds: float
    """Duration of a step, as in metrics.jsonl [s]."""
    data_seconds: float
    """Time that the rank waited for its rows [s]."""
    compute_seconds: float
    """Time in the parts of a step that run no collective: the output matrix with the loss, unless the vocabulary is
    split over ranks, and the update by AdamW [s]. It is a sample of the rank's own computation, not all of it."""
    blocked_seconds: float | None = None
    """Time in which the thread that computes was not running: it waited for other ranks, or for a core [s]; None = not
    a CPU, whose thread does not wait in collectives."""
    cpu_share: float | None = None
    """CPU time of the process, with all of its threads, over the duration of the window. 2 = two busy cores."""
    utilization: float | None = None
    """Share of the last second or less in which the GPU ran a kernel, 0 to 1, as NVML measures it. Kernels that wait
    for other ranks count. None = not CUDA, or nvidia-ml-py is not installed."""
    memory: int | None = None
    """Largest memory allocated on the device in the window [bytes]; None = not CUDA."""
    host_memory: int | None = None
    """Largest resident memory of the process since it started [bytes]."""
    sent: dict[str, int] = {}
    """Bytes that the rank sends in a step by kind of communication, computed from the layout; 0 is left out."""

    def line(self) -> bytes:
        """Return the figures as a line of JSON, without the newline."""
        return json.dumps(
            {key: rounded(value) for key, value in self.model_dump(exclude_defaults=True).items()}
        ).encode()


def rounded(value: object) -> object:
    """Return a float with four significant digits, and any other value as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


class SlowRank(NamedTuple):
    """A rank for which the others wait."""

    rank: int
    host: str
    cause: Literal["compute", "data"]
    """compute: its computation takes longer; data: it waits longer for its rows."""
    factor: float
    """Duration of a step over its duration if the rank were like the median rank of its stage; from computing, the
    rank's time over that of the median."""
    share: float
    """Share of the step in which other ranks wait for it, 0 to 1: 1 − 1 / factor."""


def slow_ranks(window: Sequence[RankFigures], min_factor: float) -> list[SlowRank]:
    """Return the ranks of a window whose factor is at least `min_factor`, the slowest first.

    A rank is compared with the lower median over the ranks of its pipeline stage. With two ranks, that is the faster
    one.
    """
    stages: dict[int, list[RankFigures]] = {}
    for figures in window:
        stages.setdefault(figures.stage, []).append(figures)
    slow = []
    for ranks in stages.values():
        compute = statistics.median_low(figures.compute_seconds for figures in ranks)
        data = statistics.median_low(figures.data_seconds for figures in ranks)
        for figures in ranks:
            factors: Mapping[Literal["compute", "data"], float] = {
                "compute": figures.compute_seconds / compute if compute else 1.0,
                "data": _factor_of_waiting(figures.step_seconds, figures.data_seconds - data),
            }
            cause = max(factors, key=factors.__getitem__)
            if (factor := factors[cause]) >= min_factor:
                slow.append(SlowRank(figures.rank, figures.host, cause, factor, 1 - 1 / factor))
    return sorted(slow, key=lambda item: -item.factor)


def _factor_of_waiting(step_seconds: float, excess: float) -> float:
    # Reading runs ahead, so a rank that waits for rows makes the step longer by its waiting.
    return step_seconds / max(step_seconds - excess, 1e-9) if excess > 0 else 1.0


def read_ranks(run: Store) -> list[RankFigures]:
    """Return the lines of a run's rank file, in order; an unfinished last line of a killed process is ignored.

    Raises ContractError if another line is not valid.
    """
    if not run.exists(RANKS_NAME):
        return []
    run.size(RANKS_NAME)  # raises for a folder or a pipe, which could not be read
    figures = []
    for number, line in enumerate(run.read_bytes(RANKS_NAME).split(b"\n")[:-1], start=1):
        try:
            figures.append(RankFigures.model_validate_json(line))
        except ValidationError as error:
            raise ContractError(
                f"{run.uri}/{RANKS_NAME}, line {number}: expected the figures of a rank, got an entry that is not "
                f"valid ({error}). Remove the file; only the report reads it."
            ) from error
    return figures
