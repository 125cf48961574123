"""The sections `[plan]`, how a model is sized for a dataset, and `[cluster]`, its devices.

A plan never changes a value that the recipe sets. A plan also stores the fitted scaling law that it uses.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from schemas.config import Section, execution, location
from schemas.text import parse_size

# A scaling law that was fitted to the project's own runs, as a plan stores it: its parameters and their confidence.


class OwnLaw(BaseModel):
    """The scaling law L(N, D) = floor + a/N^alpha + b/D^beta [nats/token] for N parameters and D training tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    floor: float = Field(ge=0)
    """E, the loss of an unlimited model [nats/token]."""
    a: float = Field(gt=0)
    """Constant A, of the term in N."""
    b: float = Field(gt=0)
    """Constant B, of the term in D."""
    alpha: float = Field(gt=0)
    """Exponent of N."""
    beta: float = Field(gt=0)
    """Exponent of D."""
    counts: Literal["all", "body"] = "all"
    """Parameters that N counts: with the embeddings ("all", as in a plan) or without ("body")."""
    held: tuple[str, ...] = ()
    """Names of the constants of the law that were not fitted, but fixed at the values of `held_from`."""
    held_from: str = ""
    """Source of the fixed values."""
    intervals: dict[str, tuple[float, float]] = {}
    """Confidence interval of each constant of the law at the level `share`; also of `exponent`, that of compute C in
    the optimal N."""
    share: float = Field(0.9, gt=0, lt=1)
    """Confidence level: share of the bootstrap fits (to resampled runs) that lie within an interval."""
    num_runs: int = Field(ge=1)
    """Number of training runs that the law was fitted to."""
    deviation: float = Field(ge=0)
    """Root mean square of ln(measured / fitted loss) over these runs."""
    dataset: str = ""
    """Digest of the dataset of all runs; empty = unknown, or several datasets."""
    params: float = Field(gt=0)
    """N of the largest run."""
    tokens: float = Field(gt=0)
    """D of the longest run."""
    compute: float = Field(gt=0)
    """6ND of the most expensive run [FLOPs]."""
    rate_factor: float = Field(1.0, gt=0)
    """Factor of the learning rates that the rule of a plan gives, found by runs of the smallest model; 1 = none was
    searched."""
    rate: float | None = Field(None, gt=0)
    """With parametrization = mup: the learning rate that was found; it is the same for every width."""
    mup_base_width: int | None = Field(None, ge=1)
    """`plan.mup_base_width` of the runs; None = the standard parametrization."""

    @property
    def source(self) -> str:
        """Text that says how many runs, and which dataset, the law was fitted to."""
        of = f"dataset {self.dataset[:12]}" if self.dataset else "datasets that it does not name"
        return f"fitted to {self.num_runs} runs on {of}"

    def source_of(self, name: str) -> str:
        """Return a text that says where the value of a constant of the law comes from."""
        return self.held_from if self._is_held(name) else self.source

    def interval(self, name: str) -> str:
        """Return a text with the confidence interval of a constant of the law, or why there is none."""
        if self._is_held(name):
            return "held, not fitted"
        if name not in self.intervals:
            return "no interval"
        low, high = self.intervals[name]
        return f"{100 * self.share:g} % between {low:.4g} and {high:.4g}"

    def _is_held(self, name: str) -> bool:
        return name in self.held or (name == "exponent" and bool(self.held))


