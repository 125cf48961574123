"""The target size of a run: N and D from the available tokens, from a budget, or from a given N.

N includes the embeddings here. For a law that excludes them, sizes are converted in both directions.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import ConfigError
from train.config.plan import ClusterConfig, PlanConfig
from train.config.settings import Settings
from train.model.shape import (
    ModelShape,
    choose_shape,
    counted_parameters,
    flops_per_token,
    num_parameters,
    sized_parameters,
)
from train.scaling import laws
from train.scaling.laws import SOURCE as INFERENCE
from train.scaling.laws import Allocation, Law, LossLaw, RatioLaw, for_lifetime
from train.scaling.own_law import law_in, read_law

LAWS_BY_NAME: dict[str, Law] = {
    "approach_1": laws.APPROACH_1,
    "approach_2": laws.APPROACH_2,
    "approach_3": laws.APPROACH_3,
    "besiroglu": laws.BESIROGLU,
    "kaplan": laws.KAPLAN,
    "deepseek": laws.DEEPSEEK,
    "llama_3": laws.LLAMA_3,
}
"""Laws by the names of `plan.law`; the law `ratio` is built from `plan.tokens_per_parameter`."""

AVAILABLE_TOKENS = "the available tokens"
BUDGET_AND_TOKENS = "the budget and the tokens"
TOKENS_OF_EPOCHS = "the tokens of train.epochs"
SECONDS = 3600.0
ROUNDS = 6
"""Iterations that convert device hours to a budget C = 6ND, which depends on the shape that C leads to; two usually
suffice."""
NEAR = 1.05
"""Largest ratio of two sizes or token counts that count as equal."""
MAX_SIZE_RATIO = 1.5
"""Largest ratio between the size of a shape and the requested size."""
MAX_SHORTAGE = 2.0
"""Largest ratio of the tokens that a law asks for with a budget to those that exist. Up to it, the budget is spent on a
model up to this many times larger than the law's; beyond it, most of the budget would be wasted."""
SHAPED = ("num_layers", "d_model")
"""Settings that together determine the size of a model."""


@dataclass(frozen=True)
class Target:
    """The target size of a model and its run, before a model shape and a whole number of steps are chosen."""

    params: float
    """N, embeddings included."""
    tokens: float
    """D, at most the dataset's tokens in `max_epochs`; `tokens_of_shape` recomputes it for the chosen shape."""
    asked: Allocation
    """Size that the law chooses with unlimited data; N is counted by the law's own rule."""
    budget: float | None
    """Compute budget C [FLOPs, as 6ND], set directly, or as device hours or money; None = no budget."""
    how: str
    """What N and D follow from, in words."""
    unique: float
    """Unique tokens of the sources in use."""
    most: float
    """Tokens of the dataset in `max_epochs` passes, or those of `train.epochs`."""
    fixed: bool = False
    """True if `train.epochs` decides D; no budget and no law changes it then."""


def read_own_law(sizing: PlanConfig) -> PlanConfig:
    """Return the settings with `law_file` replaced by the law in the file.

    Raises ConfigError if the file holds no law.
    """
    if sizing.law_file is None:
        return sizing
    given = sizing.model_dump(exclude_unset=True, exclude={"law_file"})
    return PlanConfig.model_validate(given | {"own_law": read_law(sizing.law_file).law})


def law_of(sizing: PlanConfig) -> Law:
    """Return the law that `plan.law` names; for `own`, call `read_own_law` first."""
    if sizing.law == "own":
        if sizing.own_law is None:
            raise ConfigError(
                f"plan.law_file = {sizing.law_file}: expected a plan that holds the law in this file, got one that "
                "holds only the path. Make the plan again with `penstock plan`."
            )
        return law_in(sizing.own_law)
    return (
        RatioLaw(sizing.tokens_per_parameter, laws.TWENTY.source) if sizing.law == "ratio" else LAWS_BY_NAME[sizing.law]
    )


