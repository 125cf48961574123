"""What leaving rules out was found to cost: every result below the run's `ablations`, its intervals as geometry.

An interval lies on one axis with all others of its ablation; right of zero the rules are worth it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.fs as pafs

from pipeline.report.plots import Tick, axis_label, nice_ticks
from schemas.ablation import ABLATIONS, RESULT_NAME, WITH, WITHOUT, Ablation, Comparison, read_ablation
from schemas.errors import ContractError
from schemas.storage import Store

LEFT, RIGHT = 3.0, 97.0
"""Where the smallest and the largest end of an interval lie [% across]."""
SHOWN_FATES = 8
"""Changes of fate that are listed."""


@dataclass(frozen=True)
class Drawn:
    """One interval: places are in per cent across."""

    held_out: str
    source: str
    style: str
    """kept: right of zero; beyond: left of it; unparted: it holds zero, or is none."""
    low: float
    high: float
    mean: float
    seeds: tuple[float, ...]
    """The difference of every pair."""
    losses: tuple[float, float]
    """Mean over the seeds, with the rules and without them [nats/token]."""
    nats: str
    """The mean difference [nats/token]."""
    ends: str
    """Those of its interval; empty without one."""
    bits: str
    """The mean difference [bits/byte]."""
    answer: str
    """As short as a cell wants it; the sentence above the table has the rest."""
    note: str
    """The row in words."""


@dataclass(frozen=True)
class Shown:
    """One ablation."""

    result: Ablation
    title: str
    rows: tuple[Drawn, ...]
    zero: float
    ticks: tuple[Tick, ...]
    is_current: bool
    """Whether the run still has the dataset that it was about."""


@dataclass(frozen=True)
class Ablations:
    """All of a run."""

    shown: tuple[Shown, ...]
    unreadable: tuple[str, ...]
    """What is wrong with results that are none."""


def ablations(run: Store, dataset: str | None) -> Ablations:
    """Every ablation of a run that has a result, by name; `dataset`: the digest of the run's, None = it has none."""
    folders = [run.child(f"{ABLATIONS}/{name}") for name in _names(run)]
    shown, unreadable = [], []
    for folder in (folder for folder in folders if folder.exists(RESULT_NAME)):
        try:
            shown.append(_shown(read_ablation(folder), dataset))
        except ContractError as error:
            unreadable.append(str(error))
    return Ablations(tuple(shown), tuple(unreadable))


def _names(run: Store) -> list[str]:
    """The folders of ablations: no manifest lists them, as each stands by itself."""
    infos = run.fs.get_file_info(pafs.FileSelector(run.path(ABLATIONS), allow_not_found=True))
    return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)


def _shown(result: Ablation, dataset: str | None) -> Shown:
    ends = [0.0]
    for one in result.comparisons:
        ends += [*_differences(one), *(end for end in (one.nats.low, one.nats.high) if end is not None)]
    low, high = min(ends), max(ends)

    def across(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / ((high - low) or 1.0), 2)

    return Shown(
        result=result,
        title=", ".join(result.left_out) or result.name,
        rows=tuple(_drawn(one, across) for one in result.comparisons),
        zero=across(0.0),
        ticks=tuple(Tick(across(value), axis_label(value)) for value in nice_ticks(low, high)),
        is_current=result.with_rules.dataset == dataset,
    )


def _differences(one: Comparison) -> list[float]:
    return [without - ours for ours, without in one.losses]


def _drawn(one: Comparison, across: Callable[[float], float]) -> Drawn:
    mean, low, high = one.nats.mean, one.nats.low, one.nats.high
    number = len(one.losses)
    held_out = {WITH: "with the rules", WITHOUT: "without them"}.get(one.on, one.on)
    return Drawn(
        held_out=held_out,
        source=one.source or "all",
        style="kept" if (low or 0) > 0 else "beyond" if (high or 0) < 0 else "unparted",
        low=across(mean if low is None else low),
        high=across(mean if high is None else high),
        mean=across(mean),
        seeds=tuple(map(across, _differences(one))),
        losses=(sum(pair[0] for pair in one.losses) / number, sum(pair[1] for pair in one.losses) / number),
        nats=f"{mean:+.4f}",
        ends="" if low is None or high is None else f"{low:+.4f} to {high:+.4f}",
        bits="–" if one.bits is None else f"{one.bits.mean:+.4f}",
        answer=one.answer.partition(" (")[0].partition(":")[0],
        note=f"held out {held_out}, {one.source or 'all sources'}: {mean:+.4f} nats/token; {one.answer}",
    )