class PlanConfig(Section):
    """How a plan chooses the size of the model; a plan is rejected if the settings here make an invalid shape."""

    law: Literal[
        "ratio", "approach_1", "approach_2", "approach_3", "besiroglu", "kaplan", "deepseek", "llama_3", "own"
    ] = "ratio"
    """Scaling law that relates N, the parameters, to D, the training tokens. A plan also shows the results of the other
    laws, which are in train/scaling/laws.py. ratio: D / N is `tokens_per_parameter`, on which approaches 1 and 2 of
    Hoffmann et al. 2022 and Chinchilla itself agree. own: the law in `law_file`."""
    law_file: str | None = location(None)
    """With law = own: file of a law that `penstock ladder` or `penstock fit-scaling` fitted; a plan stores the law
    itself."""
    own_law: OwnLaw | None = None
    """With law = own: the law itself, which a plan copies from `law_file`."""
    tokens_per_parameter: float = Field(20.0, ge=1e-100, le=1e20)
    """With law = ratio: training tokens per parameter. Source: Hoffmann et al. 2022, arXiv 2203.15556, Table 3."""
    compute: Annotated[float | None, BeforeValidator(parse_size)] = Field(None, gt=0)
    """Compute budget for N and D [FLOPs, as 6ND]; None = they follow from the tokens of the dataset."""
    gpu_hours: float | None = Field(None, gt=0)
    """Compute budget in hours of one `cluster.device` at `cluster.mfu` of its peak."""
    usd: float | None = Field(None, gt=0)
    """Compute budget in money [USD], at `cluster.usd_per_gpu_hour`."""
    params: Annotated[float | None, BeforeValidator(parse_size)] = Field(None, ge=1e-100)
    """Number of parameters, embeddings included, also as a text such as "124M" or "1.5B". The number of training tokens
    then follows from the scaling law."""
    inference_tokens: Annotated[float | None, BeforeValidator(parse_size)] = Field(None, gt=0)
    """Tokens that the model will read and write in use: if set, a smaller model of the same loss is trained longer.
    Source: Sardana et al. 2023, arXiv 2401.00448, section 2."""
    max_epochs: float = Field(4.0, gt=0, le=1e6)
    """Maximum number of epochs of a source; up to 4, repeated tokens are nearly as good as new. Source: Muennighoff et
    al. 2023, arXiv 2305.16264."""
    recipe: Literal["llama", "modern"] | None = None
    """Defaults of model and optimizer for settings that are not set. llama: the model of Llama with normalized queries
    and keys (`qk_norm`), `optim.z_loss` = 1e-5, and below 1e9 parameters as many key heads as query heads. modern:
    also relu2, value embeddings, residual mixing, windows, a bound of the logits, and Muon. The guide "The modern
    recipe" has what each gave. None = llama for a new plan; a plan of an earlier version keeps its defaults."""
    min_params: Annotated[int, BeforeValidator(parse_size)] = Field(200_000, ge=1)
    """Minimum model size [parameters]; a dataset too small for it is repeated, at most max_epochs times."""
    num_layers: int | None = Field(None, ge=1, le=10_000)
    """Number of layers; None = from the plan."""
    d_model: int | None = Field(None, ge=2)
    """Width of the residual stream; None = from the plan."""
    num_heads: int | None = Field(None, ge=1)
    """Number of query heads; None = from the plan."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Number of key and value heads, a divisor of num_heads; None = from the plan: all heads below 1e9 parameters."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; None = d_model / num_heads."""
    d_ffw: int | None = Field(None, ge=1)
    """Hidden width of the feed-forward; None = from the plan."""
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """Feed-forward: three matrices with a gate, or two with GELU or the square of ReLU. gelu_tanh computes GELU by its
    approximation by tanh, as GPT-2 does. Sources: Shazeer 2020, arXiv 2002.05202; Hendrycks and Gimpel 2016, arXiv
    1606.08415; So et al. 2021, arXiv 2109.08668, section 3."""
    bias: bool = False
    """Add biases to the matrices of the layers."""
    tie_embeddings: bool | None = None
    """Use the same matrix for input and output embedding; None = from the plan."""
    qk_norm: bool = False
    """Normalize queries and keys per head; every `recipe` sets it. Source: Dehghani et al. 2023, arXiv 2302.05442,
    section 2."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Norm of the residual stream; layernorm has gains and biases. Sources: Zhang and Sennrich 2019, arXiv 1910.07467;
    Ba et al. 2016, arXiv 1607.06450."""
    norm_position: Literal["pre", "post"] = "pre"
    """pre: normalize the input of each half of a layer, and the output of the last layer, as GPT-2 does. post:
    normalize the sum after each half of a layer, and the embeddings, as BERT does. Source: Xiong et al. 2020, arXiv
    2002.04745."""
    positions: Literal["rope", "relative", "learned"] = "rope"
    """rope: rotary (Su et al. 2021, arXiv 2104.09864); relative: Transformer-XL's, as in Gopher and Chinchilla (Dai et
    al. 2019, arXiv 1901.02860, section 3.3), which holds all T × T scores of each head in memory; learned: a vector for
    each position of a row, as in GPT-2 and BERT (Devlin et al. 2018, arXiv 1810.04805)."""
    max_positions: int = Field(0, ge=0)
    """With positions = learned: number of positions that have a vector, at least the longest row of the run."""
    num_token_types: int = Field(0, ge=0)
    """Number of vectors for kinds of tokens, 2 in BERT; all tokens of a run are of the first kind. 0 = none."""
    head_transform: bool = False
    """Use the head of BERT: a square matrix, GELU and a norm before the output projection, and biases."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies. Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Method that extends rotary frequencies to longer sequences. Sources: Chen et al. 2023, arXiv 2306.15595 (linear);
    Llama 3, arXiv 2407.21783, and its published configuration (wavelengths by low and high factors 1 and 4)."""
    rope_factor: float = Field(1.0, ge=1)
    """With rope_scaling = linear or llama3: the factor by which sequences become longer."""
    rope_original: int = Field(8192, ge=1, lt=1 << 53)
    """With rope_scaling = llama3: the sequence length before the extension [tokens]."""
    parametrization: Literal["standard", "mup"] = "standard"
    """How initial weights, learning rates and factors depend on the width. mup: maximal update parametrization, under
    which the best learning rate does not change with the width; it requires a rate that was found at some width (Yang
    et al. 2022, arXiv 2203.03466, table 8)."""
    mup_base_width: int = Field(256, ge=16)
    """With parametrization = mup: the d_model at which it equals the standard parametrization; a model that is k times
    wider has rates of matrices that are k times lower."""
    norm_eps: float = Field(1e-5, gt=0)
    """Number added to the mean square, or to the variance, in a norm."""
    value_embeddings: int = Field(0, ge=0)
    """Every n-th layer, counted from the last, adds a learned vector of the token to its values; 0 = no layer. The
    tables have parameters but no matrix products, so a plan does not count them as part of the model's size.
    Sources: Zhou et al. 2024, arXiv 2410.17897 (values of an earlier layer); modded-nanogpt, nanochat (tables)."""
    residual_mixing: bool = False
    """Start each layer from a weighted sum of the residual stream and the normalized token embeddings; the weights are
    learned, one for each channel. Source: modded-nanogpt and nanochat, which learn one weight for each layer."""
    window_pattern: str = Field("", pattern="^[SL]*$")
    """Attention of the layers in turn: S = the latest `window` positions, L = all, so "SSSL" repeats every four
    layers. The last layer has all positions. Empty = all layers have. Sources: Beltagy et al. 2020, arXiv 2004.05150
    (windows); OLMo 3, arXiv 2512.13961, and nanochat (three of four layers)."""
    window: int | None = Field(None, ge=1)
    """With window_pattern: number of latest positions that a query attends to in a layer S, its own included."""
    logit_softcap: float | None = Field(None, gt=0)
    """Bound of the logits z, which become cap · tanh(z / cap); None = no bound. Source: Gemma 2, arXiv 2408.00118,
    section 2 (30); nanochat has 15."""
    model: str = ""
    """The model to train: empty for the transformer of Penstock, "moe" for its mixture of experts, or
    "package.module:function" for one that an installed package declares (docs/extend/model.md)."""
    model_options: dict[str, bool | int | float | str] = Field({})
    """Options of `model`, which it reads by name."""
    device_memory: int | None = execution(None, ge=1)
    """Memory of a device [bytes], into which a micro-batch must fit; None = unknown, not checked."""
    world_sizes: tuple[PositiveInt, ...] = execution((1, 2, 8, 64), min_length=1)
    """World sizes for which memory is estimated."""

    @model_validator(mode="after")
    def _used(self) -> "PlanConfig":
        """Reject settings that would be ignored or contradict each other."""
        rotary = {"rope_theta", "rope_scaling", "rope_factor", "rope_original"}
        given = {name for name in rotary if getattr(self, name) != type(self).model_fields[name].default}
        budgets = [name for name in ("compute", "gpu_hours", "usd", "params") if getattr(self, name) is not None]
        ratio = type(self).model_fields["tokens_per_parameter"].default
        base_width = type(self).model_fields["mup_base_width"].default
        laws = sum(law is not None for law in (self.law_file, self.own_law))
        problems = [
            (len(budgets) > 1, f"{' and '.join(budgets)}: expected a single budget"),
            (
                self.inference_tokens is not None and budgets in ([], ["params"]),
                "inference_tokens requires compute, gpu_hours or usd: they set the loss to reach",
            ),
            (self.law != "ratio" and self.tokens_per_parameter != ratio, "tokens_per_parameter requires law = ratio"),
            (self.law != "own" and laws > 0, "law_file and own_law require law = own"),
            (self.law == "own" and laws == 0, "law = own requires law_file: fit a law with `penstock ladder`"),
            (laws == 2, "law_file and own_law: expected a single law"),
            (
                self.parametrization != "mup" and self.mup_base_width != base_width,
                "mup_base_width requires parametrization = mup",
            ),
            (
                self.parametrization == "mup" and self.positions == "relative",
                "parametrization = mup requires positions = rope",
            ),
            (not self.model and bool(self.model_options), "model_options requires model"),
            (self.positions != "rope" and bool(given), f"{', '.join(sorted(given))}: expected positions = rope"),
            (
                self.window_pattern.count("S") > 0 and self.window is None,
                f"window_pattern = {self.window_pattern} requires window",
            ),
            (self.window is not None and "S" not in self.window_pattern, "window requires window_pattern with an S"),
            (
                self.positions != "rope" and self.window is not None,
                "window requires positions = rope: relative positions compute all scores",
            ),
            (
                (self.positions == "learned") != bool(self.max_positions),
                "positions = learned and max_positions require each other",
            ),
            (self.rope_scaling == "none" and "rope_factor" in given, "rope_factor requires rope_scaling"),
            (
                self.rope_scaling != "llama3" and "rope_original" in given,
                "rope_original requires rope_scaling = llama3",
            ),
        ]
        if messages := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(messages))
        return self


