"""Comparison figures and advice for a plan.

The figures show the sizes that other scaling laws choose and the expected loss. The advice sentences cover shortage of
data, unusual proportions of model and run, and the cost of settings that the recipe fixes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from schemas.origin import CHECKPOINT
from schemas.takedown import removed_spans
from schemas.tokens import TRAIN, Dataset, shard_key, split_copies
from train.config.plan import OwnLaw, PlanConfig
from train.data.order import tokens_by_source
from train.data.packing import PackedSource
from train.data.permutation import RowOrder
from train.model.shape import OwnShape, active_parameters, counted_keys, counted_parameters
from train.plan.plan import Plan
from train.plan.rules import SOURCE as APPENDIX_F
from train.plan.rules import Row, SourcedFigure, figures_of, training_flops
from train.plan.target import AVAILABLE_TOKENS, LAWS_BY_NAME, NEAR, Target, law_of
from train.scaling import laws, repeats
from train.scaling.laws import LossLaw
from train.scaling.own_law import MAX_EXTRAPOLATION, law_in
from train.scaling.repeats import RepeatedData

OWN_NUMBERS = {"floor": "nats/token", "a": "", "b": "", "alpha": "", "beta": "", "exponent": ""}
"""The parameters of a law that was fitted to the user's own runs, with their units."""


def size_figures(plan: Plan, target: Target, unique: Mapping[str, float]) -> list[SourcedFigure]:
    """Return the figures of the sizes that each scaling law chooses for the budget, and of the expected loss.

    Without a budget, the laws choose for the compute of the plan itself, 6ND. `unique`: unique tokens of each source.
    """
    return figures_of([*_rows(plan, target), *_loss_rows(plan, unique)])


def _rows(plan: Plan, target: Target) -> Iterator[Row]:
    compute = target.budget or 6.0 * plan.active_params * plan.num_tokens
    formula = _budget_formula(plan.settings.plan) if target.budget else "6ND of this plan"
    yield "compute_6nd", compute, "FLOPs", formula, "recipe" if target.budget else "count"
    own = law_of(plan.settings.plan)
    for law in (own, *(law for law in (laws.TWENTY, *LAWS_BY_NAME.values()) if law != own)):
        size = law.for_compute(compute)
        counted = "N" if law.counts == "all" else "N'"
        key = law.name.lower().replace(", ", "_").replace(" ", "_")
        yield f"size.{key}.params", size.params, "parameters", f"{counted}: {law.formula}", law.source
        yield f"size.{key}.tokens", size.tokens, "tokens", "D of the same", law.source
        if isinstance(law, LossLaw):
            loss = law.loss(size.params, size.tokens)
            if loss > math.log(plan.shape.vocab_size):
                continue  # the advice explains why
            yield f"size.{key}.loss", loss, "nats/token", "L(N, D) of the law's own corpus", law.source


def _budget_formula(sizing: PlanConfig) -> str:
    """Return the formula that computes the budget C from the settings."""
    if sizing.compute is not None:
        return "the budget"
    hours = "gpu_hours" if sizing.gpu_hours is not None else "usd / usd_per_gpu_hour"
    return f"{hours} · 3600 s · peak · cluster.mfu, what 6N is of flops_per_token"


def _loss_rows(plan: Plan, unique: Mapping[str, float]) -> Iterator[Row]:
    """Yield the expected loss of the run, after the constants of a law that was fitted to the user's runs."""
    own, data = plan.settings.plan.own_law, repeats.count_repeated_tokens(tokens_by_source(plan.stages), unique)
    if own is None:
        formula, source = f"L(N', D') of this run, {_on_c4(plan)}", repeats.SOURCE
    else:
        formula, source = "L(N, D') of this run", f"{own.source}; D': {repeats.SOURCE}"
        for name, unit in OWN_NUMBERS.items():
            yield f"own_law.{name}", getattr(law_in(own), name), unit, own.interval(name), own.source_of(name)
    if (loss := _loss(plan, own, data)) <= math.log(plan.shape.vocab_size):
        yield "expected_loss", loss, "nats/token", formula, source


def _on_c4(plan: Plan) -> str:
    """Return a text that names the corpus of the published law, and its sizes if the model is outside them."""
    least, most = repeats.SIZES
    within = least <= plan.active_params <= most
    return "on C4" if within else f"on C4, a guess: its law was fitted to {least:,.0f} to {most:,.0f} parameters"


