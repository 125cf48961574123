"""The size that is aimed at: N and D from the tokens there are, from a budget, or from one of the two.

N counts the embeddings here. A law that leaves them out is asked for the size whose rest it means.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import ConfigError
from train.config.plan import ClusterConfig, PlanConfig
from train.config.settings import Settings
from train.model.shape import ModelShape, choose_shape, flops_per_token, num_parameters
from train.scaling import laws
from train.scaling.laws import SOURCE as INFERENCE
from train.scaling.laws import Allocation, Law, LossLaw, RatioLaw, for_lifetime
from train.scaling.own_law import law_in, read_law

NAMED: dict[str, Law] = {
    "approach_1": laws.APPROACH_1,
    "approach_2": laws.APPROACH_2,
    "approach_3": laws.APPROACH_3,
    "besiroglu": laws.BESIROGLU,
    "kaplan": laws.KAPLAN,
    "deepseek": laws.DEEPSEEK,
    "llama_3": laws.LLAMA_3,
}
"""The laws by the names of `plan.law`; `ratio` is made of `plan.tokens_per_parameter`."""

TOKENS_THERE_ARE = "the tokens there are"
SECONDS = 3600.0
ROUNDS = 6
"""Times that a budget is said anew as 6ND of the shape that it buys: shapes are steps, and two settle it."""
OFF = 1.5
"""Times by which a shape may miss the size that was asked for."""
SHAPED = ("num_layers", "d_model")
"""Settings that make a model the size they say."""


@dataclass(frozen=True)
class Target:
    """What a model should be, before a shape and whole steps are found for it."""

    params: float
    """N, embeddings included."""
    tokens: float
    """D, at most what the dataset gives in `max_epochs`; for the model that is found, `tokens_for` says it again."""
    asked: Allocation
    """What the law says where data does not run out, N counted as the law counts."""
    budget: float | None
    """C [FLOPs, as 6ND] that was given, as such or as hours or money; None = none was."""
    how: str
    """What N and D follow from."""
    unique: float
    """Tokens that differ, of the sources in use."""
    most: float
    """Tokens that the dataset gives in `max_epochs`."""


def read_own_law(sizing: PlanConfig) -> PlanConfig:
    """The same with the law of `plan.law_file` in its place, so that no file is needed again.

    Raises ConfigError if the file holds no law.
    """
    if sizing.law_file is None:
        return sizing
    given = sizing.model_dump(exclude_unset=True, exclude={"law_file"})
    return PlanConfig.model_validate(given | {"own_law": read_law(sizing.law_file).law})


def law_of(sizing: PlanConfig) -> Law:
    """The law that `plan.law` names, once `read_own_law` has read it."""
    if sizing.law == "own":
        if sizing.own_law is None:
            raise ConfigError(f"plan.law_file = {sizing.law_file}: expected to have been read, got that it was not")
        return law_in(sizing.own_law)
    return RatioLaw(sizing.tokens_per_parameter, laws.TWENTY.source) if sizing.law == "ratio" else NAMED[sizing.law]


def hours_of(sizing: PlanConfig, cluster: ClusterConfig) -> float | None:
    """Hours of one device that were given, as such or as money; None = none were.

    Raises ConfigError if money is given and no price.
    """
    hours = sizing.gpu_hours
    if sizing.usd is not None:
        if cluster.usd_per_gpu_hour is None:
            raise ConfigError(
                f"plan.usd = {sizing.usd:g}: expected a price, got no cluster.usd_per_gpu_hour. Set it, or give "
                "plan.gpu_hours."
            )
        hours = sizing.usd / cluster.usd_per_gpu_hour
    return hours


def target_of(
    settings: Settings, vocab_size: int, unique: float, most: float, peak: float | None, seq_len: int
) -> Target:
    """The size aimed at by whatever is given. `peak`: of one device [FLOP/s], None = not known.

    Hours buy FLOPs as an MFU counts them, attention over rows of `seq_len` included; C = 6ND is what of them the
    weights take. Raises ConfigError as `aim` does, and if hours or money are given and what they buy is not.
    """
    sizing, cluster = settings.plan, settings.cluster
    hours = hours_of(sizing, cluster)
    if hours is None:
        return aim(sizing, vocab_size, unique, most, sizing.compute)
    if peak is None:
        raise ConfigError(
            f"plan.{'usd' if sizing.usd else 'gpu_hours'}: expected a device that the hours are of, got no "
            "cluster.device. Name one, or give plan.compute."
        )
    flops, counts_all = hours * SECONDS * peak * cluster.mfu, law_of(sizing).counts == "all"
    target = aim(sizing, vocab_size, unique, most, flops)
    for _ in range(ROUNDS):
        shape = choose_shape(target.params, vocab_size, sizing)
        share = 6 * num_parameters(shape, counts_all) / flops_per_token(shape, seq_len)
        target = aim(sizing, vocab_size, unique, most, flops * share)
    return target


def aim(sizing: PlanConfig, vocab_size: int, unique: float, most: float, budget: float | None) -> Target:
    """The size aimed at; `unique`: tokens that the dataset gives in a pass, `most` with `max_epochs`.

    Of a budget that the data is too small for, what is left goes into parameters: at the same cost, tokens are what
    there is none of. Raises ConfigError if the law or the budget cannot be followed.
    """
    law, once = law_of(sizing), min(unique, most)
    if sizing.params is not None:
        body = _body_of(sizing.params, vocab_size, sizing)
        asked = law.for_params(body if law.counts == "body" else sizing.params)
        return Target(sizing.params, min(asked.tokens, most), asked, None, "plan.params", unique, most)
    if budget is None:
        asked = law.for_tokens(once)
        params = _total(asked.params, vocab_size, sizing) if law.counts == "body" else asked.params
        how = TOKENS_THERE_ARE
        if params < sizing.min_params:
            how = f"plan.min_params, as {how} ask for {params:,.0f}"
            params = float(sizing.min_params)
            asked = law.for_params(_body_of(params, vocab_size, sizing) if law.counts == "body" else params)
        return Target(params, once, asked, None, how, unique, most)
    asked = law.for_compute(budget)
    if sizing.inference_tokens is not None:
        asked = _for_use(law, asked, sizing.inference_tokens)
    tokens = min(asked.tokens, most)
    counted = asked.params if tokens == asked.tokens else budget / 6 / tokens
    params = _total(counted, vocab_size, sizing) if law.counts == "body" else counted
    if params < sizing.min_params:
        raise ConfigError(
            f"plan: expected a budget for {sizing.min_params:,} parameters (plan.min_params), got one for "
            f"{params:,.0f} and {tokens:,.0f} tokens. Raise it, or lower plan.min_params."
        )
    how = "the budget" if tokens == asked.tokens else "the budget and the tokens"
    if sizing.inference_tokens is not None:
        more = 6 * asked.params * asked.tokens / budget
        how += f", its loss at the least cost over {sizing.inference_tokens:.3g} tokens of use ({INFERENCE})"
        how += f": {more:.3g} x to train"
    return Target(params, tokens, asked, budget, how, unique, most)


def check_reached(target: Target, sizing: PlanConfig, shape: ModelShape) -> None:
    """Raise ConfigError if no shape is near the size that a budget or `plan.params` asks for."""
    found = num_parameters(shape)
    bought = target.budget is not None
    # Of a shape that is given, a budget buys the tokens.
    given = bought and all(getattr(sizing, name) is not None for name in SHAPED)
    if given or (not bought and sizing.params is None) or 1 / OFF <= found / target.params <= OFF:
        return
    wanted = f"{target.params:,.0f}" if 1 <= target.params < 1e15 else f"{target.params:.3g}"
    end, better = "most", "ask for less"
    if found > target.params:
        end, better = "least", "ask for more, or make the vocabulary smaller"
    elif target.budget is not None and target.tokens < target.asked.tokens:
        asked = target.asked
        better = (
            f"this budget is for {asked.params:,.0f} parameters on {asked.tokens:,.0f} tokens, and there are "
            f"{target.most:,.0f} in plan.max_epochs: ask for less, or get more data"
        )
    raise ConfigError(
        f"plan: expected a model of {wanted} parameters, from {target.how}, got {found:,} at {end} with "
        f"{shape.vocab_size:,} tokens in the vocabulary and what [plan] says of the shape. {better}."
    )


def how_long(target: Target, sizing: PlanConfig) -> tuple[str, str]:
    """What the D of the model that was found follows from, as a formula with its source."""
    law = law_of(sizing)
    counted = "N" if law.counts == "all" else "N'"
    if target.budget is None:
        said = f"{law.ratio:g}·N" if isinstance(law, RatioLaw) else f"D that {law.name} has for {counted}"
        return said, law.source
    if sizing.inference_tokens is not None:
        return "D of the least cost over training and use", INFERENCE
    return f"C / (6·{counted})", law.source


def tokens_for(target: Target, sizing: PlanConfig, shape: ModelShape, most: float) -> float:
    """D for the model that was found, whose N is not quite the one that was aimed at."""
    law = law_of(sizing)
    params = num_parameters(shape, law.counts == "all")
    if target.budget is None:
        return min(most, law.for_params(params).tokens)
    if sizing.inference_tokens is not None:
        return min(most, target.asked.tokens)
    return min(most, target.budget / 6 / params)


def _for_use(law: Law, asked: Allocation, inference_tokens: float) -> Allocation:
    """The cheapest size over its life that is as good as the one asked for."""
    loss_law = law if isinstance(law, LossLaw) else laws.APPROACH_3
    return for_lifetime(loss_law, loss_law.loss(asked.params, asked.tokens), inference_tokens).size


def _total(body: float, vocab_size: int, sizing: PlanConfig) -> float:
    """N with embeddings of the model whose rest has `body` parameters."""
    return _solve(lambda total: _body_of(total, vocab_size, sizing), body)


def _body_of(total: float, vocab_size: int, sizing: PlanConfig) -> float:
    return float(num_parameters(choose_shape(total, vocab_size, sizing), embeddings=False))


def _solve(function: Callable[[float], float], wanted: float) -> float:
    """Where a rising function reaches a value, to a thousandth or a step of it."""
    low, high = wanted, 2 * wanted
    while function(high) < wanted:
        low, high = high, 2 * high
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return high
