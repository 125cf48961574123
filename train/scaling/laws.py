"""Published scaling laws: the compute-optimal N parameters and D tokens for C FLOPs, N for D, and D for N.

Far from where they were fitted, the laws disagree by several times, so a plan shows all of them. They count N with the
embeddings or without, as `counts` states. The file ends with sizes that also account for the cost of inference.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from schemas.errors import ConfigError

Counts = Literal["all", "body"]
"""The counting rule of N: with embeddings ("all") or without ("body")."""

PF_DAY = 8.64e19
"""One PFLOP/s for a day [FLOPs]."""


@dataclass(frozen=True)
class Allocation:
    """The numbers of parameters and tokens on which a compute budget is spent."""

    params: float
    """N, by the law's counting rule."""
    tokens: float
    """Number of training tokens D."""

    @property
    def compute(self) -> float:
        """Training compute 6ND [FLOPs]."""
        return 6 * self.params * self.tokens


class Law(Protocol):
    """A scaling law, which relates the number of parameters N to the number of training tokens D."""

    @property
    def name(self) -> str:
        """Short name, as a plan prints it."""

    @property
    def formula(self) -> str:
        """The law in one line."""

    @property
    def source(self) -> str:
        """Publication that the law comes from."""

    @property
    def counts(self) -> Counts:
        """Which parameters N counts: `all`, or `body`, those outside the embeddings."""

    def for_compute(self, compute: float) -> Allocation:
        """Return the optimal N and D for `compute` [FLOPs]."""

    def for_tokens(self, tokens: float) -> Allocation:
        """Return the N for which D = `tokens` is optimal."""

    def for_params(self, params: float) -> Allocation:
        """Return the optimal D for N = `params`."""


