"""The parts of a training step alone: loss, attention, optimiser; their distance from the roofline, and a profile.

The roofline of a part is the longer of its FLOPs at the device's peak and of its bytes at the memory's bandwidth
(Williams et al. 2009, Communications of the ACM 52(4)). What a whole step takes besides these parts is that of the
layers without attention: products of matrices, norms, activations.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.train_gpu import GpuCase, Variant, make_learner, now, one_step, table_device
from train.config.optim import OPTIMIZERS
from train.data.batches import Batches
from train.data.rows import Rows
from train.model.attention import RowDocuments, attend
from train.model.shape import matrix_params_of_layer, num_parameters
from train.optim.optimizer import update
from train.optim.parameter import local_tensor
from train.parallel.ranks import Ranks
from train.pretrain.step import Learner

REPETITIONS = 5
PROFILED_STEPS = 2
NUM_KERNELS = 40
"""Kernels of the table."""
HALF = torch.bfloat16


def seconds_of(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """The median time of a piece of work [s], after two runs of it."""
    times = []
    for _ in range(2 + repetitions):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times[2:])


def part_line(name: str, seconds: float, times: int, flops: float, num_bytes: float) -> dict[str, Any]:
    """A part that a step has `times` times: its rates and its distance from the roofline [s a step]."""
    line = {"part": name, "seconds": seconds, "times": times, "step_seconds": seconds * times}
    line |= {"flops_per_second": flops / seconds or None, "bytes_per_second": num_bytes / seconds or None}
    least = None
    if torch.cuda.is_available():
        device = table_device()
        least = max(flops / device.peak_flops["bf16"], num_bytes / device.memory_bandwidth)
    line |= {"least_seconds": None if least is None else least * times}
    return line | {"gap_seconds": None if least is None else (seconds - least) * times}


def largest_gaps(lines: Sequence[Mapping[str, Any]], number: int = 3) -> list[dict[str, Any]]:
    """The parts furthest from the roofline; where there is no roofline, those that take longest."""
    wanted = "gap_seconds" if all(line["gap_seconds"] is not None for line in lines) else "step_seconds"
    ordered = sorted(lines, key=lambda line: line[wanted], reverse=True)
    return [dict(line) for line in ordered[:number]]


# --------------------------------------------------------------------------------------------------------------- parts


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=HALF, device=device, requires_grad=True)


def loss_alone(case: GpuCase, learner: Learner, device: torch.device) -> dict[str, Any]:
    """The loss of a micro-batch and its gradients, by the learner's own head."""
    shape, head = case.shape, learner.model.parts[0].loss
    size, width, vocab = (case.micro_batch, case.seq_len), shape.d_model, shape.vocab_size
    x_BTD, weight_VD = _normal(device, *size, width), _normal(device, vocab, width)
    targets_BT = torch.randint(vocab, size, device=device)
    head.scale, head.tally, head.num_targets = 1.0 / case.tokens, None, targets_BT.numel()

    def work() -> None:
        head(x_BTD, weight_VD, targets_BT, None).backward()
        x_BTD.grad = weight_VD.grad = None

    tokens = targets_BT.numel()
    num_bytes = 2 * 2 * width * (tokens + vocab)
    return part_line("loss", seconds_of(work), case.rows // case.micro_batch, 6.0 * tokens * width * vocab, num_bytes)


def attention_alone(case: GpuCase, learner: Learner, rows: Rows, device: torch.device) -> dict[str, Any]:
    """Attention of one layer for a micro-batch, forward and backward; FLOPs of the pairs that are seen."""
    shape, rows = case.shape, rows.part(0, case.micro_batch)
    there = rows.to(device)
    documents = None if there.documents_BT is None else RowDocuments(there.documents_BT, there.starts_N, HALF)
    attention_mask = learner.model.parts[0].attention_mask(case.seq_len, documents, device)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (_normal(device, len(rows), number, case.seq_len, shape.head_dim) for number in heads)

    def work() -> None:
        attend(q, k, v, attention_mask).backward(gradient)
        q.grad = k.grad = v.grad = None

    with torch.no_grad():
        gradient = torch.ones_like(attend(q, k, v, attention_mask))
    flops = 3.5 * 4 * seen_pairs(rows) * shape.query_width
    num_bytes = 3 * 2 * (2 * q.numel() + 2 * k.numel())
    times = shape.num_layers * case.rows // case.micro_batch
    return part_line("attention", seconds_of(work), times, flops, num_bytes)


def seen_pairs(rows: Rows) -> int:
    """Pairs of a query and a key of its document that is not after it."""
    if rows.documents_BT is None:
        length = rows.inputs_BT.shape[1]
        return len(rows) * length * (length + 1) // 2
    counts = torch.cat([torch.unique_consecutive(row, return_counts=True)[1] for row in rows.documents_BT])
    return int((counts * (counts + 1) // 2).sum())


def optimizer_alone(case: GpuCase, learner: Learner) -> dict[str, Any]:
    """An update of all parameters, by the learner's own optimiser."""
    parameters = learner.model.parameters.values()

    def work() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        update(learner.optimizer, 1e-6)

    def gradients() -> None:
        for parameter in parameters:
            torch.zeros_like(parameter)

    seconds = max(seconds_of(work) - seconds_of(gradients), 1e-9)
    update_bytes = OPTIMIZERS[learner.settings.optim.optimizer].update_bytes
    moved = update_bytes * sum(local_tensor(each).numel() for each in parameters)
    return part_line("optimizer", seconds, 1, 0.0, float(moved))


def rest_of(case: GpuCase, step_seconds: float, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a step takes besides the parts: the layers without attention."""
    seconds = max(step_seconds - sum(line["step_seconds"] for line in lines), 1e-9)
    flops = 6.0 * case.shape.num_layers * matrix_params_of_layer(case.shape) * case.tokens
    return part_line("layers without attention", seconds, 1, flops, 12.0 * num_parameters(case.shape))


def measure_parts(case: GpuCase, variant: Variant, ranks: Ranks, batches: Batches) -> list[dict[str, Any]]:
    """A line for each part of a step of this variant."""
    learner, rows = make_learner(case, variant, ranks), batches.batch(0)
    numbers = iter(range(1, 100))
    whole = seconds_of(lambda: one_step(learner, rows, next(numbers)), 3)
    lines = [
        loss_alone(case, learner, ranks.device),
        attention_alone(case, learner, rows, ranks.device),
        optimizer_alone(case, learner),
    ]
    return [*lines, rest_of(case, whole, lines)]


def profile(case: GpuCase, variant: Variant, ranks: Ranks, batches: Batches, folder: Path) -> dict[str, Any]:
    """A Chrome trace of some steps and the table of kernels, written into a folder; returns their names."""
    learner, rows = make_learner(case, variant, ranks), batches.batch(0)
    for number in (1, 2):
        one_step(learner, rows, number)
    with torch.profiler.profile() as recorded:
        for number in range(3, 3 + PROFILED_STEPS):
            one_step(learner, rows, number)
        now()
    trace, table = folder / "profile.json.gz", folder / "kernels.txt"
    recorded.export_chrome_trace(str(trace))
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = recorded.key_averages()
    table.write_text(averages.table(sort_by=order, row_limit=NUM_KERNELS, max_name_column_width=80))
    return {"profile": trace.name, "kernels": table.name, "names": len(averages), "bytes": trace.stat().st_size}
