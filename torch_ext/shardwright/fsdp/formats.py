"""Formats of weights in messages: a dtype, or a few bits with scales.

Quantizing before a gather gives the same bits as quantizing after it, because all ranks use the same scales. The scale
of a tensor or row is computed from the amax of all of its shards. A block is never divided between shards.

    amax                the largest magnitude of the elements that share a scale
    codes               quantized elements, sent as bytes; element = code * scale
    block               consecutive elements along the last dim of a weight that share a scale
    dtype of the use    dtype of the gathered weight that modules compute with (param_dtype)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._native import _planner
from ..layouts.errors import argument_error
from ..layouts.layout import Layout

_DECODED_AT_A_TIME = 1 << 20  # elements decoded at a time; bounds temporary memory

FLOAT8_MAX = 448.0  # largest number in float8_e4m3fn
ROW_MULTIPLE = 16  # `torch._scaled_mm` requires rows of a multiple of 16 bytes
_MX_BLOCK = 32  # elements of MXFP8 that share a scale
SCALES_TOGETHER = 4  # number of blocks of a row whose scales cuBLAS reads together
_TINY = torch.finfo(torch.float32).tiny  # smallest normal number
_EXPONENT_BIAS = 127  # exponent bias of float8_e8m0fnu


def with_dtype(layout: _planner.Layout, dtype: torch.dtype) -> Layout:
    """Returns the layout with another dtype."""
    order = layout.shard_order
    return Layout(layout.mesh, layout.shape, layout.placements, dtype, order, "literal", layout.flattened)


def per_block_layout(layout: _planner.Layout, block: int, size: int) -> Layout:
    """Returns the layout of a byte tensor that has `size` bytes for each `block` elements along the last dim."""
    shape = [*layout.shape[:-1], -(-layout.shape[-1] // block) * size]
    order = layout.shard_order
    return Layout(layout.mesh, shape, layout.placements, torch.uint8, order, "literal", layout.flattened)


def check_blocks(message_format: str, name: str, shards: _planner.Layout, block: int) -> None:
    """Raises ValueError if shards divide a block. `name`: name of the weight."""
    blocks = per_block_layout(shards, block, 1)
    for rank in shards.mesh.ranks:
        begins = [(begin // block, -(-end // block)) for begin, end in shards.region(rank)[-1]]
        divided = any(begin % block for begin, _ in shards.region(rank)[-1])
        if divided or begins != blocks.region(rank)[-1]:
            raise ValueError(
                f"message_format must not be {message_format!r} if shards divide blocks of {block} elements along the "
                f"last dim, got {name} of shape {tuple(shards.shape)}, placed as {', '.join(shards.placements)}. Shard "
                f"other dims, or the last dim in multiples of {block}"
            )


class Format:
    """The format of a weight in messages: the weight in a dtype. Subclasses quantize."""

    needs_amax = False  # `encode` and `decode` take a `scale`, which is `scale_of` the amax over all shards

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def check(self, name: str, shards: _planner.Layout, device_type: str) -> None:
        """Raises ValueError if the format does not support a weight with layout `shards`, or this device type."""

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        """Returns the layouts of the tensors that are sent for a weight with this layout."""
        return [with_dtype(layout, self.dtype)]

    def amax(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the amax of a shard: one number, or one for each row."""
        raise NotImplementedError

    def amax_layout(self, shards: _planner.Layout) -> Layout | None:
        """Returns the layout of `amax`; None if it is one number, which is reduced together with other weights'."""
        return None

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Returns the scale with which amax gets the largest code."""
        return _scale_of(amax, FLOAT8_MAX, _TINY)

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        """Returns the messages of a shard, one for each of `layouts`."""
        return [part.to(self.dtype)]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes the weight to `out`, from the gathered messages."""
        out.copy_(messages[0])


