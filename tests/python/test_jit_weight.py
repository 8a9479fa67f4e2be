"""`sw.fsdp.jit_weight`: weights that modules gather themselves, for a forward and again for its backward."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshes
import shardwright as sw
from pool import Pool

ROWS, COLUMNS = 7, 5  # uneven over two, three and four ranks


def whole_weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(meshes.device)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(10 + rank)).to(meshes.device)


def part(tensor: torch.Tensor, layout: sw.Layout) -> torch.Tensor:
    """Returns this rank's shard, made by torch.chunk for each placement S, one mesh dim after the other."""
    coordinate = layout.mesh.coordinate(dist.get_rank())
    assert coordinate is not None
    for placement, size, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        if placement != "R":
            dim = int(placement[2])
            chunks = tensor.chunk(size, dim)
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor.clone()


def loss_of(weight: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses the weight in two blocks: in two operations of the first, as a view in the second."""
    with weight as full:
        y = F.linear(torch.tanh(x), full) + F.linear(x.square(), full)
    with weight as full:
        z = y @ full[:, 1:3]
    return z.square().mean()


class Unsharded:
    """The interface of a jit_weight around an unsharded weight."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(whole_weight())

    def __enter__(self) -> torch.Tensor:
        return self.parameter

    def __exit__(self, *_: object) -> None:
        pass


def _trains(mesh_shape: tuple[int, ...], placements: list[str]) -> None:
    mesh = sw.Mesh(dict(zip("ab", mesh_shape)))
    shards = sw.Layout(mesh, (ROWS, COLUMNS), placements)
    use = sw.Layout(mesh, (ROWS, COLUMNS), ["R"] * len(mesh_shape))
    world, rank = dist.get_world_size(), dist.get_rank()
    sharded, expected = sw.fsdp.jit_weight(part(whole_weight(), shards), shards, use), Unsharded()
    for step in range(3):
        for weight, ranks in ((sharded, [rank]), (expected, range(world))):
            weight.parameter.grad = None
            loss = torch.stack([loss_of(weight, batch_of(r + step)) for r in ranks]).mean()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            gradient = weight.parameter.grad
            assert gradient is not None
            if weight is expected:
                gradient = part(gradient, shards)
                torch.testing.assert_close(sharded.parameter.grad, gradient, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                weight.parameter -= 0.1 * weight.parameter.grad
        with torch.no_grad(), sharded as full:
            torch.testing.assert_close(full, expected.parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mesh_shape, placements",
    [((1,), ["S(0)"]), ((2,), ["R"]), ((3,), ["S(1)"]), ((2, 2), ["R", "S(0)"]), ((2, 2), ["S(0)", "S(1)"])],
    ids=str,
)
def test_trains_as_an_unsharded_weight(pool: Pool, mesh_shape: tuple[int, ...], placements: list[str]) -> None:
    pool.run(_trains, torch.Size(mesh_shape).numel(), mesh_shape, placements)


def _gathers() -> None:
    """Gathers once for each block and backward, reduces nothing if ranks have the same data, and frees the memory."""
    mesh = sw.Mesh({"a": 2})
    shards, use = (sw.Layout(mesh, (8, 8), [p]) for p in ("S(0)", "R"))
    x = torch.ones(2, 8, device=meshes.device, requires_grad=True)
    for grad, reduction in ((None, 128), (use, 0)):
        weight = sw.fsdp.jit_weight(torch.ones(4, 8, device=meshes.device), shards, use, grad=grad)
        with sw.debug.wire_meter() as meter:
            with weight as full:
                y = F.linear(F.linear(x, full), full)
            gathered = weakref.ref(full)
            del full
            assert gathered() is None, "the graph does not hold it"
            assert meter.received_bytes == 128
            y.sum().backward()
            assert meter.received_bytes == 256 + reduction
        # Each weight of nested blocks is released and gathered again, though only the inner block's hooks run.
        other = sw.fsdp.jit_weight(torch.ones(4, 8, device=meshes.device), shards, use, grad=grad)
        with weight as full, other as second:
            y = F.linear(F.linear(x, full), second)
        gathered = weakref.ref(full), weakref.ref(second)
        del full, second
        assert gathered[0]() is None and gathered[1]() is None, "the graph does not hold them"
        with sw.debug.wire_meter() as meter:
            y.sum().backward()
        assert meter.received_bytes == 2 * (128 + reduction)
        with sw.debug.wire_meter() as meter:
            weight.prefetch()
            with weight as full:
                assert torch.equal(full.cpu(), torch.ones(8, 8))
            assert meter.received_bytes == 128
        assert weight.materialize() is weight._held
        weight.release()
        assert weight._held is None
    with weight as full:
        y = F.linear(x, full)
    (first_order,) = torch.autograd.grad(y.square().sum(), [weight.parameter], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first_order.sum().backward()
    # Frozen weights.
    weight.parameter.requires_grad_(False)
    with weight as full:
        y = F.linear(x, full)
    y.sum().backward()
    assert weight.parameter.grad is not None and torch.equal(x.grad[0], x.grad[1])


def test_gathers_once_per_block(pool: Pool) -> None:
    pool.run(_gathers, 2)


def _writes() -> None:
    """The weight is written between a forward and its backward, and after it was prefetched."""
    mesh = sw.Mesh({"a": 2})
    shards, use = (sw.Layout(mesh, (8, 8), [p]) for p in ("S(0)", "R"))
    x = torch.ones(2, 8, device=meshes.device, requires_grad=True)
    given = sw.fsdp.jit_weight(torch.ones(4, 8, device=meshes.device), shards, use)
    for weight in (given, copy.deepcopy(given)):
        weight.parameter.grad = -torch.ones_like(weight.parameter)

        def double(weight: Any = weight) -> None:
            with torch.no_grad():
                weight.parameter.mul_(2)

        # Kernels of fused optimizers do not increment the parameter's version.
        fused, foreach = (torch.optim.SGD([weight.parameter], 1.0, **{how: True}) for how in ("fused", "foreach"))
        for write, value in ((double, 2), (fused.step, 3), (foreach.step, 4), (fused.step, 5)):
            with weight as full:
                y = F.linear(x, full)
            weight.prefetch()
            write()
            with pytest.raises(RuntimeError, match="the weight was written between"):
                y.sum().backward()
            assert torch.equal(weight.materialize().cpu(), value * torch.ones(8, 8))


def test_writes_are_seen(pool: Pool) -> None:
    pool.run(_writes, 2)


@runtime_checkable
class DistributedWeight(Protocol):
    """A copy of TransformerEngine's protocol."""

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any: ...
    def materialize_group_for_backward(self) -> Any: ...
    def finalize_group_grads(self, wgrads: Any) -> Any: ...
    def grad_buffer(self) -> torch.Tensor: ...


class Linear(torch.autograd.Function):
    """A linear layer that treats its weight as TransformerEngine's layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.materialize_group_for_forward().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x, _), weight = ctx.saved_tensors, ctx.weight
        grad_of_weight = torch.matmul(gradient.T, x, out=weight.grad_buffer())
        return gradient @ weight.materialize_group_for_backward(), weight.finalize_group_grads(grad_of_weight)


def _protocol() -> None:
    mesh = sw.Mesh({"a": 3})
    shards, use = (sw.Layout(mesh, (ROWS, COLUMNS), [p]) for p in ("S(0)", "R"))
    weight = sw.fsdp.jit_weight(nn.Parameter(part(whole_weight(), shards)), shards, use)
    parameter = weight.parameter
    assert isinstance(parameter, DistributedWeight) and isinstance(parameter, torch.Tensor)
    assert not isinstance(nn.Parameter(torch.ones(2)), DistributedWeight)
    x = batch_of(dist.get_rank()).requires_grad_()
    Linear.apply(x, parameter).square().sum().backward()
    full = nn.Parameter(whole_weight())
    sum(F.linear(batch_of(rank), full).square().sum() for rank in range(3)).backward()
    assert full.grad is not None
    torch.testing.assert_close(parameter.grad, part(full.grad / 3, shards))


def test_weights_have_the_protocol_of_transformer_engine(pool: Pool) -> None:
    pool.run(_protocol, 3)


def _invalid_arguments() -> None:
    mesh = sw.Mesh({"a": 2})
    shards, use = (sw.Layout(mesh, (4, 4), [p]) for p in ("S(0)", "R"))
    pending = sw.Layout(mesh, (4, 4), ["P(sum)"])
    local = torch.ones(2, 4)

    def refuses(text: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            sw.fsdp.jit_weight(*args, **options)

    refuses("local must be a plain torch.Tensor, got a str", "local", shards, use)
    refuses("local must have shape \\(2, 4\\) .*, got shape \\(4, 4\\)", torch.ones(4, 4), shards, use)
    refuses("local must have .*, got .* dtype torch.float64", local.double(), shards, use)
    refuses("shards must be a layout without pending reductions, got", local, pending, use)
    refuses("use must be a layout without pending reductions, got", local, shards, pending)
    refuses("shards", local, "S(0)", use)
    refuses("use must be a layout with the shape, .*, got", local, shards, sw.Layout(mesh, (4, 5), ["R"]))
    other_mesh = sw.Layout(sw.Mesh({"b": 2}), (4, 4), ["R"])
    refuses("grad must be a layout with the shape, .* mesh of shards .*, got", local, shards, use, grad=other_mesh)
    refuses("group must be a torch.distributed.ProcessGroup, got a str", local, shards, use, group="all")
    other = sw.Mesh({"a": 1}, [1 - dist.get_rank()])
    on_other = [sw.Layout(other, (2, 4), [p]) for p in ("S(0)", "R")]
    refuses(r"shards must be on a mesh that contains this rank \(\d\), got", local, *on_other)


@pytest.mark.cpu_only("refusals are the same everywhere")
def test_invalid_arguments_raise(pool: Pool) -> None:
    pool.run(_invalid_arguments, 2)
