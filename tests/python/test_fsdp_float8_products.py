"""`matmul_format="float8"` of `sw.fsdp.Options`: products with received codes, compared with a model on one rank."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from fsdp_models import Mlp, batch, flat_fully_shard, full, part, shard, without_packing
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import float8_products, formats
from test_fsdp_dtypes import expected_of, float8, mxfp8
from test_fully_shard_streams import poisoned

_MISSING = float8_products._why_not("cpu", True)
NEEDS_SCALES_OF_ROWS = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))


class _Quantized(torch.autograd.Function):
    """A product of quantized factors. Its gradients are those of a product of x and the quantized weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wire: str) -> torch.Tensor:  # type: ignore[override]
        written = expected_of(wire.removesuffix(" written out"), weight)
        ctx.save_for_backward(x, written)
        if wire.startswith("mxfp8"):
            return (mxfp8(x) if wire == "mxfp8" else x) @ written.T
        largest = x.abs().amax(-1, keepdim=True) if wire == "float8_rowwise" else x.abs().max()
        return float8(x, torch.where(largest > 0, largest / 448, 1.0)) @ written.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, written = ctx.saved_tensors
        return gradients[0] @ written, gradients[0].T @ x, None


class Oracle(nn.Module):
    """The full model on one rank, with `_Quantized` products in place of its Linear modules'."""

    def __init__(self, wire: str, width: int = 10) -> None:
        super().__init__()
        self.model = Mlp(width, tied=False)
        self.wire = wire

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
            y = _Quantized.apply(x, module.weight, self.wire)  # type: ignore[no-untyped-call]
            return y if module.bias is None else y + module.bias

        x = linear(self.model.enter, x)
        for layer in self.model.layers:
            first, _, last = layer
            x = x + linear(last, torch.tanh(linear(first, x)))
        return linear(self.model.leave, x)


