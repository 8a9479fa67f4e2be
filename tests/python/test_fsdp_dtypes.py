"""`mp_policy=` and `Options.message_format` of `sw.fully_shard`: dtypes of parameters, products and messages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from fsdp_models import (
    Mlp,
    agreement_bytes,
    batch,
    flat_fully_shard,
    full,
    loss_of,
    part,
    shard,
    whole_loss,
    without_packing,
)
from meshes import get_mesh
from pool import Pool

BF16, F32 = torch.bfloat16, torch.float32
POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=BF16),
    "reduced in float32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32),
    "reduced in bfloat16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "inputs as they are": MixedPrecisionPolicy(reduce_dtype=BF16, output_dtype=BF16, cast_forward_inputs=False),
}


def train(model: Any, steps: int, micro_steps: int = 1) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = []
    for step in range(steps):
        for micro_step in range(micro_steps):
            model.set_requires_gradient_sync(micro_step == micro_steps - 1)
            out = model(batch(10 * step + micro_step))
            found.append(out.detach())
            out.float().square().mean().backward()
        found += [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def _as_stock(mesh_shape: tuple[int, ...], micro_steps: int) -> None:
    mesh = get_mesh(mesh_shape)
    for name, policy in POLICIES.items():
        inner = dataclasses.replace(policy, output_dtype=None)
        # Weights are not tied: stock adds up gradients of tied weights in another dtype in some backwards.
        ours, stock = (
            train(shard(Mlp(tied=False), wrap, mesh, {"mp_policy": policy}, mp_policy=inner), 2, micro_steps)
            for wrap in (flat_fully_shard, stock_fully_shard)
        )
        for a, b in zip(ours, stock, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            # Under the last policy, ranks accumulate gradients that are more precise than each contribution.
            if mesh_shape in [(1,), (2,)] and (micro_steps == 1 or name != "inputs as they are"):
                assert torch.equal(part(a), part(b)), name
            else:
                torch.testing.assert_close(part(a), part(b), rtol=0.05, atol=0.02)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize(("mesh_shape", "micro_steps"), [((1,), 1), ((2,), 1), ((2,), 3), ((2, 2), 1)], ids=str)
def test_mixed_precision_trains_as_stock(pool: Pool, mesh_shape: tuple[int, ...], micro_steps: int) -> None:
    pool.run(_as_stock, math.prod(mesh_shape), mesh_shape, micro_steps)


def seen_weights(model: Any, step: int) -> dict[str, torch.Tensor]:
    """Returns the weights that forwards use, by name."""
    seen: dict[str, torch.Tensor] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            for key, value in module._parameters.items():
                if value is not None:
                    seen[f"{name}.{key}"] = value.detach().clone()

        return hook

    hooks = [
        module.register_forward_pre_hook(look(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    loss_of(model, batch(step, width=64)).backward()
    for hook in hooks:
        hook.remove()
    return seen


def float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Quantizes to MXFP8 and back, block by block, with scales computed as Python floats."""
    out = torch.empty_like(x)
    for row, begin in itertools.product(range(x.size(0)), range(0, x.size(1), 32)):
        block = x[row, begin : begin + 32]
        largest = float(block.abs().max())
        scale = 2.0 ** max(-127, math.floor(math.log2(largest)) - 8) if largest > 0 else 1.0
        out[row, begin : begin + 32] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return out


