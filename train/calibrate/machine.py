"""This machine measured as a device that layouts can be searched for: products, memory, links, and what a layer costs.

All ranks measure at once, as they compute at once in a run, and of each time the shortest of several counts, which
other load on the machine moves least. The profile is a JSON file whose path is the device's name.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import ConfigError, ContractError
from train.calibrate.measure import measure
from train.parallel.device import backend_of, device_here, device_of, use_expandable_segments
from train.parallel.ranks import Ranks
from train.plan.search.device import Device, Link
from train.plan.search.devices import TABLE, device_named, write_profile

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
        raise ConfigError(
            f"calibrate: promised a file FILE.json, by which the device is named, found {path}; rename it"
        )
    if number < 1 or (threads is not None and threads < 1):
        raise ConfigError(f"calibrate: promised a rank and a thread at least, found {number} and {threads}; raise them")
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
            raise ContractError("calibrate: promised measurements, found that a rank died; see above") from None
        if isinstance(said, dict):
            return said
        tell(f"  {said}")
    raise ContractError(f"calibrate: promised measurements within {LIMIT} s, found none; start fewer ranks")


def _rank(rank: int, number: int, threads: int, store: str, pipe: Connection) -> None:
    """One rank: join the others, measure, and let rank 0 tell."""
    torch.set_num_threads(threads)
    use_expandable_segments()
    device = device_here(rank, number)
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
