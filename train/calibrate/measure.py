"""Measure this machine as a device for the layout search, and write its profile.

All ranks measure at the same time: rates of matrix products, attention and memory, and the seconds of collectives and
of tiny layers. The shortest of several repetitions counts, as it is least affected by other load.
"""

import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from schemas.errors import ConfigError, ContractError
from train.config.settings import Settings
from train.data.rows import Rows
from train.model.shape import ModelShape
from train.parallel.devices import KNOWN_DEVICES, Device, Link, device_named, write_profile
from train.parallel.parallelize import SplitModel, use_matrix_units
from train.parallel.ranks import Ranks, all_gather_single, backend_of, device_of, select_device, use_expandable_segments
from train.parallel.this_machine import machine_memory

SIDES = (256, 512, 1024)
"""Sides of the square matrices that are multiplied; on a GPU they are eight times as long."""
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes that collectives send, to measure latency and bandwidth."""
STREAMS = {"cpu": (1 << 16, 1 << 19, 1 << 22, 1 << 24), "cuda": (1 << 28,)}
"""Tensor sizes [elements] for the memory bandwidth. On a CPU some fit into its caches. On an H200, with 60 MB of cache,
tensors of 67 MB seemed to move as fast as the data sheet's peak."""
ATTENTION = {"cpu": (1, 512, 8, 64), "cuda": (8, 2048, 16, 64)}
"""Rows, row length, heads and head width for the rate of attention; smaller ones would measure launches on a GPU."""
IN_MODEL = {"product": 0.88, "traffic": 0.56}
"""The rates of the operations of a model's step on a GPU as shares of those measured alone: products of large square
matrices, and additions of large tensors. From the steps of three models on an H200, of which a product of 8,192 x 8,192
reaches 790 TFLOP/s and a copy 4.3 TB/s."""
SECONDS = 0.4
"""Seconds for each measurement, with at least three repetitions."""
SLOW = 0.01
"""Seconds of a matrix product above which no larger product is measured."""
LAYERS = (2, 6)
"""Numbers of layers of the two tiny models, whose difference in time gives the cost of a layer."""


def measure(ranks: Ranks, report: Callable[[str], None]) -> dict[str, Any]:
    """Return what `device_from` needs, by name: measured rates [FLOP/s, bytes/s] and seconds, and device properties."""
    cuda = ranks.device.type == "cuda"
    use_matrix_units(ranks.device)
    report("products of matrices")
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    flops = {name: _best_rate(ranks, kind) for name, kind in formats.items()}
    report("attention and memory")
    attention = _attention_rate(ranks, torch.bfloat16 if cuda else torch.float32)
    bandwidths = [(4 * size, _bandwidth(ranks, size)) for size in STREAMS[ranks.device.type]]
    pages = 0.0 if cuda else _page_seconds(ranks)
    report("collectives")
    links = _links(ranks) if ranks.world_size > 1 else (0.0, 0.0)
    report("tiny layers")
    return {
        "kind": ranks.device.type,
        "name": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "capability": torch.cuda.get_device_capability() if cuda else None,
        "torch": torch.__version__,
        "flops": flops,
        "attention": attention,
        "bandwidths": bandwidths,
        "pages": pages,
        "links": links,
        "memory": torch.cuda.mem_get_info()[1] if cuda else machine_memory() // ranks.local_size,
        "layers": {} if cuda else _layer_seconds(ranks, links[0]),
    }


def _shortest(ranks: Ranks, work: Callable[[], object], least: float = SECONDS) -> float:
    """Return the seconds of the fastest repetition of `work`, averaged over the ranks.

    `least`: seconds to spend on repetitions.
    """

    def once() -> float:
        start = time.perf_counter()
        work()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    # Every rank makes equally many repetitions, because some work is collective.
    (longest,) = ranks.total(once())
    times = [once() for _ in range(min(300, max(3, math.ceil(least * ranks.world_size / max(longest, 1e-6)))))]
    (total,) = ranks.total(min(times))
    return total / ranks.world_size