def _loss(plan: Plan, own: OwnLaw | None, data: RepeatedData) -> float:
    """Return the expected loss of the run [nats/token]; `own`: law fitted to the user's runs, None = published law."""
    if own is not None:
        # N is not reduced for repeated tokens: the runs of the law repeat none.
        return law_in(own).loss(plan.active_params, data.worth)
    return repeats.LAW.loss(repeats.worth_of_params(data.seen, plan.active_params), data.worth)


def flops_rows(plan: Plan) -> Iterator[Row]:
    """Yield the FLOPs per token by other counting rules than that of the plan, for comparison."""
    shape, length = plan.shape, plan.seq_len
    body, attention = active_parameters(shape, False), 12 * shape.query_width * counted_keys(shape, length)
    yield "flops_per_token.6n", 6 * plan.active_params, "FLOPs", "6·N, no attention", "Kaplan et al. 2020, section 2.1"
    yield "flops_per_token.6n_body", 6 * body, "FLOPs", "6·N', embeddings left out", "Kaplan et al. 2020, section 2.1"
    if isinstance(shape, OwnShape):
        return  # the other rules count the matrices of a transformer
    causal = plan.flops_per_token - attention // 2
    yield "flops_per_token.causal", causal, "FLOPs", "attention by what is seen: 6·layers·q·L", "count"
    for name, ends in (("appendix_f", True), ("appendix_f_body", False)):
        formula = "Hoffmann's terms" if ends else "the same without embedding and logits, as their Table A4"
        yield f"flops_per_token.{name}", training_flops(shape, length, ends) / length, "FLOPs", formula, APPENDIX_F


def advice(plan: Plan, target: Target, unique: Mapping[str, float]) -> list[str]:
    """Return sentences of advice on the data and on a law that was fitted to the user's runs.

    `unique`: unique tokens of each source.
    """
    own, drawn = plan.settings.plan.own_law, tokens_by_source(plan.stages)
    epochs = {source: tokens / unique[source] for source, tokens in drawn.items()}
    lines = _distrust(plan, own) if own else []
    if max(epochs.values()) > NEAR:
        lines.append(_of_repeats(plan, own, repeats.count_repeated_tokens(drawn, unique), epochs))
    lines += _of_no_use(plan, target, _loss(plan, own, repeats.count_repeated_tokens(drawn, unique)))
    lines += _of_budget(plan, target)
    tokens, most = target.asked.tokens, min(target.most, plan.num_tokens * NEAR)
    if tokens > target.most * NEAR:
        lines.append(_of_shortage(plan, target, epochs))
    elif tokens < target.unique / NEAR and target.how != AVAILABLE_TOKENS and tokens <= most and not target.fixed:
        what = "budget" if target.budget else "size"
        lines.append(
            f"{target.unique - tokens:,.0f} of {target.unique:,.0f} unique tokens are not needed for this {what}."
        )
    return lines


def tombstones(dataset: Dataset) -> Iterator[str]:
    """Yield a sentence about the documents that takedowns removed from the sources, if their tokens count much."""
    spans = removed_spans(dataset.folder.child("../.."), dataset.manifest)
    total = dataset.num_tokens()
    for source in total:
        keys = (shard_key(f"{source}/{TRAIN}", n) for n in range(len(dataset.streams[f"{source}/{TRAIN}"])))
        removed = sum(length for key in keys for _, length in spans.get(key, ()))
        if removed and removed >= MIN_TOMBSTONES * total[source]:
            yield (
                f"{removed:,} of {total[source]:,} tokens of {source} are in the place of documents that a takedown "
                "removed. No step learns from them, but the sizes, epochs and weights of this plan count them. A "
                "takedown with --compact leaves none."
            )


def unread_copies(dataset: Dataset, streams: Mapping[str, RowOrder]) -> Iterator[str]:
    """Yield a sentence about each source of repeated documents that has less than a chunk, so that no run reads it."""
    tokens = dataset.num_tokens()
    for source in dataset.copies:
        if source not in streams and tokens[source] <= dataset.chunk_tokens:
            yield (
                f"{source} is not read: its {tokens[source]:,} tokens are no whole chunk of {dataset.chunk_tokens:,}. "
                "A smaller tokens.chunk_tokens would read it."
            )


def heldout_read_before(plan: Plan) -> Iterator[str]:
    """Yield a sentence if the weights that a run begins from may have read its held-out documents.

    Weights that were trained on the same dataset alone have not.
    """
    line = list(plan.origin.line) if plan.origin else []
    if plan.settings.train.eval_every and any(own.dataset != plan.dataset for own in line):
        known = all(own.format == CHECKPOINT for own in line)
        evaluated = "`penstock evaluate` leaves those out" if known else "Nothing can say which"
        yield (
            "The weights to begin from may have read held-out documents, whose losses during training are then too "
            f"low. {evaluated}."
        )


