"""The sizes of a plan beside those of other laws, what its loss may be, and what to do where data runs out."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from train.config.plan import OwnLaw, PlanConfig
from train.config.settings import Settings
from train.data.order import tokens_by_source
from train.data.stages import StagePlan
from train.model.shape import ModelShape, num_parameters
from train.plan.plan import Plan
from train.plan.rules import SOURCE as APPENDIX_F
from train.plan.rules import Figure, Row, figures_of, training_flops
from train.plan.search.devices import Cluster
from train.plan.search.search import search
from train.plan.target import NAMED, TOKENS_THERE_ARE, Target, law_of
from train.scaling import laws, repeats
from train.scaling.laws import LossLaw
from train.scaling.own_law import FAR, law_in
from train.scaling.repeats import Repeated

NEAR = 1.05
"""Sizes and tokens within a twentieth of each other are called equal in words."""
OWN_NUMBERS = {"floor": "nats/token", "a": "", "b": "", "alpha": "", "beta": "", "exponent": ""}
"""Numbers of an own law, with their units."""


def size_figures(plan: Plan, target: Target, unique: Mapping[str, float]) -> list[Figure]:
    """What every law would choose, for the budget or else for the plan's own 6ND; `unique`: tokens of each source."""
    return figures_of([*_rows(plan, target), *_loss_rows(plan, unique)])


def _rows(plan: Plan, target: Target) -> Iterator[Row]:
    compute = target.budget or 6.0 * plan.num_params * plan.num_tokens
    told = _budget_told(plan.settings.plan) if target.budget else "6ND of this plan"
    yield "compute_6nd", compute, "FLOPs", told, "recipe" if target.budget else "count"
    own = law_of(plan.settings.plan)
    for law in (own, *(law for law in (laws.TWENTY, *NAMED.values()) if law != own)):
        found = law.for_compute(compute)
        counted = "N" if law.counts == "all" else "N'"
        key = law.name.lower().replace(", ", "_").replace(" ", "_")
        yield f"size.{key}.params", found.params, "parameters", f"{counted}: {law.formula}", law.source
        yield f"size.{key}.tokens", found.tokens, "tokens", "D of the same", law.source
        if isinstance(law, LossLaw):
            loss = law.loss(found.params, found.tokens)
            if loss > math.log(plan.shape.vocab_size):
                continue  # advice says why
            yield f"size.{key}.loss", loss, "nats/token", "L(N, D) of the law's own corpus", law.source


def _budget_told(sizing: PlanConfig) -> str:
    """Where C comes from."""
    if sizing.compute is not None:
        return "the budget"
    hours = "gpu_hours" if sizing.gpu_hours is not None else "usd / usd_per_gpu_hour"
    return f"{hours} · 3600 s · peak · cluster.mfu, what 6N is of flops_per_token"


def _loss_rows(plan: Plan, unique: Mapping[str, float]) -> Iterator[Row]:
    """The loss of this run, and the numbers of an own law with how sure they are."""
    own, found = plan.settings.plan.own_law, repeats.repeated(tokens_by_source(plan.stages), unique)
    if own is None:
        told, source = f"L(N', D') of this run, {_on_c4(plan)}", repeats.SOURCE
    else:
        told, source = "L(N, D') of this run", f"{own.source}; D': {repeats.SOURCE}"
        for name, unit in OWN_NUMBERS.items():
            yield f"own_law.{name}", getattr(law_in(own), name), unit, own.interval(name), own.source_of(name)
    if (loss := _loss(plan, own, found)) <= math.log(plan.shape.vocab_size):
        yield "expected_loss", loss, "nats/token", told, source


def _on_c4(plan: Plan) -> str:
    """What the published law is of."""
    least, most = repeats.SIZES
    within = least <= plan.num_params <= most
    return "on C4" if within else f"on C4, a guess: its law was fitted to {least:,.0f} to {most:,.0f} parameters"


def _loss(plan: Plan, own: OwnLaw | None, found: Repeated) -> float:
    """L(N, D'); an own law's runs saw every token once and N however large, so its N stands as it is."""
    if own is not None:
        return law_in(own).loss(plan.num_params, found.worth)
    return repeats.LAW.loss(repeats.worth_of_params(found.seen, plan.num_params), found.worth)


