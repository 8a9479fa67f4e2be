"""How weights are written in messages: in a dtype, or in eight bits with scales.

What is quantised before a gather has the bits of what is quantised after it, because ranks use the same scales: a
tensor's or a row's from all of its parts (`largest`), a block's from a block that no cut divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .._native import _planner
from ..layouts.layout import Layout

# Decoding takes this many elements at a time, so that what it needs besides its result is small.
_DECODED_AT_A_TIME = 1 << 20

LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn
ROW_MULTIPLE = 16  # bytes, of rows of float8 that `torch._scaled_mm` takes
_BLOCK = 32  # elements of MXFP8 that share a scale
SCALES_TOGETHER = 4  # blocks of a row whose scales cuBLAS reads together
_EXPONENT_BIAS = 127  # of float8_e8m0fnu


def with_dtype(layout: _planner.Layout, dtype: torch.dtype) -> Layout:
    """Returns the same layout of a tensor of another dtype."""
    order = layout.shard_order
    return Layout(layout.mesh, layout.shape, layout.placements, dtype, order, "literal", layout.flattened)


def in_blocks(layout: _planner.Layout, block: int, size: int) -> Layout:
    """Returns the layout of `size` bytes for each block of `block` elements along the last dim."""
    shape = [*layout.shape[:-1], -(-layout.shape[-1] // block) * size]
    order = layout.shard_order
    return Layout(layout.mesh, shape, layout.placements, torch.uint8, order, "literal", layout.flattened)


def check_blocks(wire: str, name: str, rest: _planner.Layout, block: int) -> None:
    """Raises ValueError if a cut divides a block."""
    blocks = in_blocks(rest, block, 1)
    for rank in rest.mesh.ranks:
        begins = [(begin // block, -(-end // block)) for begin, end in rest.region(rank)[-1]]
        divided = any(begin % block for begin, _ in rest.region(rank)[-1])
        if divided or begins != blocks.region(rank)[-1]:
            raise ValueError(
                f"message_format: got {wire!r} for {name} of shape {tuple(rest.shape)}, placed as "
                f"{', '.join(rest.placements)}, which divides blocks of {block} elements along the last dim; allowed "
                f"are shards of other dims, and shards of multiples of {block}"
            )


class Format:
    """Messages in a dtype."""

    needs_largest = False  # what `encode` and `decode` take as `scale`

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def check(self, name: str, rest: _planner.Layout, device_type: str) -> None:
        """Raises ValueError if weights that lie so cannot be written so, or not on such devices."""

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        """Returns the layouts of the tensors that are sent for a weight with this layout."""
        return [with_dtype(layout, self.dtype)]

    def largest(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the largest magnitudes in a part, whose maximum over all parts `scale_of` takes."""
        raise NotImplementedError

    def largest_layout(self, rest: _planner.Layout) -> Layout | None:
        """Where `largest` of each rank counts; None if it is one number, which is reduced with those of others."""
        return None

    def scale_of(self, largest: torch.Tensor) -> torch.Tensor:
        return torch.where(largest > 0, largest / LARGEST_FLOAT8, torch.ones_like(largest))

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        return [part.to(self.dtype)]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        out.copy_(messages[0])


class ScaledCodes(Format):
    """Codes of some bits, sent as bytes, with one float32 scale, which all ranks know before the gather."""

    needs_largest = True

    def __init__(self) -> None:
        super().__init__(torch.uint8)  # process groups move neither float8 nor float4

    def largest(self, part: torch.Tensor) -> torch.Tensor:
        return part.abs().max().float() if part.numel() else part.new_zeros((), dtype=torch.float32)


