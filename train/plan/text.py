"""A plan as text: figures by subject, tables of other laws and world sizes, then sources and advice.

Lines have at most WIDTH characters. `plan.json` holds the same figures with formula and source of each.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence

from schemas.text import format_bytes, text_table
from train.config.settings import AUTO
from train.plan.plan import Plan
from train.plan.rules import SourcedFigure

WIDTH = 118
"""Maximum number of characters of a line."""
SUBJECTS = {
    "data": "tokens padding documents_cut unique_tokens epochs worth_in_unique_tokens",
    "sizes by other laws": "compute_6nd size own_law expected_loss",
    "model": "wanted_params num_layers d_model num_heads num_kv_heads d_ffw tie_embeddings params "
    "params_without_embeddings tokens_per_parameter",
    "run": "compute global_batch batch_tokens steps warmup_steps learning_rate",
    "cost": "flops_per_token flops seconds_at_peak",
    "memory of a rank": "memory",
    "layout": "devices step_seconds tokens_per_second mfu hours gpu_hours usd",
}
"""Prefixes of the figure names of each subject; other figures are printed under `more`."""
LAWS, MEMORY = "size", "memory"


def print_plan(plan: Plan) -> str:
    """Return the plan as text, in lines of at most WIDTH characters."""
    notes = _Notes()
    lines = [
        f"plan for dataset {plan.dataset[:12]}, tokenizer {plan.tokenizer[:12]}: {plan.num_params:,} parameters, "
        f"{plan.steps:,} steps, {plan.num_tokens:,} tokens"
    ]
    lines += ["", "DEVICE", *_on_devices(plan)]
    for subject, figures in _by_subject(plan.figures):
        plain = [figure for figure in figures if _head(figure) not in (LAWS, MEMORY)]
        lines += ["", subject.upper(), *_noted(_listed(plain, notes))]
        lines += _noted(_laws([figure for figure in figures if _head(figure) == LAWS], notes))
        lines += _noted(_memory([figure for figure in figures if _head(figure) == MEMORY], notes))
    lines += ["", "SOURCES", *(line for number, name in notes for line in _wrapped(f"  [{number}] ", name))]
    return "\n".join([*lines, *(["", "ADVICE"] if plan.advice else []), *(_advice(plan.advice))])


AUTOMATIC = {
    "train.precision": "auto: bf16 on a GPU (fp16 at compute capability 7.0 to 7.5, fp32 below), fp32 on a CPU",
    "layout.compile": "auto: true on a GPU, false on a CPU",
    "layout.micro_batch": "auto: searched for when the run starts on a GPU with a known profile, else 8 rows",
    "optim.muon_precision": "auto: bf16 on a GPU, fp32 on a CPU",
}
"""Values that automatic settings take on a device, printed while no device is named."""


def _on_devices(plan: Plan) -> Iterator[str]:
    """Yield the settings that depend on the device, with their value or the rule that will set it."""
    width = max(map(len, AUTOMATIC))
    for name, automatic in AUTOMATIC.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(plan.settings, section), key)
        if section == "optim" and not plan.settings.optim.uses(key):
            continue
        text = automatic if value in (None, AUTO) else value if isinstance(value, str) else json.dumps(value)
        yield from _wrapped(f"  {name:{width}}  ", text)


class _Notes:
    """The numbered list of sources, in order of first use; figures that are counted or set have no source."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, figure: SourcedFigure) -> str:
        """Return the formula of a figure with the number of its source."""
        if figure.source in ("count", "dataset", "recipe", "estimate"):
            return figure.formula
        return f"{figure.formula} [{self.number(figure.source)}]"

    def number(self, source: str) -> int:
        """Return the number of a source in the list, to which it is added at first use."""
        return self._numbers.setdefault(source, len(self._numbers) + 1)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((number, source) for source, number in self._numbers.items())


def _head(figure: SourcedFigure) -> str:
    return figure.name.partition(".")[0]


def _by_subject(figures: Sequence[SourcedFigure]) -> Iterator[tuple[str, list[SourcedFigure]]]:
    known = {head: subject for subject, heads in SUBJECTS.items() for head in heads.split()}
    for subject in (*SUBJECTS, "more"):
        if matching := [figure for figure in figures if known.get(_head(figure), "more") == subject]:
            yield subject, matching


def _listed(figures: Sequence[SourcedFigure], notes: _Notes) -> list[tuple[str, ...]]:
    """Return a table row for each figure: name, value with its unit, and formula."""
    units = max((len(figure.unit) for figure in figures), default=0)
    return [(each.name, f"{format_value(each)} {each.unit:{units}}", notes.of(each)) for each in figures]


def _laws(figures: Sequence[SourcedFigure], notes: _Notes) -> list[tuple[str, ...]]:
    """Return a table row for each law: name, N, D, predicted loss and formula."""
    rows: dict[str, dict[str, SourcedFigure]] = {}
    for figure in figures:
        # A law may have a dot in its name: 0.5 tokens per parameter.
        law, _, kind = figure.name.removeprefix(f"{LAWS}.").rpartition(".")
        rows.setdefault(law, {})[kind] = figure
    body = [
        (
            law,
            format_value(row["params"]),
            format_value(row["tokens"]),
            format_value(row["loss"]) if "loss" in row else "",
            notes.of(row["params"]),
        )
        for law, row in rows.items()
    ]
    return [("law", "parameters", "tokens", "loss", "N with, N' without embeddings"), *body] if body else []


def _memory(figures: Sequence[SourcedFigure], notes: _Notes) -> list[tuple[str, ...]]:
    """Return a table row for each purpose of memory, with a column for each number of ranks."""
    if not figures:
        return []
    cells: dict[tuple[str, str], SourcedFigure] = {}
    for figure in figures:
        rank, _, part = figure.name.removeprefix(f"{MEMORY}.").partition(".")
        cells[rank, part] = figure
    ranks = list(dict.fromkeys(rank for rank, _ in cells))
    body = []
    for part in sorted(dict.fromkeys(part for _, part in cells), key=lambda part: not part):
        row = [cells.get((rank, part)) for rank in ranks]
        first = next(figure for figure in row if figure is not None)
        sizes = [format_bytes(figure.value) if figure else "" for figure in row]
        body.append((part or "all", *sizes, notes.of(first)))
    return [("part", *(f"{rank} ranks" if rank != "1" else "1 rank" for rank in ranks), ""), *body]


def _noted(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows as lines: first column left-aligned, last column wrapped, the others right-aligned."""
    lines = text_table([row[:-1] for row in rows], "<>", "  ")
    width = max(map(len, lines), default=0)
    for line, row in zip(lines, rows):
        yield from _wrapped(f"{line:{width}}  ", row[-1])


def _wrapped(prefix: str, text: str) -> Iterator[str]:
    """Yield `text` after a prefix, wrapped and indented to the width of the prefix."""
    room = max(WIDTH - len(prefix), 20)
    first, *more = textwrap.wrap(text, room, break_long_words=False) or [""]
    yield (prefix + first).rstrip()
    yield from (" " * len(prefix) + line for line in more)


def _advice(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from textwrap.wrap(sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def format_value(figure: SourcedFigure) -> str:
    """Return a value as text: large numbers with commas, FLOPs with an exponent, small numbers with three digits."""
    value = figure.value
    if figure.unit == "FLOPs":
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