def flops_rows(plan: Plan) -> Iterator[Row]:
    """The FLOPs of a token by other countings than the plan's own."""
    shape, length = plan.shape, plan.seq_len
    body, attention = num_parameters(shape, False), 12 * shape.num_layers * shape.query_width * length
    yield "flops_per_token.6n", 6 * plan.num_params, "FLOPs", "6·N, no attention", "Kaplan et al. 2020, section 2.1"
    yield "flops_per_token.6n_body", 6 * body, "FLOPs", "6·N', embeddings left out", "Kaplan et al. 2020, section 2.1"
    causal = plan.flops_per_token - attention // 2
    yield "flops_per_token.causal", causal, "FLOPs", "attention by what is seen: 6·layers·q·L", "count"
    for name, ends in (("appendix_f", True), ("appendix_f_body", False)):
        told = "Hoffmann's terms" if ends else "the same without embedding and logits, as their Table A4"
        yield f"flops_per_token.{name}", training_flops(shape, length, ends) / length, "FLOPs", told, APPENDIX_F


def advice(plan: Plan, target: Target, unique: Mapping[str, float]) -> list[str]:
    """What to do about the data, and how far a law of one's own may be trusted, in sentences.

    `unique`: tokens of each source that differ.
    """
    own, drawn = plan.settings.plan.own_law, tokens_by_source(plan.stages)
    epochs = {source: tokens / unique[source] for source, tokens in drawn.items()}
    lines = _distrust(plan, own) if own else []
    if max(epochs.values()) > NEAR:
        lines.append(_of_repeats(plan, own, repeats.repeated(drawn, unique), epochs))
    lines += _of_no_use(plan, target, _loss(plan, own, repeats.repeated(drawn, unique)))
    wanted, most = target.asked.tokens, min(target.most, plan.num_tokens * NEAR)
    if wanted > target.most * NEAR:
        lines.append(_of_shortage(plan, target, epochs))
    elif wanted < target.unique / NEAR and target.how != TOKENS_THERE_ARE and wanted <= most:
        what = "budget" if target.budget else "size"
        lines.append(
            f"{target.unique - wanted:,.0f} of {target.unique:,.0f} unique tokens are not needed for this {what}."
        )
    return lines


def _of_repeats(plan: Plan, own: OwnLaw | None, found: Repeated, epochs: Mapping[str, float]) -> str:
    evenly = max(epochs.values()) <= NEAR * min(epochs.values())
    each = ", ".join(f"{source} {times:.3g} times" for source, times in epochs.items())
    read = (
        f"reads {found.unique:,.0f} unique tokens {found.epochs:.3g} times"
        if evenly
        else f"draws {found.tokens:,.0f} tokens from {found.unique:,.0f} unique ones ({each})"
    )
    law, where = (law_in(own), "by the own law") if own else (repeats.LAW, _on_c4(plan))
    worth = f"The run {read}, worth {found.worth:,.0f} new ones ({100 * found.share:.0f} % each)"
    loss, with_new = _loss(plan, own, found), law.loss(plan.num_params, found.tokens)
    if max(loss, with_new) > math.log(plan.shape.vocab_size):
        return f"{worth[:-1]}; {repeats.SOURCE})."
    return f"{worth}: expected loss {loss:.3f}, with as many new ones {with_new:.3f} ({where}; {repeats.SOURCE})."


def _of_no_use(plan: Plan, target: Target, expected: float) -> Iterator[str]:
    """Why losses are left out that no model has: one that knows nothing has ln V."""
    limit, compute = math.log(plan.shape.vocab_size), target.budget or 6.0 * plan.num_params * plan.num_tokens
    sized = ((law, law.for_compute(compute)) for law in (law_of(plan.settings.plan), *NAMED.values()))
    losses = [law.loss(found.params, found.tokens) for law, found in sized if isinstance(law, LossLaw)]
    if above := sorted({round(loss, 1) for loss in (*losses, expected) if loss > limit}):
        given = f"{above[0]:.1f}" + (f" to {above[-1]:.1f}" if len(above) > 1 else "")
        yield (
            f"Expected losses above ln V = {limit:.1f} are left out: the laws are for larger models, and give {given} "
            "nats here."
        )


def _of_shortage(plan: Plan, target: Target, epochs: Mapping[str, float]) -> str:
    """Train smaller, repeat, or get more data, and how much."""
    sizing, wanted, unique = plan.settings.plan, target.asked.tokens, target.unique
    law, least = law_of(sizing), law_of(sizing).for_tokens(target.most).params
    told = f"{law.name} asks for {wanted:,.0f} tokens, and {sizing.max_epochs:g} pass(es) give {target.most:,.0f}."
    if least >= sizing.min_params:
        told += f" Train smaller: {least:,.0f} parameters suit these."
    passes = math.ceil(10 * sizing.max_epochs * wanted / target.most) / 10
    if passes <= repeats.MOST_EPOCHS:
        worth = repeats.worth_of_tokens(1.0, passes) / passes
        told += f" Or repeat: plan.max_epochs = {passes:g} would do, each token worth {100 * worth:.0f} % of a new one."
    else:
        told += (
            f" Repeating cannot make up for it: it would take {passes:,.0f} passes, and behind some "
            f"{repeats.MOST_EPOCHS} nothing is left to gain ({repeats.SOURCE})."
        )
    if wanted > unique:
        return f"{told} Or get more data: {wanted - unique:,.0f} tokens more would be read once."
    soonest = max(epochs, key=epochs.__getitem__)
    return f"{told} Or draw less of {soonest}, which is read through soonest: the sources have {unique:,.0f} tokens."