def _trains(wire: str, width: int = 10) -> None:
    """Trains as the oracle, with widths that are not multiples of 16 and with NaN in released memory."""
    world = dist.get_world_size()
    oracle = Oracle(wire, width)
    sent = wire.removesuffix(" written out")
    model = shard(
        copy.deepcopy(oracle.model), flat_fully_shard, get_mesh((world,)), message_format=sent, matmul_format="float8"
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
    sw.reset_stats()
    for step in range(4):
        losses = [oracle(batch(step, rank, width)).square().mean() for rank in range(world)]
        torch.stack(losses).mean().backward()
        with poisoned():
            loss = model(batch(step, width=width)).square().mean()
            loss.backward()
        torch.testing.assert_close(loss, losses[dist.get_rank()], rtol=1e-4, atol=1e-5)
        for actual, expected in zip(model.parameters(), oracle.parameters(), strict=True):
            assert expected.grad is not None and actual.grad is not None
            # Gradients are sent in bfloat16.
            torch.testing.assert_close(
                full(actual.grad), expected.grad, rtol=0.02, atol=0.02 * float(expected.grad.abs().max())
            )
        with torch.no_grad():  # both steps apply the same gradients, so that weights stay equal
            for actual, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                expected.grad = full(actual.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sw.stats()["unplanned_steps"] == 0


@pytest.mark.parametrize(
    ("wire", "world"), [("float8", 2), pytest.param("float8_rowwise", 3, marks=NEEDS_SCALES_OF_ROWS)]
)
def test_float8_products_train_as_the_oracle(pool: Pool, wire: str, world: int) -> None:
    pool.run(_trains, world, wire)


def _memory(wire: str) -> None:
    """A gathered weight takes a byte for each element plus padding, and only padding is added to messages."""
    sizes, received = {}, {}
    for use in (None, "float8"):
        model: Any = shard(
            Mlp(width=256, tied=False), flat_fully_shard, get_mesh((2,)), message_format=wire, matmul_format=use
        )
        with without_packing():  # no shared messages
            model(batch(0, width=256)).sum().backward()
        sizes[use] = sw.fsdp.schedule(model).arena_bytes
        with sw.debug.wire_meter() as meter:
            model.layers[0].unshard()
        received[use] = meter.received_bytes
    elements = 256 * 513 * 2
    assert sizes["float8"] < sizes[None] / 3
    # Rows of 513 elements are padded to 528. In MXFP8 they are padded to 544, with 20 scales instead of 17.
    padding = 128 * (528 - 513 if wire == "float8" else 544 - 513 + 20 - 17)
    assert received["float8"] - received[None] == padding < elements / 16


@pytest.mark.parametrize("wire", ["float8", "mxfp8"])
def test_gathered_weights_take_a_byte_per_element(pool: Pool, wire: str) -> None:
    pool.run(_memory, 2, wire)


def _read(wire: str) -> None:
    """Hooks that read a weight in use get dequantized values, and gradients flow to it. Its module is unchanged."""
    model: Any = shard(Mlp(tied=False), flat_fully_shard, get_mesh((2,)), message_format=wire, matmul_format="float8")
    linear = model.layers[1][0]
    for step in range(4):
        global_weight = full(linear.weight.detach()).clone()
        seen = []

        def look(
            module: Any, args: Any, output: torch.Tensor, seen: list[Any] = seen, step: int = step
        ) -> torch.Tensor:
            seen.append(module.weight.detach().clone())
            return output + module.weight.sum() if step % 2 else output

        hook = linear.register_forward_hook(look)
        with poisoned():
            model(batch(step)).square().mean().backward()
        hook.remove()
        assert torch.equal(seen[0], expected_of(wire, global_weight))
        assert type(linear) is nn.Linear and type(linear.weight) is not torch.Tensor
        assert part(linear.weight.grad).isfinite().all()
        model.zero_grad()


@pytest.mark.parametrize("wire", ["float8", pytest.param("float8_rowwise", marks=NEEDS_SCALES_OF_ROWS), "mxfp8"])
def test_hooks_read_dequantized_weights(pool: Pool, wire: str) -> None:
    pool.run(_read, 2, wire)


class _Stores(nn.Module):
    """A unit that stores its result instead of returning it, if `hides`."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 24), nn.Linear(24, 32)
        self.hides = hides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = self.b(torch.tanh(self.a(x)))
        return x.detach() if self.hides else self.result


def _read_in_backwards(wire: str) -> None:
    """A backward gathers weights that no hook of an output gathers, and detects writes."""
    models: list[Any] = []
    for hides in (False, True):
        torch.manual_seed(2)
        inner = flat_fully_shard(_Stores(hides), mesh=get_mesh((2,)), message_format=wire, matmul_format="float8")
        models.append(sw.fully_shard(nn.Sequential(inner), mesh=get_mesh((2,))))
    x = batch(0, width=40).requires_grad_()
    for _ in range(3):
        with poisoned():
            for model in models:
                model(x)
                model[0].result.square().mean().backward()
        for shown, hidden in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(part(shown.grad), part(hidden.grad))
    for model in models:
        model(x)
        with torch.no_grad():
            model[0].b.weight.mul_(3)
        with pytest.raises(RuntimeError, match="written between a forward and its backward"):
            model[0].result.sum().backward()


@pytest.mark.parametrize("wire", ["float8", pytest.param("float8_rowwise", marks=NEEDS_SCALES_OF_ROWS), "mxfp8"])
def test_weights_that_backwards_read_are_gathered(pool: Pool, wire: str) -> None:
    pool.run(_read_in_backwards, 2, wire)


def _linear_units() -> None:
    """A unit that is itself a Linear module also multiplies by received codes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8))
    weights = [expected_of("mxfp8", layer.weight.detach()) for layer in model]
    biases = [layer.bias.detach().clone() for layer in model]
    for layer in model:
        sw.fully_shard(
            layer, mesh=get_mesh((2,)), options=sw.fsdp.Options(message_format="mxfp8", matmul_format="float8")
        )
    sw.reset_stats()
    with poisoned(), torch.no_grad():
        for step in range(3):
            x = y = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
            for weight, bias in zip(weights, biases, strict=True):
                y = y @ weight.T + bias
            torch.testing.assert_close(model(x), y)
    assert sw.stats()["product_fallbacks"] == 3 * 2, "each was a product of what has arrived"


