"""The program `python -m train.parallel.this_machine`: the devices that a run would start on here, as JSON.

`penstock train --dry-run` starts it, because the command itself does not load torch.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File with the memory limit of a container [bytes], or `max`."""


@dataclass(frozen=True)
class ThisMachine:
    """The devices of this machine."""

    kind: str
    """Type of the devices, "cuda" or "cpu"."""
    name: str
    """Name of the GPU; empty for a CPU."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device; None for a CPU."""
    number: int
    """Number of GPUs; 1 for a CPU."""
    memory: int
    """Memory of a GPU, or of the whole machine without GPUs [bytes]."""


def machine_memory() -> int:
    """Return the main memory of this machine, or of its container if that has a lower limit [bytes]."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
    return min(memory, int(limit)) if limit.isdigit() else memory


def this_machine() -> ThisMachine:
    """Return the devices that ranks on this machine use."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ThisMachine("cpu", "", None, 1, machine_memory())
    memory = torch.cuda.get_device_properties(0).total_memory
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    return ThisMachine("cuda", name, capability, torch.cuda.device_count(), memory)


if __name__ == "__main__":
    sys.stdout.write(TypeAdapter(ThisMachine).dump_json(this_machine()).decode())
