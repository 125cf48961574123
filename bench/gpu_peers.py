"""The same steps on a GPU by ours and by peers: a compiled script of plain torch, transformers, torchtitan.

All have the same shape, first weights, rows, micro-batches, bf16 by autocast, clipping and fused AdamW.
torchtitan's model, its compilation by layer and its compiled loss are those that its trainer uses on one GPU, without
recomputation. Where documents are masked it gets their offsets, which its trainer finds in every micro-batch. The
order of its rotary pairs is another, so its losses are near ours and not equal.
"""

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.train_contenders import RATE, Contender, Loop, plain_model, seen_by, transformers_loss, transformers_model
from bench.train_gpu import (
    GPU_CASES,
    STEPS,
    TINY_CASES,
    WARM_STEPS,
    Deadline,
    GpuCase,
    Keep,
    Variant,
    batches_for,
    count_from_here,
    dataset_for,
    make_learner,
    now,
    peak_flops,
)
from train.data.rows import Rows
from train.model.shape import ModelShape, flops_per_token
from train.optim.parameter import local_tensor
from train.parallel.ranks import Ranks
from train.pretrain.step import Learner

NEAR = 0.05
"""Largest difference of the losses of first steps, whose targets are random."""

Line = dict[str, Any]
Weights = Mapping[str, Tensor]
Builder = Callable[[GpuCase, Weights, bool], Contender]

TORCHTITAN = {
    "attention_norm": "attention_norm",
    "attention.query": "attention.wq",
    "attention.key": "attention.wk",
    "attention.value": "attention.wv",
    "attention.out": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
    "embedding": "tok_embeddings",
    "norm": "norm",
    "head": "output",
}
"""Our names of modules, and those of torchtitan."""


class Ours:
    """Our learner, as the training loop calls it."""

    def __init__(self, learner: Learner):
        self._learner = learner

    def step(self, number: int, rows: Rows) -> float:
        """Make update `number` (1 = first)."""
        measured = self._learner.compute(number, rows, len(rows), rows.num_targets)
        self._learner.update(RATE, measured)
        return measured.loss


def plain_torch(case: GpuCase, weights: Weights, documents: bool) -> Loop:
    """A script of plain torch, compiled as a whole."""
    model = plain_model(case.shape, weights)
    compiled = torch.compile(model, dynamic=False)
    return Loop(model, lambda rows: compiled(rows.inputs_BT, rows.targets_BT, seen_by(rows)), case.micro_batch)


def transformers(case: GpuCase, weights: Weights, documents: bool) -> Loop:
    """LlamaForCausalLM, compiled as a whole."""
    model = transformers_model(case, {name: value.cpu() for name, value in weights.items()})
    model.to(next(iter(weights.values())).device)
    compiled = torch.compile(model, dynamic=False)
    return Loop(model, lambda rows: transformers_loss(compiled, rows), case.micro_batch)


def torchtitan(case: GpuCase, weights: Weights, documents: bool) -> Loop:
    """torchtitan's Llama 3, compiled by layer, with its compiled loss."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama3 import Transformer
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    device = next(iter(weights.values())).device
    with torch.device(device):
        model = Transformer(torchtitan_arguments(case, documents))
    model.load_state_dict({torchtitan_name(name): value for name, value in weights.items()})
    apply_compile(model, Compile(enable=True))
    loss_of = torch.compile(cross_entropy_loss, dynamic=False)

    def loss(rows: Rows) -> Tensor:
        logits = model(rows.inputs_BT, attention_masks=torchtitan_mask(rows) if documents else None)
        total: Tensor = loss_of(logits, rows.targets_BT)
        return total / rows.targets_BT.numel()

    return Loop(model, loss, case.micro_batch)


def torchtitan_arguments(case: GpuCase, documents: bool) -> Any:
    """The shape in torchtitan's settings."""
    from torchtitan.models.llama3 import TransformerModelArgs

    shape: ModelShape = case.shape
    found = TransformerModelArgs(
        dim=shape.d_model,
        n_layers=shape.num_layers,
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        multiple_of=1,
        ffn_dim_multiplier=(shape.d_ffw + 0.5) / int(8 * shape.d_model / 3),
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        max_seq_len=case.seq_len,
        attn_type="varlen" if documents else "sdpa",
        attn_mask_type="block_causal" if documents else "causal",
    )
    return found