def hours_of(sizing: PlanConfig, cluster: ClusterConfig) -> float | None:
    """Return the budget in hours of one device, from `plan.gpu_hours` or `plan.usd`; None if neither is set.

    Raises ConfigError if `plan.usd` is set without a price.
    """
    hours = sizing.gpu_hours
    if sizing.usd is not None:
        if cluster.usd_per_gpu_hour is None:
            raise ConfigError(
                f"plan.usd = {sizing.usd:g}: expected a price of a device hour, got no cluster.usd_per_gpu_hour. "
                "Set cluster.usd_per_gpu_hour, or set plan.gpu_hours instead of plan.usd."
            )
        hours = sizing.usd / cluster.usd_per_gpu_hour
    return hours


def flops_bought(settings: Settings, peak: float | None) -> float | None:
    """Return the FLOPs that `plan.gpu_hours` or `plan.usd` buy at `cluster.mfu`; None if neither is set.

    `peak`: peak of one device [FLOP/s]; None = unknown. Raises ConfigError if hours or money are set without a known
    peak or price.
    """
    hours, setting = hours_of(settings.plan, settings.cluster), _setting_of(settings.plan)
    if hours is None:
        return None
    if peak is None:
        raise ConfigError(
            f"{setting}: expected the peak FLOP/s of a device, to convert device hours to FLOPs, got neither "
            f"cluster.device nor train.peak_flops. Set one of these, or set plan.compute instead of {setting}."
        )
    return hours * SECONDS * peak * settings.cluster.mfu


def target_of(
    settings: Settings, vocab_size: int, unique: float, most: float, peak: float | None, seq_len: int
) -> Target:
    """Return the target size of the model and its run.

    `unique`, `most`: token counts as in `choose_target`. `peak`: peak of one device [FLOP/s]; None = unknown. Raises
    ConfigError as `choose_target` does, and if hours or money are set without a known peak.
    """
    sizing, fixed = settings.plan, bool(settings.train.epochs)
    flops, counts_all = flops_bought(settings, peak), law_of(sizing).counts == "all"
    if flops is None:
        return choose_target(sizing, vocab_size, unique, most, sizing.compute, fixed)
    # These FLOPs include attention over rows of `seq_len`, which C = 6ND does not count, so C is only a share of them.
    target = choose_target(sizing, vocab_size, unique, most, flops, fixed)
    for _ in range(ROUNDS):
        shape = choose_shape(target.params, vocab_size, sizing)
        share = 6 * counted_parameters(shape, counts_all) / flops_per_token(shape, seq_len)
        target = choose_target(sizing, vocab_size, unique, most, flops * share, fixed)
    return target


def choose_target(
    sizing: PlanConfig, vocab_size: int, unique: float, most: float, budget: float | None, fixed: bool = False
) -> Target:
    """Return the target size of the model and its run.

    `unique`: tokens of one pass over the dataset. `most`: tokens of `max_epochs` passes. `budget`: C [FLOPs, as 6ND];
    None = the size follows from `plan.params` or the tokens. `fixed`: the run has `most` tokens, those of
    `train.epochs`. Raises ConfigError if the law or the budget leads to no valid size.
    """
    law, once = law_of(sizing), most if fixed else min(unique, most)
    if sizing.params is not None:
        body = _body_of(sizing.params, vocab_size, sizing)
        asked = law.for_params(body if law.counts == "body" else sizing.params)
        tokens = most if fixed else min(asked.tokens, most)
        return Target(sizing.params, tokens, asked, None, "plan.params", unique, most, fixed)
    if budget is None:
        asked = law.for_tokens(once)
        params = _total(asked.params, vocab_size, sizing) if law.counts == "body" else asked.params
        how = TOKENS_OF_EPOCHS if fixed else AVAILABLE_TOKENS
        if params < sizing.min_params:
            how = f"plan.min_params, as {how} ask for {params:,.0f}"
            params = float(sizing.min_params)
            asked = law.for_params(_body_of(params, vocab_size, sizing) if law.counts == "body" else params)
        return Target(params, once, asked, None, how, unique, most, fixed)
    asked = law.for_compute(budget)
    if sizing.inference_tokens is not None:
        asked = _for_use(law, asked, sizing.inference_tokens)
    tokens = most if fixed else min(asked.tokens, most)
    # If there are too few tokens to spend the budget, the model gets more parameters than is optimal.
    counted = asked.params if tokens == asked.tokens else budget / 6 / tokens
    params = _total(counted, vocab_size, sizing) if law.counts == "body" else counted
    if params < sizing.min_params:
        raise ConfigError(
            f"plan: expected a budget for at least {sizing.min_params:,} parameters (plan.min_params), got one for "
            f"{params:,.0f} parameters on {tokens:,.0f} tokens. Raise {_setting_of(sizing)}, or lower plan.min_params."
        )
    how = "the budget" if tokens == asked.tokens else BUDGET_AND_TOKENS
    if fixed:
        how = f"the budget and {TOKENS_OF_EPOCHS}"
    if sizing.inference_tokens is not None:
        more = 6 * asked.params * asked.tokens / budget
        how += f", its loss at the least cost over {sizing.inference_tokens:.3g} tokens of use ({INFERENCE})"
        how += f": {more:.3g} x to train"
    return Target(params, tokens, asked, budget, how, unique, most, fixed)


