"""Every layout computes the same: loss and gradient norm of 20 steps, against a plain loop of one process.

All begin from one seed checkpoint that a single process wrote. The plain loop knows of no ranks: whole logits, torch's
own cross-entropy, norm, clipping and AdamW.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankFailed, shared_pool

from schemas.errors import ConfigError
from schemas.storage import Store
from train.checkpoint.note import Identity, Note, layout_of
from train.checkpoint.state import read_state
from train.checkpoint.write import write_checkpoint
from train.config.settings import load_settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape, num_parameters
from train.model.transformer import build_model, initial_weight
from train.plan.axes import axes_of, check_layout
from train.plan.planned import Plan
from train.pretrain.learner import Learner
from train.ranks import open_ranks
from train.rows import IGNORED, Rows

pytestmark = pytest.mark.dist

STEPS, BATCH, WIDTH, SOURCES = 20, 12, 32, 3
SEED = 5
# The warm-up is half the run because Adam's first updates have full size wherever the gradient is beyond rounding.
RATES = [1e-3 * min(1, step / 10) for step in range(1, STEPS + 1)]
SHAPE = ModelShape(
    vocab_size=210, num_layers=4, d_model=48, num_heads=4, num_kv_heads=2, head_dim=12, d_ffw=80, tie_embeddings=False
)
"""A vocabulary that four ranks do not divide; sizes that FSDP2 cuts unevenly."""
EXACT = (1e-6, 1e-5)
"""Bars of fp32: relative deviation of loss and of gradient norm."""


@dataclass(frozen=True)
class Case:
    """A layout, and what is trained in it."""

    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    bars: tuple[float, float] = EXACT

    def settings(self) -> dict[str, Any]:
        """The sections of a recipe."""
        return {"layout": self.layout, "train": {"seed": SEED} | self.train, "optim": self.optim}

    def of_shape(self) -> ModelShape:
        """The model's shape."""
        return ModelShape.model_validate(SHAPE.model_dump() | self.shape)


TIED, GELU = {"tie_embeddings": True}, {"activation": "gelu", "bias": True, "qk_norm": True, "num_kv_heads": 4}
IN_BF16 = {"train": {"precision": "bf16"}, "bars": (1e-3, 3e-2)}
"""Of bf16 against fp32, whose 16 bits more they allow for: 3e-4 and 3e-3 were seen."""
IN_FP8 = {"train": {"precision": "fp8"}, "shape": {"d_model": 64, "head_dim": 16}, "bars": (1e-2, 5e-2)}
"""Of fp8 against fp32: 3e-3 and 1e-2 were seen."""

CASES = {
    "one rank": Case(1),
    "one rank, micro-batches": Case(1, {"micro_batch": 5}),
    "ddp": Case(2, {"data": "ddp", "micro_batch": 4}),
    "zero1": Case(2, {"data": "zero1", "micro_batch": 4}),
    "zero2": Case(2, {"data": "zero2", "micro_batch": 4}),
    "zero3": Case(2, {"micro_batch": 4}),
    "zero3 x 4": Case(4, {"micro_batch": 2}, TIED),
    "hsdp": Case(4, {"replicate": 2, "micro_batch": 1}),
    "tensor": Case(2, {"tensor": 2}, TIED),
    "tensor x shard": Case(4, {"tensor": 2}, GELU),
    "context by heads": Case(2, {"context": 2}),
    "context by keys": Case(2, {"context": 2, "context_by": "keys"}),
    "gpipe": Case(2, {"pipeline": 2, "schedule": "gpipe", "micro_batch": 3}),
    "1f1b": Case(2, {"pipeline": 2, "micro_batch": 3}, TIED),
    "interleaved": Case(2, {"pipeline": 2, "schedule": "interleaved", "micro_batch": 3}),
    "zero bubble": Case(2, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}),
    "zbv": Case(2, {"pipeline": 2, "schedule": "zbv", "data": "zero2", "micro_batch": 3}),
    "shard x tensor x pipeline": Case(8, {"pipeline": 2, "tensor": 2, "micro_batch": 3}, TIED),
    "recompute all": Case(2, {"activation_checkpointing": "full"}),
    "recompute what is cheap": Case(2, {"activation_checkpointing": "selective"}),
    "recompute within a budget": Case(2, {"activation_checkpointing": "budget", "activation_budget": 600_000}),
    "offload": Case(2, {"offload": True}),
    "bf16": Case(2, **IN_BF16),
    "muon": Case(4, {"tensor": 2}, optim={"optimizer": "muon"}),
    "adafactor": Case(4, {"tensor": 2}, optim={"optimizer": "adafactor"}),
}
"""What every run of the tests plays."""

