"""Training in bf16 on a CUDA device measured: tokens/s and utilisation of Llama-like shapes, eager and compiled.

MFU = flops_per_token x tokens/s / peak, with flops_per_token of train/shape.py (forward and backward, 6 for each matrix
weight, attention's whole square) and the peak of dense bf16 products. Tokens are random; a step is one micro-batch.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from train_contenders import RATE, Case, llama, make_rows, plan_of

from train.model.shape import flops_per_token, num_parameters
from train.optim.members import local
from train.pretrain.learner import Learner
from train.ranks import Ranks
from train.rows import Rows

PEAKS = {"H100": 989.4e12, "H200": 989.4e12}
"""Dense bf16 products [FLOP/s], by a part of the device's name. Source: NVIDIA's data sheets, without sparsity."""
GPU_SECONDS = 360.0
"""After so long no further case is begun."""
MAX_ROWS = 1024
GPU_CASES = (
    Case(
        "124M", llama(50304, 12, 768, (12, 12), 2048).model_copy(update={"tie_embeddings": True}), 8, 1024, 4e5, 5.5e5
    ),
    Case("350M", llama(50304, 24, 1024, (16, 16), 2736), 8, 1024, 1.5e5, 2e5),
    Case("1B", llama(50304, 16, 2048, (16, 4), 5632), 4, 2048, 4.5e4, 7e4),
)


@dataclass(frozen=True)
class Variant:
    """How a case is run on the GPU."""

    data: str = "zero2"
    compile: bool = False
    masked: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.data}{' compiled' if self.compile else ''}{' documents' if self.masked else ''}"


def gpu_learner(case: Case, variant: Variant, ranks: Ranks) -> Learner:
    """A learner in bf16 that takes all rows of a step as one micro-batch; its weights are made on the device."""
    sections = {
        "train": {"seq_len": case.seq_len, "precision": "bf16"},
        "layout": {"micro_batch": 1 << 20, "data": variant.data, "compile": variant.compile},
    }
    torch._dynamo.reset()
    learner = Learner(plan_of(case, sections), ranks, 2)
    for parameter in learner.model.parameters.values():
        values = local(parameter)
        values.normal_(0, 0.02) if values.ndim == 2 else values.fill_(1)
    for value in learner._states().values():
        value.zero_()
    return learner


def gpu_speed(case: Case, learner: Learner, rows: int, masked: bool) -> dict[str, Any]:
    """Tokens/s and utilisation of whole steps on `rows` rows."""
    batch = make_rows(replace(case, rows=rows), masked)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    step = partial(_gpu_step, learner, batch)
    for number in (1, 2, 3):
        step(number)
    begin, number = _now(), 3
    while number < 8 or (_now() - begin < 2.0 and number < 40):
        number += 1
        step(number)
    rate = (number - 3) * rows * case.seq_len / (_now() - begin)
    peak = peak_flops()
    return {
        "case": case.name,
        "parameters": num_parameters(case.shape),
        "rows": rows,
        "seq_len": case.seq_len,
        "tokens_per_second": rate,
        "mfu": None if peak is None else flops_per_token(case.shape, case.seq_len) * rate / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "floor": case.floor,
        "target": case.target,
    }


def _gpu_step(learner: Learner, batch: Rows, number: int) -> None:
    learner.update(RATE, learner.compute(number, batch, len(batch), batch.num_targets))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_flops() -> float | None:
    """Of this device; None if it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def gpu_cases(cases: Sequence[Case], ranks: Ranks, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure every case: rows doubled until the memory is full, then what else there is, with the best number."""
    end = time.perf_counter() + GPU_SECONDS
    print("MFU = flops_per_token (12·layers·width·seq_len for attention) x tokens/s / peak of dense bf16")
    for case in cases:
        best = search(case, ranks, keep, end)
        variants = [Variant(compile=True), Variant("ddp", compile=True), Variant(compile=True, masked=True)]
        # Compiled layers keep less, so twice as many rows may fit.
        tried = [(variants[0], 2 * best), *((variant, best) for variant in variants)]
        for variant, rows in tried:
            if time.perf_counter() > end:
                print(f"{case.name}, {variant.name}: left out, {GPU_SECONDS:.0f} s are over")
                continue
            measure(case, variant, rows, ranks, keep)
    keep({"profile": profile(cases[0], ranks)})


def search(case: Case, ranks: Ranks, keep: Callable[[dict[str, Any]], None], end: float) -> int:
    """The number of rows that is fastest without compilation."""
    learner, rows, best = gpu_learner(case, Variant(), ranks), case.rows, (0.0, case.rows)
    try:
        while time.perf_counter() < end:
            line = gpu_speed(case, learner, rows, masked=False) | {"variant": Variant().name}
            tell(line, keep)
            best, rows = max(best, (line["tokens_per_second"], rows)), 2 * rows
            if rows > MAX_ROWS:
                break
    except torch.OutOfMemoryError:
        print(f"{case.name:>5} {rows} rows: out of memory")
    del learner
    free()
    return best[1]


def measure(case: Case, variant: Variant, rows: int, ranks: Ranks, keep: Callable[[dict[str, Any]], None]) -> None:
    """One line; whatever fails is told and kept, and does not end the bench."""
    try:
        learner = gpu_learner(case, variant, ranks)
        tell(gpu_speed(case, learner, rows, variant.masked) | {"variant": variant.name}, keep)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:500]}"
        print(f"{case.name:>5} {variant.name}, {rows} rows: {text}", flush=True)
        keep({"case": case.name, "variant": variant.name, "rows": rows, "error": text})
    free()


def tell(line: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Print a line and keep it."""
    mfu = "unknown" if line["mfu"] is None else f"{line['mfu']:.1%}"
    print(
        f"{line['case']:>5} {line['variant']:28s} {line['rows']:4d} x {line['seq_len']}  "
        f"{line['tokens_per_second']:9,.0f} tokens/s (floor {line['floor']:,.0f}, target {line['target']:,.0f})  "
        f"MFU {mfu}  {line['peak_bytes'] / 2**30:.1f} GiB",
        flush=True,
    )
    keep(line)


def free() -> None:
    """Give back what a learner held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def profile(case: Case, ranks: Ranks) -> str:
    """Where the time of three steps goes, by kernel."""
    learner, batch = gpu_learner(case, Variant(compile=True), ranks), make_rows(case, False)
    for number in (1, 2, 3):
        _gpu_step(learner, batch, number)
    with torch.profiler.profile() as found:
        for number in (4, 5, 6):
            _gpu_step(learner, batch, number)
        _now()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=80))
