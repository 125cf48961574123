"""What training came to: losses by source, what happened beside the steps, and what the steps waited for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.numbers import number
from pipeline.report.training import Step

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
class Told:
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


def by_source(steps: Sequence[Step]) -> list[SourceLosses]:
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


def _tokens(steps: Sequence[Step]) -> dict[str, int]:
    """Targets of each source; those of a source whose loss was not finite do not count."""
    found: dict[str, int] = {}
    for step in steps:
        for name, count in (step.source_tokens or {}).items():
            found[name] = found.get(name, 0) + (count if name in (step.losses or {}) else 0)
    return found


def waiting(steps: Sequence[Step]) -> Waiting:
    """The sums over the steps."""
    seconds = sum(step.step_seconds for step in steps)
    return Waiting(
        data_share=sum(step.data_seconds for step in steps) / seconds if seconds else 0.0,
        stall_seconds=sum(step.checkpoint_stall or 0.0 for step in steps),
        skipped=sum(step.skipped for step in steps),
        bytes_sent=sum(step.bytes_sent or 0 for step in steps),
        bytes_plain=sum(step.bytes_plain or 0 for step in steps),
    )


def told(events: Sequence[Mapping[str, Any]]) -> list[Told]:
    """The events in the order they happened, those left out that another one stands for."""
    return [_told(event) for event in events if event["kind"] not in FOLDED]


def _told(event: Mapping[str, Any]) -> Told:
    kind = str(event["kind"])
    what, tell, is_bad = KINDS.get(kind, (kind.replace("_", " "), lambda _: "", False))
    return Told(event["step"], str(event["at"])[:19].replace("T", " "), what, tell(event), is_bad)


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


KINDS: dict[str, tuple[str, Any, bool]] = {
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
