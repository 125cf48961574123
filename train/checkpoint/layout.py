"""The layout that a checkpoint is written in, as its note tells it."""

from collections.abc import Mapping

import torch

from schemas.config import Section
from train.checkpoint.metadata import Layout


def layout_of(section: Section, axes: Mapping[str, int], threads: int, device: str) -> Layout:
    """The layout of the section `[layout]` with the sizes of its axes, on this machine's `device`: cpu or cuda."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    chosen = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return Layout(
        ranks=ranks,
        axes=dict(axes),
        settings=section.model_dump(mode="json", include=section.fields_of("execution") - {*axes}),
        threads=threads,
        device=device,
        kernels=f"torch {torch.__version__}, {chosen}",
    )
