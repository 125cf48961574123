"""What the speed of training is compared on: shapes, rows, and contenders that compute the same with them.

Suffixes of tensors are those of the trainer: B rows, T positions.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config.settings import Settings
from train.data.rows import IGNORED, Rows
from train.data.stages import StagePlan
from train.model.draw import BY_POSITION
from train.model.shape import ModelShape, flops_per_token, num_parameters
from train.model.transformer import build_model, initial_weight
from train.parallel.ranks import Ranks
from train.plan.plan import Plan
from train.pretrain.step import Learner

RATE, CLIP, DECAY, BETAS, EPS = 1e-3, 1.0, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    name: str
    shape: ModelShape
    rows: int
    seq_len: int
    floor: float = 0.0
    """Tokens/s that a GPU must reach, and those it is meant to."""
    target: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.seq_len


def llama(vocab_size: int, num_layers: int, d_model: int, heads: tuple[int, int], d_ffw: int) -> ModelShape:
    """A shape with untied embeddings; `heads` of queries and of keys."""
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=d_model // heads[0],
        d_ffw=d_ffw,
        tie_embeddings=False,
    )


CASES = (
    Case("1M", llama(4096, 4, 96, (4, 2), 256), 8, 256),
    Case("10M", llama(4096, 10, 256, (8, 2), 704), 4, 512),
    Case("30M", llama(32000, 9, 320, (5, 1), 864), 4, 256),
)


def make_rows(case: Case, masked: bool, device: str = "cpu") -> Rows:
    """Random tokens of two sources, in documents of about 200 tokens if `masked`."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(case.shape.vocab_size, (case.rows, case.seq_len + 1), generator=generator)
    begins = torch.rand(case.rows, case.seq_len, generator=generator) < 1 / 200
    documents = begins.cumsum(1).int() if masked else None
    sources = torch.arange(case.rows) % 2
    return Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents, sources).to(torch.device(device))


def plan_of(case: Case, sections: Mapping[str, Mapping[str, Any]]) -> Plan:
    """A plan for a case, without a dataset."""
    stage = StagePlan(
        first_step=0, num_steps=1000, seq_len=case.seq_len, global_batch=case.rows, counts={"books": 1, "web": 1}
    )
    return Plan(
        dataset="",
        tokenizer="",
        order="",
        shape=case.shape,
        num_params=num_parameters(case.shape),
        stages=(stage,),
        warmup_steps=0,
        learning_rate=RATE,
        flops_per_token=flops_per_token(case.shape, case.seq_len),
        settings=Settings.model_validate(sections),
        figures=[],
        initial_weights=BY_POSITION,
    )


# ----------------------------------------------------------------------------------------------------- the contenders


class Contender(Protocol):
    """What makes a step on rows and returns its loss."""

    def step(self, number: int, rows: Rows) -> float:
        """Make update `number` (1 = first)."""


class Penstock:
    """Our own learner, as the training loop calls it."""

    def __init__(self, case: Case, ranks: Ranks):
        sections = {
            "train": {"seq_len": case.seq_len},
            "layout": {"micro_batch": case.rows},
            "optim": {"weight_decay": DECAY, "clip_norm": CLIP, "eps": EPS},
        }
        self._ranks, self.learner = ranks, Learner(plan_of(case, sections), ranks, 2)
        self.learner.init_state()

    def step(self, number: int, rows: Rows) -> float:
        (targets,) = self._ranks.total(rows.num_targets)
        measured = self.learner.compute(number, rows, len(rows), targets)
        self.learner.update(RATE, measured)
        return measured.loss


class Loop:
    """What a short script does: loss, backward, clip, step; on a GPU in bf16 by autocast."""

    def __init__(self, model: nn.Module, loss: Callable[[Rows], Tensor], micro_batch: int | None = None):
        """`loss`: mean loss of some rows; `micro_batch`: rows of a backward pass, None = all rows of a step."""
        self._loss, self._parameters, self._micro_batch = loss, list(model.parameters()), micro_batch
        decaying = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        chosen = {id(parameter) for parameter in decaying}
        others = [parameter for parameter in self._parameters if id(parameter) not in chosen]
        groups = [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)

    def step(self, number: int, rows: Rows) -> float:
        size, device = self._micro_batch or len(rows), self._parameters[0].device
        share, losses = size / len(rows), []
        for first in range(0, len(rows), size):
            part = rows.part(first, first + size).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = self._loss(part) * share
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().item()


