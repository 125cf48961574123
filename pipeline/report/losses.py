"""What training came to: losses by source, what happened beside the steps, and what the steps waited for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from pipeline.report.charts import Tick, axis_label, nice_ticks
from pipeline.report.facts import ReportedStep, number
from schemas.ablation import ABLATIONS, RESULT_NAME, WITH, WITHOUT, Ablation, Comparison, read_ablation
from schemas.errors import ContractError
from schemas.storage import Store

LAST_SHARE = 0.1
"""Share of the steps, at the end, that the training losses of sources are means of: one step has few of each."""
SHOWN_URLS = 3
FOLDED = ("undone",)
"""Events that another one stands for: the rewind that undid the steps."""


@dataclass(frozen=True)
class SourceLosses:
    """What was learnt of one source."""

    name: str
    tokens: int
    """Targets that it was trained on."""
    loss: float | None
    """Mean over its targets in the last steps [nats/token]."""
    heldout: Mapping[str, float | None]
    """Loss, perplexity and bits_per_byte when they were measured last; empty = nothing held out."""


@dataclass(frozen=True)
class EventRow:
    """An event for a reader."""

    step: int
    at: str
    what: str
    detail: str
    is_bad: bool


@dataclass(frozen=True)
class Waiting:
    """Where the time and the bytes of the steps went."""

    data_share: float
    """Share of the steps' time in which they waited for data."""
    stall_seconds: float
    """Time that they stood still for checkpoints."""
    skipped: int
    """Steps without an update."""
    bytes_sent: int
    """Of compressed gradients, by each rank; 0 = not compressed."""
    bytes_plain: int
    """Of the same gradients uncompressed."""


def by_source(steps: Sequence[ReportedStep]) -> list[SourceLosses]:
    """Every source by name; empty if the metrics do not tell sources apart."""
    tokens = _tokens(steps)
    last = steps[-max(1, round(LAST_SHARE * len(steps))) :]
    recent, sums = _tokens(last), dict.fromkeys(tokens, 0.0)
    for step in last:
        for name, loss in (step.losses or {}).items():
            sums[name] += loss * (step.source_tokens or {}).get(name, 0)
    heldout = next((step.heldout for step in reversed(steps) if step.heldout), {})
    return [
        SourceLosses(
            name=name,
            tokens=tokens.get(name, 0),
            loss=sums[name] / recent[name] if recent.get(name) else None,
            heldout=heldout.get(name, {}),
        )
        for name in sorted({*tokens, *heldout})
    ]


def _tokens(steps: Sequence[ReportedStep]) -> dict[str, int]:
    """Targets of each source; those of a source whose loss was not finite do not count."""
    found: dict[str, int] = {}
    for step in steps:
        for name, count in (step.source_tokens or {}).items():
            found[name] = found.get(name, 0) + (count if name in (step.losses or {}) else 0)
    return found


def waiting(steps: Sequence[ReportedStep]) -> Waiting:
    """The sums over the steps."""
    seconds = sum(step.step_seconds for step in steps)
    return Waiting(
        data_share=sum(step.data_seconds for step in steps) / seconds if seconds else 0.0,
        stall_seconds=sum(step.checkpoint_stall or 0.0 for step in steps),
        skipped=sum(step.skipped for step in steps),
        bytes_sent=sum(step.bytes_sent or 0 for step in steps),
        bytes_plain=sum(step.bytes_plain or 0 for step in steps),
    )


def describe_events(events: Sequence[Mapping[str, Any]]) -> list[EventRow]:
    """The events in the order they happened, those left out that another one stands for."""
    return [_told(event) for event in events if event["kind"] not in FOLDED]


def _told(event: Mapping[str, Any]) -> EventRow:
    kind = str(event["kind"])
    what, tell, is_bad = EVENT_KINDS.get(kind, (kind.replace("_", " "), lambda _: "", False))
    return EventRow(event["step"], str(event["at"])[:19].replace("T", " "), what, tell(event), is_bad)


def _skipped(event: Mapping[str, Any]) -> str:
    found = {name: event.get(name) for name in ("loss", "grad_norm")}
    parts = [f"{name} {number(value) if value is not None else 'not finite'}" for name, value in found.items()]
    scale = event.get("loss_scale")
    return ", ".join(parts) + (f", at a loss scale of {number(scale)}" if scale else "")


