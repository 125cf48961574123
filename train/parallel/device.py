"""The device of a rank: which one it trains on, and how its memory is allocated."""

import os

import torch
import torch.distributed as dist

from schemas.errors import ConfigError

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that torch 2.11 to 2.13 read the settings of the CUDA allocator from, the newest name first."""


def device_of(cuda: bool, num_devices: int, local_rank: int, local_size: int) -> torch.device:
    """The device of rank `local_rank` (0 = first) of the `local_size` ranks of a machine: a GPU each, or the CPU.

    `cuda`: whether GPUs can be used at all. Raises ConfigError if there are fewer of them than ranks.
    """
    if not cuda:
        return torch.device("cpu")
    if local_size > num_devices:
        raise ConfigError(
            f"ranks: expected at most {num_devices} rank(s) on this machine, one for each GPU, got {local_size}. Start "
            f'fewer (`penstock train --ranks {num_devices}`), or set CUDA_VISIBLE_DEVICES="" to train on CPUs.'
        )
    return torch.device("cuda", local_rank)


def device_here(local_rank: int, local_size: int) -> torch.device:
    """`device_of` on this machine; a GPU becomes the current device of this process."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    device = device_of(cuda, torch.cuda.device_count(), local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Backend of the process groups of ranks on such devices; tensors on the CPU always have one."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def place_by_torchrun() -> tuple[int, int] | None:
    """The number of this rank among those of its machine, and how many they are; None = torchrun has not set them."""
    local_rank, local_size = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None if local_rank is None or local_size is None else (int(local_rank), int(local_size))


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, unless the user has set how it allocates; call before CUDA starts.

    Chunks of logits of some 0.5 GB come and go beside weights that stay, so segments of fixed size fragment. Torch
    reads the variable when it first needs it, which is after its import (seen in the CUDA build of 2.11).
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
