"""The loader of a model of vLLM, with a check that its parameters stay as it writes them: `checked_loader`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...layouts.errors import argument_error

# Names of methods of layers that leave parameters as the loader writes them.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def checked_loader(model: torch.nn.Module, plain_methods: list[str]) -> Callable[..., object]:
    """Returns the model's ``load_weights``. It raises ValueError if a layer may convert its parameters after loading.

    Args:
        plain_methods: class names of ``quant_method`` that are allowed, in addition to `PLAIN_METHODS`.
    """
    allowed = {*PLAIN_METHODS, *plain_methods}

    def load(weights: Any) -> object:
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and type(method).__name__ not in allowed:
                kind = type(method).__name__
                raise argument_error(f"the quant_method of {name}", f"one of {', '.join(sorted(allowed))}", kind)
        return model.load_weights(weights)

    return load
