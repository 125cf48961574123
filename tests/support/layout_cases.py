"""The layouts that tests compare with a plain loop: a part for every test run, and the rest."""

from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any

import torch

from train.model.shape import ModelShape
from train.parallel.layout import SPLIT_BACKWARD

SEED = 5
SHAPE = ModelShape(
    vocab_size=210, num_layers=4, d_model=48, num_heads=4, num_kv_heads=2, head_dim=12, d_ffw=80, tie_embeddings=False
)
"""A shape with a vocabulary that four ranks do not divide and sizes that FSDP2 shards unevenly."""
EXACT = (1e-6, 1e-5)
"""Bars of fp32: relative deviation of loss and of gradient norm."""


@dataclass(frozen=True)
class Case:
    """A layout and the task that is trained in it."""

    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    bars: tuple[float, float] = EXACT
    documents: bool = True
    """True if rows contain several documents."""

    def settings(self) -> dict[str, Any]:
        """Return the sections of a recipe."""
        return {"layout": self.layout, "train": {"seed": SEED} | self.train, "optim": self.optim}

    @property
    def task(self) -> str:
        """Return the name of the task, which is independent of layout and number format."""
        changes = {name: value for name, value in self.optim.items() if name in ("z_loss", "clip_norm")}
        return f"{self.of_shape()} {self.train.get('objective')} {changes} {self.documents}"

    @property
    def refused(self) -> bool:
        """True if this torch does not compute the schedule."""
        return self.layout.get("schedule") in SPLIT_BACKWARD and torch.__version__ < "2.13"

    def of_shape(self) -> ModelShape:
        """Return the model's shape."""
        return ModelShape.model_validate(SHAPE.model_dump() | self.shape)


TIED, GELU = {"tie_embeddings": True}, {"activation": "gelu", "bias": True, "qk_norm": True, "num_kv_heads": 4}
PIPED = {
    **{"activation": "relu2", "qk_norm": True, "value_embeddings": 2, "logit_softcap": 5.0},
    **{"window_pattern": "SL", "window": 7, "num_kv_heads": 4},
}
"""What the modern recipe adds to a model, but for residual mixing, which no pipeline has."""
MODERN = PIPED | {"residual_mixing": True}
GPT2 = {
    **{"norm": "layernorm", "positions": "learned", "max_positions": 40, "activation": "gelu_tanh"},
    **{"bias": True, "tie_embeddings": True, "num_kv_heads": 4},
}
BERT = GPT2 | {"norm_position": "post", "num_token_types": 2, "head_transform": True, "activation": "gelu"}
IN_BF16 = {"train": {"precision": "bf16"}, "bars": (1e-3, 3e-2)}
"""Of bf16 against fp32, whose 16 bits more they allow for: 3e-4 and 3e-3 were seen."""
IN_FP8 = {
    "train": {"precision": "fp8", "fp8_scaling": "tensor"},
    "shape": {"d_model": 64, "head_dim": 16},
    "bars": (1e-2, 5e-2),
}
"""Of fp8 against fp32: 3e-3 and 1e-2 were seen."""
BY_TORCHAO = {name: IN_FP8 | {"train": {"precision": "fp8", "fp8_scaling": name}} for name in ("row", "gather")}

IN_FP16 = {"train": {"precision": "fp16"}, "bars": (3e-4, 3e-3)}
"""Of fp16 against fp32: 4e-5 and 5e-4 were seen."""
MASKED = {"objective": "mlm"}
STATES_ON_DISK, WEIGHTS_ON_DISK = {"offload_dir": gettempdir()}, {"offload_weights_dir": gettempdir()}

CASES = {
    "one rank": Case(1),
    "one rank, micro-batches": Case(1, {"micro_batch": 5}),
    "ddp": Case(2, {"data": "ddp", "micro_batch": 4}),
    "zero1": Case(2, {"data": "zero1", "micro_batch": 4}),
    "zero3": Case(2, {"micro_batch": 4}),
    "hsdp": Case(4, {"replicate": 2, "micro_batch": 1}),
    "tensor x shard": Case(4, {"tensor": 2}, GELU),
    "context by heads": Case(2, {"context": 2}),
    "context by keys": Case(2, {"context": 2, "context_by": "keys"}),
    "1f1b": Case(2, {"pipeline": 2, "micro_batch": 3}, TIED),
    "zero bubble": Case(2, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}),
    "recompute what is cheap": Case(2, {"activation_checkpointing": "selective"}),
    "bf16": Case(2, **IN_BF16),
    "modern x tensor x shard": Case(4, {"tensor": 2}, MODERN | TIED, optim={"z_loss": 1e-2}),
    "modern x context by keys": Case(2, {"context": 2, "context_by": "keys"}, MODERN),
    "modern x pipeline": Case(2, {"pipeline": 2, "micro_batch": 3}, PIPED),
    "BERT x pipeline x shard": Case(4, {"pipeline": 2, "micro_batch": 3}, BERT),
}
"""The cases of every test run: each axis and each way to keep the optimizer state at least once."""

