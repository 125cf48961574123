"""The best learning rate at two widths, with and without muP, on a synthetic language: `python -m bench.rate_transfer`.

The language is a random chain of tokens of order one, drawn anew in every step, so nothing repeats. A model reaches at
best the entropy of the chain. All runs have the same steps, rows and seeds; only width, rate and
parametrization differ.
"""

import math
import time

import torch
from torch import Tensor

from train.config.settings import load_settings
from train.model.loss import LossTally
from train.model.shape import choose_shape
from train.model.transformer import build_model, initial_weight
from train.optim.optimizer import make_optimizer, update
from train.plan.ladder import best_factor

VOCABULARY, SUCCESSORS = 128, 8
ROWS, POSITIONS, STEPS, WARMUP, MEASURED = 16, 64, 150, 15, 20
WIDTHS = (32, 128)
RATES = tuple(2.0**power for power in range(-9, -3))


def chain() -> Tensor:
    """Return the successors of each token, (V, SUCCESSORS); one of them follows, each as likely as the others."""
    draw = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(VOCABULARY, generator=draw)[:SUCCESSORS] for _ in range(VOCABULARY)])


def rows_of(step: int, successors: Tensor) -> Tensor:
    """Return the tokens of a step, (ROWS, POSITIONS + 1)."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(VOCABULARY, (ROWS,), generator=draw)]
    for _ in range(POSITIONS):
        ids.append(successors[ids[-1], torch.randint(SUCCESSORS, (ROWS,), generator=draw)])
    return torch.stack(ids, dim=1)


def final_loss(width: int, rate: float, parametrization: str, successors: Tensor) -> float:
    """Return the mean loss of the last steps [nats/token]; infinite if it is not a number."""
    plan = {"parametrization": parametrization, "d_model": width, "num_layers": 2, "tie_embeddings": False}
    if parametrization == "mup":
        plan["mup_base_width"] = WIDTHS[0]
    settings = load_settings({"plan": plan}, [], "bench")
    shape = choose_shape(1e6, VOCABULARY, settings.plan)
    model = build_model(shape).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, 0))
    optimizer = make_optimizer(dict(model.named_parameters()), settings.optim, width_multiplier=shape.width_multiplier)
    losses = []
    for step in range(1, STEPS + 1):
        ids = rows_of(step, successors)
        model.loss.tally, model.loss.scale = LossTally.empty(1, ids.device), 1 / (ROWS * POSITIONS)
        model(ids[:, :-1], None, ids[:, 1:], torch.zeros(ROWS, dtype=torch.int64)).backward()
        decay = 1 - (step - WARMUP) / (STEPS - WARMUP)
        update(optimizer, rate * (step / WARMUP if step < WARMUP else max(decay, 0.1)))
        losses.append(model.loss.tally.losses_S.item() / (ROWS * POSITIONS))
    mean = sum(losses[-MEASURED:]) / MEASURED
    return mean if math.isfinite(mean) else math.inf


def main() -> None:
    """Print the loss of each width and rate, and the ratio of the best rates of both widths."""
    torch.set_num_threads(1)
    successors = chain()
    print(f"entropy of the chain: {math.log(SUCCESSORS):.4f} nats/token")
    for parametrization in ("standard", "mup"):
        best = []
        for width in WIDTHS:
            began = time.process_time()
            losses = {rate: final_loss(width, rate, parametrization, successors) for rate in RATES}
            best.append(best_factor(losses))
            shown = "  ".join(f"{rate:.4f}: {loss:.4f}" for rate, loss in losses.items())
            print(f"{parametrization:<8} width {width:>4}  {shown}  best {best[-1]:.4f}", flush=True)
            print(f"         {time.process_time() - began:.0f} s of CPU", flush=True)
        print(f"{parametrization:<8} best rate at width {WIDTHS[-1]} / at width {WIDTHS[0]}: {best[-1] / best[0]:.2f}")


if __name__ == "__main__":
    main()
