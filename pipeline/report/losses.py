"""Training in the report: losses by source, events, waiting times, and the results of ablations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from pipeline.report.charts import Tick, axis_label, nice_ticks
from pipeline.report.facts import NO_VALUE, ReportedStep, number
from schemas.ablation import ABLATIONS, RESULT_NAME, WITH, WITHOUT, Ablation, Comparison, read_ablation
from schemas.errors import ContractError
from schemas.storage import Store

LAST_SHARE = 0.1
"""Share of the steps, counted from the last, over which losses are averaged: one step has few tokens of a source."""
SHOWN_URLS = 3
FOLDED = ("undone",)
"""Kinds of events that are not listed, since another event (the rewind that undid the steps) reports them."""


@dataclass(frozen=True)
class SourceLosses:
    """Training and held-out losses of one source."""

    name: str
    tokens: int
    """Number of tokens of the source that training predicted."""
    loss: float | None
    """Mean training loss over the tokens of the source in the last steps [nats/token]; None = there are none."""
    heldout: Mapping[str, float | None]
    """The last measured loss, perplexity, bits_per_byte and accuracy; empty = the source has no held-out documents."""


@dataclass(frozen=True)
class EventRow:
    """An event of the training run, as the report lists it."""

    step: int
    at: str
    name: str
    detail: str
    is_bad: bool


@dataclass(frozen=True)
class Waiting:
    """Waiting times, skipped steps and sent bytes of a training run."""

    data_share: float
    """Share of the step time spent waiting for data, 0..1."""
    stall_seconds: float
    """Time for which checkpoints stalled training [s]."""
    skipped: int
    """Steps without an update."""
    bytes_sent: int
    """Bytes of compressed gradients that each rank sent; 0 = not compressed."""
    bytes_plain: int
    """Bytes of the same gradients without compression."""


def by_source(steps: Sequence[ReportedStep]) -> list[SourceLosses]:
    """Return the losses of every source, sorted by name; empty if the metrics have no losses by source."""
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
    """Return the number of predicted tokens of each source.

    Steps in which the loss of a source was not finite are not counted for that source.
    """
    tokens: dict[str, int] = {}
    for step in steps:
        for name, count in (step.source_tokens or {}).items():
            tokens[name] = tokens.get(name, 0) + (count if name in (step.losses or {}) else 0)
    return tokens


def waiting(steps: Sequence[ReportedStep]) -> Waiting:
    """Return the waiting times and transferred bytes, summed over the steps."""
    seconds = sum(step.step_seconds for step in steps)
    return Waiting(
        data_share=sum(step.data_seconds for step in steps) / seconds if seconds else 0.0,
        stall_seconds=sum(step.checkpoint_stall or 0.0 for step in steps),
        skipped=sum(step.skipped for step in steps),
        bytes_sent=sum(step.bytes_sent or 0 for step in steps),
        bytes_plain=sum(step.bytes_plain or 0 for step in steps),
    )


def describe_events(events: Sequence[Mapping[str, Any]]) -> list[EventRow]:
    """Return the events in the order in which they happened. Events whose kind is in FOLDED are left out."""
    return [_described(event) for event in events if event["kind"] not in FOLDED]


def _described(event: Mapping[str, Any]) -> EventRow:
    kind = str(event["kind"])
    name, describe, is_bad = EVENT_KINDS.get(kind, (kind.replace("_", " "), lambda _: "", False))
    return EventRow(event["step"], str(event["at"])[:19].replace("T", " "), name, describe(event), is_bad)


def _skipped(event: Mapping[str, Any]) -> str:
    values = {"loss": event.get("loss"), "gradient norm": event.get("grad_norm")}
    parts = [f"{name} {number(value) if value is not None else 'not finite'}" for name, value in values.items()]
    scale = event.get("loss_scale")
    return ", ".join(parts) + (f", with a loss scale of {number(scale)}" if scale else "")


def _spike(event: Mapping[str, Any]) -> str:
    documents, left = event.get("documents", []), event.get("left", ["loss"])
    urls = list(dict.fromkeys(document["url"] or document["doc_id"] for document in documents))
    examples = f", such as {', '.join(urls[:SHOWN_URLS])}" if urls else ""
    value = f"loss {event['loss']:.4f}" if "loss" in left else f"gradient norm {event['grad_norm']:.4f}"
    level = f"{value}, above {event['limit']:.4f} (mean {event['mean']:.4f})"
    more = f"; gradient norm {event['grad_norm']:.4f}, above {event['grad_limit']:.4f}" if len(left) > 1 else ""
    return f"{level}{more}; {number(len(documents))} spans of documents in the step{examples}"


def _rewound(event: Mapping[str, Any]) -> str:
    quarantined = f", {number(len(event['quarantined']))} documents quarantined" if event.get("quarantined") else ""
    samples = f"{number(len(event['samples']))} samples are added to the skip list"
    return f"back to step {number(event['to_step'])}; {samples}{quarantined}"


def _early_stop(event: Mapping[str, Any]) -> str:
    best = f"; the lowest loss is {event['best']:.4f}" if event.get("best") is not None else ""
    return f"the held-out loss did not decrease in {number(event['since_best'])} measurements{best}"


def _straggler(event: Mapping[str, Any]) -> str:
    what = "waits for rows" if event.get("cause") == "data" else "computes"
    share, factor = event.get("share"), event.get("factor")
    waits = f"; the others wait for it in {100 * share:.0f} % of a step" if isinstance(share, int | float) else ""
    times = f"{factor:.1f} times" if isinstance(factor, int | float) else "several times"
    return f"rank {number(event.get('rank'))} on {event.get('host')} {what} {times} as long as the median{waits}"


def _resumed(event: Mapping[str, Any]) -> str:
    now, before = _flat(event.get("layout", {})), _flat(event.get("layout_before", {}))
    changes = [f"{name} {before.get(name)} → {now.get(name)}" for name in now if now[name] != before.get(name)]
    return f"from {event['checkpoint']}" + (f", with another layout: {', '.join(changes)}" if changes else "")


def _flat(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout with the entries of its inner mappings at the top level."""
    flat: dict[str, Any] = {}
    for name, value in layout.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def _interrupted(event: Mapping[str, Any]) -> str:
    return f"{event['signal']}; " + (f"saved {event['checkpoint']}" if event["checkpoint"] else "no checkpoint exists")