MIN_TOMBSTONES = 0.001
"""Share of a source's tokens that removed documents leave, from which on a plan says so."""
MOST_PADDING = 0.05
"""Share of padding from which on the advice says what it costs."""


def costly_padding(plan: Plan, packed: Sequence[PackedSource]) -> Iterator[str]:
    """Yield a sentence on the FLOPs that padding costs, if it is at least 5 % of the positions of the run."""
    drawn, padding = tokens_by_source(plan.stages), {source.name: source.padding for source in packed}
    share = sum(drawn[name] * padding.get(name, 0.0) for name in drawn) / sum(drawn.values())
    if share >= MOST_PADDING:
        flops = plan.flops_per_token * sum(drawn.values())
        worst = max(drawn, key=lambda name: padding.get(name, 0.0))
        yield (
            f"{100 * share:.1f} % of the positions are padding ({worst} {100 * padding[worst]:.1f} %): "
            f"{share * flops:.3g} of {flops:.3g} FLOPs are lost. Raise train.pack_chunks = "
            f'{plan.settings.train.chunks_together}, lower train.seq_len, or set train.packing = "stream".'
        )


def _of_repeats(plan: Plan, own: OwnLaw | None, data: RepeatedData, epochs: Mapping[str, float]) -> str:
    """Return the sentence on how often the run reads its unique tokens, and how many new tokens this is worth."""
    evenly = max(epochs.values()) <= NEAR * min(epochs.values())
    each = ", ".join(f"{source} {times:.3g} times" for source, times in epochs.items())
    read = (
        f"reads {data.unique:,.0f} unique tokens {data.epochs:.3g} times"
        if evenly
        else f"draws {data.tokens:,.0f} tokens from {data.unique:,.0f} unique ones ({each})"
    )
    law, where = (law_in(own), "by the own law") if own else (repeats.LAW, _on_c4(plan))
    worth = f"The run {read}, worth {data.worth:,.0f} new ones ({100 * data.share:.0f} % each)"
    loss, with_new = _loss(plan, own, data), law.loss(plan.active_params, data.tokens)
    if max(loss, with_new) > math.log(plan.shape.vocab_size):
        return f"{worth[:-1]}; {repeats.SOURCE})."
    return f"{worth}: expected loss {loss:.3f}, with as many new ones {with_new:.3f} ({where}; {repeats.SOURCE})."


def _of_no_use(plan: Plan, target: Target, expected: float) -> Iterator[str]:
    """Yield a sentence if the plan leaves out expected losses because they are above ln V."""
    # ln V is the loss of a uniform prediction.
    limit, compute = math.log(plan.shape.vocab_size), target.budget or 6.0 * plan.active_params * plan.num_tokens
    sized = ((law, law.for_compute(compute)) for law in (law_of(plan.settings.plan), *LAWS_BY_NAME.values()))
    losses = [law.loss(size.params, size.tokens) for law, size in sized if isinstance(law, LossLaw)]
    if above := sorted({round(loss, 1) for loss in (*losses, expected) if loss > limit}):
        given = f"{above[0]:.1f}" + (f" to {above[-1]:.1f}" if len(above) > 1 else "")
        yield (
            f"Expected losses above ln V = {limit:.1f} are left out: the laws are for larger models, and give {given} "
            "nats here."
        )


def _of_budget(plan: Plan, target: Target) -> Iterator[str]:
    """Yield a sentence if settings choose the tokens, and another number of them than the budget pays for."""
    train = plan.settings.train
    ends = bool(train.stages) and train.stages[-1].tokens is not None
    if target.budget is None or target.fixed or (train.steps is None and not ends):
        return
    counted = counted_parameters(plan.shape, law_of(plan.settings.plan).counts == "all")
    spent, setting = 6.0 * counted * plan.num_tokens, "train.steps" if train.steps is not None else "train.stages"
    if not 1 / NEAR <= spent / target.budget <= NEAR:
        yield (
            f"{setting} decides the number of training tokens, and the budget does not: 6ND of this run is "
            f"{spent:.3g} FLOPs, that of the budget {target.budget:.3g}."
        )