def _distrust(plan: Plan, own: OwnLaw) -> list[str]:
    """Why a law of one's own may not hold for a plan."""
    lines = []
    if own.dataset != plan.dataset:
        of = f"dataset {own.dataset[:12]}" if own.dataset else "a dataset that it does not name"
        lines.append(
            f"The own law was fitted on {of}, this run's is {plan.dataset[:12]}: a law holds for one corpus and "
            "tokenizer; `penstock ladder` fits it anew."
        )
    times = 6 * plan.num_params * plan.num_tokens / own.compute
    if times > FAR:
        lines.append(
            f"This plan costs {times:,.0f} times the dearest run that the own law was fitted to (6ND = "
            f"{own.compute:.3g} FLOPs); so far above, its sizes and losses are guesses: `penstock ladder --largest` "
            "trains larger ones."
        )
    return lines


# The proportions of a plan that no published run has: said in sentences, never refused.

LEAST_RATIO, GPT_3 = 1.7, "GPT-3 175B: 300 G tokens; Brown et al. 2020, arXiv 2005.14165, table 2.1"
MOST_RATIO, QWEN_3 = 60_000.0, "Qwen 3 0.6B: 36 T tokens; Yang et al. 2025, arXiv 2505.09388, sections 2 and 3"
FEW_STEPS = 100
"""Steps below which a warm-up of a tenth is ten updates or fewer."""
MOST_EMBEDDINGS = 0.5
"""Share of the parameters in the embeddings that is called large."""


def odd_proportions(plan: Plan) -> Iterator[str]:
    """What is out of proportion, a sentence each."""
    ratio = plan.num_tokens / plan.num_params
    if ratio < LEAST_RATIO:
        yield (
            f"{ratio:.3g} tokens for each of {plan.num_params:,} parameters: fewer than in any published run "
            f"({LEAST_RATIO} in {GPT_3}); most of the model will stay as it was drawn. Train a smaller one, or longer."
        )
    if ratio > MOST_RATIO:
        yield (
            f"{ratio:,.0f} tokens for each of {plan.num_params:,} parameters: more than in any published run "
            f"({MOST_RATIO:,.0f} in {QWEN_3}); a larger model would learn more of them."
        )
    if plan.steps < FEW_STEPS:
        yield (
            f"{plan.steps} steps are few: {plan.warmup_steps} of them warm up. A smaller train.global_batch makes more "
            f"of the same tokens."
        )
    share = 1 - num_parameters(plan.shape, False) / plan.num_params
    if share > MOST_EMBEDDINGS:
        yield (
            f"{100 * share:.0f} % of the parameters are embeddings of {plan.shape.vocab_size:,} tokens; a smaller "
            "vocabulary would leave more to the layers."
        )


# What settings that a recipe fixes cost: the fastest layout found, beside that with each of them left free.

SEARCHED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train", ("precision",)),
    ("layout", ("compile",)),
    ("layout", ("micro_batch",)),
    ("layout", ("activation_checkpointing", "activation_budget")),
)
"""Sections, and settings of them that are freed together; the first names the sentence."""
WORTH_A_WORD = 0.01
"""Least share of a step that a sentence is written for."""


def costs_of_fixed(
    shape: ModelShape, settings: Settings, run: Sequence[StagePlan], cluster: Cluster, step_seconds: float
) -> Iterator[str]:
    """A sentence for each fixed setting that makes the step of `step_seconds` longer than it has to be."""
    for section, names in SEARCHED:
        freed = without(settings, section, names)
        if freed is None:
            continue
        best = search(shape, freed, run, cluster, top=1).best
        share = step_seconds / best[0].step_seconds - 1 if best else 0.0
        if share >= WORTH_A_WORD:
            value = json.dumps(getattr(getattr(settings, section), names[0]))
            yield (
                f"{section}.{names[0]} = {value} costs {100 * share:.0f} %: {step_seconds:.3g} s a step in place of "
                f"{best[0].step_seconds:.3g} s; leave it out."
            )


def without(settings: Settings, section: str, names: Sequence[str]) -> Settings | None:
    """The same with settings of a section left out; None = none of them is set, though it may equal its default."""
    found = getattr(settings, section)
    if not found.model_fields_set & set(names):
        return None
    left = type(found).model_validate(found.model_dump(exclude_unset=True, exclude=set(names)))
    return settings.model_copy(update={section: left})
