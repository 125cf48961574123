"""Residual mixing: a layer starts from a weighted sum of the residual stream and the normalized token embeddings."""

import torch
from torch import Tensor, nn


class ChannelGain(nn.Module):
    """A learned gain for each channel.

    The published models learn one number for each layer. One for each channel is sharded like the gain of a norm.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the channels times their gains, in the same dtype."""
        return x_BTD * self.weight.type_as(x_BTD)
