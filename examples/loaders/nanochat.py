"""Batches of a Penstock run for nanochat's training loop: `train_loader = penstock_loader(run, B, T, rank, ranks)`."""

from collections.abc import Iterator

import torch

import penstock

NO_LOSS = -1
"""The target that nanochat's cross-entropy ignores; Penstock's is -100."""


def penstock_loader(
    run: str, B: int, T: int, rank: int = 0, ranks: int = 1, step: int = 0, device: str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets), int64 of shape (B, T), without end; resume by `step`, with any number of ranks."""
    samples = penstock.open(run).tokens.torch_dataset()
    if samples[0]["inputs"].numel() != T:
        raise ValueError(f"T: expected the train.seq_len of {run}, {samples[0]['inputs'].numel()}, got {T}.")
    while True:
        first = (step * ranks + rank) * B
        rows = samples.__getitems__([number % len(samples) for number in range(first, first + B)])
        inputs, targets = (torch.stack([row[name] for row in rows]) for name in ("inputs", "targets"))
        yield inputs.to(device), targets.masked_fill(targets < 0, NO_LOSS).to(device)
        step += 1
