"""The section `[plan]`: how a model is sized for a dataset; a value that is given is never changed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from schemas.config import Section, execution, location
from schemas.errors import ConfigError
from schemas.mix import read_mix
from schemas.storage import Store
from schemas.tokens import Dataset

# A law of loss that was fitted to runs of one's own, as a plan keeps it: its numbers, and how sure they are.


class OwnLaw(BaseModel):
    """L(N, D) = floor + a/N^alpha + b/D^beta [nats/token] of one dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    floor: float = Field(ge=0)
    """E, the loss of a model without bounds [nats/token]."""
    a: float = Field(gt=0)
    """A."""
    b: float = Field(gt=0)
    """B."""
    alpha: float = Field(gt=0)
    """Exponent of N."""
    beta: float = Field(gt=0)
    """Exponent of D."""
    counts: Literal["all", "body"] = "all"
    """Whether N has the embeddings in it ("all", as a plan counts) or not."""
    held: tuple[str, ...] = ()
    """Numbers that were not fitted, but taken from `held_from`."""
    held_from: str = ""
    """Source of what was held."""
    intervals: dict[str, tuple[float, float]] = {}
    """Where each number lies with probability `share`, and `exponent`, that of C in the best N."""
    share: float = Field(0.9, gt=0, lt=1)
    """What the intervals hold of the fits to runs drawn anew."""
    num_runs: int = Field(ge=1)
    """Number of runs."""
    deviation: float = Field(ge=0)
    """Root of the mean square of ln(measured / fitted loss)."""
    dataset: str = ""
    """Digest of the dataset of all runs; empty = not known, or not one."""
    params: float = Field(gt=0)
    """N of the largest run."""
    tokens: float = Field(gt=0)
    """D of the longest run."""
    compute: float = Field(gt=0)
    """6ND of the dearest run [FLOPs]."""

    @property
    def source(self) -> str:
        """Where the law comes from."""
        of = f"dataset {self.dataset[:12]}" if self.dataset else "datasets that it does not name"
        return f"fitted to {self.num_runs} runs on {of}"

    def held_if(self, name: str) -> str:
        """Where a number comes from."""
        return self.held_from if self._is_held(name) else self.source

    def told(self, name: str) -> str:
        """How sure a number is, in words."""
        if self._is_held(name):
            return "held, not fitted"
        if name not in self.intervals:
            return "no interval"
        low, high = self.intervals[name]
        return f"{100 * self.share:g} % between {low:.4g} and {high:.4g}"

    def _is_held(self, name: str) -> bool:
        return name in self.held or (name == "exponent" and bool(self.held))