SLOW = {
    "masked tokens x pipeline x tensor": Case(4, {"pipeline": 2, "tensor": 2, "micro_batch": 3}, TIED, MASKED),
    "GPT-2 x context by heads": Case(2, {"context": 2}, GPT2),
    "GPT-2 x context by keys": Case(2, {"context": 2, "context_by": "keys"}, GPT2),
    "GPT-2, ddp": Case(2, {"data": "ddp"}, GPT2),
    "GPT-2, compile": Case(2, {"compile": True}, GPT2),
    "BERT, zero1, recompute all": Case(2, {"data": "zero1", "activation_checkpointing": "full"}, BERT, MASKED),
    "BERT, compile": Case(2, {"compile": True}, BERT, MASKED),
    "BERT, offload": Case(2, {"offload": True}, BERT, MASKED),
    "layernorm x tensor": Case(2, {"tensor": 2}, TIED | {"norm": "layernorm"}),
    "GPT-2, bf16": Case(2, shape=GPT2, **IN_BF16),
    "BERT, bf16, ddp": Case(2, {"data": "ddp"}, BERT, **{**IN_BF16, "train": IN_BF16["train"] | MASKED}),
    "muon": Case(4, {"tensor": 2}, optim={"optimizer": "muon"}),
    "zero2": Case(2, {"data": "zero2", "micro_batch": 4}),
    "zero3 x 4": Case(4, {"micro_batch": 2}, TIED),
    "tensor": Case(2, {"tensor": 2}, TIED),
    "gpipe": Case(2, {"pipeline": 2, "schedule": "gpipe", "micro_batch": 3}),
    "interleaved": Case(2, {"pipeline": 2, "schedule": "interleaved", "micro_batch": 3}),
    "zbv": Case(2, {"pipeline": 2, "schedule": "zbv", "data": "zero2", "micro_batch": 3}),
    "shard x tensor x pipeline": Case(8, {"pipeline": 2, "tensor": 2, "micro_batch": 3}, TIED),
    "recompute all": Case(2, {"activation_checkpointing": "full"}),
    "recompute within a budget": Case(2, {"activation_checkpointing": "budget", "activation_budget": 600_000}),
    "offload": Case(2, {"offload": True}),
    "no documents x context": Case(2, {"context": 2}, documents=False),
    "adafactor": Case(4, {"tensor": 2}, optim={"optimizer": "adafactor"}),
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
    "offload parameters x tensor": Case(4, {"tensor": 2, "offload": "parameters"}),
    "offload to a disk x tensor": Case(4, {"tensor": 2, "offload": "all"} | STATES_ON_DISK | WEIGHTS_ON_DISK),
    "offload weights to a disk, uneven": Case(3, {"offload": "parameters"} | WEIGHTS_ON_DISK),
    "offload optimizer x pipeline, muon": Case(
        4, {"pipeline": 2, "micro_batch": 3, "offload": "optimizer"}, optim={"optimizer": "muon"}
    ),
    "offload optimizer, zero1": Case(2, {"data": "zero1", "offload": "optimizer"}),
    "offload optimizer, compile, hsdp": Case(4, {"replicate": 2, "offload": "optimizer", "compile": True}),
    "compile": Case(2, {"compile": True}),
    "compile, ddp, recompute all": Case(2, {"data": "ddp", "compile": True, "activation_checkpointing": "full"}),
    "compile x tensor": Case(2, {"tensor": 2, "compile": True}, TIED),
    "compile x context": Case(2, {"context": 2, "compile": True}),
    "compile x pipeline": Case(2, {"pipeline": 2, "micro_batch": 3, "compile": True}),
    "compile x pipeline x tensor": Case(4, {"pipeline": 2, "tensor": 2, "micro_batch": 3, "compile": True}),
    "compile x tensor x context by keys": Case(
        4, {"tensor": 2, "context": 2, "context_by": "keys", "compile": True, "activation_checkpointing": "selective"}
    ),
    "compile x hsdp": Case(4, {"replicate": 2, "micro_batch": 1, "compile": True}),
    "compile, zero1, z-loss": Case(2, {"data": "zero1", "compile": True}, TIED, optim={"z_loss": 1e-2}),
    "compile, offload": Case(2, {"offload": True, "compile": True}),
    "compile, masked tokens": Case(2, {"compile": True}, TIED, MASKED),
    "bf16, ddp": Case(2, {"data": "ddp"}, **IN_BF16),
    "bf16 x tensor x pipeline": Case(4, {"tensor": 2, "pipeline": 2, "micro_batch": 3}, **IN_BF16),
    "lamb": Case(4, {"tensor": 2}, optim={"optimizer": "lamb"}),
    "muon x pipeline": Case(4, {"pipeline": 2, "micro_batch": 3}, optim={"optimizer": "muon"}),
    "fp16": Case(2, **IN_FP16),
    "fp16 x pipeline": Case(2, {"pipeline": 2, "micro_batch": 3}, **IN_FP16),
    "masked tokens x context by keys": Case(2, {"context": 2, "context_by": "keys"}, train=MASKED),
    "masked tokens x context by heads": Case(2, {"context": 2}, TIED, MASKED),
    "no documents x pipeline x context": Case(4, {"pipeline": 2, "context": 2, "micro_batch": 3}, documents=False),
    "no documents x tensor": Case(2, {"tensor": 2}, documents=False),
    "not clipped x pipeline": Case(2, {"pipeline": 2, "micro_batch": 3}, TIED, optim={"clip_norm": None}),
    "sends everything it compresses x pipeline": Case(
        4,
        {"pipeline": 2, "replicate": 2, "compress": "topk", "compress_share": 1.0, "micro_batch": 1},
        TIED,
    ),
    "sends everything it compresses x tensor": Case(
        4, {"tensor": 2, "replicate": 2, "compress": "randomk", "compress_share": 1.0, "micro_batch": 2}
    ),
    "tensor x context x replicas": Case(8, {"tensor": 2, "context": 2, "context_by": "keys", "replicate": 2}, GELU),
    "fp8": Case(2, **IN_FP8),
    "fp8, a scale a row": Case(2, **BY_TORCHAO["row"]),
    "fp8, gathered in 8 bits": Case(2, **BY_TORCHAO["gather"]),
    "modern": Case(1, {}, MODERN),
    "modern, ddp, recompute all": Case(2, {"data": "ddp", "activation_checkpointing": "full"}, MODERN),
    "modern, zero1 x 4": Case(4, {"data": "zero1"}, MODERN),
    "modern, zero2, recompute what is cheap": Case(
        2, {"data": "zero2", "activation_checkpointing": "selective"}, MODERN
    ),
    "modern x hsdp": Case(4, {"replicate": 2, "micro_batch": 1}, MODERN | TIED),
    "modern x context by heads": Case(2, {"context": 2}, MODERN),
    "modern x tensor x context": Case(8, {"tensor": 2, "context": 2}, MODERN),
    "modern, no documents x context by keys": Case(2, {"context": 2, "context_by": "keys"}, MODERN, documents=False),
    "modern, no documents": Case(2, {}, MODERN, documents=False),
    "modern, compile": Case(2, {"compile": True}, MODERN),
    "modern, compile x tensor": Case(2, {"tensor": 2, "compile": True}, MODERN),
    "modern, compile, ddp, recompute all": Case(
        2, {"data": "ddp", "compile": True, "activation_checkpointing": "full"}, MODERN
    ),
    "modern, offload": Case(2, {"offload": True}, MODERN),
    "modern x tensor x pipeline": Case(4, {"tensor": 2, "pipeline": 2, "micro_batch": 3}, PIPED | TIED),
    "modern x zero bubble": Case(
        2, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}, PIPED
    ),
    "modern, bf16": Case(2, shape=MODERN, **IN_BF16),
    "modern, bf16, ddp": Case(2, {"data": "ddp"}, shape=MODERN, **IN_BF16),
    "modern, fp8": Case(2, **(IN_FP8 | {"shape": MODERN | {"d_model": 64, "head_dim": 16}})),
    "modern, normuon x tensor": Case(4, {"tensor": 2}, MODERN, optim={"optimizer": "normuon"}),
    "normuon, zero1": Case(2, {"data": "zero1"}, optim={"optimizer": "normuon", "muon_coefficients": "polar_express"}),
    "normuon x hsdp": Case(4, {"replicate": 2}, optim={"optimizer": "normuon"}),
    "normuon x pipeline": Case(4, {"pipeline": 2, "micro_batch": 3}, optim={"optimizer": "normuon"}),
    "normuon x context": Case(2, {"context": 2}, optim={"optimizer": "normuon"}),
    "normuon, offload to a disk": Case(
        2, {"offload": "all"} | STATES_ON_DISK | WEIGHTS_ON_DISK, optim={"optimizer": "normuon"}
    ),
    "z-loss": Case(4, {"tensor": 2}, TIED, optim={"z_loss": 1e-2}),
    "z-loss in a pipeline": Case(2, {"pipeline": 2, "micro_batch": 3}, optim={"z_loss": 1e-2}),
}
"""The rest of the matrix."""
