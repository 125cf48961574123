"""What an ablation found: its result from what the proxies lost, and the result as text."""

from collections.abc import Iterator, Mapping, Sequence

from jobs.verbs.branch import Change
from jobs.verbs.pairs import Pair
from pipeline.inspect.diff import KEPT, Difference, compare, open_side
from schemas.ablation import WITH, WITHOUT, Ablation, Comparison, Interval, Moved, Proxies, Side
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.data.order import tokens_drawn
from train.eval.paired import SHARE, Losses, answer_of, compare_sides, label_of

SHOWN = 12
"""Changes of fate that are listed."""


def conclude(
    change: Change,
    runs: Mapping[str, Store],
    pairs: Sequence[Pair],
    measured: tuple[Sequence[str], Losses],
    seconds: Mapping[str, float],
) -> Ablation:
    """The result of an ablation from what its proxies lost."""
    a, b = (open_side(runs[side]) for side in (WITH, WITHOUT))
    found = compare(a, b, 0)
    on, losses = measured
    comparisons = compare_sides(on, [pair.seed for pair in pairs], losses)
    return Ablation(
        name=change.name,
        left_out=change.words,
        settings=found.settings,
        with_rules=_side(open_dataset(runs[WITH]), found.kept[0]),
        without=_side(open_dataset(runs[WITHOUT]), found.kept[1]),
        documents=tuple(_moved(found)),
        tokens=found.tokens,
        proxies=_proxies(pairs),
        share=SHARE,
        comparisons=tuple(comparisons),
        measurements=tuple(one for several in losses.values() for one in several),
        answer=answer_of(comparisons),
        seconds={name: round(value, 1) for name, value in seconds.items()},
    )


def _side(dataset: Dataset, documents: int) -> Side:
    return Side(dataset=dataset.digest, documents=documents, tokens=sum(dataset.num_tokens().values()))


def _moved(found: Difference) -> Iterator[Moved]:
    ordered = sorted(found.documents.items(), key=lambda item: (-item[1], item[0]))
    for (source, old, new), count in ordered:
        yield Moved(source=source, with_rules=old, without=new, documents=count)


def _proxies(pairs: Sequence[Pair]) -> Proxies:
    plans = {side: proxy.plan for side, proxy in pairs[0].proxies.items()}
    plan = plans[WITH]
    passes = {}
    for side, proxy in pairs[0].proxies.items():
        drawn = sum(tokens_drawn(plans[side].stages).values())
        passes[side] = round(drawn / sum(open_dataset(proxy.run).num_tokens().values()), 4)
    return Proxies(
        params=plan.num_params,
        tokens=plan.num_tokens,
        steps=plan.steps,
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        learning_rate=plan.learning_rate,
        seeds=tuple(pair.seed for pair in pairs),
        epochs=passes,
    )


def tell(result: Ablation) -> str:
    """The result as text."""
    proxies, ours, theirs = result.proxies, result.with_rules, result.without
    lines = [
        "",
        f"without {', '.join(result.left_out) or 'what --set changes'}: {theirs.documents:,} documents, "
        f"{theirs.tokens:,} training tokens",
        f"with    {' ' * len(', '.join(result.left_out) or 'what --set changes')}: {ours.documents:,} documents, "
        f"{ours.tokens:,} training tokens",
        *_fates(result.documents),
        "",
        f"{len(proxies.seeds)} pairs of proxies: {proxies.params:,} parameters, {proxies.tokens:,} tokens each "
        f"({proxies.steps:,} steps of {proxies.global_batch} x {proxies.seq_len}; "
        + ", ".join(f"{passes:.2f} epochs {side}" for side, passes in proxies.epochs.items())
        + ")",
        *_left_out(result),
        "",
        *_table(result.comparisons, result.share),
        "",
        result.answer,
        "(" + ", ".join(f"{name} {value:.0f} s" for name, value in result.seconds.items()) + ")",
    ]
    return "\n".join(lines)


def _fates(moved: Sequence[Moved]) -> Iterator[str]:
    """What became of documents, most frequent first."""
    for one in moved[:SHOWN]:
        yield f"  {one.documents:>7,}  {one.source}  {_fate(one.with_rules)} → {_fate(one.without)}"
    if rest := moved[SHOWN:]:
        yield f"  {sum(one.documents for one in rest):>7,}  in {len(rest)} more changes"


def _fate(fate: str) -> str:
    return fate if fate == KEPT else f"dropped by {fate}"


def _left_out(result: Ablation) -> Iterator[str]:
    """How many held-out documents do not count."""
    names = dict.fromkeys(one.on for one in result.comparisons)
    for name, one in zip(names, result.measurements, strict=False):  # those of the first proxy, on every set
        if one.left_out:
            yield (
                f"{label_of(name)}: {one.left_out:,} of {one.documents:,} documents left out, because a proxy was "
                "trained on them or on a copy"
            )


def _table(comparisons: Sequence[Comparison], share: float) -> list[str]:
    """The comparisons, a line each."""
    rows = [("held out", "source", "with", "without", f"difference [{share:.0%}], nats/token", "bits/byte", "")]
    for one in comparisons:
        means = [sum(pair[side] for pair in one.losses) / len(one.losses) for side in (0, 1)]
        bits = "–" if one.bits is None else shown(one.bits)
        answer = one.answer.partition(":")[0].partition(" (")[0]
        rows.append((one.on, one.source or "all", f"{means[0]:.4f}", f"{means[1]:.4f}", shown(one.nats), bits, answer))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def shown(found: Interval) -> str:
    """An interval as text."""
    if found.low is None or found.high is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
