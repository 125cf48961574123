"""The plan: what a dataset's token counts say about the model and the run, every number with its formula and source.

N is the number of all parameters, a tied embedding counted once: the 20 tokens per parameter were measured on such
counts (Hoffmann et al. 2022, Table A9 includes the embedding), and Pearce and Song 2024, arXiv 2406.12907, trace the
disagreement of Kaplan et al. to leaving it out. Rules that were fitted without embeddings get N without them.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from train import rules
from train.config import PlanConfig, TrainConfig
from train.order import Order, make_order
from train.rules import Figure, Row, figures_of
from train.shape import ModelShape, choose_shape, cost_figures, flops_per_token, memory_per_rank, num_parameters

PLAN_NAME = "train/plan.json"
MAX_WARMUP = 2000
HOFFMANN = "Hoffmann et al. 2022, arXiv 2203.15556, Table 3"
TABLE_A9 = "Hoffmann et al. 2022, arXiv 2203.15556, Table A9"
AINSLIE = "Ainslie et al. 2023, arXiv 2305.13245, section 3.3"
SHAZEER = "Shazeer 2020, arXiv 2002.05202, section 3"
MOBILE = "Liu et al. 2024, arXiv 2402.14905, section 2.2"
PORIAN_WARMUP = "Porian et al. 2024, arXiv 2406.19146, section 3.3"


class Plan(BaseModel):
    """A sized run: everything the trainer needs besides the dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dataset: str
    """Digest of the dataset the plan was made for."""
    tokenizer: str
    """SHA-256 of the tokenizer's model file."""
    order: str
    """Digest of the order of the samples."""
    shape: ModelShape
    """Shape of the model."""
    num_params: int
    """Exact number of parameters of that shape."""
    seq_len: int
    """Tokens per sequence; a sample holds one more."""
    global_batch: int
    """Sequences per step."""
    steps: int
    """Optimiser steps."""
    warmup_steps: int
    """Steps of linear warm-up."""
    learning_rate: float
    """Peak learning rate."""
    flops_per_token: int
    """FLOPs of forward and backward per token."""
    plan_config: PlanConfig
    """Settings the plan was made with."""
    train_config: TrainConfig
    """Settings the plan was made with."""
    figures: list[Figure]
    """Every number above and those behind it, in the order they follow from each other."""


@dataclass(frozen=True)
class _Data:
    """What the dataset offers under the settings."""

    samples: dict[str, int]
    """Unique samples of each source in use."""
    shares: dict[str, float]
    """Share of each source in the samples of the run."""
    most_samples: int
    """Samples until the source that repeats soonest has been read max_epochs times."""
    wanted: float
    """Parameters the model should have."""