def check_size_reached(target: Target, sizing: PlanConfig, shape: ModelShape) -> None:
    """Check that the shape has about the size that a budget, `plan.params` or a set `plan.min_params` requires.

    Raises ConfigError if it does not, or if there are too few tokens to spend the budget on.
    """
    params = sized_parameters(shape)
    bought = target.budget is not None
    unsized = not bought and sizing.params is None
    if unsized and "min_params" in sizing.model_fields_set and params < sizing.min_params / MAX_SIZE_RATIO:
        raise ConfigError(
            f"plan.min_params: expected a model of at least {sizing.min_params:,} parameters, got {params:,}, the most "
            f"that {shape.vocab_size:,} tokens in the vocabulary and the shape settings of [plan] allow. Lower "
            "plan.min_params, or remove the shape settings."
        )
    # If the shape is given, a budget buys only the tokens.
    given = bought and all(getattr(sizing, name) is not None for name in SHAPED)
    if bought and not given:
        _check_enough_tokens(target, sizing)
    if given or unsized or 1 / MAX_SIZE_RATIO <= params / target.params <= MAX_SIZE_RATIO:
        return
    requested = f"{target.params:,.0f}" if 1 <= target.params < 1e15 else f"{target.params:.3g}"
    bound, fix = "most", f"Lower {_setting_of(sizing)}"
    if params > target.params:
        bound, fix = "fewest", f"Raise {_setting_of(sizing)}, or make the vocabulary smaller"
    raise ConfigError(
        f"plan: expected a model of {requested} parameters, from {target.how}, got {params:,}, the {bound} that "
        f"{shape.vocab_size:,} tokens in the vocabulary and the shape settings of [plan] allow. {fix}."
    )


def _check_enough_tokens(target: Target, sizing: PlanConfig) -> None:
    """Raise ConfigError if a budget asks for over MAX_SHORTAGE times the tokens of `max_epochs` passes."""
    asked, most, setting = target.asked, target.most, _setting_of(sizing)
    if asked.tokens <= MAX_SHORTAGE * most:
        return
    if target.fixed:
        raise ConfigError(
            f"{setting}: expected a budget for at most {MAX_SHORTAGE:g} times the {most:,.0f} tokens of train.epochs, "
            f"got one for {asked.tokens:,.0f} tokens and {asked.params:,.0f} parameters. Lower {setting}, or raise "
            "train.epochs."
        )
    fixes = [f"add {(asked.tokens - most) / sizing.max_epochs:,.0f} training tokens to the dataset"]
    suited = law_of(sizing).for_tokens(most)
    if suited.params >= sizing.min_params and sizing.inference_tokens is None:
        budget = getattr(sizing, setting.partition(".")[2]) * suited.compute / (target.budget or 1.0)
        fixes.insert(0, f"lower {setting} to {budget:.2g} ({suited.params:,.0f} parameters)")
    sentence = f"{', '.join(fixes)}, or set plan.params in place of {setting}"
    passes = f"{sizing.max_epochs:g} pass" + ("" if sizing.max_epochs == 1 else "es")
    raise ConfigError(
        f"{setting}: expected a budget for at most {MAX_SHORTAGE:g} times the {most:,.0f} tokens of {passes} over the "
        f"dataset (plan.max_epochs), got one for {asked.tokens:,.0f} tokens and {asked.params:,.0f} parameters, so "
        f"{asked.tokens - most:,.0f} tokens are missing. {sentence[0].upper()}{sentence[1:]}."
    )