def test_linear_units_multiply_by_codes(pool: Pool) -> None:
    pool.run(_linear_units, 2)


def _invalid_formats() -> None:
    mesh = get_mesh((2,))
    linear = nn.Linear(6, 4)

    def refuses(text: str, **options: Any) -> None:
        float8_products._why_not.cache_clear()
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(linear, mesh=mesh, **options)
        assert type(linear) is nn.Linear

    refuses("matmul_format must be 'float8' or None, got 'mxfp8'", matmul_format="mxfp8", message_format="float8")
    refuses(
        "matmul_format must be None for weight with kept_placements",
        matmul_format="float8",
        message_format="float8",
        reshard_after_forward=2,
    )
    with mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("no units for float8")):
        refuses(
            "matmul_format must be None for weight with a scale for each row on cpu, got 'float8': "
            "torch._scaled_mm raises RuntimeError: no units for float8",
            matmul_format="float8",
            message_format="float8_rowwise",
        )
    float8_products._why_not.cache_clear()


def test_invalid_matmul_formats_raise(pool: Pool) -> None:
    pool.run(_invalid_formats, 2)


# ----------------------------------------------------------------------------------------------------- block scales


@functools.cache
def to_blocked() -> Any:
    """Returns PyTorch's function that orders scales as cuBLAS reads them. Its module needs more packages to import."""
    source = Path(torch.__file__).with_name("testing") / "_internal" / "common_quantized.py"
    wanted = ("ceil_div", "to_blocked")
    found = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in wanted]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), str(source), "exec"), names)
    return names["to_blocked"]


