"""Modules that multiply as `nn.Linear` does."""

from __future__ import annotations

import torch
from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Returns true if a module multiplies as `nn.Linear` does, also if it is a unit itself."""
    return type(module).forward in (nn.Linear.forward, linear_forward) and "forward" not in vars(module)


OWN_PRODUCT = "_shardwright_product"  # of a module whose products are ours: the forward that makes them


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a Linear module that is a unit: `nn.Module` looks it up before hooks change its class."""
    forward = self.__dict__.get(OWN_PRODUCT, nn.Linear.forward)
    y: torch.Tensor = forward(self, input)
    return y
