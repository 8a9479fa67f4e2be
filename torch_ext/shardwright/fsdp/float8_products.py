"""Matmuls that use weights in the float8 format of their messages: `matmul_format="float8"` of `Options`.

The weight of an `nn.Linear` has no memory besides its received messages: codes, and scales if each row has one. Both
are received with the shape and padding that `torch._scaled_mm` takes:

    codes    [N up to a multiple of 16, K up to a multiple of 16], rows padded with zeros
    scales   [N up to a multiple of 16]; or one number, which all ranks have before the gather

In MXFP8 and NVFP4, K is padded to a block of 32, or to four blocks of 16. Scales are received in rows, padded to a
multiple of four blocks. One strided copy brings them into the order that cuBLAS reads, in tiles of 128 rows and four
blocks:

    scales   [N / 128, blocks / 4, 32, 4, 4]; the scale of row r and block b is at
             [r // 128, b // 4, r % 32, r % 128 // 32, b % 4], such as row 200, block 5 at [1, 1, 8, 2, 1]

N and K are the rows and columns of the weight. `Weight.scales` has the scales of a weight in that order.

While the weight is in use, its module has a subclass of its class. The first read of the weight other than by a matmul
decodes it, in this use and in all later ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..runtime import counters
from .chunks import OWN_FORWARD, is_linear
from .formats import ROW_MULTIPLE, SCALES_TOGETHER, BlockFormat, Dtypes, Float8, RowwiseFloat8
from .layouts import Layouts
from .weights import Weight

_ELEMENTS_AT_A_TIME = 1 << 20  # elements of a weight that are decoded at a time


class Float8Product:
    """A matmul by the received codes and scales of a weight (`weights.Product`)."""

    def __init__(self, columns: int, is_rowwise: bool) -> None:
        self.is_rowwise = is_rowwise
        self.scales_bytes = 0  # no buffer: received scales are used as they are
        # A matmul reads padding beyond the last row of the weight. It only affects result columns that are dropped.
        self.padding_bytes = ROW_MULTIPLE * max(columns + -columns % ROW_MULTIPLE, torch.float32.itemsize)

    def prepare(self, weight: Weight) -> None:
        """Does nothing: matmuls take the messages as they are received."""

    def begin(self, weight: Weight) -> None:
        """Makes the module multiply by the received codes from now on."""
        module: Any = weight.owners[0][0]
        if _WEIGHT not in vars(module):
            original: Any = type(module)
            module.__class__ = _float8_class(original)
            module.__dict__.update({_WEIGHT: weight, OWN_FORWARD: _LinearInFloat8.forward})

    def end(self, weight: Weight) -> None:
        """Undoes `begin`: gives the module its own class back."""
        for module, _ in weight.owners:
            module.__dict__.pop(OWN_FORWARD, None)
            if module.__dict__.pop(_WEIGHT, None) is not None:
                module.__class__ = type(module).__mro__[2]  # after the subclass and _LinearInFloat8

    def multiply(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Returns x @ weight.T. Quantizes `x` like the weight: with one scale, or with one for each row."""
        codes, scales = self._codes_and_scales(weight)
        weight_format = weight.gather.format
        scale = weight_format.scale_of(weight_format.amax(x))
        code = weight_format.encode(x, scale)[0].view(torch.float8_e4m3fn)
        out = torch.bfloat16 if self.is_rowwise and x.device.type != "cpu" else x.dtype
        y = torch._scaled_mm(code, codes.t(), scale.unsqueeze(-1) if self.is_rowwise else scale, scales, out_dtype=out)
        return y[:, : weight.unsharded.size(0)].to(x.dtype)

    def input_gradient(self, dy: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Returns dy @ weight, in the dtype of `dy`. Decodes some rows of the weight at a time."""
        dx = dy.new_zeros(dy.size(0), weight.unsharded.size(1), dtype=torch.float32)
        for rows in self.rows_at_a_time(weight):
            dx += dy[:, rows] @ self.decoded(weight, rows).to(dy.dtype)
        return dx.to(dy.dtype)

    def rows_at_a_time(self, weight: Weight, multiple: int = 1) -> Iterator[slice]:
        """Returns slices of the rows to decode at a time. They begin at multiples of `multiple`."""
        num_rows, length = weight.unsharded.shape
        step = max(1, _ELEMENTS_AT_A_TIME // max(1, length) // multiple) * multiple
        return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))

    def decoded(self, weight: Weight, rows: slice) -> torch.Tensor:
        """Returns these rows of the weight, decoded to float32."""
        codes, scales = self._codes_and_scales(weight)
        factor = scales.view(-1, 1)[rows] if self.is_rowwise else scales
        return codes[rows, : weight.unsharded.size(1)].float() * factor

    def _codes_and_scales(self, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the received codes and scales, including the padding after the last row."""
        assert weight.gather.undecoded is not None
        (_, *scales), scale = weight.gather.undecoded
        codes = self._codes(weight).view(torch.float8_e4m3fn)
        if not self.is_rowwise:
            assert scale is not None
            return codes, scale
        return codes, scales[0].as_strided((1, codes.size(0)), (codes.size(0), 1))

    def _codes(self, weight: Weight) -> torch.Tensor:
        """Returns a view of the received codes, as bytes, including the padding after the last row."""
        assert weight.gather.undecoded is not None
        code = weight.gather.undecoded[0][0]
        num_rows = code.size(0) + -code.size(0) % ROW_MULTIPLE
        return code.as_strided((num_rows, code.size(1)), code.stride())


_TILE = 128  # number of rows whose scales cuBLAS reads together


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Returns the view [R / 128, C / 4, 32, 4, 4] of scales [R, C], in the order that cuBLAS reads."""
    rows, blocks = scales.size(0) // _TILE, scales.size(1) // SCALES_TOGETHER
    return scales.view(rows, 4, 32, blocks, SCALES_TOGETHER).permute(0, 3, 2, 1, 4)


class BlockProduct(Float8Product):
    """A matmul by a weight [num_rows, columns] with a scale for each block of `block` elements of a row.

    If `torch._scaled_mm` takes no block scales on the device, the weight is decoded, which is counted as a fallback.
    """

    def __init__(self, num_rows: int, columns: int, block: int) -> None:
        super().__init__(columns, False)
        self._tiles = -(-num_rows // _TILE), -(-columns // (SCALES_TOGETHER * block))  # of 128 rows and 4 blocks
        scales_in_row = SCALES_TOGETHER * self._tiles[1]
        # Matmuls read past the last row: codes in multiples of 16 rows, scales in multiples of 128 rows.
        self.padding_bytes = max(ROW_MULTIPLE * block, _TILE) * scales_in_row
        # `Weight.scales`: the scales in the order that cuBLAS reads.
        self.scales_bytes = _TILE * self._tiles[0] * scales_in_row

    def prepare(self, weight: Weight) -> None:
        """Copies the received scales to `Weight.scales`, in the order that cuBLAS reads."""
        if weight.gather.undecoded is not None:
            scales = weight.gather.undecoded[0][1]
            rows = scales.as_strided((self._tiles[0] * _TILE, scales.size(1)), scales.stride())
            self._scales_of(weight).copy_(in_tiles(rows))

    def multiply(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Returns x @ weight.T. Quantizes `x` like the weight, unless the weight is decoded."""
        weight_format, num_rows = weight.gather.format, weight.unsharded.size(0)
        assert isinstance(weight_format, BlockFormat) and weight.gather.undecoded is not None
        reason = _why_no_block_scales(x.device.type, weight_format)
        if reason is None and x.size(0) > 0:
            scale = weight_format.scale_of(weight_format.amax(x)) if weight_format.needs_amax else None
            codes, scales = weight_format.encode(x, scale)
            operands = (codes, _tiled(scales)), (self._codes(weight), self._scales_of(weight))
            y = _scaled_mm(weight_format, *operands, x.dtype)[:, :num_rows]
            weight_scale = weight.gather.undecoded[1]
            return (y if scale is None or weight_scale is None else y.float() * (scale * weight_scale)).to(x.dtype)
        if reason is not None:
            counters.count_product_fallback(f"{weight_format.name} weights as received on {x.device.type}: {reason}")
        y = x.new_empty(x.size(0), num_rows)
        for rows in self.rows_at_a_time(weight):
            y[:, rows] = x @ self.decoded(weight, rows).to(x.dtype).t()
        return y

    def rows_at_a_time(self, weight: Weight, multiple: int = _TILE) -> Iterator[slice]:
        """Returns slices that begin at the first row of a tile of scales."""
        return super().rows_at_a_time(weight, multiple)

    def decoded(self, weight: Weight, rows: slice) -> torch.Tensor:
        """Returns these rows of the weight, decoded to float32. `rows.start` is a multiple of 128."""
        assert weight.gather.undecoded is not None
        tiles = self._scales_of(weight)[rows.start // _TILE : -(-rows.stop // _TILE)]
        scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, SCALES_TOGETHER * self._tiles[1])[: rows.stop - rows.start]
        out = torch.empty(scales.size(0), weight.unsharded.size(1), device=scales.device)
        weight.gather.format.decode([self._codes(weight)[rows], scales], weight.gather.undecoded[1], out)
        return out

    def _scales_of(self, weight: Weight) -> torch.Tensor:
        """Returns the scales in tiles (shape: see `in_tiles`), as bytes."""
        assert weight.scales is not None
        return weight.scales[: self.scales_bytes].view(*self._tiles, 32, 4, SCALES_TOGETHER)


def _tiled(scales: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of scales in tiles, with rows padded with zeros to a multiple of 128."""
    return in_tiles(torch.nn.functional.pad(scales, (0, 0, 0, -scales.size(0) % _TILE))).contiguous()


_Operand: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # codes of rows, and their scales in tiles


def _scaled_mm(block_format: BlockFormat, a: _Operand, b: _Operand, dtype: torch.dtype) -> torch.Tensor:
    """Returns a @ b.T for rows `a` [M, K] and `b` [N, K]; in bfloat16 on devices, in `dtype` on CPU."""
    codes = a[0].view(block_format.code_dtype), b[0].view(block_format.code_dtype).t()
    scales = (each[1].view(block_format.scale_dtype).flatten() for each in (a, b))
    return torch._scaled_mm(*codes, *scales, out_dtype=dtype if a[0].device.type == "cpu" else torch.bfloat16)


_reasons: dict[tuple[str, str], str | None] = {}  # results of `_why_no_block_scales`, by device type and format


def _why_no_block_scales(device_type: str, block_format: BlockFormat) -> str | None:
    """Returns why `torch._scaled_mm` cannot take block scales on a device type, or None. Tries it once."""
    if (device_type, block_format.name) not in _reasons:
        _reasons[device_type, block_format.name] = _try_blocks(device_type, block_format)
    return _reasons[device_type, block_format.name]


def _try_blocks(device_type: str, block_format: BlockFormat) -> str | None:
    """Returns why a matmul with block scales fails on a device type, or None. Its numbers must be exact."""
    values = 6 * torch.eye(_TILE, device=device_type)
    try:
        code, scales = block_format.encode(values, values.new_ones(()))
        found = _scaled_mm(block_format, (code, _tiled(scales)), (code, _tiled(scales)), torch.float32)
    except torch.OutOfMemoryError:
        raise  # does not show whether the device has the kernel
    except Exception as error:  # a missing kernel may raise anything
        return f"torch._scaled_mm raises {_first_line(error)}"
    if not torch.equal(found.float(), 6 * values):
        return "torch._scaled_mm returns wrong numbers"
    return None


def _first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


_WEIGHT = "_shardwright_float8"  # attribute of a module: the Weight that its forward multiplies by


class _LinearInFloat8(nn.Linear):
    """The class of a Linear module while its weight is in use: multiplies by the received codes."""

    @torch._disable_dynamo
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = vars(self)[_WEIGHT]
        y: torch.Tensor = _Multiply.apply(input, weight.unsharded, weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The full weight, for code other than `forward`: decodes it."""
        return vars(self)[_WEIGHT].read()


@functools.cache
def _float8_class(original: type) -> type:
    """Returns the subclass of a module's class that multiplies by received codes."""
    return type(original.__name__, (_LinearInFloat8, original), {})


class _Multiply(torch.autograd.Function):
    """`F.linear`. For the gradient of `x`, the weight is gathered again.

    So autograd saves an empty view of `full`, the unsharded parameter: reads.py then gathers and detects writes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, full: torch.Tensor, weight: Weight) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, full[:0] if ctx.needs_input_grad[0] else None)
        ctx.weight = weight
        assert isinstance(weight.product, Float8Product)
        y = weight.product.multiply(x.reshape(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], y.size(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        rows = gradients[0].reshape(-1, gradients[0].size(-1))
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = ctx.weight.product.input_gradient(rows, ctx.weight).view_as(x) if needs_x else None
        dw = rows.t().mm(x.reshape(-1, x.size(-1))) if needs_weight else None
        return dx, dw, None


def product_of(
    name: str, parameter: nn.Parameter, owners: Sequence[tuple[nn.Module, str]], layouts: Layouts, dtypes: Dtypes
) -> tuple[Dtypes, Float8Product | None]:
    """Returns dtypes with a padded message format, and the matmul of a weight; `dtypes` and None if it is unsuitable.

    A weight is suitable if only one `nn.Linear` has it, its columns are not sharded, and it is sent in float8, MXFP8 or
    NVFP4.

    Raises:
        ValueError: `torch._scaled_mm` does not support the format on this device type, or the unit keeps a copy of the
            weight after forwards.
    """
    module, own_name = owners[0]
    is_weight = own_name == "weight" and is_linear(module)
    is_plain = (
        len(owners) == 1 and not isinstance(parameter, DTensor) and not set(layouts.shards.placements) - {"R", "S(0)"}
    )
    if not (is_weight and is_plain and isinstance(dtypes.gathers, (Float8, BlockFormat))) or parameter.numel() == 0:
        return dtypes, None
    is_rowwise = isinstance(dtypes.gathers, RowwiseFloat8)
    block = dtypes.gathers.block if isinstance(dtypes.gathers, BlockFormat) else 0
    reason = None if block else _why_not(layouts.mesh.device_type, is_rowwise)
    if reason is not None:
        kind = "a scale for each row" if is_rowwise else "one scale for each weight"
        raise ValueError(
            f"matmul_format must be None for {name} with {kind} on {layouts.mesh.device_type}, got 'float8': {reason}. "
            "With None, weights are converted to the dtype of mp_policy after the gather"
        )
    if layouts.kept is not None:
        raise ValueError(
            f"matmul_format must be None for {name} with kept_placements or an integer reshard_after_forward, got "
            "'float8'. These options keep converted copies of weights"
        )
    weight_format: Any = type(dtypes.gathers)
    padded = dataclasses.replace(dtypes, gathers=weight_format(pads=True))
    return padded, BlockProduct(parameter.size(0), parameter.size(1), block) if block else Float8Product(
        parameter.size(1), is_rowwise
    )


@functools.cache
def _why_not(device_type: str, is_rowwise: bool) -> str | None:
    """Returns why `torch._scaled_mm` cannot be used on a device type, or None. Tries it on exact numbers."""
    a, b = (torch.eye(ROW_MULTIPLE, device=device_type).to(torch.float8_e4m3fn) for _ in range(2))
    shapes = [(ROW_MULTIPLE, 1), (1, ROW_MULTIPLE)] if is_rowwise else [(), ()]
    scales = [torch.full(shape, 2.0, device=device_type) for shape in shapes]
    try:
        found = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    except torch.OutOfMemoryError:
        raise  # does not show whether the device has the kernel
    except Exception as error:  # a missing kernel may raise anything
        return f"torch._scaled_mm raises {_first_line(error)}"
    if not torch.equal(found.float(), 4 * torch.eye(ROW_MULTIPLE, device=device_type)):
        return "torch._scaled_mm returns wrong numbers"
    return None