def _best_rate(ranks: Ranks, kind: torch.dtype) -> float:
    """Return the highest rate of a product of square matrices [FLOP/s]."""
    best = 0.0
    for side in SIDES:
        side *= 8 if ranks.device.type == "cuda" else 1
        best = max(best, _product_rate(ranks, side, kind))
        if 2 * side**3 / best > SLOW:
            break
    return best


def _product_rate(ranks: Ranks, side: int, kind: torch.dtype) -> float:
    # Random values: a GPU lowers its clock less for ones or zeros, and seems faster than it is.
    left, right = (torch.randn(side, side, device=ranks.device).to(kind) for _ in range(2))
    return 2 * side**3 / _shortest(ranks, lambda: left @ right)


def _attention_rate(ranks: Ranks, kind: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward together."""
    rows, length, heads, width = ATTENTION[ranks.device.type]
    parts = [
        torch.randn(rows, heads, length, width, dtype=kind, device=ranks.device, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn_like(parts[0])

    def work() -> None:
        F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

    # Only unmasked pairs count. Both passes together have 3.5 times the FLOPs of the forward pass.
    return 3.5 * 4 * rows * length * length / 2 * heads * width / _shortest(ranks, work)


def _bandwidth(ranks: Ranks, numbers: int) -> float:
    """Return the bytes that an addition of `numbers` elements reads and writes per second."""
    values = torch.ones(numbers, device=ranks.device)
    target = torch.empty_like(values)
    return 12 * numbers / _shortest(ranks, lambda: torch.add(values, values, out=target))


def _page_seconds(ranks: Ranks) -> float:
    """Return the extra seconds per byte to fill new memory, with its page faults, instead of reused memory."""
    numbers = STREAMS["cpu"][-1]
    target = torch.empty(numbers)
    anew, again = _shortest(ranks, lambda: torch.ones(numbers)), _shortest(ranks, lambda: target.fill_(1))
    return max(0.0, anew - again) / (4 * numbers)


def _links(ranks: Ranks) -> tuple[float, float]:
    """Return the seconds of an all-gather of SMALL bytes, and the bandwidth with which a rank sends [bytes/s]."""
    size = LARGE * (16 if ranks.device.type == "cuda" else 1)
    small, large = _gather_seconds(ranks, SMALL), _gather_seconds(ranks, size)
    return small, (ranks.world_size - 1) * size / max(1e-9, large - small)


def _gather_seconds(ranks: Ranks, size: int) -> float:
    own = torch.ones(size // 4, device=ranks.device)
    whole = torch.empty(ranks.world_size * len(own), device=ranks.device)
    return _shortest(ranks, lambda: all_gather_single(whole, own))


def _layer_seconds(ranks: Ranks, collective: float) -> dict[str, float]:
    """Return the seconds of one layer of a tiny model, forward and backward, for each kind of parallelism.

    Keys: `plain` (every rank has the whole model), `sharded` (zero3), `tensor` (tensor parallelism). The time of
    collectives is subtracted. The key `outside` has the seconds of a micro-batch outside the layers.
    """
    plain = [_tiny_seconds(ranks, layers, {"data": "ddp"}) for layers in LAYERS]
    slope = max(0.0, (plain[1] - plain[0]) / (LAYERS[1] - LAYERS[0]))
    seconds = {"plain": slope, "outside": max(0.0, plain[0] - LAYERS[0] * slope), "sharded": slope, "tensor": slope}
    if ranks.world_size > 1:
        # A layer has two all-gathers of weights and a reduce-scatter; the tensor axis has eight collectives.
        for name, layout, times in (("sharded", {"data": "zero3"}, 3), ("tensor", {"tensor": ranks.world_size}, 8)):
            few, many = (_tiny_seconds(ranks, layers, layout) for layers in LAYERS)
            seconds[name] = max(slope, (many - few) / (LAYERS[1] - LAYERS[0]) - times * collective)
    return seconds


def _tiny_seconds(ranks: Ranks, layers: int, layout: dict[str, Any]) -> float:
    """Return the seconds of a forward and backward pass of a model so small that most of the time is overhead."""
    heads, length = 4 * ranks.world_size, 8 * ranks.world_size
    settings = Settings.model_validate({"layout": {"micro_batch": 1} | layout})
    shape = ModelShape(
        vocab_size=64 * ranks.world_size,
        num_layers=layers,
        d_model=8 * heads,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=8,
        d_ffw=16 * heads,
        tie_embeddings=False,
    )
    model = SplitModel(shape, settings, ranks, 1, [(length, ranks.world_size)])
    model.set_initial_weights(0)
    ids = torch.ones(1, length, dtype=torch.int64)
    if model.compressor is not None:
        model.compressor.start(1)
    rows = model.micro_batches(Rows(ids, ids, None, torch.zeros(1, dtype=torch.int64)), ranks.world_size)
    return _shortest(ranks, lambda: model.backward(rows[:1], 1.0), 2 * SECONDS)


# The command `penstock calibrate`: start the ranks, and make a device profile from their measurements.
#
# All ranks measure at once, as they compute at once in a run. The profile is a JSON file whose path names the device.

LIMIT = 150
"""Seconds to wait for the ranks' measurements."""


def calibrate(
    path: Path, ranks: int | None = None, threads: int | None = None, report: Callable[[str], None] = print
) -> Device:
    """Measure `ranks` ranks of this machine together, write the profile and return the device.

    `ranks`: None = one rank for each GPU; without GPUs, two ranks, or one on a single core. `threads`: CPU threads of
    each rank; None = the CPU cores divided by the ranks. Raises ConfigError for an invalid path or number, or for more
    ranks than GPUs. Raises ContractError if a rank fails.
    """
    cores = len(os.sched_getaffinity(0))
    number = _num_ranks(cores) if ranks is None else ranks
    if path.suffix != ".json":
        raise ConfigError(f"calibrate: expected a path that ends in .json, got {path}. Give a path such as FILE.json.")
    if number < 1 or (threads is not None and threads < 1):
        raise ConfigError(
            f"calibrate: expected at least one rank and one thread, got --ranks {number} and --threads {threads}. "
            "Set --ranks and --threads to at least 1."
        )
    device_of(torch.cuda.is_available(), torch.cuda.device_count(), 0, number)  # raises before any rank starts
    each = max(1, cores // number) if threads is None else threads
    report(f"measuring {number} rank(s) of {each} thread(s) at once, up to a minute")
    measurements = _measured(number, each, report)
    device = device_from(measurements, number, max(number, cores // each))
    write_profile(device, path)
    report(f"{path}: {_summary(device)}")
    return device


def _num_ranks(cores: int) -> int:
    return torch.cuda.device_count() or min(2, cores)


def device_from(measured: dict[str, Any], ranks: int, at_once: int) -> Device:
    """Return the device profile that follows from the result of `measure`.

    `ranks`: number of ranks that measured together; `at_once`: ranks that the CPU cores can run at the same time.
    """
    cuda = measured["kind"] == "cuda"
    same = device_named(measured["name"]) if cuda else None
    alike = [device for device in KNOWN_DEVICES if cuda and device.name.partition("-")[0] in measured["name"].lower()]
    alike = alike or [device for device in KNOWN_DEVICES if device.name == ("h100-sxm" if cuda else "cpu")]
    known = same or alike[-1]
    peak = max(measured["flops"].values())
    reference = measured["flops"].get("bf16", peak) if cuda else measured["flops"]["fp32"]
    changes: dict[str, Any] = {
        "name": f"{measured['name']}, measured",
        "kind": measured["kind"],
        "capability": measured.get("capability"),
        "memory_bytes": measured["memory"],
        "layer_seconds": measured["layers"],
        "source": f"measured with {ranks} rank(s) at once, torch {measured['torch']}",
        "uncertain": "other load while it was measured"
        + ("" if ranks > 1 else "; links, for which it takes two ranks"),
        "gpus_per_node": ranks,
    }
    if same is not None:
        # The peaks of its data sheet stay, as MFU uses them; the shares of them follow from what was measured.
        changes |= {
            "product_share": min(1.0, IN_MODEL["product"] * reference / same.peak_flops["bf16"]),
            "attention_share": min(1.0, measured["attention"] / same.peak_flops["bf16"]),
            "traffic_share": min(1.0, IN_MODEL["traffic"] * measured["bandwidths"][-1][1] / same.memory_bandwidth),
        }
    else:
        # The measured rate is divided by the share of a peak of a similar device, which gives the peak.
        changes |= {
            "peak_flops": {name: flops / known.product_share for name, flops in measured["flops"].items()},
            "attention_share": min(1.0, known.product_share * measured["attention"] / reference),
            "memory_bandwidth": measured["bandwidths"][-1][1] / known.traffic_share,
        }
    if not cuda:
        changes |= {"at_once": at_once, "op_seconds": 0.0, "overlap": 0.0, "by_size": measured["bandwidths"]}
        changes["page_seconds"] = measured["pages"]
    if ranks > 1:
        small, bandwidth = measured["links"]
        changes["within"] = Link(bandwidth=bandwidth, latency=small / 2 / (ranks - 1)).model_dump()
        changes["collective_seconds"] = small / 2
    return Device.model_validate(known.model_dump() | changes)


def _summary(device: Device) -> str:
    flops = ", ".join(f"{name} {rate * device.product_share / 1e9:.4g}" for name, rate in device.peak_flops.items())
    layers = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in device.layer_seconds.items())
    return (
        f"{flops} GFLOP/s, memory {device.memory_bandwidth * device.traffic_share / 1e9:.3g} GB/s, links "
        f"{device.within.bandwidth / 1e9:.3g} GB/s and {1e6 * device.collective_seconds:.3g} us"
        + (f", a tiny layer [ms]: {layers}" if layers else "")
    )


# The processes of the ranks.


def _measured(number: int, threads: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Start a process for each rank, report the progress lines of rank 0, and return its result of `measure`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (number, threads, str(Path(folder) / "store"), sender)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(number)]
        for process in processes:
            process.start()
        sender.close()
        try:
            return _listen(receiver, report)
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _listen(pipe: Connection, report: Callable[[str], None]) -> dict[str, Any]:
    end = time.monotonic() + LIMIT
    while pipe.poll(max(0.0, end - time.monotonic())):
        try:
            message = pipe.recv()
        except EOFError:
            raise ContractError(
                "calibrate: expected measurements, got a rank that ended early. Fix the error that is printed above."
            ) from None
        if isinstance(message, dict):
            return message
        report(f"  {message}")
    raise ContractError(f"calibrate: expected measurements within {LIMIT} s, got none. Set --ranks to a lower number.")


def _rank(rank: int, number: int, threads: int, store: str, pipe: Connection) -> None:
    """Run the process of a rank: join the other ranks, measure, and on rank 0 send the result through `pipe`."""
    torch.set_num_threads(threads)
    use_expandable_segments()
    device = select_device(rank, number)
    files = dist.FileStore(store, number)  # type: ignore[attr-defined]
    limit, own = timedelta(seconds=LIMIT), device if device.type == "cuda" else None
    dist.init_process_group(backend_of(device), store=files, rank=rank, world_size=number, timeout=limit, device_id=own)
    try:
        ranks = Ranks(rank, number, number, device, dist.new_group(backend="gloo"))
        result = measure(ranks, lambda line: pipe.send(line) if rank == 0 else None)
        if rank == 0:
            pipe.send(result)
        dist.barrier(group=ranks.control)
    finally:
        dist.destroy_process_group()
