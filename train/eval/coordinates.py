"""A coordinate check: how the activations of models of several widths move in their first updates.

Under muP an update moves an activation by as much at any width, so the best learning rate does not depend on the width.
In the standard parametrization it moves the further, the wider the model. Source: Yang et al. 2022, arXiv 2203.03466,
section 7 and appendix D.1.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import PenstockError
from schemas.logs import print_error, printable_output
from schemas.text import text_table
from train.config.settings import Settings, load_settings
from train.model.loss import LossTally
from train.model.shape import ModelShape, choose_shape
from train.model.transformer import Transformer, build_model, initial_weight
from train.optim.optimizer import make_optimizer, update

TIMES = (1, 2, 4, 8)
"""Widths, as multiples of the narrowest."""
STEPS, ROWS, POSITIONS, LAYERS = 5, 8, 32, 2
RATE = 0.01
"""Learning rate where the recipe sets none: high, so that a few updates show the difference."""
MAX_GROWTH = 1.2
"""Largest ratio by which activations may move further each time that the width doubles. Widths of 32 to 256 and of 64
to 512 gave at most 1.06 with muP, and without it 2.7 and 3.9 with AdamW, 1.3 and 1.6 with Muon."""


@dataclass(frozen=True)
class Coordinates:
    """The activations of one model at each step."""

    width: int
    """d_model of the model."""
    moved: list[dict[str, float]]
    """Mean absolute change of the activations of each place since the first step, by place, for each later step."""


def shape_of_width(settings: Settings, width: int, vocab_size: int) -> ModelShape:
    """Return the shape of the recipe's model with this width and LAYERS layers."""
    given = settings.plan.model_dump(exclude_unset=True, exclude={"params", "d_ffw"})
    plan = type(settings.plan).model_validate(given | {"d_model": width, "num_layers": LAYERS})
    return choose_shape(1e6, vocab_size, plan)


def measure_width(settings: Settings, shape: ModelShape) -> Coordinates:
    """Train a model for some steps on the same rows, and return how its activations move."""
    model = build_model(shape, causal=settings.train.objective != "mlm").to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, settings.train.seed))
    optimizer = make_optimizer(dict(model.named_parameters()), settings.optim, width_multiplier=shape.width_multiplier)
    rate, ids = settings.optim.learning_rate or RATE, _rows(shape.vocab_size)
    model.loss.tally, model.loss.scale = LossTally.empty(1, ids.device), 1 / (ROWS * POSITIONS)
    seen = []
    for step in range(STEPS):
        seen.append(_activations(model, ids[:, :-1]))
        if step + 1 < STEPS:
            model(ids[:, :-1], None, ids[:, 1:], torch.zeros(ROWS, dtype=torch.int64)).backward()
            update(optimizer, rate)
    first = seen[0]
    moved = [{name: (values[name] - first[name]).abs().mean().item() for name in first} for values in seen[1:]]
    return Coordinates(shape.d_model, moved)


def _rows(vocab_size: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    start, stride = (torch.randint(1, vocab_size, (ROWS, 1), generator=draw) for _ in range(2))
    return (start + stride * torch.arange(POSITIONS + 1)) % vocab_size


@torch.no_grad()
def _activations(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    """Return the activations at several places of a model, by place in the order of the model."""
    places: dict[str, nn.Module | None] = {"embedding": model.embedding}
    for number, block in enumerate(model.layers):
        places |= {f"attention {number}": block.attention, f"feed-forward {number}": block.ffn}
    places["head"] = None if model.transform is None else model.transform.dense
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(name, output)

    hooks = [module.register_forward_hook(keep(name)) for name, module in places.items() if module is not None]
    try:
        seen["logits"] = model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: seen[name] for name in (*places, "logits") if name in seen}


def growth(measured: Sequence[Coordinates], place: str) -> float:
    """Return the ratio by which a place moves further each time that the width doubles, at the last step.

    It is the slope of a straight line of least squares through the logarithms.
    """
    x = [math.log2(model.width) for model in measured]
    y = [math.log2(max(model.moved[-1][place], 1e-30)) for model in measured]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    pairs = list(zip(x, y, strict=True))
    slope = sum((a - middle_x) * (b - middle_y) for a, b in pairs) / sum((a - middle_x) ** 2 for a in x)
    return float(2.0**slope)


def check_coordinates(settings: Settings, vocab_size: int, narrowest: int) -> list[Coordinates]:
    """Return the coordinates of models of TIMES the narrowest width."""
    shapes = [shape_of_width(settings, narrowest * times, vocab_size) for times in TIMES]
    return [measure_width(settings, shape) for shape in shapes]


def describe_check(measured: Sequence[Coordinates], parametrization: str) -> list[str]:
    """Return the lines of the table of a check, and its verdict."""
    rows = [("place", "step", *(f"width {model.width}" for model in measured), "a doubling")]
    for place in measured[0].moved[-1]:
        for step in range(len(measured[0].moved)):
            last = step + 1 == len(measured[0].moved)
            values = (f"{model.moved[step][place]:.4f}" for model in measured)
            rows.append((place, str(step + 1), *values, f"x {growth(measured, place):.2f}" if last else ""))
    widest = max(measured[0].moved[-1], key=lambda place: growth(measured, place))
    ratio = growth(measured, widest)
    verdict = (
        f"activations move alike at all widths (at most x {ratio:.2f} for twice the width, at {widest}): "
        "a learning rate transfers between widths"
        if ratio <= MAX_GROWTH
        else f"activations move x {ratio:.2f} as far for twice the width, at {widest}: a learning rate is right for "
        "one width only"
    )
    lines = [f"mean absolute change of activations since the first step, parametrization {parametrization}"]
    return [*lines, *text_table(rows, "<>", "  "), verdict]


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, check, print, and return the exit code: 1 if muP does not keep activations alike."""
    parser = argparse.ArgumentParser(prog="train.eval.coordinates", description=__doc__)
    parser.add_argument("settings", help="JSON file with the training sections of a recipe")
    parser.add_argument("--vocabulary", type=int, required=True, help="number of token ids")
    parser.add_argument("--narrowest", type=int, required=True, help="d_model of the narrowest model")
    a = parser.parse_args(argv)
    raw: Mapping[str, Any] = json.loads(Path(a.settings).read_text(encoding="utf-8"))
    try:
        settings = load_settings(raw, [], a.settings)
        torch.manual_seed(0)
        measured = check_coordinates(settings, a.vocabulary, a.narrowest)
    except PenstockError as error:
        print_error(error)
        return 2
    print("\n".join(describe_check(measured, settings.plan.parametrization)))
    alike = all(growth(measured, place) <= MAX_GROWTH for place in measured[0].moved[-1])
    return 0 if alike or settings.plan.parametrization == "standard" else 1


if __name__ == "__main__":
    sys.exit(main())