@dataclass(frozen=True)
class LossLaw:
    """A loss L(N, D) = E + A/N^alpha + B/D^beta [nats/token], and its minimum along C = 6ND.

    Source of the closed form: Hoffmann et al. 2022, arXiv 2203.15556, equation 4.
    """

    name: str
    source: str
    floor: float
    """E, the irreducible loss [nats/token]."""
    a: float
    """A, the factor of N^-alpha."""
    b: float
    """B, the factor of D^-beta."""
    alpha: float
    beta: float
    counts: Counts = "all"

    @property
    def formula(self) -> str:
        """The law in one line."""
        terms = f"{self.floor:.4g} + {self.a:.4g}/N^{self.alpha:.4g} + {self.b:.4g}/D^{self.beta:.4g}"
        return f"least {terms} on C = 6ND"

    @property
    def scale(self) -> float:
        """G = (alpha·A / (beta·B))^(1 / (alpha + beta)), the factor of N = G · (C / 6)^exponent."""
        return math.pow(self.alpha * self.a / (self.beta * self.b), 1 / (self.alpha + self.beta))

    @property
    def exponent(self) -> float:
        """The exponent of C in the optimal N; the optimal D grows as C^(1 - exponent)."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, params: float, tokens: float) -> float:
        """Return L(N, D) [nats/token]."""
        return self.floor + self.a * math.pow(params, -self.alpha) + self.b * math.pow(tokens, -self.beta)

    def for_compute(self, compute: float) -> Allocation:
        """Return the N and D of the lowest loss for `compute` [FLOPs]."""
        params = self.scale * math.pow(compute / 6, self.exponent)
        return Allocation(params, compute / 6 / params)

    def for_tokens(self, tokens: float) -> Allocation:
        """Return the N for which D = `tokens` is optimal."""
        return self.for_compute(6 * math.pow(tokens * self.scale, 1 / (1 - self.exponent)))

    def for_params(self, params: float) -> Allocation:
        """Return the optimal D for N = `params`."""
        return self.for_compute(6 * math.pow(params / self.scale, 1 / self.exponent))


@dataclass(frozen=True)
class ComputePowerLaw:
    """N = n·C^a and D = d·C^b, fitted separately: 6ND may differ from C."""

    name: str
    source: str
    n: float
    a: float
    d: float
    b: float
    counts: Counts = "all"
    unit: float = 1.0
    """Unit of C [FLOPs]."""

    @property
    def formula(self) -> str:
        """The law in one line."""
        where = "" if self.unit == 1 else f", C in {self.unit:.3g} FLOPs"
        return f"N = {self.n:.4g}·C^{self.a:.4g}, D = {self.d:.4g}·C^{self.b:.4g}{where}"

    def for_compute(self, compute: float) -> Allocation:
        """Return the optimal N and D for `compute` [FLOPs]."""
        budget = compute / self.unit
        return Allocation(self.n * math.pow(budget, self.a), self.d * math.pow(budget, self.b))

    def for_tokens(self, tokens: float) -> Allocation:
        """Return the N for which D = `tokens` is optimal."""
        return Allocation(self.n * math.pow(tokens / self.d, self.a / self.b), tokens)

    def for_params(self, params: float) -> Allocation:
        """Return the optimal D for N = `params`."""
        return Allocation(params, self.d * math.pow(params / self.n, self.b / self.a))


@dataclass(frozen=True)
class TokensLaw:
    """D = d·C^b, and N follows from 6ND = C."""

    name: str
    source: str
    d: float
    b: float
    counts: Counts = "all"

    @property
    def formula(self) -> str:
        """The law in one line."""
        return f"D = {self.d:.4g}·C^{self.b:.4g}, N = C / 6D"

    def for_compute(self, compute: float) -> Allocation:
        """Return the optimal N and D for `compute` [FLOPs]."""
        tokens = self.d * math.pow(compute, self.b)
        return Allocation(compute / 6 / tokens, tokens)

    def for_tokens(self, tokens: float) -> Allocation:
        """Return the N for which D = `tokens` is optimal."""
        return self.for_compute(math.pow(tokens / self.d, 1 / self.b))

    def for_params(self, params: float) -> Allocation:
        """Return the optimal D for N = `params`."""
        # C = 6ND and D = d·C^b: D^(1 - b) = d·(6N)^b.
        tokens = math.pow(self.d * math.pow(6 * params, self.b), 1 / (1 - self.b))
        return Allocation(params, tokens)


@dataclass(frozen=True)
class RatioLaw:
    """D = r·N, and N follows from 6ND = C."""

    ratio: float
    source: str
    counts: Counts = "all"

    @property
    def name(self) -> str:
        """Short name, as a plan prints it."""
        return f"{self.ratio:g} tokens per parameter"

    @property
    def formula(self) -> str:
        """The law in one line."""
        return f"D = {self.ratio:g}·N, C = 6ND"

    def for_compute(self, compute: float) -> Allocation:
        """Return the N and D for `compute` [FLOPs]."""
        return self.for_params(math.sqrt(compute / 6 / self.ratio))

    def for_tokens(self, tokens: float) -> Allocation:
        """Return the N for D = `tokens`."""
        return Allocation(tokens / self.ratio, tokens)

    def for_params(self, params: float) -> Allocation:
        """Return the D for N = `params`."""
        return Allocation(params, self.ratio * params)


HOFFMANN = "Hoffmann et al. 2022, arXiv 2203.15556"

APPROACH_1 = ComputePowerLaw(
    "Hoffmann, approach 1", f"{HOFFMANN}, Table 3 (our fit of it)", 0.09916, 0.498099, 1.69608, 0.501854
)
"""Minimum over training curves. The paper prints a table, not the law: this law is a log-log fit of that table, with
6ND within 0.5 % of C."""

APPROACH_2 = ComputePowerLaw(
    "Hoffmann, approach 2", f"{HOFFMANN}, Table A3 (our fit of it)", 0.14488, 0.489942, 1.15276, 0.51002
)
"""IsoFLOP profiles; also our fit of the paper's table."""

APPROACH_3 = LossLaw(
    name="Hoffmann, approach 3",
    source=f"{HOFFMANN}, section 3.3, the numbers of its TeX file before rounding",
    floor=math.exp(0.5267228),
    a=math.exp(6.0073404),
    b=math.exp(6.0179186),
    alpha=0.33917084,
    beta=0.2849083,
)
"""Parametric loss. With unrounded numbers, the law gives the paper's own 40 billion parameters at Chinchilla's
budget."""

