"""The sizes of a plan beside those of other laws, what its loss may be, and what to do where data runs out."""

from collections.abc import Iterator

from train.config.own_law import OwnLaw
from train.model.shape import num_parameters
from train.plan.flops import SOURCE as APPENDIX_F
from train.plan.flops import training_flops
from train.plan.planned import Plan
from train.plan.rules import Figure, Row, figures_of
from train.plan.target import NAMED, Target, law_of
from train.scaling import laws, repeats
from train.scaling.laws import LossLaw
from train.scaling.own import FAR, law_in

NEAR = 1.05
"""Sizes and tokens within a twentieth of each other are called equal in words."""
OWN_NUMBERS = {"floor": "nats/token", "a": "", "b": "", "alpha": "", "beta": "", "exponent": ""}
"""Numbers of an own law, with their units."""


def size_figures(plan: Plan, target: Target) -> list[Figure]:
    """What every law would choose, for the budget or else for the plan's own 6ND."""
    return figures_of(_rows(plan, target))


def _rows(plan: Plan, target: Target) -> Iterator[Row]:
    compute = target.budget or 6.0 * plan.num_params * plan.num_tokens
    told = "the budget" if target.budget else "6ND of this plan"
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
            yield f"size.{key}.loss", loss, "nats/token", "L(N, D) of the law's own corpus", law.source
    if plan.settings.plan.own_law is not None:
        yield from _own_rows(plan, plan.settings.plan.own_law, target.unique)


def _own_rows(plan: Plan, own: OwnLaw, unique: float) -> Iterator[Row]:
    """The numbers of an own law, how sure they are, and the loss that it promises this run."""
    for name, unit in OWN_NUMBERS.items():
        yield f"own_law.{name}", getattr(law_in(own), name), unit, own.told(name), own.held_if(name)
    loss = _own_loss(plan, own, unique)
    yield "expected_loss", loss, "nats/token", "L(N, D') of this run", f"{own.source}; D': {repeats.SOURCE}"


def _own_loss(plan: Plan, own: OwnLaw, unique: float) -> float:
    """L(N, D'): the law's runs saw every token once and N however large, so N stands as it is."""
    return law_in(own).loss(plan.num_params, repeats.worth_of_tokens(unique, plan.num_tokens))


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


def advice(plan: Plan, target: Target) -> list[str]:
    """What to do about the data, and how far a law of one's own may be trusted, in sentences."""
    drawn, wanted, unique = plan.num_tokens, target.asked.tokens, target.unique
    law = law_of(plan.settings.plan)
    own = plan.settings.plan.own_law
    lines = _distrust(plan, own) if own else []
    if drawn > unique * NEAR:
        worth = repeats.worth_of_tokens(unique, drawn)
        loss = _own_loss(plan, own, unique) if own else repeats.expected_loss(plan.num_params, drawn, unique)
        best, where = (law_in(own), "by the own law") if own else (repeats.LAW, "on C4")
        lines.append(
            f"The run reads {unique:,.0f} unique tokens {drawn / unique:.3g} times, worth {worth:,.0f} new ones "
            f"({100 * worth / drawn:.0f} % each): expected loss {loss:.3f}, with as many new ones "
            f"{best.loss(plan.num_params, drawn):.3f} ({where}; {repeats.SOURCE})."
        )
    if wanted > drawn * NEAR:
        fitting = law.for_tokens(drawn)
        epochs = wanted / unique
        lines.append(
            f"{law.name} asks for {wanted:,.0f} tokens. Train smaller: {fitting.params:,.0f} parameters suit the "
            f"{drawn:,.0f} tokens there are. Or repeat: plan.max_epochs = {epochs:.2g} would do. Or get more data: "
            f"{wanted - unique:,.0f} tokens more would be read once."
        )
    if wanted < unique / NEAR and target.budget:
        lines.append(f"{unique - wanted:,.0f} of {unique:,.0f} unique tokens are not needed for this budget.")
    return lines


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
