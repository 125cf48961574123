"""Training measured on a device at fixed sizes: tokens/s, utilisation, memory and time against the plan, compilations.

Rows come through the trainer's own reader from documents of random tokens whose lengths are log-normal, as those of
the web are. Each variant has a fixed number of rows and steps; a deadline is checked between variants. The cases of a
CPU are the same with tiny models. MFU = flops_per_token x tokens/s / peak of dense bf16 products, with flops_per_token
of train/model/shape.py (forward and backward, 6 for each matrix weight, attention's whole square).
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo.utils as dynamo

from bench.train_contenders import RATE, Case, llama, plan_of
from schemas.errors import ConfigError
from schemas.tokens import Dataset
from tests.support.random_documents import write_documents
from tests.support.tiny_stages import batches_of
from train.config.settings import Settings
from train.config.train import TrainConfig
from train.data.batches import Batches, Prefetch
from train.data.rows import Rows
from train.model.shape import flops_per_token, num_parameters
from train.optim.optimizer import state_tensors
from train.optim.parameter import local_tensor
from train.parallel.devices import Cluster, Device, device_named, device_of
from train.parallel.memory import memory_of_rank
from train.parallel.ranks import Ranks
from train.plan.search.search import predict
from train.pretrain.step import Learner

Keep = Callable[[dict[str, Any]], None]
WARM_STEPS, STEPS = 2, 6
"""Steps before the clock starts, which compile, and those that are measured."""
SECONDS = 480.0
"""Length of a call on a machine that is lent for ten minutes a command; no variant begins that would pass it."""


@dataclass(frozen=True)
class GpuCase(Case):
    """A model, the rows of a step and of a micro-batch."""

    micro_batch: int = 8


GPU_CASES = (
    GpuCase(
        "124M",
        llama(50304, 12, 768, (12, 12), 2048).model_copy(update={"tie_embeddings": True}),
        *(512, 1024, 4e5, 5.5e5, 64),
    ),
    GpuCase("350M", llama(50304, 24, 1024, (16, 16), 2816), 256, 1024, 1.5e5, 2e5, 32),
    GpuCase("1B", llama(50304, 16, 2048, (16, 4), 5632), 64, 2048, 4.5e4, 7e4, 8),
)
"""Steps of 524,288, 262,144 and 131,072 tokens: about a second and a half each on an H100."""
LARGE_CASE = GpuCase("3B", llama(50304, 28, 3072, (24, 8), 8192), 32, 2048, micro_batch=4)
"""A model of 3.1 B, which took 73.5 GiB in bf16 on an H200: about what an H100 has."""
TINY = llama(512, 2, 64, (4, 4), 128).model_copy(update={"tie_embeddings": True})
TINY_CASES = tuple(
    GpuCase(f"tiny {case.name}", TINY.model_copy(update={"num_layers": layers}), 8, 64, micro_batch=4)
    for layers, case in zip((2, 3, 4), GPU_CASES)
)
"""The same on a CPU: the depth alone differs, so that compiled layers are found in the cache."""
TINY_LARGE_CASE = replace(TINY_CASES[0], name="tiny 3B", shape=TINY.model_copy(update={"num_layers": 5}))


@dataclass(frozen=True)
class Variant:
    """How a case is run."""

    precision: str = "bf16"
    compile: bool = True
    documents: bool = True
    offload: bool = False
    deterministic: bool = False

    @property
    def name(self) -> str:
        """In words."""
        words = [self.precision, "compile" if self.compile else "eager"]
        words += ["documents"] if self.documents else []
        words += ["offload"] if self.offload else []
        return " ".join([*words, *(["deterministic"] if self.deterministic else [])])

    def sections(self, case: GpuCase) -> dict[str, dict[str, Any]]:
        """The settings, none of them left to a default that depends on the device."""
        train = {"seq_len": case.seq_len, "precision": self.precision, "document_mask": self.documents}
        train |= {"deterministic": self.deterministic}
        layout = {"micro_batch": case.micro_batch, "data": "zero2", "compile": self.compile, "offload": self.offload}
        return {"train": train, "layout": layout}


VARIANTS = (
    *(Variant(), Variant("fp8"), Variant(documents=False)),
    *(Variant(compile=False), Variant(deterministic=True)),
)
"""What users run comes first, as a deadline may leave out the rest. The last one leaves its process slower in fp8."""


class Deadline:
    """The time of a call: work begins only if as long as the longest so far is left."""

    def __init__(self, seconds: float = SECONDS):
        self._begin, self._seconds, self._longest = time.monotonic(), seconds, 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The context of one piece of work."""
        begin = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begin)

    @property
    def has_room(self) -> bool:
        """Whether another piece of work may begin."""
        return time.monotonic() - self._begin + self._longest <= self._seconds


# ---------------------------------------------------------------------------------------------------------------- rows


def dataset_for(folder: Path, case: GpuCase) -> Dataset:
    """Documents for all steps of a case."""
    return write_documents(folder, case, WARM_STEPS + STEPS + 1)


def batches_for(dataset: Dataset, case: GpuCase, variant: Variant) -> Batches:
    """The batches of a variant, read by the trainer's own reader."""
    config = TrainConfig.model_validate(variant.sections(case)["train"])
    return batches_of(dataset, config, case.rows)


# --------------------------------------------------------------------------------------------------------------- steps


def make_learner(case: GpuCase, variant: Variant, ranks: Ranks) -> Learner:
    """A learner whose weights are drawn on the device; compilations are counted from here."""
    count_from_here()
    learner = Learner(plan_of(case, variant.sections(case)), ranks, 2)
    for parameter in learner.model.parameters.values():
        values = local_tensor(parameter)
        values.normal_(0, 0.02) if values.ndim == 2 else values.fill_(1)
    for value in state_tensors(learner.optimizer).values():
        value.zero_()
    return learner


