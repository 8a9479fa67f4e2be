"""Products that take weights in float8 as they arrive: `use="float8"` of `fully_shard`.

The weight of an `nn.Linear` has no memory besides what arrives: its codes, and its scales if each row has one. Both
arrive in the place, and with the padding, in which `torch._scaled_mm` takes them:

    codes    [N up to a multiple of 16, K up to a multiple of 16], rows padded with zeros
    scales   [N up to a multiple of 16]; or one number, which all ranks know before

While the weight is in use, its module has a subclass of its class. Whoever reads the weight in another way gets it
written out, then and in later uses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .formats import ROW_MULTIPLE, Float8, RowwiseFloat8
from .layouts import Layouts
from .policy import Dtypes
from .weights import Weight

_ELEMENTS_AT_A_TIME = 1 << 20  # of a weight, that a backward multiplies by


class Float8Product:
    """What multiplies by a weight as it has arrived. It does not refer to the weight, which refers to it."""

    def __init__(self, columns: int, is_rowwise: bool) -> None:
        self.is_rowwise = is_rowwise
        # What a product reads beyond the last row only makes columns that nobody reads.
        self.padding_bytes = ROW_MULTIPLE * max(columns + -columns % ROW_MULTIPLE, torch.float32.itemsize)

    def begin(self, weight: Weight) -> None:
        """The module takes the weight as it has arrived from now on."""
        module: Any = weight.places[0][0]
        if _WEIGHT not in vars(module):
            original: Any = type(module)
            module.__class__ = _in_float8(original)
            module.__dict__[_WEIGHT] = weight

    def end(self, weight: Weight) -> None:
        for module, _ in weight.places:
            if module.__dict__.pop(_WEIGHT, None) is not None:
                module.__class__ = type(module).__mro__[2]

    def multiply(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Multiplies rows in any dtype, which are quantised as the weight is: with one scale, or one for each row."""
        codes, scales = self._arrived(weight)
        written_as = weight.carried.format
        scale = written_as.scale_of(written_as.largest(x))
        code = written_as.encode(x, scale)[0].view(torch.float8_e4m3fn)
        out = torch.bfloat16 if self.is_rowwise and x.device.type != "cpu" else x.dtype
        y = torch._scaled_mm(code, codes.t(), scale.unsqueeze(-1) if self.is_rowwise else scale, scales, out_dtype=out)
        return y[:, : weight.whole.size(0)].to(x.dtype)

    def multiply_back(self, dy: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Multiplies gradients of rows, in their dtype, by the weight that the codes and scales encode."""
        codes, scales = self._arrived(weight)
        number, length = weight.whole.shape
        step = max(1, _ELEMENTS_AT_A_TIME // codes.size(1))
        dx = dy.new_zeros(dy.size(0), length, dtype=torch.float32)
        for begin in range(0, number, step):
            some = slice(begin, min(begin + step, number))
            factor = scales.view(-1, 1)[some] if self.is_rowwise else scales
            dx += dy[:, some] @ (codes[some, :length].float() * factor).to(dy.dtype)
        return dx.to(dy.dtype)

    def _arrived(self, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the codes and scales where they have arrived, with the padding after the last row."""
        assert weight.carried.arrived is not None
        (code, *scales), scale = weight.carried.arrived
        number = code.size(0) + -code.size(0) % ROW_MULTIPLE
        codes = code.as_strided((number, code.size(1)), code.stride()).view(torch.float8_e4m3fn)
        if not self.is_rowwise:
            assert scale is not None
            return codes, scale
        return codes, scales[0].as_strided((1, number), (number, 1))


_WEIGHT = "_shardwright_float8"  # of a module that multiplies so


class _LinearInFloat8(nn.Linear):
    """What a Linear module is while its weight is in use."""

    @torch._disable_dynamo
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = vars(self)[_WEIGHT]
        y: torch.Tensor = _Multiply.apply(input, weight.whole, weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        whole: nn.Parameter = vars(self)[_WEIGHT].read()
        return whole


@functools.cache
def _in_float8(original: type) -> type:
    return type(original.__name__, (_LinearInFloat8, original), {})


class _Multiply(torch.autograd.Function):
    """`F.linear`. Of the weight nothing is saved: it is gathered again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: torch.Tensor, weight: Weight) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight = weight
        assert isinstance(weight.product, Float8Product)
        y = weight.product.multiply(x.reshape(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], y.size(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = gradients[0].reshape(-1, gradients[0].size(-1))
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = ctx.weight.product.multiply_back(rows, ctx.weight).view_as(x) if needs_x else None
        dw = rows.t().mm(x.reshape(-1, x.size(-1))) if needs_weight else None
        return dx, dw, None


def product_of(
    name: str, given: nn.Parameter, places: Sequence[tuple[nn.Module, str]], layouts: Layouts, dtypes: Dtypes
) -> tuple[Dtypes, Float8Product | None]:
    """For a weight that only one `nn.Linear` has, whose rows are not cut, and which is sent in float8.

    Returns:
        Its dtypes, and what multiplies by it; for other weights, what was given and None.

    Raises:
        ValueError: `torch._scaled_mm` does not run there, or a copy of the weight would be kept.
    """
    module, own_name = places[0]
    is_linear = own_name == "weight" and type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    is_plain = len(places) == 1 and not isinstance(given, DTensor) and not set(layouts.rest.placements) - {"R", "S(0)"}
    if not (is_linear and is_plain and isinstance(dtypes.gathers, Float8)):
        return dtypes, None
    is_rowwise = isinstance(dtypes.gathers, RowwiseFloat8)
    reason = _why_not(layouts.mesh.device_type, is_rowwise)
    if reason is not None:
        kind = "a scale for each row" if is_rowwise else "one scale for each weight"
        raise ValueError(
            f"use: got 'float8' for {name} with {kind} on {layouts.mesh.device_type}, where {reason}; allowed there is "
            "use=None, with which weights are written to the dtype of mp_policy when they have arrived"
        )
    if layouts.kept is not None:
        raise ValueError(
            f"use: got 'float8' for {name} besides keep= or a number of ranks in reshard_after_forward=, which keep "
            "copies of what weights are written to; allowed is one of the two"
        )
    padded = dataclasses.replace(dtypes, gathers=type(dtypes.gathers)(pads=True))
    return padded, Float8Product(given.size(1), is_rowwise)


def check_use(use: Any) -> None:
    if use is not None and use != "float8":
        raise ValueError(f"use: got {use!r}; allowed are 'float8' and None")


@functools.cache
def _why_not(device_type: str, is_rowwise: bool) -> str | None:
    """Why `torch._scaled_mm` cannot be used on a kind of device, by trying it on numbers with an exact result."""
    a, b = (torch.eye(ROW_MULTIPLE, device=device_type).to(torch.float8_e4m3fn) for _ in range(2))
    shapes = [(ROW_MULTIPLE, 1), (1, ROW_MULTIPLE)] if is_rowwise else [(), ()]
    scales = [torch.full(shape, 2.0, device=device_type) for shape in shapes]
    try:
        found = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    except Exception as error:  # whatever kernels raise that a device does not have
        return f"torch._scaled_mm raises {type(error).__name__}: {str(error).splitlines()[0]}"
    if not torch.equal(found.float(), 4 * torch.eye(ROW_MULTIPLE, device=device_type)):
        return "torch._scaled_mm gives another result than scales and factors have"
    return None