# The section `[cluster]`: the devices that a run is planned for. It sizes the model of a budget in hours or money.


class ClusterConfig(Section):
    """The devices that a run is planned for, by their names in `train/parallel/devices.toml`, and their price."""

    device: str = execution("")
    """Name of the device, such as h100-sxm (an unknown name is an error that lists all), or a calibration file."""
    gpus: int | None = execution(None, ge=1)
    """Number of devices in a node; None = the usual number for this device."""
    nodes: int = execution(1, ge=1)
    """Number of nodes."""
    usd_per_gpu_hour: float | None = execution(None, gt=0)
    """Price of a device per hour [USD]; None = unknown, so no cost is shown and a budget in money is rejected."""
    mfu: float = execution(0.4, gt=0, le=1)
    """Assumed share of the dense bf16 peak, which converts device hours to FLOPs until a layout is known. Llama 3
    (arXiv 2407.21783, table 4) reached 0.38 to 0.43."""

    @model_validator(mode="after")
    def _used(self) -> "ClusterConfig":
        """Reject settings that need a device if no device is named."""
        if not self.device and (given := sorted(self.model_fields_set - {"device"})):
            raise ValueError(
                f"{' and '.join(given)}: expected a device, got none. Set cluster.device to the device that "
                "these settings describe, or remove the settings."
            )
        return self