SLOW = {
    "ddp x 4": Case(4, {"data": "ddp", "micro_batch": 1}, TIED),
    "zero1 x 4": Case(4, {"data": "zero1"}, GELU),
    "zero2 x 4": Case(4, {"data": "zero2", "micro_batch": 1}),
    "zero3 x 8": Case(8, {"micro_batch": 1}),
    "hsdp x 8": Case(8, {"replicate": 4, "data": "zero2", "micro_batch": 1}, TIED),
    "hsdp x context": Case(8, {"replicate": 2, "context": 2}),
    "tensor x 4": Case(4, {"tensor": 4}, {"num_kv_heads": 4}),
    "context by heads x 4": Case(4, {"context": 4}),
    "context by keys x 4": Case(4, {"context": 4, "context_by": "keys"}, TIED),
    "context x shard": Case(4, {"context": 2}, GELU),
    "tensor x context x shard": Case(8, {"tensor": 2, "context": 2, "context_by": "keys"}),
    "tensor x context by heads": Case(4, {"tensor": 2, "context": 2}),
    "pipeline x 4": Case(4, {"pipeline": 4, "micro_batch": 2}, TIED),
    "pipeline x shard": Case(4, {"pipeline": 2, "micro_batch": 3}),
    "pipeline x shard, zero2": Case(4, {"pipeline": 2, "data": "zero2", "micro_batch": 2}, TIED),
    "pipeline x tensor": Case(4, {"pipeline": 2, "tensor": 2, "micro_batch": 3}),
    "pipeline x context": Case(4, {"pipeline": 2, "context": 2, "micro_batch": 3}),
    "pipeline x hsdp": Case(8, {"pipeline": 2, "replicate": 2, "micro_batch": 1}),
    "interleaved x tensor": Case(4, {"pipeline": 2, "tensor": 2, "schedule": "interleaved", "micro_batch": 3}, TIED),
    "zero bubble x shard": Case(4, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}, TIED),
    "zbv x shard": Case(4, {"pipeline": 2, "schedule": "zbv", "data": "zero2", "micro_batch": 2}),
    "recompute in a pipeline": Case(2, {"pipeline": 2, "activation_checkpointing": "full", "micro_batch": 3}),
    "recompute x tensor": Case(2, {"tensor": 2, "activation_checkpointing": "selective"}),
    "offload x tensor": Case(4, {"tensor": 2, "offload": True}),
    "compile": Case(2, {"compile": True}),
    "bf16, ddp": Case(2, {"data": "ddp"}, **IN_BF16),
    "bf16 x tensor x pipeline": Case(4, {"tensor": 2, "pipeline": 2, "micro_batch": 3}, **IN_BF16),
    "lamb": Case(4, {"tensor": 2}, optim={"optimizer": "lamb"}),
    "muon x pipeline": Case(4, {"pipeline": 2, "micro_batch": 3}, optim={"optimizer": "muon"}),
    "fp8": Case(2, **IN_FP8),
    "z-loss": Case(4, {"tensor": 2}, TIED, optim={"z_loss": 1e-2}),
    "z-loss in a pipeline": Case(2, {"pipeline": 2, "micro_batch": 3}, optim={"z_loss": 1e-2}),
}
"""The rest of the matrix."""