def expected_of(wire: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(wire, torch.dtype):
        return x.to(wire).float()
    if x.ndim < 2:
        return x
    if wire == "mxfp8":
        return mxfp8(x)
    largest = x.abs().amax(-1, keepdim=True) if wire == "float8_rowwise" else x.abs().max()
    return float8(x, torch.where(largest > 0, largest / 448, 1.0))


class ExtremeWeights(Mlp):
    """A model whose weights have rows of zeros, small values and large values."""

    def __init__(self) -> None:
        super().__init__(width=64)
        with torch.no_grad():
            for p in self.parameters():
                p.view(-1)[: p.numel() // 3].mul_(1e-5)
                p[1].zero_()
                p.view(-1)[-1] = 3.0


WIRES = [torch.bfloat16, "float8", "float8_rowwise", "mxfp8"]


def _shards_by_rows(world: int, wire: Any) -> None:
    """Gathered quantized shards equal the quantized full weight, bit for bit."""
    mesh = get_mesh((world,))
    for use in (F32, BF16):
        model: Any = shard(
            ExtremeWeights(), flat_fully_shard, mesh, message_format=wire, mp_policy=MixedPrecisionPolicy(use, F32)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            now = {name: full(p.detach()) for name, p in model.named_parameters()}
            found = seen_weights(model, step)
            assert found
            for name, value in found.items():
                if name in now:
                    assert value.dtype == use
                    assert torch.equal(value, expected_of(wire, now[name]).to(use)), (name, step)
            optimizer.step()
            optimizer.zero_grad()

        # A unit's messages have weights of eight bits, their scales, and one maximum for all weights.
        received = []
        for each in (model, shard(ExtremeWeights(), flat_fully_shard, mesh)):
            with sw.debug.wire_meter() as meter:
                for module in [each, *each.layers]:
                    module.unshard()
            received.append(meter.received_bytes)
        ratio = received[0] / received[1]
        assert ratio <= (0.5 if wire is torch.bfloat16 else 0.27 if wire == "float8" else 0.29), ratio


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_gathered_shards_equal_the_quantized_weight(pool: Pool, wire: Any) -> None:
    pool.run(_shards_by_rows, 3, 3, wire)


@pytest.mark.parametrize(("wire", "world"), [("float8_rowwise", 2), ("float8", 3), ("mxfp8", 2)], ids=str)
def test_quantized_gather_if_shards_split_rows(pool: Pool, wire: Any, world: int) -> None:
    pool.run(_shards_by_columns, world, wire)


def _shards_by_columns(wire: Any) -> None:
    mesh = get_mesh((torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    model: Any = nn.Linear(128, 10)
    with torch.no_grad():
        model.weight.mul_(torch.arange(1, 129) / 64)
    expected = expected_of(wire, model.weight.detach().clone())
    sw.fully_shard(
        model, mesh=mesh, options=sw.fsdp.Options(message_format=wire), shard_placement_fn=lambda p: Shard(p.ndim - 1)
    )
    model.unshard()
    assert torch.equal(model.weight, expected)
    model.reshard()
    model(torch.ones(2, 128)).sum().backward()


def _gradients(mesh_shape: tuple[int, ...]) -> None:
    """Contributions are sent in bfloat16 and summed in float32, in rank order."""
    mesh = get_mesh(mesh_shape)
    world = math.prod(mesh_shape)
    model: Any = sw.fully_shard(
        nn.Linear(7, 5, bias=False), mesh=mesh, options=sw.fsdp.Options(message_format=torch.bfloat16)
    )
    inputs = [torch.randn(4, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    for _ in range(3):  # the second step is timed, and ranks compare times
        model.zero_grad()
        with sw.debug.wire_meter() as meter:
            (model(inputs[torch.distributed.get_rank()]).sum(0) @ torch.arange(1.0, 6)).backward()
    each = [torch.arange(1.0, 6)[:, None] * x.sum(0) for x in inputs]
    expected = each[0].to(BF16).float()
    if len(mesh_shape) == 1:
        for other in each[1:]:
            expected = expected + other.to(BF16).float()
        assert torch.equal(full(model.weight.grad), expected / world)
    else:  # summed over the sharded mesh dim first, then over replicas
        torch.testing.assert_close(full(model.weight.grad), torch.stack([e.to(BF16).float() for e in each]).mean(0))
    assert isinstance(model.weight.grad, DTensor) and model.weight.grad.dtype == F32
    if len(mesh_shape) == 1:
        own = model.weight.to_local().numel()
        assert meter.received_bytes == 2 * (35 - own) + 2 * (world - 1) * own + agreement_bytes(model)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_bfloat16_gradients_are_summed_in_float32(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    pool.run(_gradients, math.prod(mesh_shape), mesh_shape)


def _scale_exchanges() -> None:
    """One exchange, with one message between two ranks, determines the scales of all weights."""
    mesh = get_mesh((2,))
    model: Any = shard(Mlp(), flat_fully_shard, mesh, message_format="float8")
    plain: Any = shard(Mlp(), flat_fully_shard, mesh, message_format=torch.bfloat16)
    calls = []
    for each in (model, plain):
        each.set_requires_gradient_sync(False)
        loss_of(each, batch(0)).backward()
        with sw.debug.wire_meter() as meter:
            loss_of(each, batch(1)).backward()
        calls.append(meter.by_op["c10d.recv_"][0])
    assert calls[0] == calls[1] + 1, calls
    # After a write to a shard, scales are determined again.
    model.layers[0].unshard()
    with torch.no_grad():
        model.layers[0].reshard()
        model.layers[0][0].weight.mul_(1000)
    model.layers[0].unshard()
    weight = full(model.layers[0]._shardwright_unit.unit.weights[0].sharded.detach())
    assert torch.equal(model.layers[0][0].weight, expected_of("float8", weight))
    model.reshard()


def test_one_exchange_determines_all_scales(pool: Pool) -> None:
    pool.run(_scale_exchanges, 2)


def _memory() -> None:
    """The schedule counts received messages in addition to the gathered weight."""
    mesh = get_mesh((2,))
    sizes = {}
    for wire in (None, torch.bfloat16, "float8"):
        model: Any = shard(Mlp(width=64), flat_fully_shard, mesh, message_format=wire)
        with without_packing():  # no shared messages
            loss_of(model, batch(0, width=64)).backward()
        (schedule,) = sw.fsdp.schedules(model)
        sizes[wire] = max(size for *_, size, _ in schedule.buffers)
    largest = 64 * 129 * 4 * 2 + 129 * 4
    assert sizes[None] >= largest
    assert sizes["float8"] - sizes[None] >= 2 * 64 * 129
    assert sizes[torch.bfloat16] - sizes[None] >= largest // 2


def test_schedule_counts_received_messages(pool: Pool) -> None:
    pool.run(_memory, 2)


def _other_layouts() -> None:
    """Partial resharding after the forward, and storage in a finer layout, do not change gradients."""
    mesh = get_mesh((4,))
    for options in (
        {"mp_policy": POLICIES["reduced in bfloat16"]},
        {"message_format": "float8"},
        {"message_format": BF16},
    ):
        found = []
        for layouts in (
            {},
            {"reshard_after_forward": 2},
            {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]},
        ):
            model: Any = shard(Mlp(), flat_fully_shard, mesh, {"prefetch": 0}, **options, **layouts)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                loss_of(model, batch(step)).backward()
                found.append([part(p.grad) for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
            if "reshard_after_forward" in layouts:
                (schedule,) = sw.fsdp.schedules(model)
                assert any(from_copy for *_, from_copy in schedule.gathers)
        for i, gradients in enumerate(found):
            assert all(map(torch.equal, gradients, found[i % 3])), (options, i)


def test_low_precision_gradients_do_not_depend_on_layouts(pool: Pool) -> None:
    pool.run(_other_layouts, 4)


def _tensor_parallel() -> None:
    """Scales are those of the full weight, also if tensor parallelism shards it; gradients are right as well."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    global_tensor = torch.randn(9, 64) * torch.arange(1, 65)
    inputs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    each = [2 * (x @ global_tensor.T).T @ x for x in inputs]
    for wire, cut in (("float8", 0), ("float8_rowwise", 1), ("mxfp8", 1), ("mxfp8", 0)):
        model: Any = nn.Linear(64, 9, bias=False)
        model.weight = nn.Parameter(distribute_tensor(global_tensor, mesh["tp"], [Shard(cut)]))
        sw.fully_shard(model, mesh=mesh["dp"], options=sw.fsdp.Options(message_format=wire))
        model.unshard()
        expected = expected_of(wire, global_tensor)
        assert isinstance(model.weight, DTensor) and model.weight.placements == (Shard(cut),)
        assert torch.equal(model.weight.full_tensor(), expected), (wire, cut)
        x = inputs[mesh.get_local_rank("dp")]
        out = model(DTensor.from_local(x, mesh["tp"], [Replicate()]))
        out.redistribute(mesh["tp"], [Replicate()]).to_local().square().sum().backward()
        torch.testing.assert_close(
            full(model.weight.grad), (each[0] + each[1]) / 2, rtol=0.1, atol=0.1 * float(each[0].abs().max())
        )


def test_tensor_parallel_weights_have_scales_of_the_full_weight(pool: Pool) -> None:
    pool.run(_tensor_parallel, 4)


class FrozenCodes(nn.Module):
    """A layer with frozen parameters whose dtypes cannot be averaged, such as the codes of a quantized weight."""

    DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.codes = nn.Linear(6, 5, bias=False)  # computed with, but not called
        values = [torch.randint(0, 9, (5, 6), dtype=torch.uint8)]
        values += [torch.randint(0, 9, (5,)).to(dtype) for dtype in self.DTYPES]
        self.codes.weight = nn.Parameter(values[0], requires_grad=False)
        for i, value in enumerate(values[1:]):
            self.register_parameter(f"frozen{i}", nn.Parameter(value, requires_grad=False))
        self.values = [value.clone() for value in values]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = [self.codes.weight, *(getattr(self, f"frozen{i}") for i in range(len(self.DTYPES)))]
        for parameter, value in zip(frozen, self.values, strict=True):
            assert parameter.dtype == value.dtype
            assert torch.equal(parameter.view(torch.uint8), value.view(torch.uint8))
        hidden = nn.functional.linear(self.linear(x), frozen[0].to(x.dtype))
        return hidden * sum(parameter.to(x.dtype) for parameter in frozen[1:])


def _frozen_codes(mesh_shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    unsharded = FrozenCodes()
    model = flat_fully_shard(FrozenCodes(), mesh=get_mesh(mesh_shape), **arguments)
    for step in range(4):
        model.zero_grad()
        unsharded.zero_grad()
        loss_of(model, batch(step, width=6)).backward()
        whole_loss(unsharded, step, width=6).backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            assert p.dtype == q.dtype and p.requires_grad == q.requires_grad and (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"chunked": True}, {"reshard_after_forward": False}], ids=str)
def test_frozen_weights_have_any_dtype(pool: Pool, mesh_shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    pool.run(_frozen_codes, math.prod(mesh_shape), mesh_shape, arguments)


def _invalid_formats() -> None:
    mesh = get_mesh((2,))
    linear = nn.Linear(66, 4)

    def refuses(text: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(linear, mesh=mesh, **options)

    refuses("message_format must be torch.bfloat16, .* got 'int8'", message_format="int8")
    refuses("message_format must be .*, got torch.float64", message_format=torch.float64)
    refuses("message_format must be .*, got 'int8'", message_format=lambda p: "int8")
    refuses("mp_policy must be a .*MixedPrecisionPolicy or None, got a dtype", mp_policy=torch.bfloat16)
    refuses(
        r"message_format must not be 'mxfp8' .* blocks of 32 .*, got weight of shape \(4, 66\), placed as S\(1\)",
        message_format="mxfp8",
        shard_placement_fn=lambda p: Shard(p.ndim - 1),
    )
    assert not isinstance(linear.weight, DTensor), "a refused module is left as it was"
    sw.fully_shard(linear, mesh=mesh, options=sw.fsdp.Options(message_format=lambda p: "mxfp8" if p.ndim > 1 else None))
    linear(torch.ones(1, 66)).sum().backward()


def test_invalid_formats_raise(pool: Pool) -> None:
    pool.run(_invalid_formats, 2)
