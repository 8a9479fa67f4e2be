"""`message_format="nvfp4"` of `sw.fsdp.Options`, with torchao if it is installed, else with equivalent functions."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardwright as sw
from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import formats
from test_fsdp_float8_products import scaled_mm_replaced
from test_fully_shard_streams import poisoned

_NAME = "torchao.prototype.mx_formats.nvfp4_tensor"
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of float4_e2m1fn, by code


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the codes of the nearest four-bit floats. Ties go to the even code."""
    distances = (x.abs().unsqueeze(-1) - _MAGNITUDES).abs()
    ties = torch.arange(8) % 2 * 1e-9
    return (distances + ties).argmin(-1) + 8 * (torch.signbit(x)).long()


def quantize(x: torch.Tensor, block: int, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(x.shape[0], -1, block)
    scales = (blocks.abs().amax(-1) / 6 / scale).clamp(torch.finfo(torch.float8_e4m3fn).tiny, 448)
    scales = scales.to(torch.float8_e4m3fn)
    scaled = blocks * (1 / scale / scales.float()).unsqueeze(-1)
    codes = codes_of(scaled.clamp(-6, 6)).view(x.shape)
    return scales, (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


class Quantized:
    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: int, _: Any, scale: torch.Tensor) -> None:
        self.parts = codes, scales, block, scale

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        codes, scales, block, scale = self.parts
        each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        values = _MAGNITUDES[each % 8] * torch.where(each >= 8, -1.0, 1.0)
        return (values * (scale * scales.float()).repeat_interleave(block, -1)).to(dtype)


@contextmanager
def torchao() -> Iterator[None]:
    formats._why_not.cache_clear()
    if importlib.util.find_spec("torchao") is not None:
        yield
        return
    names = [_NAME[:end] for end in range(len(_NAME)) if _NAME[end] == "."] + [_NAME]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        if name != "torchao":
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    modules[_NAME].nvfp4_quantize = quantize  # type: ignore[attr-defined]
    modules[_NAME].NVFP4Tensor = Quantized  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield
    formats._why_not.cache_clear()


def expected_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the full weight, quantized row by row and dequantized."""
    length = x.size(-1)
    padded = nn.functional.pad(x, (0, -length % 16))
    scale = x.abs().max() / (448 * 6)
    scales, codes = quantize(padded, 16, scale)
    return Quantized(codes, scales, 16, None, scale).dequantize(torch.float32)[:, :length]


def _gathered(width: int, dim: int, use: str | None) -> None:
    with torchao():
        torch.manual_seed(0)
        model: Any = nn.Linear(width, 10)
        with torch.no_grad():
            model.weight.mul_(torch.arange(1, width + 1) / width)
            model.weight[3].zero_()
        weight = model.weight.detach().clone()
        mesh = get_mesh((2,))
        placed = {"shard_placement_fn": lambda p: Shard(dim if p.ndim > 1 else 0)}
        flat_fully_shard(model, mesh=mesh, options=sw.fsdp.Options(message_format="nvfp4", matmul_format=use), **placed)
        with sw.debug.wire_meter() as meter:
            model.unshard()
        assert torch.equal(model.weight, expected_of(weight))
        bias, largest, blocks = 4 * 5, 4, -(-width // 16)
        assert meter.received_bytes <= blocks * 5 * (8 + 1) + bias + 2 * largest
        model.reshard()
        model(torch.ones(2, width)).sum().backward()
        assert full(model.weight.grad).shape == weight.shape


@pytest.mark.parametrize(("width", "dim", "use"), [(64, 0, None), (40, 0, None), (64, 1, None), (64, 0, "float8")])
def test_gathered_shards_equal_the_quantized_weight(pool: Pool, width: int, dim: int, use: str | None) -> None:
    """With `use="float8"` too: reading such a weight dequantizes it."""
    pool.run(_gathered, 2, width, dim, use)


def _multiplies(width: int, takes_blocks: bool) -> None:
    """Products use codes and scales, or rows dequantized from them. Released memory is filled with NaN."""
    with torchao(), scaled_mm_replaced() if takes_blocks else nullcontext():
        torch.manual_seed(0)
        linear = nn.Linear(width, 300)
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        model: Any = nn.Sequential(linear)
        sw.fully_shard(
            model, mesh=get_mesh((2,)), options=sw.fsdp.Options(message_format="nvfp4", matmul_format="float8")
        )
        sw.reset_stats()
        for step in range(3):
            x, dy = torch.randn(2, 5, width).requires_grad_(), torch.randn(2, 5, 300)
            with poisoned():
                y = model(x)
                y.backward(dy)
            rows = x.detach().view(-1, width)
            expected = (expected_of(rows) if takes_blocks else rows) @ expected_of(weight).T + bias
            torch.testing.assert_close(y.detach().view(-1, 300), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(x.grad, dy @ expected_of(weight), rtol=1e-4, atol=1e-4)
            assert sw.stats()["product_fallbacks"] == (0 if takes_blocks else step + 1)
        reasons = sw.stats()["product_fallback_reasons"]
        assert all(reason.startswith("NVFP4 weights as received on cpu: torch._scaled_mm") for reason in reasons)
        assert full(linear.weight.grad).isfinite().all()


@pytest.mark.parametrize("width, takes_blocks", [(40, True), (200, True), (200, False)])
def test_nvfp4_products_equal_products_of_quantized_factors(pool: Pool, width: int, takes_blocks: bool) -> None:
    pool.run(_multiplies, 2, width, takes_blocks)


def _trains() -> None:
    with torchao():
        model = shard(Mlp(width=32), flat_fully_shard, get_mesh((2,)), message_format="nvfp4")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(8):
            loss = loss_of(model, batch(0, width=32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_nvfp4_training_reduces_the_loss(pool: Pool) -> None:
    pool.run(_trains, 2)


def _unsupported() -> None:
    mesh = get_mesh((2,))
    linear = nn.Linear(72, 4)

    def refuses(text: str, **options: Any) -> None:
        formats._why_not.cache_clear()
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(linear, mesh=mesh, options=sw.fsdp.Options(message_format="nvfp4"), **options)
        assert type(linear) is nn.Linear

    allowed = "'float8', 'float8_rowwise', 'mxfp8', torch.bfloat16, torch.float16 and None"
    needs = f"message_format must be one of {allowed} for weight on cpu, got 'nvfp4'.* torchao"
    loaded = [name for name in sys.modules if name.partition(".")[0] == "torchao"]
    with mock.patch.dict(sys.modules, dict.fromkeys(["torchao", *loaded])):
        refuses(f"{needs}.* cannot be imported")
    with torchao():
        wrong = mock.patch.object(sys.modules.get(_NAME) or formats._torchao(), "nvfp4_quantize")
        with wrong as quantized:
            quantized.side_effect = NotImplementedError("no kernel for 4 bits")
            refuses(f"{needs}.* raise NotImplementedError: no kernel for 4 bits")
        refuses(
            "message_format must not be 'nvfp4' .* blocks of 16 elements along the last dim, got weight",
            shard_placement_fn=lambda p: Shard(p.ndim - 1),
        )


def test_unsupported_nvfp4_raises(pool: Pool) -> None:
    pool.run(_unsupported, 2)


@pytest.mark.parametrize("largest", [1e-30, 1e-36, 1e-40, 1e-43, 1e-45, 0.0])
@pytest.mark.parametrize("wire", ["float8", "float8_rowwise", "mxfp8", "nvfp4"])
def test_tiny_weights_are_not_quantized_to_nan(wire: str, largest: float) -> None:
    """The error is at most a step of the codes, or a step of the smallest scale."""
    weights = largest * torch.linspace(-1, 1, 64).repeat(2, 1)
    weights[:, 16:32] = 0
    with torchao() if wire == "nvfp4" else nullcontext():
        wire_format, found = formats.FORMATS[wire](), torch.empty_like(weights)
        scale = wire_format.scale_of(wire_format.amax(weights)) if wire_format.needs_amax else None
        wire_format.decode(wire_format.encode(weights, scale), scale, found)
    torch.testing.assert_close(found, weights, rtol=0, atol=max(largest / 6, 1e-36))