def batch_of(step: int) -> Rows:
    """Rows of a learnable sequence with documents of random lengths; the last rows have fewer targets."""
    draw = torch.Generator().manual_seed(step)
    start, stride = torch.randint(0, 210, (BATCH, 1), generator=draw), torch.randint(1, 4, (BATCH, 1), generator=draw)
    ids = (start + stride * torch.arange(WIDTH + 1)) % 210
    documents = (torch.rand(BATCH, WIDTH, generator=draw) < 0.1).cumsum(1).int()
    targets = ids[:, 1:].clone()
    targets[torch.rand(BATCH, WIDTH, generator=draw) < 0.3 * torch.arange(BATCH)[:, None] / BATCH] = IGNORED
    return Rows(ids[:, :-1].contiguous(), targets, documents, torch.arange(BATCH) % SOURCES)


def plan_of(case: Case) -> Plan:
    """As much of a plan as a learner looks at."""
    stage = StagePlan(first_step=0, num_steps=STEPS, seq_len=WIDTH, global_batch=BATCH, counts={"a": 1})
    settings = load_settings(case.settings(), [], "test")
    return Plan(
        **{"dataset": "d", "tokenizer": "t", "order": "o", "shape": case.of_shape(), "stages": (stage,)},
        **{"num_params": num_parameters(case.of_shape()), "warmup_steps": 10, "learning_rate": 1e-3},
        **{"flops_per_token": 1, "settings": settings, "figures": []},
    )