def _setting_of(sizing: PlanConfig) -> str:
    """Return the setting that requests the size: `plan.params`, or the setting that gives the budget."""
    names = ("params", "compute", "gpu_hours", "usd")
    return next((f"plan.{name}" for name in names if getattr(sizing, name) is not None), "the budget")


def formula_for_params(target: Target, sizing: PlanConfig) -> tuple[str, str]:
    """Return the formula for the requested N, and its source."""
    law = law_of(sizing)
    if target.budget is not None and (target.fixed or target.tokens < target.asked.tokens):
        counted = "N" if law.counts == "all" else "N'"
        tokens = "those of train.epochs" if target.fixed else "the tokens in plan.max_epochs"
        return f"from {target.how}: {counted} = C / (6·D), D = {tokens}", "count"
    return f"from {target.how}: {law.formula}", law.source


def formula_for_tokens(target: Target, sizing: PlanConfig) -> tuple[str, str]:
    """Return the formula for D of the chosen shape, and its source."""
    law = law_of(sizing)
    counted = "N" if law.counts == "all" else "N'"
    if target.fixed:
        return "Σ train.epochs · U", "recipe"
    if target.budget is None:
        formula = f"{law.ratio:g}·N" if isinstance(law, RatioLaw) else f"D that {law.name} has for {counted}"
        return formula, law.source
    if sizing.inference_tokens is not None:
        return "D of the least cost over training and use", INFERENCE
    return f"C / (6·{counted})", law.source


def tokens_of_shape(target: Target, sizing: PlanConfig, shape: ModelShape, most: float) -> float:
    """Return the number of training tokens D for the chosen shape, at most `most`.

    Raises ConfigError if a budget buys another number of tokens for a given shape than `train.epochs` asks for.
    """
    law = law_of(sizing)
    params = counted_parameters(shape, law.counts == "all")
    if target.fixed:
        bought = target.budget / 6 / params if target.budget else most
        if all(getattr(sizing, name) is not None for name in SHAPED) and not 1 / NEAR <= bought / most <= NEAR:
            raise ConfigError(
                f"{_setting_of(sizing)}, train.epochs: expected one number of training tokens, got {bought:,.0f} that "
                f"the budget buys for {params:,} parameters, and {most:,.0f} of train.epochs. Remove "
                f"{_setting_of(sizing)} or train.epochs, or remove one of {' and '.join(f'plan.{n}' for n in SHAPED)}."
            )
        return most
    if target.budget is None:
        return min(most, law.for_params(params).tokens)
    if sizing.inference_tokens is not None:
        return min(most, target.asked.tokens)
    return min(most, target.budget / 6 / params)


def _for_use(law: Law, asked: Allocation, inference_tokens: float) -> Allocation:
    """Return the size that has the loss of `asked` at the lowest total cost of training and inference."""
    loss_law = law if isinstance(law, LossLaw) else laws.APPROACH_3
    return for_lifetime(loss_law, loss_law.loss(asked.params, asked.tokens), inference_tokens).size


def _total(body: float, vocab_size: int, sizing: PlanConfig) -> float:
    """Return N, embeddings included, of the model with `body` parameters outside the embeddings."""
    return _solve(lambda total: _body_of(total, vocab_size, sizing), body)


def _body_of(total: float, vocab_size: int, sizing: PlanConfig) -> float:
    return float(num_parameters(choose_shape(total, vocab_size, sizing), embeddings=False))


def _solve(function: Callable[[float], float], value: float) -> float:
    """Return the argument at which an increasing function reaches `value`, to within 0.1 %.

    The function may have jumps.
    """
    low, high = value, 2 * value
    while function(high) < value:
        low, high = high, 2 * high
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high