def one_step(learner: Learner, rows: Rows, number: int) -> None:
    """Make update `number` (1 = first) from the rows of a step, as the training loop does."""
    learner.update(RATE, learner.compute(number, rows, len(rows), rows.num_targets))


def now() -> float:
    """The time when the device has finished all work [s]."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Compilations(NamedTuple):
    """What torch.compile did since `count_from_here`."""

    graphs: int
    recompilations: int
    """Graphs that took the place of one whose guards failed."""


def count_from_here() -> None:
    """Forget what was compiled and counted."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()
    dynamo.set_compilation_metrics_limit(4096)


def compilations() -> Compilations:
    """The counts of graphs and of recompilations."""
    again = sum(each.recompile_reason is not None for each in dynamo.get_compilation_metrics())
    return Compilations(dynamo.counters["stats"]["unique_graphs"], again)


def table_device() -> Device:
    """The plan's entry of this device: of a GPU by its name, or that of an H100; else of a CPU's core."""
    if not torch.cuda.is_available():
        return device_of("cpu")
    return device_named(torch.cuda.get_device_name()) or device_of("h100-sxm")


def peak_flops() -> float | None:
    """Dense bf16 products of this device [FLOP/s]; None on a CPU."""
    return table_device().peak_flops["bf16"] if torch.cuda.is_available() else None


def planned(case: GpuCase, variant: Variant) -> dict[str, float | None]:
    """Bytes and seconds of a step that the plan predicts; no seconds where its table lacks the number format."""
    settings, device = Settings.model_validate(variant.sections(case)), table_device()
    memory = memory_of_rank(case.shape, settings, 1, case.seq_len, case.rows, device.kind)
    try:
        cluster = Cluster.of(device.name, 1)
        seconds = predict(case.shape, settings, (case.seq_len, case.rows), cluster).step_seconds
    except ConfigError:
        return {"planned_bytes": memory.peak, "planned_seconds": None}
    return {"planned_bytes": memory.peak, "planned_seconds": seconds}


def speed(case: GpuCase, variant: Variant, ranks: Ranks, batches: Batches) -> dict[str, Any]:
    """What the steps of a variant took."""
    began, cuda = now(), torch.cuda.is_available()
    learner = make_learner(case, variant, ranks)
    with Prefetch(batches.batch, WARM_STEPS + STEPS, ranks.device.type) as rows:
        for step in range(WARM_STEPS):
            one_step(learner, rows.take(step)[0], step + 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        warm, begin, waited = compilations(), now(), 0.0
        for step in range(WARM_STEPS, WARM_STEPS + STEPS):
            taken, seconds = rows.take(step)
            waited += seconds
            one_step(learner, taken, step + 1)
        seconds, counted = now() - begin, compilations()
    rate, peak = STEPS * case.tokens / seconds, peak_flops()
    return {
        "parameters": num_parameters(case.shape),
        "rows": case.rows,
        "micro_batch": case.micro_batch,
        "seq_len": case.seq_len,
        "tokens_per_second": rate,
        "floor": case.floor or None,
        "target": case.target or None,
        "mfu": None if peak is None else flops_per_token(case.shape, case.seq_len) * rate / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "step_seconds": seconds / STEPS,
        "loader_stall": waited / seconds,
        "graphs": counted.graphs,
        "recompilations": counted.recompilations,
        "graphs_while_measured": counted.graphs - warm.graphs,
        "warm_seconds": begin - began,
    }


# --------------------------------------------------------------------------------------------------------------- cases


def measure(case: GpuCase, variant: Variant, ranks: Ranks, dataset: Dataset) -> dict[str, Any]:
    """One line; a failure is part of it, and does not end the bench."""
    line: dict[str, Any] = {"case": case.name, "variant": variant.name}
    try:
        line |= planned(case, variant) | speed(case, variant, ranks, batches_for(dataset, case, variant))
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return line


def measure_cases(
    cases: Sequence[GpuCase], variants: Sequence[Variant], ranks: Ranks, keep: Keep, deadline: Deadline
) -> None:
    """The first variant of each case, then the second of each, and so on, until the deadline."""
    with tempfile.TemporaryDirectory() as folder:
        datasets = dict(_datasets(Path(folder), cases))
        for variant in variants:
            for case in cases:
                if not deadline.has_room:
                    keep({"case": case.name, "variant": variant.name, "left_out": "the time of the call was over"})
                    continue
                with deadline.measuring():
                    line = measure(case, variant, ranks, datasets[case.name])
                keep(line)


def _datasets(folder: Path, cases: Sequence[GpuCase]) -> Iterator[tuple[str, Dataset]]:
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        yield case.name, dataset_for(folder / str(number), case)


def shown(line: Mapping[str, Any]) -> str:
    """A line of a case for a terminal."""
    begin = f"{line['case']:>9} {line['variant']:22s}"
    if problem := line.get("error") or line.get("left_out"):
        return f"{begin} {problem}"
    mfu = "-" if line["mfu"] is None else f"{line['mfu']:.1%}"
    return (
        f"{begin} {line['rows']} x {line['seq_len']}  {line['tokens_per_second']:9,.0f} tokens/s  MFU {mfu}  "
        f"{line['graphs']} graphs, {line['recompilations']} again, {line['warm_seconds']:.0f} s to warm up"
    )


def gpu_cases(ranks: Ranks, keep: Keep) -> None:
    """Every case and variant, for as long as a call may take."""

    def tell(line: dict[str, Any]) -> None:
        print(shown(line), flush=True)
        keep(line)

    measure_cases(GPU_CASES, VARIANTS, ranks, tell, Deadline())