def _spike(event: Mapping[str, Any]) -> str:
    documents, left = event.get("documents", []), event.get("left", ["loss"])
    urls = list(dict.fromkeys(document["url"] or document["doc_id"] for document in documents))
    among = f", among them {', '.join(urls[:SHOWN_URLS])}" if urls else ""
    found = f"loss {event['loss']:.4f}" if "loss" in left else f"gradient norm {event['grad_norm']:.4f}"
    level = f"{found}, above {event['limit']:.4f} (mean {event['mean']:.4f})"
    more = f"; gradient norm {event['grad_norm']:.4f}, above {event['grad_limit']:.4f}" if len(left) > 1 else ""
    return f"{level}{more}; {number(len(documents))} parts of documents{among}"


def _rewound(event: Mapping[str, Any]) -> str:
    kept_out = f", {number(len(event['quarantined']))} documents quarantined" if event.get("quarantined") else ""
    samples = f"{number(len(event['samples']))} samples are skipped from then on"
    return f"back to step {number(event['to_step'])}; {samples}{kept_out}"


def _early_stop(event: Mapping[str, Any]) -> str:
    best = f"; the lowest was {event['best']:.4f}" if event.get("best") is not None else ""
    return f"no lower held-out loss in {number(event['since_best'])} measurements{best}"


def _resumed(event: Mapping[str, Any]) -> str:
    now, before = _flat(event.get("layout", {})), _flat(event.get("layout_before", {}))
    changes = [f"{name} {before.get(name)}, now {now.get(name)}" for name in now if now[name] != before.get(name)]
    return f"from {event['checkpoint']}" + (f", in another layout: {'; '.join(changes)}" if changes else "")


def _flat(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A layout without its inner levels."""
    found: dict[str, Any] = {}
    for name, value in layout.items():
        found |= value if isinstance(value, Mapping) else {name: value}
    return found


def _interrupted(event: Mapping[str, Any]) -> str:
    return f"{event['signal']}; " + (f"{event['checkpoint']} stands" if event["checkpoint"] else "no checkpoint stands")


EVENT_KINDS: dict[str, tuple[str, Any, bool]] = {
    "skipped": ("update skipped", _skipped, True),
    "spike": ("spike", _spike, True),
    "rewound": ("rewound", _rewound, True),
    "failed_save": ("checkpoint not written", lambda event: str(event["error"]), True),
    "early_stop": ("ended early", _early_stop, False),
    "resumed": ("resumed", _resumed, False),
    "interrupted": ("asked to stop", _interrupted, False),
    "stopped": ("ended with an error", lambda event: str(event["reason"]), True),
}
"""By kind of event: what the report calls it, what it tells of it, and whether something went wrong."""


# What leaving rules out was found to cost: every result below the run's `ablations`, its intervals as geometry.
#
# An interval lies on one axis with all others of its ablation; right of zero the rules are worth it.

LEFT, RIGHT = 3.0, 97.0
"""Where the smallest and the largest end of an interval lie [% across]."""
SHOWN_FATES = 8
"""Changes of fate that are listed."""


@dataclass(frozen=True)
class IntervalRow:
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
class AblationView:
    """One ablation."""

    result: Ablation
    title: str
    rows: tuple[IntervalRow, ...]
    zero: float
    ticks: tuple[Tick, ...]
    is_current: bool
    """Whether the run still has the dataset that it was about."""


@dataclass(frozen=True)
class Ablations:
    """All of a run."""

    shown: tuple[AblationView, ...]
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


def _shown(result: Ablation, dataset: str | None) -> AblationView:
    ends = [0.0]
    for one in result.comparisons:
        ends += [*_differences(one), *(end for end in (one.nats.low, one.nats.high) if end is not None)]
    low, high = min(ends), max(ends)

    def across(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / ((high - low) or 1.0), 2)

    return AblationView(
        result=result,
        title=", ".join(result.left_out) or result.name,
        rows=tuple(_drawn(one, across) for one in result.comparisons),
        zero=across(0.0),
        ticks=tuple(Tick(across(value), axis_label(value)) for value in nice_ticks(low, high)),
        is_current=result.with_rules.dataset == dataset,
    )


def _differences(one: Comparison) -> list[float]:
    return [without - ours for ours, without in one.losses]


def _drawn(one: Comparison, across: Callable[[float], float]) -> IntervalRow:
    mean, low, high = one.nats.mean, one.nats.low, one.nats.high
    number = len(one.losses)
    held_out = {WITH: "with the rules", WITHOUT: "without them"}.get(one.on, one.on)
    return IntervalRow(
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