def by_row(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Returns scales [rows, blocks], given scales in the order in which cuBLAS reads them."""
    padded = [rows + -rows % 128, blocks + -blocks % 4]
    assert scales.numel() == padded[0] * padded[1]
    places = to_blocked()(torch.arange(scales.numel()).view(padded))
    found = torch.empty_like(scales.flatten())
    found[places] = scales.flatten()
    return found.view(padded)[:rows, :blocks]


def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Computes as `torch._scaled_mm` on devices that take block scales, and checks the conditions of that operator."""
    assert a.size(1) == b.size(0) and a.size(1) % 16 == b.size(1) % 16 == 0
    written = []
    for codes, scale in zip((a, b.t()), scales, strict=True):
        assert codes.is_contiguous() and scale.is_contiguous()
        if codes.dtype == torch.float4_e2m1fn_x2:
            both = torch.stack([codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4], -1).flatten(-2).long()
            values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[both % 8] * (1 - both // 8 * 2)
            block, of_scales = 16, torch.float8_e4m3fn
        else:
            assert codes.dtype == torch.float8_e4m3fn
            values, block, of_scales = codes.float(), 32, torch.float8_e8m0fnu
        assert scale.dtype == of_scales
        each = by_row(scale.view(torch.uint8), values.size(0), values.size(1) // block).view(of_scales).float()
        written.append(values * each.repeat_interleave(block, 1))
    return (written[0] @ written[1].T).to(out_dtype)


@contextlib.contextmanager
def scaled_mm_replaced() -> Iterator[None]:
    """Replaces this rank's `torch._scaled_mm` with one that takes block scales."""
    float8_products._reasons.clear()
    try:
        with mock.patch.object(torch, "_scaled_mm", scaled_mm):
            yield
    finally:
        float8_products._reasons.clear()


@pytest.mark.parametrize("rows, blocks", [(1, 1), (128, 4), (129, 4), (300, 9)])
def test_scales_are_ordered_as_cublas_reads_them(rows: int, blocks: int) -> None:
    scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8)
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    ours = float8_products.in_tiles(padded).contiguous()
    assert ours.shape == (-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    assert torch.equal(ours.flatten(), to_blocked()(scales))
    assert torch.equal(by_row(ours, rows, blocks), scales)


def _in_blocks(width: int, takes_blocks: bool) -> None:
    """Trains as `_trains`. While a module computes, the scales of the full weight are in their padded place."""
    with scaled_mm_replaced() if takes_blocks else contextlib.nullcontext():
        _trains("mxfp8" if takes_blocks else "mxfp8 written out", width)
        stats = sw.stats()
        # One product for each of the eight Linear modules in each of four steps.
        counted = 0 if takes_blocks else 4 * 8
        assert stats["product_fallbacks"] == counted
        for reason, count in stats["product_fallback_reasons"].items():
            assert reason.startswith("MXFP8 weights as received on cpu: torch._scaled_mm raises") and count == counted
        model: Any = shard(Mlp(width, tied=False), flat_fully_shard, get_mesh((dist.get_world_size(),)), **IN_BLOCKS)
        linear = model.layers[0][2]
        weight = next(w for w in model.layers[0]._shardwright_unit.unit.weights if w.owners[0][0] is linear)
        global_weight = full(linear.weight.detach())
        places = []

        def look(*_: Any) -> None:
            places.append(weight.scales[: weight.product.scales_bytes].clone())

        linear.register_forward_pre_hook(look)
        with poisoned():
            for step in range(3):
                model(batch(step, width=width)).sum().backward()
        _, scales = formats.Mxfp8().encode(global_weight, None)
        for place in places:
            assert torch.equal(by_row(place, *scales.shape), scales)


IN_BLOCKS: dict[str, Any] = {"message_format": "mxfp8", "matmul_format": "float8"}


@pytest.mark.parametrize("world, width, takes_blocks", [(2, 10, True), (3, 70, True), (2, 70, False), (1, 10, False)])
def test_mxfp8_products_train_as_the_oracle(pool: Pool, world: int, width: int, takes_blocks: bool) -> None:
    pool.run(_in_blocks, world, width, takes_blocks)


def test_fallback_reason_names_an_error_without_text() -> None:
    with mock.patch.object(torch, "_scaled_mm", side_effect=NotImplementedError()):
        why = float8_products._try_blocks("cpu", formats.Mxfp8(pads=True))
    assert why == "torch._scaled_mm raises NotImplementedError"
    no_memory = mock.patch.object(torch, "_scaled_mm", side_effect=torch.OutOfMemoryError("no memory"))
    with no_memory, pytest.raises(torch.OutOfMemoryError):  # lack of memory is no reason against the device
        float8_products._try_blocks("cpu", formats.Mxfp8(pads=True))


def _subclass_made_later() -> None:
    """A user changes the class of a Linear unit to a subclass, which calls the unit's forward."""
    torch.manual_seed(0)
    plain, changed = (nn.Linear(32, 32) for _ in range(2))
    changed.load_state_dict(plain.state_dict())
    for each in (plain, changed):
        sw.fully_shard(
            each,
            mesh=get_mesh((dist.get_world_size(),)),
            options=sw.fsdp.Options(message_format="float8", matmul_format="float8"),
        )

    class Twice(type(changed)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    changed.__class__ = Twice
    x = torch.randn(8, 32)
    for _ in range(2):
        assert torch.equal(changed(x), 2 * plain(x))
        changed(x).sum().backward()
        plain(x).sum().backward()
    assert torch.equal(full(changed.weight.grad), 2 * full(plain.weight.grad))


def test_class_changed_after_sharding_trains(pool: Pool) -> None:
    pool.run(_subclass_made_later, 2)
