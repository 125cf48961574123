"""Matrix products of the layers in fp8 with dynamic scaling, by this module or by torchao.

Scales are computed from the values every time, so no state is kept between steps; master weights keep their dtype and
are quantized where they are used. This module's products have one scale per tensor: forward in e4m3, gradients in e5m2,
sums in float32 in the device's matrix units. torchao has one per row, or one per tensor with an all-gather in fp8.

Shape suffixes: N tokens, I columns of a weight (inputs), O rows of it (outputs).
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import ConfigError
from train.model.attention import compute_dtype
from train.model.transformer import Transformer

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of values and of gradients. Source: Micikevicius et al. 2022, arXiv 2209.05433, section 3."""
SMALLEST = 1e-30
"""Largest magnitude of a tensor below which it is scaled as if it had this one."""
MULTIPLE = 16
"""The devices' fp8 products require operands with sizes that are a multiple of this."""
MIN_CAPABILITY = (8, 9)
"""Minimum CUDA compute capability (Ada, then Hopper) with matrix units for these formats."""


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if the device cannot compute fp8 products. A CPU can compute them slowly, for tests."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"train.precision: expected a CPU or CUDA device for fp8, got a device of type {device.type}. "
            "Set train.precision to bf16."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"train.precision: expected CUDA capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more for fp8, "
            f"got {capability[0]}.{capability[1]}. Set train.precision to bf16."
        )


def has_torchao() -> bool:
    """Return True if torchao is installed."""
    return find_spec("torchao") is not None


def enable_fp8(model: Transformer, scaling: str = "tensor", emulated: bool = False) -> None:
    """Compute the matrix products of the layers in fp8, except those of `unquantized_matrices`.

    `scaling`: tensor = without torchao; row = torchao with a scale per row; gather = torchao with fp8 all-gathers.
    `emulated`: run torchao on a device without fp8 matrix units. Raises ConfigError if torchao is required and is
    not installed.
    """
    wide = set(unquantized_matrices(model))
    if scaling != "tensor":
        _with_torchao(model, scaling, emulated, wide)
        return
    for name, module in _matrices(model):
        if name not in wide:
            # Only the class changes: with a function set on each module, torch.compile makes a graph for each.
            module.__class__ = Fp8Linear


def _with_torchao(model: Transformer, scaling: str, emulated: bool, wide: set[str]) -> None:
    if not has_torchao():
        raise ConfigError(
            f"train.fp8_scaling: expected torchao to be installed for {scaling}, got none. "
            "Install torchao, or set train.fp8_scaling to tensor."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise" if scaling == "row" else "tensorwise")
    config = replace(config, emulate=emulated, enable_fsdp_float8_all_gather=scaling == "gather")
    chosen = {module for name, module in _matrices(model) if name not in wide}
    convert_to_float8_training(model.blocks, config=config, module_filter_fn=lambda module, name: module in chosen)


def compute_scales(model: Transformer) -> None:
    """Compute the scales of all weights that are gathered in fp8, in one all-reduce. Call it after each update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def unquantized_matrices(model: Transformer) -> list[str]:
    """Return the names of the layers' matrices that stay out of fp8: those with a size that is no multiple of 16."""
    return [
        name for name, module in _matrices(model) if module.in_features % MULTIPLE or module.out_features % MULTIPLE
    ]


def _matrices(model: Transformer) -> list[tuple[str, nn.Linear]]:
    return [
        (f"blocks.{name}", module) for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)
    ]


class Fp8Linear(nn.Linear):
    """A linear layer whose three products, forward and backward, are computed in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, (..., outputs), in the dtype of autocast or of x."""
        dtype = compute_dtype(x)
        y: Tensor = _Product.apply(x.flatten(0, -2), self.weight, dtype)  # type: ignore[no-untyped-call]
        y = y.unflatten(0, x.shape[:-1])  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """x @ weight.T, with its forward product and both backward products in fp8."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        x8_NI, x_scale = _quantize(x_NI, FORWARD)
        weight8_OI, weight_scale = _quantize(weight_OI, FORWARD)
        # A reference to the weight: a copy would outlive the gathered weights of a sharded layer.
        ctx.save_for_backward(x8_NI, x_scale, weight_OI)
        ctx.formats = (x_NI.dtype, dtype)
        return _scaled_product(x8_NI, weight8_OI, x_scale * weight_scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        x8_NI, x_scale, weight_OI = ctx.saved_tensors
        stream, dtype = ctx.formats
        gradient8_NO, gradient_scale = _quantize(gradients[0], BACKWARD)
        for_x_NI = for_weight_OI = None
        if ctx.needs_input_grad[0]:
            weight8_OI, weight_scale = _quantize(weight_OI, FORWARD)
            for_x_NI = _scaled_product(
                gradient8_NO, weight8_OI.T.contiguous(), gradient_scale * weight_scale, dtype
            ).to(stream)
        if ctx.needs_input_grad[1]:
            # The sum is over tokens, so zeros pad the number of tokens to a multiple of 16.
            padding = -len(x8_NI) % MULTIPLE
            gradient8_ON, x8_IN = (_pad_rows(x8.T, padding) for x8 in (gradient8_NO, x8_NI))
            for_weight_OI = _scaled_product(gradient8_ON, x8_IN, gradient_scale * x_scale, dtype).to(weight_OI.dtype)
        return for_x_NI, for_weight_OI, None


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in fp8, scaled to the maximum of the format, and the factor that undoes the scaling."""
    largest = torch.finfo(dtype).max
    # A tensor of zeros is kept. The bound also keeps the factor and its inverse in the range of normal float32.
    most = x.detach().abs().amax().float().clamp(min=SMALLEST)
    # A product, because a division for each element made layers of 350 M parameters 10 % slower on an H200. The rounded
    # product can exceed the largest number, and e4m3 has no infinity.
    return (x.float() * (largest / most)).clamp(-largest, largest).to(dtype), most / largest


def _scaled_product(left: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return scale · left @ right.T; `left` and `right` are fp8 matrices with contiguous rows.

    `fast`: let a GPU sum products with fewer bits, which is accurate enough for a forward pass but not for gradients.
    """
    unit = torch.ones_like(scale)
    y: Tensor = torch._scaled_mm(
        left, right.T, scale_a=scale, scale_b=unit, out_dtype=dtype, use_fast_accum=fast and left.is_cuda
    )
    return y


def _pad_rows(x: Tensor, padding: int) -> Tensor:
    """Return the fp8 matrix with contiguous rows and `padding` zeros appended to each row."""
    # An fp8 zero is a zero byte.
    return F.pad(x.contiguous().view(torch.uint8), (0, padding)).view(x.dtype)