class Float8(ScaledCodes):
    """float8_e4m3fn.

    Args:
        pads: rows with zeros, up to a multiple of 16.
    """

    def __init__(self, pads: bool = False) -> None:
        super().__init__()
        self.pads = pads

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        return [in_blocks(layout, ROW_MULTIPLE, ROW_MULTIPLE) if self.pads else with_dtype(layout, torch.uint8)]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        assert scale is not None
        return [self._padded(_to_float8(part.float() / scale))]

    def _padded(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(codes, (0, -codes.size(-1) % ROW_MULTIPLE)) if self.pads else codes

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        assert scale is not None
        _decode(messages[0], scale.expand(math.prod(out.shape[:-1]), 1), out)


class RowwiseFloat8(Float8):
    """float8_e4m3fn with a float32 scale for each row, that is for all elements along the last dim."""

    def largest(self, part: torch.Tensor) -> torch.Tensor:
        return part.abs().amax(-1).float() if part.size(-1) else part.new_zeros(part.shape[:-1], dtype=torch.float32)

    def largest_layout(self, rest: _planner.Layout) -> Layout:
        return _without_last_dim(rest, "P(max)")

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        return [*super().layouts(layout), _without_last_dim(layout, "R")]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        assert scale is not None
        return [*super().encode(part, scale.unsqueeze(-1)), scale]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        _decode(messages[0], messages[1].reshape(-1, 1), out)


class InBlocks(Format):
    """With a scale for each block of elements along the last dim."""

    name: str
    block: int
    elements_in_byte: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype


class Mxfp8(InBlocks):
    """float8_e4m3fn with a power of two for each block of 32 elements along the last dim (OCP MX, rounded down).

    Args:
        pads: rows of codes with zeros, up to whole blocks, and rows of scales, up to a multiple of four.
    """

    name, block, elements_in_byte = "MXFP8", _BLOCK, 1
    code_dtype, scale_dtype = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def __init__(self, pads: bool = False) -> None:
        super().__init__(torch.uint8)
        self.pads = pads

    def check(self, name: str, rest: _planner.Layout, device_type: str) -> None:
        check_blocks("mxfp8", name, rest, _BLOCK)

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        if self.pads:
            return [
                in_blocks(layout, _BLOCK, _BLOCK),
                in_blocks(layout, SCALES_TOGETHER * _BLOCK, SCALES_TOGETHER),
            ]
        return [with_dtype(layout, torch.uint8), in_blocks(layout, _BLOCK, 1)]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        length = part.size(-1)
        count = -(-length // _BLOCK)
        padded = torch.nn.functional.pad(part.float(), (0, count * _BLOCK - length)).unflatten(-1, (count, _BLOCK))
        largest = padded.abs().amax(-1)
        # Of 448 = 1.75 * 2**8; frexp has mantissas from 0.5 on, so its exponents are larger by one.
        exponent = (torch.frexp(largest).exponent - 9).clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS)
        scaled = _to_float8(torch.ldexp(padded, -exponent.unsqueeze(-1)).flatten(-2))
        code = torch.where(largest.isfinite(), exponent + _EXPONENT_BIAS, 255).to(torch.uint8)  # 255 stands for NaN
        if self.pads:
            return [scaled, torch.nn.functional.pad(code, (0, -count % SCALES_TOGETHER))]
        return [scaled[..., :length], code]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        _decode(messages[0], messages[1].view(torch.float8_e8m0fnu).flatten(0, -2), out)


def _to_float8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).view(torch.uint8)


def _decode(code: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Writes code * scales. `scales` has a row for each row of `out`: one number, or one for each block."""
    length = out.size(-1)
    if out.numel() == 0:
        return
    rows, codes = out.view(-1, length), code[..., :length].view(torch.float8_e4m3fn).view(-1, length)
    step = max(1, _DECODED_AT_A_TIME // length)
    for begin in range(0, rows.size(0), step):
        some = slice(begin, begin + step)
        factor = scales[some].float()
        if factor.size(1) != 1:
            factor = factor.repeat_interleave(_BLOCK, 1)[:, :length]
        rows[some] = codes[some].float() * factor


def _without_last_dim(layout: _planner.Layout, instead: str) -> Layout:
    """Of one number for each row; `instead` of cuts of the rows themselves."""
    last = len(layout.shape) - 1
    order = layout.shard_order
    cuts_rows = order.pop(last, [])
    placements = [instead if i in cuts_rows else text for i, text in enumerate(layout.placements)]
    # Mesh dims of size 1 are in no order.
    placements = ["R" if f"({last}" in text else text for text in placements]
    return Layout(layout.mesh, layout.shape[:-1], placements, torch.float32, order, "literal")


FORMATS: dict[str, Callable[[], Format]] = {"float8": Float8, "float8_rowwise": RowwiseFloat8, "mxfp8": Mxfp8}
