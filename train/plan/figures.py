"""The figures of a plan: every number with its unit, its formula and the source of the formula.

They cover data, model, run, cost and memory; `DatasetOffer` holds the samples and the target that they follow from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.tokens import TRAIN, Dataset
from train.config.settings import Settings
from train.data.order import tokens_by_source
from train.data.packing import PackedSource
from train.data.stages import StagePlan, row_length
from train.model.shape import ModelShape, OwnShape, active_parameters, flops_per_token, num_parameters
from train.parallel.layout import axes_of, data_ranks, layout_problems
from train.parallel.memory import SOURCES, Memory
from train.parallel.own_memory import memory_of_any
from train.plan import rules
from train.plan.advice import flops_rows, size_figures
from train.plan.plan import Plan
from train.plan.rules import Row, SourcedFigure, figures_of
from train.plan.target import Target, formula_for_params, formula_for_tokens
from train.scaling import repeats

MAX_WARMUP = 2000
HOFFMANN = "Hoffmann et al. 2022, arXiv 2203.15556, Table 3"
TABLE_A9 = "Hoffmann et al. 2022, arXiv 2203.15556, Table A9"
AINSLIE = "Ainslie et al. 2023, arXiv 2305.13245, section 3.3"
KV_HEADS = "num_heads / 4, a power of two, at most 8"
ALL_HEADS = "num_heads, below 1e9 parameters"
SHAZEER = "Shazeer 2020, arXiv 2002.05202, section 3"
MOBILE = "Liu et al. 2024, arXiv 2402.14905, section 2.2"
PORIAN_WARMUP = "Porian et al. 2024, arXiv 2406.19146, section 3.3"
DING = "Ding et al. 2024, arXiv 2404.10830, section 3"
MEMORY = "memory"
"""Prefix of the names of memory figures."""
ACTIVE = "the dense law at the active parameters, as Krajewski et al. 2024, arXiv 2402.07871, compare by FLOPs"
PALM = "Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B"


@dataclass(frozen=True)
class DatasetOffer:
    """The samples that the dataset provides under the settings, and the target size that follows from them."""

    samples: dict[str, int]
    """Unique samples of each source in use."""
    most_samples: int
    """Samples of a run in which the source that repeats soonest is read max_epochs times; with `train.epochs`, those of
    the run."""
    target: Target
    """Target size of the model and the run."""
    seq_len: int
    """Tokens of a sample."""
    packed: Sequence[PackedSource] = ()
    """Packing results of each source; empty = rows are cut from the stream."""

    @property
    def unique(self) -> dict[str, float]:
        """Unique tokens of each source in use."""
        return {source: float(number * self.seq_len) for source, number in self.samples.items()}


def figures_of_plan(dataset: Dataset, plan: Plan, offer: DatasetOffer, compute: float) -> list[SourcedFigure]:
    """Return all figures of the plan, in order of computation.

    `compute`: FLOPs of the run, embeddings not counted.
    """
    figures = [
        *_data_figures(dataset, plan, offer),
        *size_figures(plan, offer.target, offer.unique),
        *_model_figures(plan, offer),
    ]
    return [*figures, *_run_figures(plan, offer, compute), *_cost_figures(plan)]


def _data_figures(dataset: Dataset, plan: Plan, offer: DatasetOffer) -> list[SourcedFigure]:
    total, drawn, seq_len = dataset.num_tokens(TRAIN), tokens_by_source(plan.stages), plan.settings.train.seq_len
    unique = {source: number * seq_len for source, number in offer.samples.items()}
    given = {source: f", train.epochs = {times:g}" for source, times in plan.settings.train.epochs.items()}
    given |= {source: f", {number} in an epoch (dedup.rehydration)" for source, number in dataset.copies.items()}
    worth = repeats.count_repeated_tokens(drawn, unique).worth
    repeated = "Σ U + U·R*·(1 − exp(−(D/U − 1)/R*)), R* = 15.39"
    whole = "U = Σ whole chunks; a source's last token is a target only"
    rows: list[Row] = [
        *((f"tokens.{source}", total[source], "tokens", "in the manifest", "dataset") for source in offer.samples),
        *_packed_rows(offer.packed),
        (
            "unique_tokens",
            sum(unique.values()),
            "tokens",
            "U = Σ rows · L, padding included" if offer.packed else whole,
            "dataset",
        ),
        ("tokens", plan.num_tokens, "tokens", "D = Σ steps · B · L", "count"),
        *(
            (
                f"epochs.{source}",
                tokens / unique[source],
                "passes",
                f"D of the source / U{given.get(source, '')}",
                "count",
            )
            for source, tokens in drawn.items()
        ),
        ("worth_in_unique_tokens", round(worth), "tokens", repeated, repeats.SOURCE),
    ]
    return figures_of(rows)


def _packed_rows(packed: Sequence[PackedSource]) -> Iterator[Row]:
    """Yield the padding of each packed source and the number of its documents that packing cuts."""
    for source in packed:
        cut = f"in more than one row, of {source.num_documents:,}; {source.cut_in_stream:,} cut from the stream"
        yield f"padding.{source.name}", source.padding, "", "1 − tokens / (rows · L)", DING
        yield f"documents_cut.{source.name}", source.cut, "documents", cut, DING


def _model_figures(plan: Plan, offer: DatasetOffer) -> list[SourcedFigure]:
    shape, settings, origin = plan.shape, plan.settings.plan, plan.origin
    exact = "N = V·d·(1 if tied else 2) + layers·(2·d·q + 2·d·kv + 3·d·ffw + norms) + d, other options likewise"
    nearest, counted = "nearest to wanted_params", "counted in the model that plan.model builds"
    kv_heads = ALL_HEADS if shape.num_kv_heads == shape.num_heads else KV_HEADS

    def chosen(setting: float | None, formula: str, source: str) -> tuple[str, str]:
        return _given(setting, formula, source) if origin is None else ("as in the weights", origin.name)

    rows: list[Row] = [
        (
            "wanted_params",
            round(offer.target.params),
            "parameters",
            *formula_for_params(offer.target, settings),
        ),
        ("num_layers", shape.num_layers, "", *chosen(settings.num_layers, nearest, TABLE_A9)),
        ("d_model", shape.d_model, "", *chosen(settings.d_model, nearest, TABLE_A9)),
        ("num_heads", shape.num_heads, "", *chosen(settings.num_heads, "d / width of a head", TABLE_A9)),
        ("num_kv_heads", shape.num_kv_heads, "", *chosen(settings.num_kv_heads, kv_heads, AINSLIE)),
        (
            "d_ffw",
            shape.d_ffw,
            "",
            *chosen(settings.d_ffw, "4·d, 8/3 · d with a gate, from d = 512 on in 256s", SHAZEER),
        ),
        ("tie_embeddings", int(shape.tie_embeddings), "", *chosen(settings.tie_embeddings, "2·V·d > N/5", MOBILE)),
        ("params", plan.num_params, "parameters", counted if isinstance(shape, OwnShape) else exact, "count"),
        ("params_without_embeddings", num_parameters(shape, False), "parameters", "N − embeddings", "count"),
    ]
    active = active_parameters(shape)
    if isinstance(shape, OwnShape):
        rows.append(("active_params", active, "parameters", "N of the laws: those that compute one token", ACTIVE))
    rows.append(("tokens_per_parameter", plan.num_tokens / active, "", "D / N", HOFFMANN))
    return figures_of(rows)


def _run_figures(plan: Plan, offer: DatasetOffer, compute: float) -> list[SourcedFigure]:
    body, tokens = active_parameters(plan.shape, False), plan.num_tokens
    train, optim = plan.settings.train, plan.settings.optim
    tokens_formula, source = formula_for_tokens(offer.target, plan.settings.plan)
    limit, most = (", or for max_epochs", "in max_epochs") if not train.epochs else ("", "of train.epochs")
    batch = f"B = 0.2920·C^0.3271 / L, to a power of two; C for D = {tokens_formula}{limit}"
    if plan.global_batch == offer.most_samples:
        batch = f"all samples {most}, fewer than {batch}"
    steps = f"D / (B · L), D = {tokens_formula}, " + ("rounded down" if train.epochs else "no source over max_epochs")
    warmup = f"as many tokens as parameters, at most {MAX_WARMUP} steps and a tenth of the run"
    law = rules.step_law_learning_rate(body, tokens)
    rows: list[Row] = [
        ("compute", compute, "FLOPs", "C = (6·matrices + 12·layers·d·L)·D without embeddings", rules.DEEPSEEK),
        ("global_batch", plan.global_batch, "sequences", *_given(train.global_batch, batch, rules.DEEPSEEK)),
        ("batch_tokens", plan.global_batch * plan.seq_len, "tokens", "B · L", "count"),
        ("batch_tokens.step_law", rules.step_law_batch(tokens), "tokens", "0.58·D^0.571", rules.STEP_LAW),
        ("batch_tokens.porian", rules.porian_batch(body), "tokens", "160·2048·(N'/108e6)^(2/3)", rules.PORIAN),
        ("steps", plan.steps, "steps", *_given(train.steps, steps, source)),
        ("warmup_steps", plan.warmup_steps, "steps", *_given(optim.warmup_steps, warmup, PORIAN_WARMUP)),
        ("learning_rate", plan.learning_rate, "", *_rate_formula(plan)),
        ("learning_rate.step_law", law, "", "1.79·N'^−0.713·D^0.307", rules.STEP_LAW),
        ("learning_rate.porian", rules.porian_learning_rate(body), "", "0.0047·(N'/108e6)^(−1/3)", rules.PORIAN),
    ]
    if body < rules.MAX_KAPLAN_PARAMS:
        rate = rules.kaplan_learning_rate(body)
        rows.append(("learning_rate.kaplan", rate, "", "0.003239 − 0.0001395·ln N'", rules.KAPLAN))
    return figures_of(rows)


def _rate_formula(plan: Plan) -> tuple[str, str]:
    """Return formula and source of the learning rate."""
    sizing, own = plan.settings.plan, plan.settings.plan.own_law
    formula, source = "0.3118·C^−0.1250", rules.DEEPSEEK
    if own is not None and own.rate_factor != 1:
        formula, source = f"{own.rate_factor:.3g}·{formula}", f"{source}, factor {own.source}"
    if sizing.parametrization == "mup" and own is not None:
        formula, source = f"found at the base width {sizing.mup_base_width}", own.source
    return _given(plan.settings.optim.learning_rate, formula, source)


def _given(setting: float | None, formula: str, source: str) -> tuple[str, str]:
    """Return formula and source of a value; "as given" and "recipe" if the recipe sets the value."""
    return (formula, source) if setting is None else ("as given", "recipe")


def _cost_figures(plan: Plan) -> list[SourcedFigure]:
    """Return the figures of FLOPs, duration (if the device's peak is known) and memory."""
    train = plan.settings.train
    lengths = [row_length(train, stage.seq_len) for stage in plan.stages]
    flops = sum(
        flops_per_token(plan.shape, length) * length * stage.num_samples
        for stage, length in zip(plan.stages, lengths, strict=True)
    )
    rows: list[Row] = [
        ("flops_per_token", plan.flops_per_token, "FLOPs", "6·(matrices + V·d) + 12·layers·q·L", PALM),
        ("flops", flops, "FLOPs", "Σ flops_per_token · positions", PALM),
        *flops_rows(plan),
    ]
    if train.peak_flops is not None:
        rows.append(
            ("seconds_at_peak", flops / train.peak_flops, "s", "flops / train.peak_flops, one device", "recipe")
        )
    return figures_of([*rows, *_memory_rows(plan)])


def memory_needed(shape: ModelShape, settings: Settings, stages: Sequence[StagePlan], world_size: int) -> Memory | None:
    """Return the memory of one GPU in the training stage that needs the most memory.

    None if the layout, or the global batch of a stage, does not work with `world_size` ranks.
    """
    needs = []
    for stage in stages:
        length, batch = row_length(settings.train, stage.seq_len), stage.global_batch
        if any(layout_problems(shape, settings, world_size, [length], batch)):
            return None
        if data_ranks(axes_of(settings.layout, world_size)) > batch:
            return None
        needs.append(memory_of_any(shape, settings, world_size, (length, batch), "cuda"))
    return max(needs, key=lambda need: need.peak)


def update_memory_figures(plan: Plan) -> Plan:
    """Return the plan with memory figures recomputed from its current settings."""
    others = [figure for figure in plan.figures if not figure.name.startswith(f"{MEMORY}.")]
    return plan.model_copy(update={"figures": [*others, *figures_of(_memory_rows(plan))]})


def _memory_rows(plan: Plan) -> Iterator[Row]:
    resolved = plan.settings.for_device("cuda")
    device = f"GPU in {resolved.train.precision}" + (", compiled" if resolved.layout.compile else "")
    for world_size in plan.settings.plan.world_sizes:
        need = memory_needed(plan.shape, plan.settings, plan.stages, world_size)
        if need is not None:
            yield from memory_rows(need, world_size, device)


def memory_rows(need: Memory, world_size: int, device: str = "GPU") -> Iterator[Row]:
    """Yield the memory of one of `world_size` ranks, by purpose and in total."""
    for name, size in need.at_peak.items():
        if size:
            yield f"{MEMORY}.{world_size}.{name}", size, "bytes", *SOURCES[name]
    formula = f"sum of these, per {device}, at its peak: {need.peak_moment}"
    yield f"{MEMORY}.{world_size}", need.peak, "bytes", formula, "estimate"
    for name, size in (("host", need.host), ("disk", need.disk)):
        if size:
            yield f"{MEMORY}.{world_size}.{name}", size, "bytes", "what layout.offload keeps there", "count"