def _of_shortage(plan: Plan, target: Target, epochs: Mapping[str, float]) -> str:
    """Return the advice for too few tokens: train a smaller model, repeat data, or get more, with amounts."""
    sizing, required, unique = plan.settings.plan, target.asked.tokens, target.unique
    law, least = law_of(sizing), law_of(sizing).for_tokens(target.most).params
    if target.fixed:
        return f"{law.name} asks for {required:,.0f} tokens, and train.epochs gives {target.most:,.0f}." + (
            f" Train smaller: {least:,.0f} parameters suit these." if least >= sizing.min_params else ""
        )
    passes_give = "1 pass gives" if sizing.max_epochs == 1 else f"{sizing.max_epochs:g} passes give"
    sentence = f"{law.name} asks for {required:,.0f} tokens, and {passes_give} {target.most:,.0f}."
    if least >= sizing.min_params:
        sentence += f" Train smaller: {least:,.0f} parameters suit these."
    passes = math.ceil(10 * sizing.max_epochs * required / target.most) / 10
    if passes <= repeats.MOST_EPOCHS:
        worth = repeats.worth_of_tokens(1.0, passes) / passes
        sentence += (
            f" Or repeat: plan.max_epochs = {passes:g} would do, each token worth {100 * worth:.0f} % of a new one."
        )
    else:
        sentence += (
            f" Repeating cannot make up for it: it would take {passes:,.0f} passes, and beyond some "
            f"{repeats.MOST_EPOCHS} nothing is left to gain ({repeats.SOURCE})."
        )
    if required > unique:
        return f"{sentence} Or get more data: {required - unique:,.0f} tokens more would be read once."
    soonest = max(epochs, key=lambda source: epochs[source] / split_copies(source)[1])
    return (
        f"{sentence} Or draw less of {soonest}, which is read through soonest: the sources have {unique:,.0f} tokens."
    )


def _distrust(plan: Plan, own: OwnLaw) -> list[str]:
    """Return the reasons why a law fitted to the user's runs may not hold for this plan, one sentence per entry."""
    lines = []
    if own.dataset != plan.dataset:
        of = f"dataset {own.dataset[:12]}" if own.dataset else "a dataset that it does not name"
        lines.append(
            f"The own law was fitted on {of}, this run's is {plan.dataset[:12]}: a law holds for one corpus and "
            "tokenizer; `penstock ladder` fits it anew."
        )
    times = 6 * plan.active_params * plan.num_tokens / own.compute
    if times > MAX_EXTRAPOLATION:
        lines.append(
            f"This plan costs {times:,.0f} times the dearest run that the own law was fitted to (6ND = "
            f"{own.compute:.3g} FLOPs); so far above, its sizes and losses are guesses: `penstock ladder --largest` "
            "trains larger ones."
        )
    return lines


# Proportions outside the range of published runs. They are reported as advice and never rejected.

LEAST_RATIO, GPT_3 = 1.7, "GPT-3 175B: 300 G tokens; Brown et al. 2020, arXiv 2005.14165, table 2.1"
MOST_RATIO, QWEN_3 = 60_000.0, "Qwen 3 0.6B: 36 T tokens; Yang et al. 2025, arXiv 2505.09388, sections 2 and 3"
FEW_STEPS = 100
"""Optimizer steps below which a warm-up of a tenth of the run has fewer than ten updates."""
MOST_EMBEDDINGS = 0.5
"""Share of the parameters in the embeddings above which the advice mentions this share."""


def unusual_proportions(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each number outside its usual range: tokens per parameter, steps, share of embeddings."""
    ratio = plan.num_tokens / plan.active_params
    if ratio < LEAST_RATIO:
        yield (
            f"{ratio:.3g} tokens for each of {plan.active_params:,} parameters: fewer than in any published run "
            f"({LEAST_RATIO} in {GPT_3}); most of the model will stay as it was drawn. Train a smaller one, or longer."
        )
    if ratio > MOST_RATIO:
        yield (
            f"{ratio:,.0f} tokens for each of {plan.active_params:,} parameters: more than in any published run "
            f"({MOST_RATIO:,.0f} in {QWEN_3}); a larger model would learn more of them."
        )
    if plan.steps < FEW_STEPS:
        yield (
            f"{plan.steps} steps are few: {plan.warmup_steps} of them warm up. A smaller train.global_batch makes more "
            f"of the same tokens."
        )
    share = 1 - active_parameters(plan.shape, False) / plan.active_params
    if share > MOST_EMBEDDINGS:
        yield (
            f"{100 * share:.0f} % of the parameters are embeddings of {plan.shape.vocab_size:,} tokens; a smaller "
            "vocabulary would leave more to the layers."
        )