def torchtitan_name(name: str) -> str:
    """torchtitan's name of a parameter."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{TORCHTITAN[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"layers.{layer}.{TORCHTITAN[inner]}.{kind}"


def torchtitan_mask(rows: Rows) -> Any:
    """The offsets of documents in its form."""
    from torchtitan.models.attention import VarlenMetadata

    assert rows.starts_N is not None
    length = rows.inputs_BT.shape[1]
    return VarlenMetadata(rows.starts_N, rows.starts_N, length, length)


PEERS: dict[str, Builder] = {"torchtitan": torchtitan, "plain torch": plain_torch, "transformers": transformers}
MODULES = {"torchtitan": "torchtitan", "plain torch": "torch", "transformers": "transformers"}
"""The module that each peer needs. A T × T mask of documents would be all that the two others have in place of offsets,
so they take part on causal rows alone."""


# ------------------------------------------------------------------------------------------------------------- measure


def rows_of(case: GpuCase, documents: bool) -> list[Rows]:
    """The rows of all steps, read by the trainer's own reader; each contender copies its micro-batches to the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        batches = batches_for(dataset_for(Path(folder), case), case, Variant(documents=documents))
        return [batches.batch(step) for step in range(WARM_STEPS + STEPS)]


def steps_of(contender: Contender, rows: Sequence[Rows], case: GpuCase) -> dict[str, Any]:
    """Tokens/s, the losses of all steps, and the largest memory."""
    cuda, began = torch.cuda.is_available(), now()
    losses = [contender.step(number, each) for number, each in enumerate(rows[:WARM_STEPS], start=1)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = now()
    for number, each in enumerate(rows[WARM_STEPS:], start=WARM_STEPS + 1):
        losses.append(contender.step(number, each))
    rate, peak = STEPS * case.tokens / (now() - begin), peak_flops()
    return {
        "tokens_per_second": rate,
        "mfu": None if peak is None else flops_per_token(case.shape, case.seq_len) * rate / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "losses": losses,
        "warm_seconds": begin - began,
    }


def line_of(name: str, case: GpuCase, documents: bool, build: Callable[[], Contender], rows: Sequence[Rows]) -> Line:
    """What a contender's steps took; a failure is part of the line, and does not end the bench."""
    count_from_here()
    line = {"case": case.name, "peer": name, "mask": "documents" if documents else "causal"}
    try:
        return line | steps_of(build(), rows, case)
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compare(case: GpuCase, documents: bool, names: Sequence[str], ranks: Ranks, keep: Keep) -> None:
    """Keep a line for ours and one for each peer, with the ratio of its rate to ours."""
    rows = rows_of(case, documents)
    learner = make_learner(case, Variant(documents=documents), ranks)
    weights = {name: local_tensor(value.detach()).clone() for name, value in learner.model.parameters.items()}
    ours = line_of("penstock", case, documents, partial(Ours, learner), rows)
    keep(ours)
    del learner
    gc.collect()
    for name in names:
        if find_spec(MODULES[name]) is None:
            keep({"case": case.name, "peer": name, "left_out": f"{MODULES[name]} is not installed"})
            continue
        line = line_of(name, case, documents, partial(PEERS[name], case, weights, documents), rows)
        if "error" not in line and "error" not in ours:
            line["times_ours"] = line["tokens_per_second"] / ours["tokens_per_second"]
            line["losses_apart"] = max(abs(a - b) for a, b in zip(line["losses"], ours["losses"]))
            if line["losses_apart"] > NEAR:
                line["error"] = f"expected losses within {NEAR} of ours, got {line['losses_apart']:.3f} apart"
        keep(line)


def measure_peers(ranks: Ranks, keep: Keep, deadline: Deadline) -> None:
    """Documents masked, which torchtitan can do on a GPU alone, then causal rows, until the deadline."""
    cases = GPU_CASES if torch.cuda.is_available() else TINY_CASES
    untied = [replace(each, shape=each.shape.model_copy(update={"tie_embeddings": False})) for each in cases]
    for case in untied[1:]:
        if deadline.has_room:
            with deadline.measuring():
                compare(case, torch.cuda.is_available(), ["torchtitan"], ranks, keep)
    if deadline.has_room:
        compare(untied[0], False, list(PEERS), ranks, keep)
