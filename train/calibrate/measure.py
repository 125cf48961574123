"""What a rank measures while the others do too: rates of products and memory, seconds of collectives and layers."""

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
from train.parallel.mesh import all_gather_single
from train.parallel.parallelize import SplitModel, use_matrix_units
from train.parallel.ranks import Ranks, backend_of, device_of, select_device, use_expandable_segments
from train.plan.search.devices import TABLE, Device, Link, device_named, write_profile

SIDES = (256, 512, 1024)
"""Sides of the square matrices that are multiplied; on a GPU eight times as long."""
SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes that collectives send, for the latency and for the bandwidth."""
STREAMS = (1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Numbers that the memory's bandwidth is measured on: those that caches hold, and more."""
SECONDS = 0.4
"""Time for each measurement, at least three repetitions."""
SLOW = 0.01
"""Seconds of a product behind which no larger one is tried."""
LAYERS = (2, 6)
"""Depths of the tiny models, whose difference is what a layer costs."""


def measure(ranks: Ranks, tell: Callable[[str], None]) -> dict[str, Any]:
    """Rates of products, attention and memory, seconds of collectives and of empty layers."""
    cuda = ranks.device.type == "cuda"
    use_matrix_units(ranks.device)
    tell("products of matrices")
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    flops = {name: _best_rate(ranks, kind) for name, kind in formats.items()}
    tell("attention and memory")
    attention = _attention_rate(ranks, torch.bfloat16 if cuda else torch.float32)
    bandwidths = [(4 * size, _bandwidth(ranks, size)) for size in STREAMS]
    pages = 0.0 if cuda else _page_seconds(ranks)
    tell("collectives")
    links = _links(ranks) if ranks.world_size > 1 else (0.0, 0.0)
    tell("empty layers")
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
        "memory": torch.cuda.mem_get_info()[1] if cuda else _memory_of_machine() // ranks.local_size,
        "layers": {} if cuda else _layer_seconds(ranks, links[0]),
    }