class ScaledCodes(Format):
    """Codes of a few bits, sent as bytes, with one float32 scale, which all ranks have before the gather."""

    needs_amax = True

    def __init__(self) -> None:
        super().__init__(torch.uint8)  # process groups do not support float8 and float4

    def amax(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the amax of a shard, one number."""
        return part.abs().max().float() if part.numel() else part.new_zeros((), dtype=torch.float32)


class Float8(ScaledCodes):
    """float8_e4m3fn.

    Args:
        pads: pad rows with zeros to a multiple of 16.
    """

    def __init__(self, pads: bool = False) -> None:
        super().__init__()
        self.pads = pads

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        return [per_block_layout(layout, ROW_MULTIPLE, ROW_MULTIPLE) if self.pads else with_dtype(layout, torch.uint8)]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        assert scale is not None
        return [self._padded(_to_float8(part.float() / scale))]

    def _padded(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns the codes with rows padded with zeros to a multiple of 16, if `pads`."""
        return torch.nn.functional.pad(codes, (0, -codes.size(-1) % ROW_MULTIPLE)) if self.pads else codes

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        assert scale is not None
        _decode(messages[0], scale.expand(math.prod(out.shape[:-1]), 1), out)


class RowwiseFloat8(Float8):
    """float8_e4m3fn with a float32 scale for each row (all elements along the last dim)."""

    def amax(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the amax of each row of a shard."""
        return part.abs().amax(-1).float() if part.size(-1) else part.new_zeros(part.shape[:-1], dtype=torch.float32)

    def amax_layout(self, shards: _planner.Layout) -> Layout:
        return _without_last_dim(shards, "P(max)")

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        return [*super().layouts(layout), _without_last_dim(layout, "R")]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        assert scale is not None
        return [*super().encode(part, scale.unsqueeze(-1)), scale]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        _decode(messages[0], messages[1].reshape(-1, 1), out)


class BlockFormat(Format):
    """Codes with a scale for each block of elements along the last dim."""

    name: str  # for error texts
    block: int  # number of elements of a block
    elements_in_byte: int
    code_dtype: torch.dtype  # as `torch._scaled_mm` takes codes
    scale_dtype: torch.dtype


class Mxfp8(BlockFormat):
    """float8_e4m3fn with a power of two for each block of 32 elements along the last dim (OCP MX, rounded down).

    Args:
        pads: pad rows of codes with zeros to a multiple of 32, and rows of scales to a multiple of four.
    """

    name, block, elements_in_byte = "MXFP8", _MX_BLOCK, 1
    code_dtype, scale_dtype = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def __init__(self, pads: bool = False) -> None:
        super().__init__(torch.uint8)
        self.pads = pads

    def check(self, name: str, shards: _planner.Layout, device_type: str) -> None:
        check_blocks("mxfp8", name, shards, _MX_BLOCK)

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        if self.pads:
            return [
                per_block_layout(layout, _MX_BLOCK, _MX_BLOCK),
                per_block_layout(layout, SCALES_TOGETHER * _MX_BLOCK, SCALES_TOGETHER),
            ]
        return [with_dtype(layout, torch.uint8), per_block_layout(layout, _MX_BLOCK, 1)]

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        length = part.size(-1)
        count = -(-length // _MX_BLOCK)
        padded = torch.nn.functional.pad(part.float(), (0, count * _MX_BLOCK - length)).unflatten(
            -1, (count, _MX_BLOCK)
        )
        amax = padded.abs().amax(-1)
        # The largest code is 448 = 1.75 * 2**8. frexp's mantissas start at 0.5, so its exponents are larger by one.
        exponent = (torch.frexp(amax).exponent - 9).clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS)
        scaled = _to_float8(torch.ldexp(padded, -exponent.unsqueeze(-1)).flatten(-2))
        code = torch.where(amax.isfinite(), exponent + _EXPONENT_BIAS, 255).to(torch.uint8)  # 255 is NaN
        if self.pads:
            return [scaled, torch.nn.functional.pad(code, (0, -count % SCALES_TOGETHER))]
        return [scaled[..., :length], code]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        _decode(messages[0], messages[1].view(torch.float8_e8m0fnu).flatten(0, -2), out)


def _scale_of(amax: torch.Tensor, largest: float, least: float) -> torch.Tensor:
    """Returns amax / largest, but at least `least`, because a division by a smaller scale overflows; 1 for zeros."""
    return torch.where(amax > 0, (amax / largest).clamp(min=least), torch.ones_like(amax))


def _to_float8(scaled: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn codes as bytes. Magnitudes above FLOAT8_MAX get the largest code."""
    return scaled.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _decode(code: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Writes code * scales to `out`. `scales` has a row for each row of `out`, with one scale or one for each block."""
    length = out.size(-1)
    if out.numel() == 0:
        return
    rows, codes = out.view(-1, length), code[..., :length].view(torch.float8_e4m3fn).view(-1, length)
    step = max(1, _DECODED_AT_A_TIME // length)
    for begin in range(0, rows.size(0), step):
        some = slice(begin, begin + step)
        factor = scales[some].float()
        if factor.size(1) != 1:
            factor = factor.repeat_interleave(_MX_BLOCK, 1)[:, :length]
        rows[some] = codes[some].float() * factor


def _without_last_dim(layout: _planner.Layout, instead: str) -> Layout:
    """Returns the layout of one float32 for each row. Placements that shard the last dim become `instead`."""
    last = len(layout.shape) - 1
    order = layout.shard_order
    shard_last = order.pop(last, [])
    placements = [instead if i in shard_last else text for i, text in enumerate(layout.placements)]
    # Mesh dims of size 1 are not in the shard order.
    placements = ["R" if f"({last}" in text else text for text in placements]
    return Layout(layout.mesh, layout.shape[:-1], placements, torch.float32, order, "literal")


FORMATS: dict[str, Callable[[], Format]] = {"float8": Float8, "float8_rowwise": RowwiseFloat8, "mxfp8": Mxfp8}


# ---- NVFP4, by torchao's functions: four bits per element, a scale for each 16 elements and one for the weight
#
# torchao is optional: it is imported for `message_format="nvfp4"`, and tried once on each device type.

_NV_BLOCK = 16  # elements that share a scale
_NVFP4_MAX = 448.0 * 6.0  # largest float8_e4m3fn (block scales) times largest float4_e2m1fn (codes)
_NVFP4_BLOCKS_AT_A_TIME = 1 << 16  # blocks decoded at a time; bounds temporary memory


class Nvfp4(ScaledCodes, BlockFormat):
    """float4_e2m1fn, two in a byte, with a float32 scale for the weight and a float8_e4m3fn scale for each block of 16
    along the last dim.

    Args:
        pads: pad rows with zeros to a multiple of four blocks.
    """

    name, block, elements_in_byte = "NVFP4", _NV_BLOCK, 2
    code_dtype, scale_dtype = torch.float4_e2m1fn_x2, torch.float8_e4m3fn

    def __init__(self, pads: bool = False) -> None:
        super().__init__()
        self._padded_blocks = SCALES_TOGETHER if pads else 1  # rows are padded to a multiple of this number of blocks

    def check(self, name: str, shards: _planner.Layout, device_type: str) -> None:
        reason = _why_not(device_type)
        if reason is not None:
            others = [key for key in FORMATS if key != "nvfp4"]
            raise ValueError(
                f"message_format must be one of {', '.join(map(repr, others))}, torch.bfloat16, torch.float16 and None "
                f"for {name} on {device_type}, got 'nvfp4'. It requires torchao's kernels: {reason}"
            )
        check_blocks("nvfp4", name, shards, _NV_BLOCK)

    def layouts(self, layout: _planner.Layout) -> list[Layout]:
        unit = self._padded_blocks * _NV_BLOCK
        return [per_block_layout(layout, unit, unit // 2), per_block_layout(layout, unit, self._padded_blocks)]

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        return _scale_of(amax, _NVFP4_MAX, _TINY / torch.finfo(torch.float8_e4m3fn).tiny)

    def encode(self, part: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        length = part.size(-1)
        count = -(-length // (self._padded_blocks * _NV_BLOCK)) * self._padded_blocks
        shapes = [(*part.shape[:-1], count * _NV_BLOCK // 2), (*part.shape[:-1], count)]
        if part.numel() == 0:
            return [part.new_empty(shape, dtype=torch.uint8) for shape in shapes]
        padded = torch.nn.functional.pad(part.float(), (0, count * _NV_BLOCK - length)).view(-1, count * _NV_BLOCK)
        scales, codes = _torchao().nvfp4_quantize(padded, _NV_BLOCK, scale)
        return [codes.view(shapes[0]), scales.view(torch.uint8).view(shapes[1])]

    def decode(self, messages: Sequence[torch.Tensor], scale: torch.Tensor | None, out: torch.Tensor) -> None:
        length = out.size(-1)
        if out.numel() == 0:
            return
        rows, codes = out.view(-1, length), messages[0].flatten(0, -2)
        scales = messages[1].view(torch.float8_e4m3fn).flatten(0, -2)
        step = max(1, _NVFP4_BLOCKS_AT_A_TIME // scales.size(1))
        for begin in range(0, rows.size(0), step):
            some = slice(begin, begin + step)
            tensor = _torchao().NVFP4Tensor(codes[some], scales[some], _NV_BLOCK, torch.float32, scale)
            rows[some] = tensor.dequantize(torch.float32)[:, :length]


def _torchao() -> Any:
    """Returns torchao's module with the NVFP4 functions. Raises ImportError without torchao."""
    from torchao.prototype.mx_formats import nvfp4_tensor  # type: ignore[import-not-found, unused-ignore]

    return nvfp4_tensor


@functools.cache
def _why_not(device_type: str) -> str | None:
    """Returns why torchao's NVFP4 functions cannot be used on a device type, or None. Tries them on exact numbers."""
    try:
        _torchao()
    except ImportError as error:
        return f"torchao cannot be imported ({error})"
    try:
        values = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 2], device=device_type)
        decoded = torch.empty_like(values)
        tried, scale = Nvfp4(), torch.ones((), device=device_type)
        tried.decode(tried.encode(values, scale), scale, decoded)
    except torch.OutOfMemoryError:
        raise  # does not show whether the device has the kernels
    except Exception as error:  # a missing kernel may raise anything
        return f"they raise {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not torch.equal(decoded, values):
        return f"they return {decoded.tolist()} for {values.tolist()}, which four bits represent exactly"
    return None


FORMATS["nvfp4"] = Nvfp4


# ---- dtypes of weights and gradients: sharded, in use, and in messages (`mp_policy`, `Options.message_format`)

MessageFormat: TypeAlias = torch.dtype | str | None  # a `message_format` for one parameter; None: dtypes of mp_policy

# If reduce_dtype is None, FSDP2 reduces gradients in param_dtype (torch up to 2.14) or in the parameter's dtype (2.15).
_REDUCES_IN_PARAM_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)

