"""A mixture of experts computes the same in every layout that takes it, against a loop of one process without ranks.

The loop computes each token's experts one by one, whole logits, torch's own cross-entropy and AdamW. Other layouts
are refused before a rank starts.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from schemas.errors import ConfigError
from tests.support.layout_cases import EXACT, IN_BF16, SEED, SHAPE
from tests.support.layout_checks import check_layout
from tests.support.rank_pool import shared_pool
from train.config.settings import load_settings
from train.data.rows import IGNORED, Rows
from train.data.stages import StagePlan
from train.model.count_own import count_model
from train.model.moe import MixtureFeedForward
from train.model.own import build_any
from train.model.shape import OwnShape
from train.plan.plan import Plan
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

STEPS, BATCH, WIDTH, SOURCES = 4, 8, 16, 3
RATES = [1e-3 * min(1, step / 4) for step in range(1, STEPS + 1)]
DROPS = {"experts": 4, "top_k": 2, "dense_layers": 1, "shared": 1, "capacity_factor": 1.0, "balance": 0.1}
DROPLESS = {"experts": 4, "top_k": 1, "router_z": 0.01}

Figures = list[tuple[float, float, list[float], dict[str, float]]]
"""Loss, gradient norm, loss of each source, and figures of the model at every step."""


@cache
def shape_of(**options: Any) -> OwnShape:
    """Return the shape of a small mixture of experts, counted."""
    values = SHAPE.model_dump() | {"num_layers": 3, "model": "train.model.moe:build", "max_positions": WIDTH}
    return count_model(OwnShape.model_validate(values | {"options": options}), [WIDTH], True)


def batch_of(step: int) -> Rows:
    """Return rows of a learnable sequence; the last rows have fewer targets."""
    draw = torch.Generator().manual_seed(step)
    start, stride = torch.randint(0, 210, (BATCH, 1), generator=draw), torch.randint(1, 4, (BATCH, 1), generator=draw)
    ids = (start + stride * torch.arange(WIDTH + 1)) % 210
    documents = (torch.rand(BATCH, WIDTH, generator=draw) < 0.1).cumsum(1).int()
    targets = ids[:, 1:].clone()
    targets[torch.rand(BATCH, WIDTH, generator=draw) < 0.3 * torch.arange(BATCH)[:, None] / BATCH] = IGNORED
    return Rows(ids[:, :-1].contiguous(), targets, documents, torch.arange(BATCH) % SOURCES)


def plan_of(options: dict[str, Any], settings: dict[str, Any]) -> Plan:
    """Return a plan with the fields that a learner uses."""
    stage = StagePlan(first_step=0, num_steps=STEPS, seq_len=WIDTH, global_batch=BATCH, counts={"a": 1})
    train = {"seed": SEED} | settings.get("train", {})
    shape = shape_of(**options)
    return Plan(
        **{"dataset": "d", "tokenizer": "t", "order": "o", "shape": shape, "stages": (stage,), "warmup_steps": 10},
        **{"num_params": shape.num_params, "learning_rate": 1e-3, "flops_per_token": 1, "figures": []},
        **{"settings": load_settings(settings | {"train": train}, [], "test")},
    )


def learn(ranks: Any, options: dict[str, Any], settings: dict[str, Any]) -> Figures:
    """Return the figures of a run of some steps on one rank of a layout."""
    learner, actual = Learner(plan_of(options, settings), ranks, SOURCES), []
    learner.init_state()
    for step in range(1, STEPS + 1):
        whole, here = batch_of(step), learner.model.rows_here(BATCH)
        measured = learner.compute(step, whole.part(here.start, here.stop), BATCH, whole.num_targets)
        losses = [total / count for total, count in zip(measured.losses, measured.counts, strict=True)]
        figures = learner.model.figures_of(measured.model_sums)
        actual.append((measured.loss, measured.grad_norm, losses, figures))
        learner.update(RATES[step - 1], measured)
    return actual


def one_by_one(self: MixtureFeedForward, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mixture of a layer token by token, with dropped assignments counted in a loop."""
    options, (rows, length, _) = self.options, x_BTD.shape
    capacity = -(-length * options.top_k // options.experts) * (options.capacity_factor or options.experts)
    output = [[torch.zeros_like(x_BTD[0, 0]) for _ in range(length)] for _ in range(rows)]
    losses, figures = [], []
    for row in range(rows):
        logits = x_BTD[row] @ self.router.weight.T
        probs = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        chosen = probs.argsort(1, descending=True)[:, : options.top_k]
        taken, loads, dropped = [0] * options.experts, [0] * options.experts, 0
        for token in range(length):
            for choice in range(options.top_k):
                expert = int(chosen[token, choice])
                loads[expert] += 1
                if taken[expert] == capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                share = probs[token, expert] / (probs[token, chosen[token]].sum() if options.top_k > 1 else 1)
                x, own = x_BTD[row, token], self.experts
                hidden = F.silu(own.gate[expert] @ x) * (own.up[expert] @ x)
                output[row][token] = output[row][token] + share * (own.down[expert] @ hidden)
        shares = torch.tensor(loads) / (length * options.top_k)
        balance = options.experts * (shares * probs.mean(0)).sum()
        z = (torch.exp(logits).sum(1).log() ** 2).mean()
        losses.append(options.balance * balance + options.router_z * z)
        figures.append(torch.tensor([*loads, dropped, balance.item(), z.item(), 1.0]))
    mixed = torch.stack([torch.stack(tokens) for tokens in output])
    return mixed + (self.shared(x_BTD) if self.shared else 0), torch.stack(losses), torch.stack(figures)


def plain(options: dict[str, Any]) -> Figures:
    """Return the same figures from a loop without ranks, chunks or groups of tokens."""
    shape = shape_of(**options)
    model: Any = build_any(shape, None, True).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_weight(name, parameter.shape, SEED))
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rule, actual = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False), []
    for step in range(1, STEPS + 1):
        rows = batch_of(step)
        hidden = model.hidden(rows.inputs_BT, rows.documents_BT, None)
        logits, targets = (hidden.stream_BTD @ hidden.output_VD.T).flatten(0, 1), rows.targets_BT.flatten()
        by_row = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none").view(BATCH, WIDTH).sum(1)
        counts = (rows.targets_BT != IGNORED).sum(1)
        (by_row + hidden.auxiliary_B * counts).sum().div(rows.num_targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for group in rule.param_groups:
            group["lr"] = RATES[step - 1]
        rule.step()
        rule.zero_grad()
        of = [rows.sources_B == source for source in range(SOURCES)]
        sources = [(by_row[own].sum() / counts[own].sum()).item() for own in of]
        figures = model.figures_of(hidden.figures_BF.double().sum(0).tolist())
        actual.append(((by_row.sum() / rows.num_targets).item(), norm, sources, figures))
    return actual


def check_equal(actual: Figures, expected: Figures, bars: tuple[float, float] = EXACT) -> None:
    """Check that losses, norms and figures agree: counts exactly in fp32, everything else within the bars."""
    for (loss, norm, losses, figures), (loss_, norm_, losses_, figures_) in zip(actual, expected, strict=True):
        assert [loss, *losses] == pytest.approx([loss_, *losses_], rel=bars[0])
        assert norm == pytest.approx(norm_, rel=bars[1])
        if bars == EXACT:
            assert figures == pytest.approx(figures_, rel=1e-5)


def in_layouts(number: int, options: dict[str, Any], settings: list[dict[str, Any]]) -> list[Figures]:
    """Return the figures of layouts on `number` ranks, on which all ranks agree."""
    everywhere = [shared_pool().play(number, learn, options, each) for each in settings]
    assert all(actual == ranks[0] for ranks in everywhere for actual in ranks), "ranks disagree"
    return [ranks[0] for ranks in everywhere]


@pytest.mark.parametrize("options", [DROPS, DROPLESS], ids=["drops", "dropless"])
def test_every_layout_equals_a_loop_over_tokens(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    layouts: list[dict[str, Any]] = [
        {"data": "ddp", "micro_batch": 4},
        {"data": "zero1", "activation_checkpointing": "full"},
        {"data": "zero2", "micro_batch": 4, "activation_checkpointing": "selective"},
        {"micro_batch": 1},
        {"expert_parallel": True, "micro_batch": 4},
        {"expert_parallel": True, "data": "zero2", "activation_checkpointing": "full"},
    ]
    actual = in_layouts(2, options, [{"layout": layout} for layout in layouts])
    actual += in_layouts(4, options, [{"layout": {"replicate": 2}}, {"layout": {"expert_parallel": True}}])
    actual += in_layouts(1, options, [{}])
    monkeypatch.setattr(MixtureFeedForward, "forward", one_by_one)
    expected = plain(options)
    for figures in actual:
        check_equal(figures, expected)
    assert expected[-1][0] < expected[0][0] - 0.02
    dropped = [step[3]["dropped"] for step in expected]
    assert all(dropped) if options == DROPS else not any(dropped)


def test_16_bits_muon_and_lamb_agree_too() -> None:
    muon, lamb = ({"optim": {"optimizer": name}} for name in ("muon", "lamb"))
    reference = in_layouts(1, DROPS, [{}, muon, lamb])
    rounded = {"train": IN_BF16["train"]}
    for settings, expected, bars in (
        (rounded, reference[0], IN_BF16["bars"]),
        (rounded | {"layout": {"expert_parallel": True}}, reference[0], IN_BF16["bars"]),
        (rounded | {"layout": {"data": "ddp"}}, reference[0], IN_BF16["bars"]),
        (muon | {"layout": {"micro_batch": 4}}, reference[1], EXACT),
        (muon | {"layout": {"expert_parallel": True}}, reference[1], EXACT),
        (lamb | {"layout": {"micro_batch": 4}}, reference[2], EXACT),
        (lamb | {"layout": {"data": "zero1"}}, reference[2], EXACT),
        (lamb | {"layout": {"expert_parallel": True}}, reference[2], EXACT),
    ):
        check_equal(in_layouts(2, DROPS, [settings])[0], expected, bars)


@pytest.mark.slow
def test_compiled_layers_agree() -> None:
    expected = in_layouts(1, DROPS, [{}])[0]
    compiled = {"layout": {"compile": True, "micro_batch": 4, "activation_checkpointing": "full"}}
    check_equal(in_layouts(2, DROPS, [compiled])[0], expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": {"tensor": 2}}, r"layout\.tensor: expected 1 with plan\.model = train\.model\.moe:build, got 2"),
        ({"layout": {"context": 2}}, r"layout\.context: expected 1 .* what its positions exchange is unknown"),
        ({"layout": {"pipeline": 2}}, r"layout\.pipeline: expected 1 .* where its layers could be cut"),
        ({"train": {"precision": "fp8"}}, r"train\.precision: expected a format other than fp8 with plan\.model"),
        ({"layout": {"activation_checkpointing": "budget", "activation_budget": 9}}, "got budget"),
        ({"layout": {"expert_parallel": True, "compile": True}}, "number of tokens that a rank receives changes"),
        ({"layout": {"expert_parallel": True, "shard": 6}}, "a number of experts that 6 ranks divide, got 4"),
    ],
)
def test_what_is_not_possible_is_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    number = settings.get("layout", {}).get("shard", 2)
    with pytest.raises(ConfigError, match=message):
        check_layout(shape_of(**DROPS), load_settings(settings, [], "test"), number, [WIDTH], BATCH)


def test_a_gpu_does_not_compile_layers_whose_experts_are_divided() -> None:
    settings = load_settings({"layout": {"expert_parallel": True}}, [], "test").for_device("cuda")
    assert settings.layout.compile is False
    check_layout(shape_of(**DROPS), settings, 2, [WIDTH], BATCH)


def test_experts_are_not_divided_without_experts_or_over_replicas() -> None:
    settings = load_settings({"layout": {"expert_parallel": True}}, [], "test")
    with pytest.raises(ConfigError, match=r"layout\.expert_parallel: expected plan\.model = moe, got the transformer"):
        check_layout(SHAPE, settings, 2, [WIDTH], BATCH)
    with pytest.raises(ConfigError, match="expert_parallel requires data = zero2 or zero3, replicate = 1"):
        load_settings({"layout": {"expert_parallel": True, "replicate": 2}}, [], "test")