class PlainBlock(nn.Module):
    """A layer as a short script writes it."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape, width = shape, shape.d_model
        self.norm1, self.norm2 = nn.RMSNorm(width, shape.norm_eps), nn.RMSNorm(width, shape.norm_eps)
        self.q = nn.Linear(width, shape.query_width, bias=False)
        self.k = nn.Linear(width, shape.key_width, bias=False)
        self.v = nn.Linear(width, shape.key_width, bias=False)
        self.o = nn.Linear(shape.query_width, width, bias=False)
        self.gate = nn.Linear(width, shape.d_ffw, bias=False)
        self.up = nn.Linear(width, shape.d_ffw, bias=False)
        self.down = nn.Linear(shape.d_ffw, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None) -> Tensor:
        """The stream after the layer."""
        batch, length, _ = x.shape
        y = self.norm1(x)
        heads = batch, length, -1, self.shape.head_dim
        q, k, v = (part(y).view(heads).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainModel(nn.Module):
    """A Llama-like model as a short script writes it: whole logits, torch's own cross-entropy."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layers = nn.ModuleList(PlainBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor, seen: Tensor | None) -> Tensor:
        """The mean loss."""
        angles = torch.arange(inputs.shape[1], device=inputs.device)[:, None] * self._frequencies
        x, cos, sin = self.embed(inputs), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


PLAIN = {
    "attention_norm": "norm1",
    "attention.query": "q",
    "attention.key": "k",
    "attention.value": "v",
    "attention.out": "o",
    "ffn_norm": "norm2",
    "ffn.gate": "gate",
    "ffn.up": "up",
    "ffn.down": "down",
}
"""Our names of what is in a layer, and the plain model's."""


def seen_by(rows: Rows) -> Tensor | None:
    """The mask of documents, (B, 1, T, T); None without them."""
    if rows.documents_BT is None:
        return None
    return (rows.documents_BT[:, :, None] == rows.documents_BT[:, None, :]).tril()[:, None]


def initial_weights(shape: ModelShape) -> dict[str, Tensor]:
    """What a run of seed 0 begins with."""
    named = build_model(shape).named_parameters()
    return {name: initial_weight(name, parameter.shape, shape, 0) for name, parameter in named}


def plain_model(shape: ModelShape, weights: Mapping[str, Tensor]) -> PlainModel:
    """The model of the short script with these weights, on their device."""
    model, state = PlainModel(shape), {}
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            state[f"layers.{layer}.{PLAIN[inner]}.{kind}"] = value
        else:
            state[f"{'embed' if module == 'embedding' else module}.{kind}"] = value
    model.load_state_dict(state)
    return model.to(next(iter(weights.values())).device)


def plain_torch(case: Case, ranks: Ranks) -> Loop:
    """The short script."""
    model = plain_model(case.shape, initial_weights(case.shape))
    return Loop(model, lambda rows: model(rows.inputs_BT, rows.targets_BT, seen_by(rows)))


def transformers_model(case: Case, weights: Mapping[str, Tensor]) -> Any:
    """LlamaForCausalLM with these weights, through the files that our export writes."""
    from transformers import LlamaForCausalLM

    from train.export.llama import export_llama

    with tempfile.TemporaryDirectory() as folder:
        export_llama(weights, case.shape, case.seq_len, None, Path(folder) / "model")
        model = LlamaForCausalLM.from_pretrained(Path(folder) / "model", attn_implementation="sdpa")
    model.train()
    return model


def transformers_loss(model: Any, rows: Rows) -> Tensor:
    """The mean loss of a model of transformers."""
    targets, seen = rows.targets_BT, seen_by(rows)
    found = model(rows.inputs_BT, attention_mask=seen, labels=targets, shift_labels=targets, use_cache=False)
    loss: Tensor = found.loss
    return loss


def transformers(case: Case, ranks: Ranks) -> Loop:
    """The same loop around LlamaForCausalLM."""
    model = transformers_model(case, initial_weights(case.shape))
    return Loop(model, lambda rows: transformers_loss(model, rows))


CONTENDERS: dict[str, Callable[[Case, Ranks], Contender]] = {
    "penstock": Penstock,
    "plain torch": plain_torch,
    "transformers": transformers,
}


def taking_part() -> list[str]:
    """The contenders that can run here."""
    try:
        import transformers as found
    except ImportError as error:
        print(f"transformers does not take part: {error}")
        return [name for name in CONTENDERS if name != "transformers"]
    print(f"transformers {found.__version__}")
    return list(CONTENDERS)