_ALLOWED = f"torch.bfloat16, torch.float16, {', '.join(map(repr, FORMATS))}, None or a function that returns one"


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of one weight."""

    use: torch.dtype  # dtype of the gathered weight
    gathers: Format  # format of the weight in messages
    reduce: torch.dtype  # dtype in which gradients are summed
    gradients: torch.dtype  # dtype of gradients in messages
    mp_policy: MixedPrecisionPolicy | None = None  # passed to the extension protocol (extensions.py)

    @property
    def are_plain(self) -> bool:
        """True if the weight is sent in the dtype of its use, unquantized."""
        return type(self.gathers) is Format and self.gathers.dtype == self.use

    def is_shard_dtype(self, own: torch.dtype) -> bool:
        """Returns true if a weight that is held unsharded in dtype `own` can be used without a conversion."""
        return self.use == own and type(self.gathers) is Format and self.gathers.dtype == own


class Policy:
    """The mixed-precision policy and message format of one unit."""

    def __init__(self, mp_policy: MixedPrecisionPolicy | None, value: Any) -> None:
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            allowed = "a torch.distributed.fsdp.MixedPrecisionPolicy or None"
            raise argument_error("mp_policy", allowed, f"a {type(mp_policy).__name__}")
        self._policy = mp_policy or MixedPrecisionPolicy()
        self._message_format: Callable[[nn.Parameter], MessageFormat] = (
            value if callable(value) else lambda parameter: value
        )

    def of(self, parameter: nn.Parameter) -> Dtypes:
        """Returns the dtypes of a parameter, full or sharded."""
        return dataclasses.replace(self._of(parameter), mp_policy=self._policy)

    def _of(self, parameter: nn.Parameter) -> Dtypes:
        """Returns the dtypes of a parameter, without `mp_policy`."""
        own = parameter.dtype
        if not own.is_floating_point:
            return Dtypes(own, Format(own), own, own)
        policy = self._policy
        override: Any = getattr(policy, "param_dtype_override_fn", None)  # since torch 2.15
        use = (override(parameter) if override is not None else None) or policy.param_dtype or own
        if use not in (own, policy.param_dtype):
            raise ValueError(
                f"param_dtype_override_fn of mp_policy must return {own}, {policy.param_dtype} or None, got {use!r}"
            )
        reduce = policy.reduce_dtype or (use if _REDUCES_IN_PARAM_DTYPE else own)
        message = self._message_format(parameter)
        check_message_format(message)
        if message is None:
            return Dtypes(use, Format(use), reduce, reduce)
        reduce = policy.reduce_dtype or torch.float32
        if isinstance(message, torch.dtype):
            return Dtypes(use, Format(message), reduce, message)
        # Parameters of one dim (biases and norms) are small, so they are sent at full precision.
        gathers = FORMATS[message]() if parameter.ndim > 1 else Format(use)
        return Dtypes(use, gathers, reduce, torch.bfloat16)

    def cast_inputs(self, value: Any) -> Any:
        """Returns an argument of a forward, cast to param_dtype if the policy casts inputs."""
        return _cast(value, self._policy.param_dtype if self._policy.cast_forward_inputs else None)

    def cast_output(self, value: Any) -> Any:
        """Returns an output of a forward, cast to output_dtype if the policy has one."""
        return _cast(value, self._policy.output_dtype)

    @property
    def casts_inputs(self) -> bool:
        """True if inputs of forwards are cast."""
        return self._policy.cast_forward_inputs and self._policy.param_dtype is not None

    @property
    def casts_outputs(self) -> bool:
        """True if outputs of forwards are cast."""
        return self._policy.output_dtype is not None


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns a floating-point tensor in a dtype; other values, and all values if `dtype` is None, as they are."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def check_message_format(value: Any) -> None:
    """Raises ValueError unless `value` is a message format for one parameter, or None."""
    if value is not None and value not in (torch.bfloat16, torch.float16) and value not in FORMATS:
        raise argument_error("message_format", _ALLOWED, repr(value))