def learn(ranks, case: Case, seed: str, fault: str = "") -> list[tuple[float, float, list[float]]]:
    """Loss, gradient norm and loss of each source at every step, as one of the ranks of a layout."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    run = Store(seed)
    note = Note.model_validate_json(run.read_bytes("note.json"))
    learner.begin()  # the seed holds weights only
    weights = {name: value for name, value in learner.state().items() if name.startswith("model.")}
    for value in weights.values():
        value.zero_()
    read_state(run, note, weights, ranks)
    found = []
    for step in range(1, STEPS + 1):
        whole = batch_of(step)
        here = learner.model.rows_here(BATCH)
        rows = whole.part(here.start, here.stop)
        if fault == "rows of another step" and ranks.rank == 1:
            rows = batch_of(step + 1).part(here.start, here.stop)
        targets = whole.num_targets / (2 if fault == "averaged over the ranks" else 1)
        measured = learner.compute(step, rows, BATCH, targets)
        losses = [total / max(count, 1) for total, count in zip(measured.losses, measured.counts, strict=True)]
        found.append((measured.loss, measured.grad_norm, losses))
        assert sum(measured.counts) == whole.num_targets or fault
        learner.update(RATES[step - 1], measured)
    return found


@cache
def plain(shape: ModelShape, optimizer: str, z_loss: float) -> list[tuple[float, float, list[float]]]:
    """The same, by a loop that knows of no ranks, parts, chunks or fused kernels."""
    model = build_model(shape).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, SEED))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rule = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    found = []
    for step in range(1, STEPS + 1):
        rows = batch_of(step)
        logits, targets = model(rows.inputs_BT, rows.documents_BT).flatten(0, 1), rows.targets_BT.flatten()
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        loss = losses.sum() / rows.num_targets
        extra = z_loss * (logits.logsumexp(-1)[targets != IGNORED] ** 2).mean() if z_loss else 0.0
        (loss + extra).backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in rule.param_groups:
            group["lr"] = RATES[step - 1]
        rule.step()
        rule.zero_grad()
        by_row, counts = losses.detach().view(BATCH, WIDTH).sum(1), (rows.targets_BT != IGNORED).sum(1)
        sources = [
            (by_row[rows.sources_B == s].sum() / counts[rows.sources_B == s].sum()).item() for s in range(SOURCES)
        ]
        found.append((loss.item(), norm.item(), sources))
    return found


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory):
    """The seed checkpoint of a shape, as a folder; written once by a single process, weights alone."""

    @cache
    def seed(shape: ModelShape) -> str:
        run = Store(str(tmp_path_factory.mktemp("seed")))
        case = Case(1, shape=shape.model_dump())
        with open_ranks() as ranks:
            learner = Learner(plan_of(case), ranks, SOURCES)
            learner.begin()
            names = ("dataset", "tokenizer", "order", "skip_list", "code_version")
            identity = Identity(**dict.fromkeys(names, "seed"), settings={}, skip_length=0)
            layout = layout_of(learner.settings.layout, axes_of(learner.settings.layout, 1), 1, "cpu")
            weights = {name: value for name, value in learner.state().items() if name.startswith("model.")}
            note = write_checkpoint(run, Note(step=0, identity=identity, layout=layout), weights, ranks)
        run.write_atomic("note.json", note.to_bytes())
        return run.uri

    return seed


def deviation(found: list, reference: list) -> tuple[float, float]:
    """Largest relative deviation of the losses, those of the sources included, and of the gradient norms."""
    pairs = list(zip(found, reference, strict=True))
    losses = [abs(a[0] / b[0] - 1) for a, b in pairs]
    losses += [abs(x / y - 1) for a, b in pairs for x, y in zip(a[2], b[2], strict=True)]
    return max(losses), max(abs(a[1] / b[1] - 1) for a, b in pairs)


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)], ids=lambda name: name
)
def test_every_layout_equals_a_plain_loop(seeds, name: str) -> None:
    case = (CASES | SLOW)[name]
    shape, seed = case.of_shape(), seeds(case.of_shape())
    everywhere = shared_pool().play(case.ranks, learn, case, seed)
    assert all(found == everywhere[0] for found in everywhere), "ranks disagree"
    optimizer = case.optim.get("optimizer", "adamw")
    if optimizer == "adamw":
        reference = plain(shape, optimizer, case.optim.get("z_loss", 0.0))
    else:
        reference = shared_pool().play(1, learn, Case(1, shape=case.shape, optim=case.optim), seed)[0]
    loss, norm = deviation(everywhere[0], reference)
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}")
    assert loss <= case.bars[0]
    assert norm <= case.bars[1]
    assert everywhere[0][-1][0] < everywhere[0][0][0] - 0.1


@pytest.mark.parametrize("fault", ["rows of another step", "averaged over the ranks"])
def test_a_wrong_layout_is_found_out(seeds, fault: str) -> None:
    case = Case(2, {"data": "zero2"})
    loss, norm = deviation(shared_pool().play(2, learn, case, seeds(SHAPE), fault)[0], plain(SHAPE, "adamw", 0.0))
    assert norm > 1e-2
    assert loss > 1e-3 or fault == "averaged over the ranks"  # clipping hides a factor from AdamW's first updates


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ({"tensor": 2, "context": 2}, {"positions": "relative"}, "positions = relative"),
        ({"pipeline": 2, "schedule": "zbv", "data": "zero2"}, TIED, "tie_embeddings"),
        ({"tensor": 3}, {}, "num_heads: promised a multiple of tensor = 3, found 4"),
    ],
)
def test_what_no_layout_can_do_is_refused(layout: dict, shape: dict, message: str) -> None:
    case = Case(12, layout, shape)
    with pytest.raises(ConfigError, match=message):
        check_layout(case.of_shape(), load_settings(case.settings(), [], "test"), 12, [WIDTH], BATCH)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pipeline": 2, "schedule": "zbv"}, "schedule = zbv wants data = zero2"),
        ({"data": "ddp", "tensor": 2}, "data = ddp stands alone"),
        ({"compress": "topk"}, "compress wants data = ddp or replicate > 1"),
        ({"schedule": "gpipe"}, "schedule and stages_per_rank want pipeline > 1"),
        ({"activation_budget": 5}, "activation_budget and activation_checkpointing = budget want each other"),
    ],
)
def test_what_a_layout_would_ignore_is_refused(layout: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"layout": layout}, [], "test")


def test_a_failing_rank_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: [^$]*no such checkpoint"):
        shared_pool().play(2, fail_on_the_second, str(tmp_path))


def fail_on_the_second(ranks, folder: str) -> None:
    """A rank that raises while the other waits for nothing."""
    if ranks.rank == 1:
        raise FileNotFoundError(f"{folder}: no such checkpoint")