APPROACH_3_ROUNDED = LossLaw(
    "Hoffmann, approach 3 as printed", f"{HOFFMANN}, equation 10", 1.69, 406.4, 410.7, 0.34, 0.28
)
"""The five numbers as the paper prints them: a fifth fewer parameters at Chinchilla's budget. For comparison only."""

BESIROGLU = LossLaw(
    name="Besiroglu",
    source="Besiroglu et al. 2024, arXiv 2404.10102, table 1 (five digits of their notebook)",
    floor=1.81686,
    a=482.00572,
    b=2085.4342,
    alpha=0.34781,
    beta=0.36585,
)
"""A refit of approach 3 to the points of the paper's figure."""

KAPLAN = ComputePowerLaw(
    "Kaplan", "Kaplan et al. 2020, arXiv 2001.08361, appendix A, table 6", 1.3e9, 0.73, 2e10, 0.27, "body", PF_DAY
)

DEEPSEEK = ComputePowerLaw(
    "DeepSeek", "Bi et al. 2024, arXiv 2401.02954, section 3.2 (N = M / 6)", 0.1715 / 6, 0.5243, 5.8316, 0.4757, "body"
)
"""The paper uses M, the FLOPs per token with attention and without embeddings; N here is M / 6."""

LLAMA_3 = TokensLaw("Llama 3", "Llama Team 2024, arXiv 2407.21783, section 3.2.1", 0.299, 0.537)

TWENTY = RatioLaw(20.0, f"{HOFFMANN}, Table 3, rounded")

LAWS: tuple[Law, ...] = (TWENTY, APPROACH_1, APPROACH_2, APPROACH_3, BESIROGLU, KAPLAN, DEEPSEEK, LLAMA_3)
"""Laws that a plan compares; the first is the default."""


# Inference-aware sizing: the N and D of a loss with the lowest cost of training and inference.
#
# Source: Sardana et al. 2023, arXiv 2401.00448, section 2: minimize 6·N·D + 2·N·D_inference where L(N, D) is the
# target.

SOURCE = "Sardana et al. 2023, arXiv 2401.00448, section 2"
STEPS = 200
"""Golden-section steps of the search, enough for the precision of a float."""


@dataclass(frozen=True)
class Lifetime:
    """The size of a model and of its training run, with the total cost of training and inference."""

    size: Allocation
    loss: float
    """L(N, D) [nats/token]."""
    inference_tokens: float
    """Tokens that the model processes in inference."""

    @property
    def compute(self) -> float:
        """FLOPs of training and inference."""
        return self.size.compute + 2 * self.size.params * self.inference_tokens


def tokens_to_reach(law: LossLaw, params: float, loss: float) -> float:
    """Return the D at which a model of N = `params` reaches a loss [nats/token]; infinite if it never does."""
    left = loss - law.floor - law.a * math.pow(params, -law.alpha)
    return math.pow(law.b / left, 1 / law.beta) if left > 0 else math.inf


def for_lifetime(law: LossLaw, loss: float, inference_tokens: float) -> Lifetime:
    """Return the N and D that reach a loss [nats/token] at the lowest cost of training and inference together.

    `inference_tokens`: tokens that the model will process in inference.
    Raises ConfigError if no model of the law reaches the loss.
    """
    if loss <= law.floor:
        raise ConfigError(
            f"plan.inference_tokens: expected a compute budget whose loss is above {law.floor:.4g}, the irreducible "
            f"loss of the scaling law `{law.name}`, got a loss of {loss:.4g}. Lower the budget: plan.compute, "
            "plan.gpu_hours or plan.usd."
        )

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        return params * (6 * tokens_to_reach(law, params, loss) + 2 * inference_tokens)

    # The range runs from the smallest model that can reach the loss to one that needs few tokens.
    low = math.log(law.a / (loss - law.floor)) / law.alpha
    high = low + 2 * math.log(1e6)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    params = math.exp((low + high) / 2)
    return Lifetime(Allocation(params, tokens_to_reach(law, params, loss)), loss, inference_tokens)