def _memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shortest(ranks: Ranks, work: Callable[[], object], least: float = SECONDS) -> float:
    """Seconds of the quickest repetition, the mean over the ranks; each makes as many, since some are collectives."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    (longest,) = ranks.total(once())
    times = [once() for _ in range(min(300, max(3, math.ceil(least * ranks.world_size / max(longest, 1e-6)))))]
    (total,) = ranks.total(min(times))
    return total / ranks.world_size


def _best_rate(ranks: Ranks, kind: torch.dtype) -> float:
    """FLOP/s of products, the best of some sizes; a format that has no kernel of its own is slow enough with few."""
    best = 0.0
    for side in SIDES:
        side *= 8 if ranks.device.type == "cuda" else 1
        best = max(best, _product_rate(ranks, side, kind))
        if 2 * side**3 / best > SLOW:
            break
    return best


def _product_rate(ranks: Ranks, side: int, kind: torch.dtype) -> float:
    """FLOP/s of products of square matrices."""
    left, right = (torch.ones(side, side, dtype=kind, device=ranks.device) for _ in range(2))
    return 2 * side**3 / _shortest(ranks, lambda: left @ right)


def _attention_rate(ranks: Ranks, kind: torch.dtype) -> float:
    """FLOP/s of causal attention forward and backward, of the pairs that are seen, each counted 3.5 times."""
    length, heads, width = 512, 8, 64
    parts = [
        torch.randn(1, heads, length, width, dtype=kind, device=ranks.device, requires_grad=True) for _ in range(3)
    ]

    def work() -> None:
        F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True).sum().backward()  # type: ignore[no-untyped-call]

    return 3.5 * 4 * length * length / 2 * heads * width / _shortest(ranks, work)


def _bandwidth(ranks: Ranks, numbers: int) -> float:
    """Bytes/s of an addition."""
    values = torch.ones(numbers, device=ranks.device)
    target = torch.empty_like(values)
    return 12 * numbers / _shortest(ranks, lambda: torch.add(values, values, out=target))


def _page_seconds(ranks: Ranks) -> float:
    """Seconds a byte of a tensor takes more if it is made anew, so large that the allocator has none of it left."""
    numbers = STREAMS[-1]
    target = torch.empty(numbers)
    anew, again = _shortest(ranks, lambda: torch.ones(numbers)), _shortest(ranks, lambda: target.fill_(1))
    return max(0.0, anew - again) / (4 * numbers)


def _links(ranks: Ranks) -> tuple[float, float]:
    """Seconds of a collective of hardly anything, and the bandwidth that each rank sends at [bytes/s]."""
    size = LARGE * (16 if ranks.device.type == "cuda" else 1)
    small, large = _gather_seconds(ranks, SMALL), _gather_seconds(ranks, size)
    return small, (ranks.world_size - 1) * size / max(1e-9, large - small)


def _gather_seconds(ranks: Ranks, size: int) -> float:
    """Seconds of an all-gather in which each rank has `size` bytes."""
    own = torch.ones(size // 4, device=ranks.device)
    whole = torch.empty(ranks.world_size * len(own), device=ranks.device)
    return _shortest(ranks, lambda: all_gather_single(whole, own))


def _layer_seconds(ranks: Ranks, collective: float) -> dict[str, float]:
    """What a layer costs forward and backward in a tiny model by how it is split, its collectives taken off.

    `outside` is what a micro-batch costs besides its layers.
    """
    plain = [_tiny_seconds(ranks, layers, {"data": "ddp"}) for layers in LAYERS]
    slope = max(0.0, (plain[1] - plain[0]) / (LAYERS[1] - LAYERS[0]))
    found = {"plain": slope, "outside": max(0.0, plain[0] - LAYERS[0] * slope), "sharded": slope, "tensor": slope}
    if ranks.world_size > 1:
        # A layer gathers its weights twice and sums its gradients; along the tensor axis the stream goes eight times.
        for name, layout, times in (("sharded", {"data": "zero3"}, 3), ("tensor", {"tensor": ranks.world_size}, 8)):
            few, many = (_tiny_seconds(ranks, layers, layout) for layers in LAYERS)
            found[name] = max(slope, (many - few) / (LAYERS[1] - LAYERS[0]) - times * collective)
    return found


def _tiny_seconds(ranks: Ranks, layers: int, layout: dict[str, Any]) -> float:
    """Seconds of the forward and backward pass of a model that has next to nothing to compute."""

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
    model = SplitModel(shape, settings, ranks, 1, (length, ranks.world_size))
    model.set_initial_weights(0)
    ids = torch.ones(1, length, dtype=torch.int64)
    if model.compressor is not None:
        model.compressor.start(1)
    rows = model.micro_batches(Rows(ids, ids, None, torch.zeros(1, dtype=torch.int64)), ranks.world_size)
    return _shortest(ranks, lambda: model.backward(rows[:1], 1.0), 2 * SECONDS)


# This machine measured as a device that layouts can be searched for: products, memory, links, and what a layer costs.
#
# All ranks measure at once, as they compute at once in a run, and of each time the shortest of several counts, which
# other load on the machine moves least. The profile is a JSON file whose path is the device's name.

LIMIT = 150
"""Seconds after which ranks that have said nothing are given up."""


def calibrate(
    path: Path, ranks: int | None = None, threads: int | None = None, tell: Callable[[str], None] = print
) -> Device:
    """Measure `ranks` ranks of this machine together and write the profile; returns the device.

    None: a rank for each GPU, else two on a CPU, as far as there are cores; and the threads that a run would have.
    Raises ConfigError for a path or a number that cannot be, or that exceeds the GPUs, ContractError if a rank dies.
    """
    cores = len(os.sched_getaffinity(0))
    number = _num_ranks(cores) if ranks is None else ranks
    if path.suffix != ".json":
        raise ConfigError(f"calibrate: expected a file FILE.json, by which the device is named, got {path}. Rename it.")
    if number < 1 or (threads is not None and threads < 1):
        raise ConfigError(f"calibrate: expected a rank and a thread at least, got {number} and {threads}. Raise them.")
    device_of(torch.cuda.is_available(), torch.cuda.device_count(), 0, number)  # refuses before any rank starts
    each = max(1, cores // number) if threads is None else threads
    tell(f"measuring {number} rank(s) of {each} thread(s) at once, up to a minute")
    found = _measured(number, each, tell)
    device = device_from(found, number, max(number, cores // each))
    write_profile(device, path)
    tell(f"{path}: {_in_words(device)}")
    return device


def _num_ranks(cores: int) -> int:
    return torch.cuda.device_count() or min(2, cores)


def device_from(found: dict[str, Any], ranks: int, at_once: int) -> Device:
    """The device that measurements describe: seconds and rates as `measure` names them."""
    cuda = found["kind"] == "cuda"
    alike = [device for device in TABLE if cuda and device.name.partition("-")[0] in found["name"].lower()]
    alike = alike or [device for device in TABLE if device.name == ("h100-sxm" if cuda else "cpu")]
    known = (device_named(found["name"]) if cuda else None) or alike[-1]
    peak = max(found["flops"].values())
    reference = found["flops"].get("bf16", peak) if cuda else found["flops"]["fp32"]
    changes: dict[str, Any] = {
        "name": f"{found['name']}, measured",
        "kind": found["kind"],
        # What was measured is the rate itself: of a data sheet's peak the known share is taken. An MFU is by bf16's.
        "peak_flops": {name: flops / known.product_share for name, flops in found["flops"].items()},
        "attention_share": min(1.0, known.product_share * found["attention"] / reference),
        "capability": found.get("capability"),
        "memory_bytes": found["memory"],
        "memory_bandwidth": found["bandwidths"][-1][1] / known.traffic_share,
        "layer_seconds": found["layers"],
        "source": f"measured with {ranks} rank(s) at once, torch {found['torch']}",
        "uncertain": "other load while it was measured"
        + ("" if ranks > 1 else "; links, for which it takes two ranks"),
        "gpus_per_node": ranks,
    }
    if not cuda:
        changes |= {"at_once": at_once, "op_seconds": 0.0, "overlap": 0.0, "by_size": found["bandwidths"]}
        changes["page_seconds"] = found["pages"]
    if ranks > 1:
        small, bandwidth = found["links"]
        changes["within"] = Link(bandwidth=bandwidth, latency=small / 2 / (ranks - 1)).model_dump()
        changes["collective_seconds"] = small / 2
    return Device.model_validate(known.model_dump() | changes)


def _in_words(device: Device) -> str:
    flops = ", ".join(f"{name} {rate * device.product_share / 1e9:.4g}" for name, rate in device.peak_flops.items())
    layers = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in device.layer_seconds.items())
    return (
        f"{flops} GFLOP/s, memory {device.memory_bandwidth * device.traffic_share / 1e9:.3g} GB/s, links "
        f"{device.within.bandwidth / 1e9:.3g} GB/s and {1e6 * device.collective_seconds:.3g} us"
        + (f", an empty layer [ms]: {layers}" if layers else "")
    )


# ------------------------------------------------------------------------------------------------------------ the ranks


def _measured(number: int, threads: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the ranks found, as rank 0 tells it; every line that it says before is progress."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        arguments = (number, threads, str(Path(folder) / "store"), there)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(number)]
        for process in processes:
            process.start()
        there.close()
        try:
            return _listen(here, tell)
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _listen(pipe: Connection, tell: Callable[[str], None]) -> dict[str, Any]:
    end = time.monotonic() + LIMIT
    while pipe.poll(max(0.0, end - time.monotonic())):
        try:
            said = pipe.recv()
        except EOFError:
            raise ContractError("calibrate: expected measurements, got that a rank died. See above.") from None
        if isinstance(said, dict):
            return said
        tell(f"  {said}")
    raise ContractError(f"calibrate: expected measurements within {LIMIT} s, got none. Start fewer ranks.")


def _rank(rank: int, number: int, threads: int, store: str, pipe: Connection) -> None:
    """One rank: join the others, measure, and let rank 0 tell."""
    torch.set_num_threads(threads)
    use_expandable_segments()
    device = select_device(rank, number)
    files = dist.FileStore(store, number)  # type: ignore[attr-defined]
    limit, own = timedelta(seconds=LIMIT), device if device.type == "cuda" else None
    dist.init_process_group(backend_of(device), store=files, rank=rank, world_size=number, timeout=limit, device_id=own)
    try:
        ranks = Ranks(rank, number, number, device, dist.new_group(backend="gloo"))
        found = measure(ranks, lambda line: pipe.send(line) if rank == 0 else None)
        if rank == 0:
            pipe.send(found)
        dist.barrier(group=ranks.control)
    finally:
        dist.destroy_process_group()
