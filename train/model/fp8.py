"""Matrices of the layers in 8 bits, by torchao where it is installed or by our own products, with dynamic scales.

Scales are taken from the numbers themselves, every time, so nothing is remembered between steps; weights stay as they
are and are rounded where they are used. Our own products have one scale a tensor: forward in e4m3, gradients in e5m2,
sums in float32 in the device's matrix units. torchao has one a row, or one a tensor with weights gathered in 8 bits.

Shape suffixes: N tokens, I columns of a weight (inputs), O rows of it (outputs).
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import ConfigError
from train.model.attention import number_format
from train.model.transformer import Transformer

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of numbers and of their slopes. Source: Micikevicius et al. 2022, arXiv 2209.05433, section 3."""
MULTIPLE = 16
"""What the devices' products in 8 bits want the lengths of their operands to be a multiple of."""
MIN_CAPABILITY = (8, 9)
"""First CUDA devices (Ada, then Hopper) with matrix units for these formats."""


def check_fp8(device: torch.device) -> None:
    """Raises ConfigError where the device has no products in 8 bits; a CPU has them, to test with and slow."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(f"train.precision: expected products in fp8, got a device of type {device.type}. Set bf16.")
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        raise ConfigError(
            f"train.precision: expected products in fp8, which want CUDA capability {MIN_CAPABILITY[0]}."
            f"{MIN_CAPABILITY[1]} or more, got {found[0]}.{found[1]}. Set bf16."
        )


def has_torchao() -> bool:
    """Whether torchao is installed."""
    return find_spec("torchao") is not None


def with_fp8(model: Transformer, scaling: str = "tensor", emulated: bool = False) -> None:
    """Compute the layers' matrices in 8 bits; those that `stays_wide` names, head and embedding remain.

    `scaling`: tensor, by our own products; row or gather, by torchao, a scale a row or weights gathered in 8 bits.
    `emulated`: by torchao without matrix units for it, as on a CPU. Raises ConfigError if torchao is needed and is not
    installed.
    """
    wide = set(stays_wide(model))
    if scaling != "tensor":
        _with_torchao(model, scaling, emulated, wide)
        return
    for name, module in _matrices(model):
        if name not in wide:
            # The class changes and nothing else: for a function set on each module torch.compile makes a graph each.
            module.__class__ = Fp8Linear


def _with_torchao(model: Transformer, scaling: str, emulated: bool, wide: set[str]) -> None:
    if not has_torchao():
        raise ConfigError(
            f"train.fp8_scaling: expected torchao for {scaling}, got none installed. Install torchao, or set tensor."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise" if scaling == "row" else "tensorwise")
    config = replace(config, emulate=emulated, enable_fsdp_float8_all_gather=scaling == "gather")
    chosen = {module for name, module in _matrices(model) if name not in wide}
    convert_to_float8_training(model.blocks, config=config, module_filter_fn=lambda module, name: module in chosen)


def compute_scales(model: Transformer) -> None:
    """Compute the scales of weights that are gathered in 8 bits, all in one all-reduce. Call it after an update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def stays_wide(model: Transformer) -> list[str]:
    """Names of the layers' matrices that fp8 leaves alone, as one of their lengths is no multiple of 16."""
    return [
        name for name, module in _matrices(model) if module.in_features % MULTIPLE or module.out_features % MULTIPLE
    ]


def _matrices(model: Transformer) -> list[tuple[str, nn.Linear]]:
    return [
        (f"blocks.{name}", module) for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)
    ]


class Fp8Linear(nn.Linear):
    """A linear map whose three products, forward and backward, are computed in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, (..., outputs), in the number format of autocast or of x."""
        number = number_format(x)
        y: Tensor = _Product.apply(x.flatten(0, -2), self.weight, number)  # type: ignore[no-untyped-call]
        y = y.unflatten(0, x.shape[:-1])  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(number)


class _Product(torch.autograd.Function):
    """x @ weight.T, its three products in 8 bits.

    What is kept for the backward pass is x in 8 bits, and the weight itself: a copy of it would outlive the moment
    for which a sharded layer holds its weights.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, number: torch.dtype) -> Tensor:
        x8_NI, x_scale = _rounded(x_NI, FORWARD)
        weight8_OI, weight_scale = _rounded(weight_OI, FORWARD)
        ctx.save_for_backward(x8_NI, x_scale, weight_OI)
        ctx.formats = (x_NI.dtype, number)
        return _times(x8_NI, weight8_OI, x_scale * weight_scale, number, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Slopes for x and for the weight."""
        x8_NI, x_scale, weight_OI = ctx.saved_tensors
        stream, number = ctx.formats
        slope8_NO, slope_scale = _rounded(gradients[0], BACKWARD)
        for_x_NI = for_weight_OI = None
        if ctx.needs_input_grad[0]:
            weight8_OI, weight_scale = _rounded(weight_OI, FORWARD)
            for_x_NI = _times(slope8_NO, weight8_OI.T.contiguous(), slope_scale * weight_scale, number).to(stream)
        if ctx.needs_input_grad[1]:
            # Tokens are summed over here: zeros fill their number up to a multiple.
            lacking = -len(x8_NI) % MULTIPLE
            slope8_ON, x8_IN = (_longer(x8.T, lacking) for x8 in (slope8_NO, x8_NI))
            for_weight_OI = _times(slope8_ON, x8_IN, slope_scale * x_scale, number).to(weight_OI.dtype)
        return for_x_NI, for_weight_OI, None


def _rounded(x: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in 8 bits, its largest number the largest there is, and the factor that undoes the scaling."""
    largest = torch.finfo(number).max
    # Zeros stay zeros: a scale below the smallest normal float32 would be flushed to 0 by a GPU.
    scale = x.detach().abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    # Rounding of the quotient may come out above the largest number, which e4m3 has no infinity for.
    return (x.float() / scale).clamp(-largest, largest).to(number), scale


def _times(left: Tensor, right: Tensor, scale: Tensor, number: torch.dtype, fast: bool = False) -> Tensor:
    """left @ right.T, both with contiguous rows, times the scale.

    `fast`: on a GPU the partial sums keep fewer bits. That is for forward passes: slopes need the bits.
    """
    one = torch.ones_like(scale)
    y: Tensor = torch._scaled_mm(
        left, right.T, scale_a=scale, scale_b=one, out_dtype=number, use_fast_accum=fast and left.is_cuda
    )
    return y


def _longer(x: Tensor, lacking: int) -> Tensor:
    """The matrix with contiguous rows, `lacking` zeros at the end of each; as bytes, where a zero is a zero too."""
    return F.pad(x.contiguous().view(torch.uint8), (0, lacking)).view(x.dtype)