def _started(event: Mapping[str, Any]) -> str:
    layout = event.get("layout", {})
    return f"{number(layout.get('ranks'))} × {layout.get('device', NO_VALUE)}"


EVENT_KINDS: dict[str, tuple[str, Any, bool]] = {
    "begun": ("started", _started, False),
    "skipped": ("update skipped", _skipped, True),
    "spike": ("spike", _spike, True),
    "rewound": ("rewound", _rewound, True),
    "failed_save": ("checkpoint not saved", lambda event: str(event["error"]), True),
    "early_stop": ("early stop", _early_stop, False),
    "straggler": ("slow rank", _straggler, True),
    "resumed": ("resumed", _resumed, False),
    "interrupted": ("interrupted", _interrupted, False),
    "stopped": ("stopped by an error", lambda event: str(event["reason"]), True),
}
"""Kind of event → its name in the report, a function that formats its details, and True if it is a problem."""


# Ablations: every result in the `ablations` folder of the run. The intervals of an ablation share one axis; an interval
# to the right of zero means that the rules lower the loss.

LEFT, RIGHT = 3.0, 97.0
"""Horizontal positions of the smallest and the largest end of the intervals [% of the width]."""
SHOWN_VERDICTS = 8
"""Number of changes of verdict that are listed."""


@dataclass(frozen=True)
class IntervalRow:
    """One row of the drawing of an ablation: a loss difference with its confidence interval.

    `low`, `high`, `mean` and `seeds` are horizontal positions [% of the width].
    """

    held_out: str
    source: str
    style: str
    """`kept`: right of zero; `beyond`: left of zero; `neutral`: contains zero, or there is no interval."""
    low: float
    high: float
    mean: float
    seeds: tuple[float, ...]
    """Position of the difference of every pair of models."""
    losses: tuple[float, float]
    """Mean loss over the seeds, with the rules and without them [nats/token]."""
    nats: str
    """The mean difference [nats/token]."""
    ends: str
    """Both ends of the interval [nats/token]; empty if there is no interval."""
    bits: str
    """The mean difference [bits/byte]."""
    answer: str
    """The conclusion in a few words; the sentence above the table has the details."""
    note: str
    """Description of the row for its tooltip."""