def make_plan(dataset: Dataset, plan: PlanConfig, train: TrainConfig) -> Plan:
    """The plan for a dataset. Raises ConfigError if settings contradict each other or what the dataset offers."""
    order = make_order(dataset, train)
    data = _offered(order, plan)
    shape = choose_shape(data.wanted, dataset.tokenizer.vocab_size, plan)
    _check_memory(shape, plan, train)
    num_params = num_parameters(shape)
    tokens = min(plan.tokens_per_parameter * num_params, data.most_samples * train.seq_len)
    body_flops = flops_per_token(shape, train.seq_len, logits=False)
    sequences = rules.deepseek_batch(body_flops * tokens) / train.seq_len
    batch = train.global_batch or _power_of_two(sequences, data.most_samples)
    steps = train.steps or max(1, min(round(tokens / (batch * train.seq_len)), data.most_samples // batch))
    if steps * batch > data.most_samples:
        raise ConfigError(
            f"train.steps, train.global_batch: promised at most plan.max_epochs = {plan.max_epochs:g} passes, which "
            f"are {data.most_samples} samples, found {steps} steps of {batch}; lower them or raise plan.max_epochs"
        )
    compute = body_flops * steps * batch * train.seq_len
    by_size = min(MAX_WARMUP, math.ceil(num_params / (batch * train.seq_len)), steps // 10)
    sized = Plan(
        dataset=dataset.digest,
        tokenizer=dataset.tokenizer.sha256,
        order=order.digest,
        shape=shape,
        num_params=num_params,
        seq_len=train.seq_len,
        global_batch=batch,
        steps=steps,
        warmup_steps=by_size if train.warmup_steps is None else train.warmup_steps,
        learning_rate=train.learning_rate or _rounded(rules.deepseek_learning_rate(compute)),
        flops_per_token=flops_per_token(shape, train.seq_len),
        plan_config=plan,
        train_config=train,
        figures=[],
    )
    figures = [*_data_figures(dataset, sized, data), *_model_figures(sized, data), *_run_figures(sized, compute)]
    figures += cost_figures(shape, plan, train, steps * batch * train.seq_len)
    return sized.model_copy(update={"figures": figures})


def _offered(order: Order, plan: PlanConfig) -> _Data:
    samples = {stream.source: stream.num_samples for stream in order.streams}
    block, passes = sum(order.counts.values()), Fraction(str(plan.max_epochs))
    most = max(1, min(int(passes * samples[name] * block / count) for name, count in order.counts.items()))
    tokens = min(sum(samples.values()), most) * order.seq_len
    return _Data(
        samples=samples,
        shares={name: count / block for name, count in order.counts.items()},
        most_samples=most,
        wanted=max(plan.min_params, tokens / plan.tokens_per_parameter),
    )


def _power_of_two(sequences: float, most: int) -> int:
    """The power of two nearest to a number of sequences by ratio, so that ranks can share a batch; at most `most`."""
    return max(1, min(1 << max(0, round(math.log2(sequences))), most))


def _rounded(rate: float) -> float:
    """Three digits: a rule is not known better, and the last bits of a power differ between machines."""
    return float(f"{rate:.3g}")


def _check_memory(shape: ModelShape, plan: PlanConfig, train: TrainConfig) -> None:
    need = memory_per_rank(shape, train, max(plan.world_sizes))
    fixed = sum(need.values()) - need["states"]
    if plan.device_memory is not None and fixed > plan.device_memory:
        raise ConfigError(
            f"train.micro_batch: promised to fit into plan.device_memory = {plan.device_memory} bytes, found that "
            f"{train.micro_batch} sequences of {train.seq_len} need {fixed} besides the optimiser states; lower it or "
            'set train.activation_checkpointing = "full"'
        )


def _data_figures(dataset: Dataset, plan: Plan, data: _Data) -> list[Figure]:
    total, drawn = dataset.num_tokens(TRAIN), plan.steps * plan.global_batch
    unique = sum(data.samples.values()) * plan.seq_len
    worth = sum(
        rules.worth_in_unique_tokens(data.samples[source], drawn * share) for source, share in data.shares.items()
    )
    repeated = "Σ U + U·R*·(1 − exp(−(D/U − 1)/R*)), R* = 15.39"
    rows: list[Row] = [
        *((f"tokens.{source}", total[source], "tokens", "in the manifest", "dataset") for source in data.samples),
        ("unique_tokens", unique, "tokens", "U = Σ whole chunks; a source's last token is a target only", "dataset"),
        ("tokens", drawn * plan.seq_len, "tokens", "D = steps · B · L", "count"),
        *(
            (f"epochs.{source}", drawn * share / data.samples[source], "passes", "D · share / U", "count")
            for source, share in data.shares.items()
        ),
        ("worth_in_unique_tokens", round(worth * plan.seq_len), "tokens", repeated, rules.MUENNIGHOFF),
    ]
    return figures_of(rows)


def _model_figures(plan: Plan, data: _Data) -> list[Figure]:
    shape, settings = plan.shape, plan.plan_config
    exact = "N = V·d·(1 if tied else 2) + layers·(2·d² + 2·d·kv + 3·d·ffw + norms) + d"
    nearest = "nearest to wanted_params"
    tokens = plan.steps * plan.global_batch * plan.seq_len
    rows: list[Row] = [
        (
            "wanted_params",
            round(data.wanted),
            "parameters",
            f"max(min_params, U / {settings.tokens_per_parameter:g}), U at most what max_epochs allows",
            HOFFMANN,
        ),
        ("num_layers", shape.num_layers, "", *_given(settings.num_layers, nearest, TABLE_A9)),
        ("d_model", shape.d_model, "", *_given(settings.d_model, nearest, TABLE_A9)),
        ("num_heads", shape.num_heads, "", *_given(settings.num_heads, "d / width of a head", TABLE_A9)),
        ("num_kv_heads", shape.num_kv_heads, "", *_given(settings.num_kv_heads, "num_heads / 4, at least 2", AINSLIE)),
        ("d_ffw", shape.d_ffw, "", *_given(settings.d_ffw, "8/3 · d, to a multiple of 16", SHAZEER)),
        ("tie_embeddings", int(shape.tie_embeddings), "", *_given(settings.tie_embeddings, "2·V·d > N/5", MOBILE)),
        ("params", plan.num_params, "parameters", exact, "count"),
        ("params_without_embeddings", num_parameters(shape, False), "parameters", "N − embeddings", "count"),
        ("tokens_per_parameter", tokens / plan.num_params, "", "D / N", HOFFMANN),
    ]
    return figures_of(rows)


def _run_figures(plan: Plan, compute: float) -> list[Figure]:
    body, tokens = num_parameters(plan.shape, False), plan.steps * plan.global_batch * plan.seq_len
    train, per = plan.train_config, plan.plan_config.tokens_per_parameter
    batch = f"B = 0.2920·C^0.3271 / L, to a power of two; C for {per:g}·N tokens or max_epochs"
    steps = f"{per:g}·N / (B · L), no source over max_epochs"
    warmup = f"as many tokens as parameters, at most {MAX_WARMUP} steps and a tenth of the run"
    law = rules.step_law_learning_rate(body, tokens)
    rows: list[Row] = [
        ("compute", compute, "FLOPs", "C = (6·matrices + 12·layers·d·L)·D without embeddings", rules.DEEPSEEK),
        ("global_batch", plan.global_batch, "sequences", *_given(train.global_batch, batch, rules.DEEPSEEK)),
        ("batch_tokens", plan.global_batch * plan.seq_len, "tokens", "B · L", "count"),
        ("batch_tokens.step_law", rules.step_law_batch(tokens), "tokens", "0.58·D^0.571", rules.STEP_LAW),
        ("batch_tokens.porian", rules.porian_batch(body), "tokens", "160·2048·(N'/108e6)^(2/3)", rules.PORIAN),
        ("steps", plan.steps, "steps", *_given(train.steps, steps, HOFFMANN)),
        ("warmup_steps", plan.warmup_steps, "steps", *_given(train.warmup_steps, warmup, PORIAN_WARMUP)),
        ("learning_rate", plan.learning_rate, "", *_given(train.learning_rate, "0.3118·C^−0.1250", rules.DEEPSEEK)),
        ("learning_rate.step_law", law, "", "1.79·N'^−0.713·D^0.307", rules.STEP_LAW),
        ("learning_rate.porian", rules.porian_learning_rate(body), "", "0.0047·(N'/108e6)^(−1/3)", rules.PORIAN),
    ]
    if body < rules.MAX_KAPLAN_PARAMS:
        rate = rules.kaplan_learning_rate(body)
        rows.append(("learning_rate.kaplan", rate, "", "0.003239 − 0.0001395·ln N'", rules.KAPLAN))
    return figures_of(rows)


def _given(setting: float | None, formula: str, source: str) -> tuple[str, str]:
    """Formula and source of a value that the recipe may have set instead."""
    return (formula, source) if setting is None else ("as given", "recipe")


def write_plan(run: Store, plan: Plan) -> None:
    """Replace the run's plan."""
    run.write_atomic(PLAN_NAME, plan.model_dump_json(indent=1).encode())


def read_plan(run: Store, dataset: Dataset | None = None) -> Plan:
    """The run's plan. Raises ContractError if there is none, or if it is for another dataset (None: the run's own)."""
    if not run.exists(PLAN_NAME):
        raise ContractError(f"{run.uri}: promised a plan, found no {PLAN_NAME}; make it with `penstock plan`")
    try:
        plan = Plan.model_validate(run.read_json(PLAN_NAME))
    except ValidationError as error:
        raise ContractError(f"{run.uri}/{PLAN_NAME}: does not hold together: {error}; plan again") from error
    found = (dataset or open_dataset(run)).digest
    if plan.dataset != found:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: promised dataset {plan.dataset}, the run now holds {found}; "
            "plan again, or restore the dataset"
        )
    return plan


def print_plan(plan: Plan) -> str:
    """The plan as a table of text, one figure a line."""
    rows = [(f.name, _shown(f.value, f.unit), f.unit, f.formula, f.source) for f in plan.figures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"plan for dataset {plan.dataset[:12]}, tokenizer {plan.tokenizer[:12]}"]
    for name, value, unit, formula, source in rows:
        cells = (name.ljust(widths[0]), value.rjust(widths[1]), unit.ljust(widths[2]), formula.ljust(widths[3]), source)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _shown(value: int | float, unit: str) -> str:
    if isinstance(value, int) and unit != "FLOPs":
        return f"{value:,}"
    return f"{value:.3g}" if value < 1e5 or unit == "FLOPs" else f"{value:,.0f}"