class PlanConfig(Section):
    """How the model is sized; every override must keep the shape valid, or the plan is refused."""

    law: Literal[
        "ratio", "approach_1", "approach_2", "approach_3", "besiroglu", "kaplan", "deepseek", "llama_3", "own"
    ] = "ratio"
    """Which N belongs to which D; train/scaling/laws.py has all, and a plan shows the others beside it. ratio:
    `tokens_per_parameter`, since approaches 1 and 2 and Chinchilla itself agree on it. own: that of `law_file`."""
    law_file: str | None = location(None)
    """own: file of a law that `penstock ladder` or `penstock fit-scaling` fitted; a plan keeps the law itself."""
    own_law: OwnLaw | None = None
    """own: the law itself, as a plan has it from `law_file`."""
    tokens_per_parameter: float = Field(20.0, gt=0)
    """ratio: training tokens per parameter. Source: Hoffmann et al. 2022, arXiv 2203.15556, Table 3."""
    compute: float | None = Field(None, gt=0)
    """Budget [FLOPs, as 6ND] that N and D are chosen for; None = they follow from the tokens there are."""
    gpu_hours: float | None = Field(None, gt=0)
    """The same as hours of one of `cluster.device` at `cluster.mfu` of its peak."""
    usd: float | None = Field(None, gt=0)
    """The same as money [USD], at `cluster.usd_per_gpu_hour`."""
    params: float | None = Field(None, gt=0)
    """N that D is chosen for [parameters, embeddings included]."""
    inference_tokens: float | None = Field(None, gt=0)
    """Tokens that the model will read and write in use: with it, a smaller model of the same loss is trained longer.
    Source: Sardana et al. 2023, arXiv 2401.00448, section 2."""
    max_epochs: float = Field(4.0, gt=0)
    """Most passes over a source; 4 are nearly as good as new. Source: Muennighoff et al. 2023, arXiv 2305.16264."""
    min_params: int = Field(200_000, ge=1)
    """Smallest model [parameters] to plan for; a dataset too small for it is repeated, at most max_epochs times."""
    num_layers: int | None = Field(None, ge=1)
    """Number of layers; None = from the plan."""
    d_model: int | None = Field(None, ge=2)
    """Width of the residual stream; None = from the plan."""
    num_heads: int | None = Field(None, ge=1)
    """Number of query heads; None = from the plan."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Number of key and value heads, a divisor of num_heads; None = from the plan."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; None = d_model / num_heads."""
    d_ffw: int | None = Field(None, ge=1)
    """Hidden width of the feed-forward; None = from the plan."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward: three matrices with a gate, or two. Sources: Shazeer 2020, arXiv 2002.05202; Hendrycks and Gimpel
    2016, arXiv 1606.08415."""
    bias: bool = False
    """Whether the matrices of the layers have biases."""
    tie_embeddings: bool | None = None
    """Whether input and output embedding are one matrix; None = from the plan."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head. Source: Dehghani et al. 2023, arXiv 2302.05442, section 2."""
    positions: Literal["rope", "relative"] = "rope"
    """rope: rotary (Su et al. 2021, arXiv 2104.09864); relative: Transformer-XL's, as in Gopher and Chinchilla (Dai et
    al. 2019, arXiv 1901.02860, section 3.3), which holds a square of scores per head."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies. Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How rotary frequencies are stretched to longer sequences. Sources: Chen et al. 2023, arXiv 2306.15595 (linear);
    Llama 3, arXiv 2407.21783, and its published configuration (wave lengths by low and high factors 1 and 4)."""
    rope_factor: float = Field(1.0, ge=1)
    """linear, llama3: how many times longer."""
    rope_original: int = Field(8192, ge=1)
    """llama3: the length that was stretched [tokens]."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    device_memory: int | None = execution(None, ge=1)
    """Memory of one device [bytes], which a micro-batch must fit into; None = unknown, not checked."""
    world_sizes: tuple[PositiveInt, ...] = execution((1, 2, 8, 64), min_length=1)
    """Numbers of ranks that memory is estimated for."""

    @model_validator(mode="after")
    def _used(self) -> "PlanConfig":
        """Refuse a setting that the positions would ignore."""
        rotary = {"rope_theta", "rope_scaling", "rope_factor", "rope_original"}
        given = {name for name in rotary if getattr(self, name) != type(self).model_fields[name].default}
        budgets = [name for name in ("compute", "gpu_hours", "usd", "params") if getattr(self, name) is not None]
        ratio = type(self).model_fields["tokens_per_parameter"].default
        laws = sum(law is not None for law in (self.law_file, self.own_law))
        problems = [
            (len(budgets) > 1, f"{' and '.join(budgets)}: one budget is wanted"),
            (
                self.inference_tokens is not None and budgets in ([], ["params"]),
                "inference_tokens wants compute, gpu_hours or usd: the loss to be reached follows from it",
            ),
            (self.law != "ratio" and self.tokens_per_parameter != ratio, "tokens_per_parameter wants law = ratio"),
            (self.law != "own" and laws > 0, "law_file and own_law want law = own"),
            (self.law == "own" and laws == 0, "law = own wants law_file: fit one with `penstock ladder`"),
            (laws == 2, "law_file and own_law: one law is wanted"),
            (self.positions != "rope" and bool(given), f"{', '.join(sorted(given))}: positions = rope is wanted"),
            (self.rope_scaling == "none" and "rope_factor" in given, "rope_factor wants rope_scaling"),
            (self.rope_scaling != "llama3" and "rope_original" in given, "rope_original wants rope_scaling = llama3"),
        ]
        if found := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(found))
        return self


# The section `[cluster]`: the devices that a run is planned for; nothing of it changes what is computed.


class ClusterConfig(Section):
    """Devices by the names of the plan's table, and what they cost."""

    device: str = execution("")
    """Name of the device, such as h100-sxm (an unknown name is answered with those known), or a calibration's file."""
    gpus: int | None = execution(None, ge=1)
    """Devices in a node; None = as many as a usual node has of them."""
    nodes: int = execution(1, ge=1)
    """Nodes."""
    usd_per_gpu_hour: float | None = execution(None, gt=0)
    """Price of a device for an hour [USD]; None = unknown, so no cost is shown and no budget in money is taken."""
    mfu: float = execution(0.4, gt=0, le=1)
    """Share of the dense bf16 peak by which hours of devices become FLOPs, until a layout is known. Llama 3 (arXiv
    2407.21783, table 4) reached 0.38 to 0.43."""

    @model_validator(mode="after")
    def _used(self) -> "ClusterConfig":
        """Refuse settings of a device that is not named."""
        if not self.device and (given := sorted(self.model_fields_set - {"device"})):
            raise ValueError(f"{' and '.join(given)}: device is wanted")
        return self


# A mix that a run follows: its shares as settings, the copy that is kept beside the plan, and what contradicts it.

WEIGHTS, MIX = "train.weights", "train.mix"


def mix_overrides(path: str, dataset: Dataset, overrides: Sequence[str] = ()) -> list[str]:
    """What the mix in a file says of a dataset's sources, as `section.key=value`: shares, and the digest of the file.

    Raises ConfigError if the file is no mix, is for other sources, or if `overrides` give shares as well.
    """
    if found := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]:
        raise ConfigError(
            f"--mix {path}: expected shares in one place, got --set {' and '.join(found)} too. Leave one out."
        )
    parts = read_mix(path).of(set(dataset.num_tokens()), f"mix {path}, for dataset {dataset.digest[:12]}")
    shares = ", ".join(f"{json.dumps(name)} = {part.share!r}" for name, part in sorted(parts.items()))
    return [f"{WEIGHTS}={{{shares}}}", f'{MIX}="{_digest(path)}"']


def keep_mix(run: Store, path: str) -> str:
    """Copy a mix beside the plan that follows it; returns where it is, relative to the run.

    The name holds the digest, so a plan that is made again by another mix overwrites none.
    """
    name = kept_name(_digest(path))
    run.write_atomic(name, Path(path).read_bytes())
    return name


def kept_name(digest: str) -> str:
    """Where the mix of a digest is kept, relative to the run."""
    return f"train/mix-{digest[:12]}.toml"


def check_kept(settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError if overrides change the shares of a plan that follows a mix, `settings` being the plan's."""
    mix = settings.get("train", {}).get("mix")
    if mix and (found := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]):
        raise ConfigError(
            f"--set {' and '.join(found)}: expected the shares of mix {mix[:12]}, which the plan follows. Plan again "
            "without --mix, or with another."
        )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