@dataclass(frozen=True)
class AblationView:
    """One ablation, as the report shows it."""

    result: Ablation
    title: str
    rows: tuple[IntervalRow, ...]
    zero: float
    ticks: tuple[Tick, ...]
    is_current: bool
    """True if the ablation used the current dataset of the run."""


@dataclass(frozen=True)
class Ablations:
    """All ablations of a run."""

    shown: tuple[AblationView, ...]
    unreadable: tuple[str, ...]
    """Error messages of results that cannot be read."""


def ablations(run: Store, dataset: str | None) -> Ablations:
    """Return every ablation of a run that has a result, sorted by name.

    `dataset` is the digest of the run's dataset; None = the run has none.
    """
    folders = [run.child(f"{ABLATIONS}/{name}") for name in _names(run)]
    shown, unreadable = [], []
    for folder in (folder for folder in folders if folder.exists(RESULT_NAME)):
        try:
            shown.append(_shown(read_ablation(folder), dataset))
        except ContractError as error:
            unreadable.append(str(error))
    return Ablations(tuple(shown), tuple(unreadable))


def _names(run: Store) -> list[str]:
    """Return the names of the ablation folders."""
    # The folder is listed, because no manifest lists ablations.
    infos = run.fs.get_file_info(pafs.FileSelector(run.path(ABLATIONS), allow_not_found=True))
    return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)


def _shown(result: Ablation, dataset: str | None) -> AblationView:
    ends = [0.0]
    for comparison in result.comparisons:
        interval = (comparison.nats.low, comparison.nats.high)
        ends += [*_differences(comparison), *(end for end in interval if end is not None)]
    low, high = min(ends), max(ends)

    def across(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / ((high - low) or 1.0), 2)

    return AblationView(
        result=result,
        title=", ".join(result.left_out) or result.name,
        rows=tuple(_drawn(comparison, across) for comparison in result.comparisons),
        zero=across(0.0),
        ticks=tuple(Tick(across(value), axis_label(value)) for value in nice_ticks(low, high)),
        is_current=result.with_rules.dataset == dataset,
    )


def _differences(comparison: Comparison) -> list[float]:
    return [without_rules - with_rules for with_rules, without_rules in comparison.losses]


def _drawn(comparison: Comparison, across: Callable[[float], float]) -> IntervalRow:
    mean, low, high = comparison.nats.mean, comparison.nats.low, comparison.nats.high
    losses, source = comparison.losses, comparison.source
    held_out = {WITH: "with the rules", WITHOUT: "without the rules"}.get(comparison.on, comparison.on)
    return IntervalRow(
        held_out=held_out,
        source=source or "all",
        style="kept" if (low or 0) > 0 else "beyond" if (high or 0) < 0 else "neutral",
        low=across(mean if low is None else low),
        high=across(mean if high is None else high),
        mean=across(mean),
        seeds=tuple(map(across, _differences(comparison))),
        losses=(sum(pair[0] for pair in losses) / len(losses), sum(pair[1] for pair in losses) / len(losses)),
        nats=f"{mean:+.4f}",
        ends="" if low is None or high is None else f"{low:+.4f} to {high:+.4f}",
        bits="–" if comparison.bits is None else f"{comparison.bits.mean:+.4f}",
        answer=comparison.answer.partition(" (")[0].partition(":")[0],
        note=f"held-out {held_out}, {source or 'all sources'}: {mean:+.4f} nats/token; {comparison.answer}",
    )
