"""NVFP4 in messages, by torchao's functions: four bits per element with a scale for each 16 and one for each weight.

torchao is no dependency: it is looked for with `message_format="nvfp4"`, and tried once on each kind of device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._native import _planner
from ..layouts.layout import Layout
from .formats import FORMATS, SCALES_TOGETHER, InBlocks, ScaledCodes, check_blocks, in_blocks

_BLOCK = 16  # elements that share a scale
_LARGEST = 448.0 * 6.0  # of float8_e4m3fn, of which scales of blocks are, times that of float4_e2m1fn
_ROWS_AT_A_TIME = 1 << 16  # bounds what decoding needs besides its result, in blocks


class Nvfp4(ScaledCodes, InBlocks):
    """float4_e2m1fn, two in a byte, with a float8_e4m3fn scale for each block of 16 along the last dim as well.

    Args:
        pads: rows with zeros, up to a multiple of four blocks.
    """

    name, block, elements_in_byte = "NVFP4", _BLOCK, 2
    code_dtype, scale_dtype = torch.float4_e2m1fn_x2, torch.float8_e4m3fn

    def __init__(self, pads: bool = False) -> None:
        super().__init__()
        self._together = SCALES_TOGETHER if pads else 1  # blocks

    def check(self, name: str, rest: _planner.Layout, device_type: str) -> None:
        reason = _why_not(device_type)
        if reason is not None:
            others = [key for key in FORMATS if key != "nvfp4"]
            raise ValueError(
                f"message_format: got 'nvfp4' for {name} on {device_type}, which needs torchao: {reason}; "
                f"allowed without them are {', '.join(map(repr, others))}, torch.bfloat16 and torch.float16"
            )
        check_blocks("nvfp4", name, rest, _BLOCK)

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        unit = self._together * _BLOCK
        return [in_blocks(layout, unit, unit // 2), in_blocks(layout, unit, self._together)]

    def scale_of(self, largest: torch.Tensor) -> torch.Tensor:
        return torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        length = part.size(-1)
        count = -(-length // (self._together * _BLOCK)) * self._together
        shapes = [(*part.shape[:-1], count * _BLOCK // 2), (*part.shape[:-1], count)]
        if part.numel() == 0:
            return [part.new_empty(shape, dtype=torch.uint8) for shape in shapes]
        padded = torch.nn.functional.pad(part.float(), (0, count * _BLOCK - length)).view(-1, count * _BLOCK)
        scales, codes = _torchao().nvfp4_quantize(padded, _BLOCK, scale)
        return [codes.view(shapes[0]), scales.view(torch.uint8).view(shapes[1])]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        length = out.size(-1)
        if out.numel() == 0:
            return
        rows, codes = out.view(-1, length), messages[0].flatten(0, -2)
        scales = messages[1].view(torch.float8_e4m3fn).flatten(0, -2)
        step = max(1, _ROWS_AT_A_TIME // scales.size(1))
        for begin in range(0, rows.size(0), step):
            some = slice(begin, begin + step)
            made = _torchao().NVFP4Tensor(codes[some], scales[some], _BLOCK, torch.float32, scale)
            rows[some] = made.dequantize(torch.float32)[:, :length]


def _torchao() -> Any:
    from torchao.prototype.mx_formats import nvfp4_tensor  # type: ignore[import-not-found, unused-ignore]

    return nvfp4_tensor


@functools.cache
def _why_not(device_type: str) -> str | None:
    """Quantises what has an exact result, and reads it again."""
    try:
        _torchao()
    except ImportError as error:
        return f"it cannot be imported ({error})"
    try:
        given = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 2], device=device_type)
        found = torch.empty_like(given)
        tried, scale = Nvfp4(), torch.ones((), device=device_type)
        tried.decode(tried.encode(given, scale), scale, found)
    except torch.OutOfMemoryError:
        raise  # says nothing about what the device has
    except Exception as error:  # whatever kernels raise that a device does not have
        return f"they raise {type(error).__name__} there: {str(error).splitlines()[0] if str(error) else ''}"
    if not torch.equal(found, given):
        return f"they give {found.tolist()} for {given.tolist()}, which four bits can hold"
    return None


FORMATS["nvfp4"] = Nvfp4
