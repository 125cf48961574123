"""A plan as text: figures by subject, other laws, world sizes, sources and advice; and the dry run.

Lines of a plan have at most WIDTH characters. `plan.json` holds the same figures with formula and source of each.
"""

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.text import format_bytes, text_table
from train.config.settings import AUTO, Settings
from train.data.stages import StagePlan, row_length
from train.model.shape import ModelShape, OwnShape, flops_per_token, num_parameters
from train.parallel.layout import (
    axes_of,
    axes_problem,
    data_ranks,
    layers_of,
    num_micro_batches,
    rows_of,
    stages_of,
)
from train.parallel.memory import Memory
from train.parallel.metadata import metadata_bytes
from train.parallel.own_memory import checkpoint_bytes_of_any, memory_of_any
from train.plan.plan import Plan, rank_problems
from train.plan.rules import SourcedFigure

WIDTH = 118
"""Maximum number of characters of a line."""
SUBJECTS = {
    "data": "tokens padding documents_cut unique_tokens epochs worth_in_unique_tokens",
    "sizes by other laws": "compute_6nd size own_law expected_loss",
    "model": "wanted_params num_layers d_model num_heads num_kv_heads d_ffw tie_embeddings params "
    "params_without_embeddings active_params tokens_per_parameter",
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
    """The numbered list of sources, in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, figure: SourcedFigure) -> str:
        """Return the formula of a figure, followed by the reference number of its source, such as `[3]`."""
        if figure.source in ("count", "dataset", "recipe", "estimate"):
            return figure.formula
        return f"{figure.formula} [{self.number(figure.source)}]"

    def number(self, source: str) -> int:
        """Return the number of a source in the list; a source that is not yet in the list is added."""
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


COMPARED = {
    "num_params": ("parameters", ""),
    "num_tokens": ("tokens", ""),
    "steps": ("train.steps", "train.steps"),
    "global_batch": ("train.global_batch", "train.global_batch"),
    "warmup_steps": ("optim.warmup_steps", "optim.warmup_steps"),
    "learning_rate": ("optim.learning_rate", "optim.learning_rate"),
}
"""Values of a plan that follow from others -> the name that is printed, and the setting that fixes the value."""


def describe_changes(before: Plan, plan: Plan, overrides: Sequence[str]) -> list[str]:
    """Return lines about the derived values that differ between two plans; empty if there are none.

    `before`: the plan without `overrides` (`section.key=value`). Values that an override sets are left out.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    rows, settings = [], []
    for field, (name, setting) in COMPARED.items():
        old, new = getattr(before, field), getattr(plan, field)
        if old != new and setting not in given:
            rows.append((name, f"{new:,}", f"{old:,} without these settings"))
            settings += [setting] if setting else []
    if not rows:
        return []
    fix = f"  To fix one of them, set {' or '.join(settings)}." if settings else ""
    lines = [f"  {line}" for line in text_table(rows, "<>", "  ")]
    return [f"FOLLOWS FROM {' '.join(overrides)}", *lines, *([fix] if fix else []), ""]


def format_value(figure: SourcedFigure) -> str:
    """Return a value as text: large numbers with commas, FLOPs with an exponent, small numbers with three digits."""
    value = figure.value
    if figure.unit == "FLOPs":
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


# The dry run: a text description of a run on a number of ranks, which names everything that does not fit or divide.
#
# It shows layout, memory, steps and cost. All of it is computed from the plan alone, without a process group, a device
# or weights.

SHOWN_GROUPS = 4
"""Maximum number of groups of ranks, and of ranges of rows, that a line lists."""


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank, for which a dry run describes a run."""

    kind: str
    """Type of the device, "cpu" or "cuda"."""
    name: str
    """Name to print, such as `this machine, cpu` or `h100-sxm`."""
    memory: int | None = None
    """Memory for one rank [bytes], with which the estimate is compared without plan.device_memory; None = unknown."""


def describe_run(plan: Plan, settings: Settings, world_size: int, device: RankDevice) -> str:
    """Return a description of a plan's run under `settings` on `world_size` ranks.

    A line that starts with `!!` names a problem. Memory is estimated for `device`, and compared with
    `plan.device_memory` or else with the memory of `device`. A last line has the memory on a GPU, if `device` is none.
    """
    given, settings = settings, settings.for_device(device.kind)
    batches, problems = [stage.global_batch for stage in plan.stages], rank_problems(plan, settings, world_size)
    lines = [f"{world_size} rank(s), nothing was started"]
    lines += [f"!! {problem}" for problem in problems]
    lines += _model(plan, settings, device)
    if axes_problem(settings.layout, world_size) is None:
        axes = axes_of(settings.layout, world_size)
        lines += [*_axes(settings, axes), *_stages_of_pipeline(plan, settings)]
        for batch in dict.fromkeys(batches):
            lines += _rows(settings, axes, batch)
        if not problems:
            lines += _rank_memory(plan, settings, world_size, device)
    lines += [*_steps(plan), *_cost(plan, settings, world_size)]
    if device.kind != "cuda" and not problems:
        on_gpu = given.for_device("cuda")
        lines.append(
            f"on a GPU: {_precision(on_gpu)}, {format_bytes(peak_memory(plan, on_gpu, world_size, 'cuda'))} of memory "
            "for each rank"
        )
    return "\n".join(lines)


def _model(plan: Plan, settings: Settings, device: RankDevice) -> Iterator[str]:
    shape = plan.shape
    if isinstance(shape, OwnShape):
        of_token = "" if shape.active_params == shape.num_params else f", {shape.active_params:,} compute one token"
        yield f"model: {shape.model}, {shape.num_params:,} parameters{of_token}, {shape.num_layers} layers"
    else:
        yield _transformer(shape)
    yield f"precision ({device.name}): {_precision(settings)}; optimizer: {settings.optim.optimizer}"


def _transformer(shape: ModelShape) -> str:
    return (
        f"model: {num_parameters(shape):,} parameters ({num_parameters(shape, False):,} without embeddings), "
        f"{shape.num_layers} layers of width {shape.d_model}, {shape.num_heads} heads of width {shape.head_dim} "
        f"({shape.num_kv_heads} for keys and values), {shape.activation} of width {shape.d_ffw}, "
        f"{shape.vocab_size:,} tokens in the vocabulary"
    )


def _precision(settings: Settings) -> str:
    return settings.train.precision + (", compiled" if settings.layout.compile else "")


def _axes(settings: Settings, axes: dict[str, int]) -> Iterator[str]:
    layout = settings.layout
    longer = {axis: size for axis, size in axes.items() if size > 1}
    yield f"layout: {layout.data}, " + (" · ".join(f"{axis} {size}" for axis, size in longer.items()) or "one rank")
    for axis in longer:
        groups = list(groups_along(axes, axis))
        shown = " | ".join(_span(group) for group in groups[:SHOWN_GROUPS])
        yield f"  {axis}: ranks {shown}" + (f" | … ({len(groups)} groups)" if len(groups) > SHOWN_GROUPS else "")


def groups_along(axes: dict[str, int], axis: str) -> Iterator[list[int]]:
    """Yield the groups of ranks that differ only on `axis`; `axes`: sizes of the axes, outermost first."""
    sizes = list(axes.values())
    index = list(axes).index(axis)
    stride, size = math.prod(sizes[index + 1 :]), sizes[index]
    for first in range(math.prod(sizes)):
        if first // stride % size == 0:
            yield [first + step * stride for step in range(size)]


def _span(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    shown = [str(number) for number in numbers]
    return ",".join(shown if len(shown) <= 8 else [*shown[:3], "…", shown[-1]])


def _rows(settings: Settings, axes: dict[str, int], global_batch: int) -> Iterator[str]:
    groups, size = data_ranks(axes), settings.layout.rows_at_once
    number = num_micro_batches(global_batch, settings.layout, axes)
    parts = [rows_of(global_batch, groups, part) for part in range(groups)]
    counts = sorted({len(part) for part in parts})
    shown = ", ".join(f"{part.start}-{part.stop - 1}" if part else "none" for part in parts[:SHOWN_GROUPS])
    more = ", …" if groups > SHOWN_GROUPS else ""
    used = min(size, counts[-1])
    split = f"{groups} data-parallel groups of ranks compute {' or '.join(map(str, counts))} rows each ({shown}{more})"
    yield (
        f"rows: {global_batch} a step; {f'{split}; ' if groups > 1 else ''}{number} micro-batch"
        f"{'es' if number > 1 else ''} of {used}"
    )
    if counts[0] == 0:
        idle = sum(not part for part in parts)
        yield f"!! {idle} of {groups} groups of ranks have no rows: there are {global_batch}"
    elif len(counts) > 1:
        yield (
            f"!! {global_batch} rows do not divide by {groups} groups of ranks: some compute "
            f"{counts[0]} and wait for those with {counts[1]}"
        )
    if rest := counts[-1] % used:
        alike = settings.layout.pipeline > 1 or settings.layout.compile
        padded = "is padded with rows that do not count" if alike else "is smaller"
        yield f"!! {counts[-1]} rows do not divide by micro-batches of {used}: the last, of {rest}, {padded}"


def _stages_of_pipeline(plan: Plan, settings: Settings) -> Iterator[str]:
    layout, num_layers = settings.layout, plan.shape.num_layers
    if layout.pipeline == 1:
        return
    total = layout.pipeline * layout.stages
    yield f"pipeline: {layout.schedule}, {total} stages"
    for rank in range(layout.pipeline):
        parts = []
        for stage in stages_of(layout, rank):
            layers = layers_of(num_layers, total, stage)
            ends = "embedding, " * (stage == 0), ", head" * (stage == total - 1)
            shown = f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
            parts.append(f"{ends[0]}{shown}{ends[1]}" if layers else "no layers")
        yield f"  {rank}: {' | '.join(parts)}"
    if num_layers % total:
        yield f"!! {num_layers} layers do not divide by {total} stages: some have one more, and the others wait"


def peak_memory(plan: Plan, settings: Settings, world_size: int, kind: str) -> int:
    """Return the estimated peak memory of a rank [bytes]. `kind`: type of the device, for which settings are known."""
    return max(_need(plan, stage, settings, world_size, kind).peak for stage in range(len(plan.stages)))


def _rank_memory(plan: Plan, settings: Settings, world_size: int, device: RankDevice) -> Iterator[str]:
    needs = {stage: _need(plan, stage, settings, world_size, device.kind) for stage in range(len(plan.stages))}
    stage, need = max(needs.items(), key=lambda item: item[1].peak)
    where = f" of stage {stage + 1}" if len(needs) > 1 else ""
    largest = f"{format_bytes(need.peak)} at its largest, the {need.peak_moment}{where}"
    yield f"memory of a rank ({device.name}), estimated: {largest}"
    for name, size in sorted(need.at_peak.items(), key=lambda item: -item[1]):
        if size:
            yield f"  {name}: {format_bytes(size)}"
    others = (f"{name} {format_bytes(sum(sizes.values()))}" for name, sizes in need.moments.items())
    yield f"  by moment: {', '.join(others)}"
    if need.host:
        yield f"  in the host's memory: {format_bytes(need.host)}"
    if need.disk:
        yield f"  on a disk: {format_bytes(need.disk)}"
    limit, source = settings.plan.device_memory, "plan.device_memory is"
    if limit is None:
        limit, source = device.memory, f"the memory for each rank ({device.name}) is"
    if limit is None:
        yield "  device memory is unknown: set it with --set plan.device_memory=80_000_000_000 [bytes]"
    elif need.peak > limit:
        yield f"!! does not fit: {source} {format_bytes(limit)}, {format_bytes(need.peak - limit)} less"
    else:
        yield f"  fits: {source} {format_bytes(limit)}, {100 * need.peak / limit:.0f} % of it used"


def _need(plan: Plan, stage: int, settings: Settings, world_size: int, device: str) -> Memory:
    chosen = plan.stages[stage]
    batch = row_length(settings.train, chosen.seq_len), chosen.global_batch
    return memory_of_any(plan.shape, settings, world_size, batch, device)


def _steps(plan: Plan) -> Iterator[str]:
    yield f"run: {plan.steps:,} steps, {plan.num_tokens:,} tokens"
    if len(plan.stages) > 1:
        for number, stage in enumerate(plan.stages, start=1):
            yield (
                f"  stage {number}: steps {stage.first_step + 1}-{stage.end}, {stage.num_tokens:,} tokens, "
                f"{stage.global_batch} rows of {stage.seq_len}"
            )


def _cost(plan: Plan, settings: Settings, world_size: int) -> Iterator[str]:
    per_step = {_flops_of_step(plan, stage) for stage in plan.stages}
    total = sum(_flops_of_step(plan, stage) * stage.num_steps for stage in plan.stages)
    steps = " to ".join(f"{flops:.3g}" for flops in sorted(per_step)[:: max(1, len(per_step) - 1)])
    yield f"FLOPs: {steps} a step, {total:.3g} in all, {total / world_size:.3g} on each rank"
    if peak := settings.train.peak_flops:
        yield f"  {total / world_size / peak:.3g} s at the peak of the devices ({peak:.3g} FLOP/s each)"
    yield f"checkpoint: {format_bytes(checkpoint_bytes_of_any(plan.shape, settings))} over all ranks"
    if not axes_problem(settings.layout, world_size):
        yield f"  its metadata: {format_bytes(metadata_bytes(plan.shape, settings, world_size))}"


def _flops_of_step(plan: Plan, stage: StagePlan) -> int:
    length = row_length(plan.settings.train, stage.seq_len)
    return flops_per_token(plan.shape, length) * stage.global_batch * length
