"""Dense and sparse models at equal FLOPs per token: held-out losses on the source code of Python, byte by byte.

`python -m bench.experts` trains each model from several seeds on one CPU core, and prints a line for each as it ends.
The text is the standard library of the Python that runs it; every tenth file is held out.
"""

import argparse
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.config.optim import OptimConfig
from train.model.count_own import count_model
from train.model.own import build_any
from train.model.shape import ModelShape, OwnShape, active_parameters, flops_per_token, num_parameters
from train.optim.optimizer import make_optimizer, update

LENGTH, ROWS, HELDOUT_ROWS = 128, 16, 256
SIZES = {"vocab_size": 256, "num_layers": 4, "d_model": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
DENSE = ModelShape.model_validate(SIZES | {"d_ffw": 192, "tie_embeddings": False})
SPARSE: dict[str, dict[str, Any]] = {
    "8 experts, 2 used": {"experts": 8, "top_k": 2},
    "8 experts, 1 used, capacity 1.25": {"experts": 8, "top_k": 1, "capacity_factor": 1.25},
}


def read_bytes(heldout: bool) -> Tensor:
    """Return the bytes of the training files, or of the held-out files, one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for number, path in enumerate(files) if (number % 10 == 0) == heldout]
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in chosen)), dtype=torch.uint8).long()


def rows_of(text: Tensor, number: int, draw: torch.Generator) -> Tensor:
    """Return rows of LENGTH + 1 bytes from random places."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (number, 1), generator=draw)
    return text[starts + torch.arange(LENGTH + 1)]


def shapes() -> Iterator[tuple[str, ModelShape]]:
    """Yield the name and the shape of each model."""
    yield "dense", DENSE
    for name, options in SPARSE.items():
        values = DENSE.model_dump() | {"model": "train.model.moe:build", "max_positions": LENGTH, "options": options}
        yield name, count_model(OwnShape.model_validate(values), [LENGTH], True)


def heldout_loss(shape: ModelShape, seed: int, steps: int) -> float:
    """Return the held-out loss of a model after training [nats/byte]."""
    model = build_any(shape, None, True).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_weight(name, parameter.shape, seed))
    optimizer = make_optimizer(dict(model.named_parameters()), OptimConfig.model_validate({}))
    text, draw = read_bytes(heldout=False), torch.Generator().manual_seed(seed)
    model.loss.scale = 1 / (ROWS * LENGTH)
    for step in range(steps):
        rows = rows_of(text, ROWS, draw)
        model(rows[:, :-1], None, rows[:, 1:].contiguous()).backward()
        update(optimizer, 3e-3 * min(1.0, (step + 1) / 50, 10 * (1 - step / steps)))
    rows = rows_of(read_bytes(heldout=True), HELDOUT_ROWS, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(rows[:, :-1], None).flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()))


def main() -> None:
    """Train every model and print its sizes and held-out losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=600, help=f"steps of {ROWS} x {LENGTH} bytes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, shape in shapes():
        began = time.process_time()
        losses = [heldout_loss(shape, seed, arguments.steps) for seed in range(arguments.seeds)]
        seconds = (time.process_time() - began) / len(losses)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        print(
            f"{name}: {num_parameters(shape):,} parameters, {active_parameters(shape):,} active, "
            f"{flops_per_token(shape, LENGTH):,} FLOPs a byte; loss {statistics.mean(losses):.4f} ± {spread:.4f} "
            f"({', '.join(f'{loss:.4f}' for loss in losses)}); {seconds:.0f} s of CPU a run",
            flush=True,
        )


if __name__ == "__main__":
    main()
