"""The shortcut of a repeated `DTensor.redistribute` returns what PyTorch's method returned the first time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pairs import two_dims
from pool import Pool
from shardwright.dtensor import shortcut

WORLD = 4
SHAPE = (7, 5)
# Pairs that stock gets right.
PAIRS = two_dims("gather one", "gather both", "swap", "sum and cut", "cut one", "cut both", "hand over", "nothing")


def _source(src: list[str]) -> DTensor:
    return dtensors.distribute(oracle.global_tensor(SHAPE, torch.float32, 3, True), get_mesh((2, 2)), src)


def _look(result: DTensor, source: DTensor) -> dict[str, Any]:
    local = result._local_tensor
    return {
        "spec": result._spec,
        "shape": result.shape,
        "stride": result.stride(),
        "requires_grad": result.requires_grad,
        "is_leaf": result.is_leaf,
        "local strides": local.stride(),
        "aliases": local is source._local_tensor,
        "values": local.tolist(),
    }


def _repeated(src: list[str], dst: list[str]) -> list[dict[str, Any]]:
    """Looks at results of stock, of three of our calls (the last two by the shortcut), and of stock again."""
    source, placements = _source(src), dtensors.to_placements(dst)
    looks = [_look(source.redistribute(placements=placements), source)]
    sw.reset_stats()
    with sw.enabled(strict=True):
        for _ in range(3):
            looks.append(_look(source.redistribute(placements=placements), source))
    looks.append(_look(source.redistribute(placements=placements), source))
    assert sw.stats()["calls"] == (3 if src != dst else 0)
    return looks


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_repeated_redistributes_equal_stock(pool: Pool, src: list[str], dst: list[str]) -> None:
    for looks in pool.run(_repeated, WORLD, src, dst):
        assert all(look == looks[0] for look in looks[1:])


def _argument_forms() -> None:
    source = _source(["S(0)", "S(1)"])
    mesh = source.device_mesh
    expected = source.redistribute(mesh, [Shard(1), Replicate()])._local_tensor
    with sw.enabled(strict=True):
        for _ in range(3):
            for result in (
                source.redistribute(mesh, [Shard(1), Replicate()]),
                source.redistribute(mesh, placements=(Shard(-1), Replicate())),
                source.redistribute(device_mesh=mesh, placements=[Shard(-1), Replicate()]),
                source.redistribute(placements=[Shard(1), Replicate()], forward_dtype=torch.float32),
            ):
                assert torch.equal(result._local_tensor, expected)
                assert result.placements == (Shard(1), Replicate())
            narrow = source.redistribute(placements=[Shard(1), Replicate()], forward_dtype=torch.bfloat16)
            assert narrow.dtype is torch.bfloat16 and torch.equal(narrow._local_tensor, expected.bfloat16())
            later = source.redistribute(placements=[Shard(1), Replicate()], async_op=True)
            assert isinstance(later._local_tensor, AsyncCollectiveTensor)
            assert torch.equal(later._local_tensor.wait(), expected)
            with pytest.raises(RuntimeError, match="placements is needed"):
                source.redistribute(mesh)


def test_argument_forms_give_same_result(pool: Pool) -> None:
    pool.run(_argument_forms, WORLD)


def _gradients() -> None:
    source = _source(["S(0)", "S(1)"])
    placements = [Replicate(), Shard(0)]
    leaf = source.detach().requires_grad_()
    leaf.redistribute(placements=placements).sum().backward()
    assert leaf.grad is not None
    expected = leaf.grad.full_tensor()
    with sw.enabled(strict=True):
        for _ in range(2):
            assert not source.redistribute(placements=placements).requires_grad
            with torch.no_grad():
                assert not leaf.redistribute(placements=placements).requires_grad
            moved = leaf.redistribute(placements=placements)
            assert moved.requires_grad and moved.grad_fn is not None
            leaf.grad = None
            moved.sum().backward()
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.full_tensor(), expected)


def test_autograd_records_repeated_redistributes(pool: Pool) -> None:
    pool.run(_gradients, WORLD)


def _look_at_backward(src: list[str], dst: list[str], **kwargs: Any) -> dict[str, Any]:
    """Looks at a redistribute, at the gradient in a hook, at its backward and at the second backward."""
    leaf = _source(src).detach().requires_grad_()
    seen = []
    moved = leaf.redistribute(placements=dtensors.to_placements(dst), **kwargs)
    moved.register_hook(lambda gradient: seen.append((gradient._spec, gradient._local_tensor.tolist())))
    weight = oracle.global_tensor(SHAPE, moved.dtype, 4, True)
    total = (moved * dtensors.distribute(weight, get_mesh((2, 2)), dst)).square().sum()
    (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
    total.backward(retain_graph=True)
    assert leaf.grad is not None
    once = leaf.grad._local_tensor.clone()
    total.backward(retain_graph=True)
    looks = {
        "result": (moved._spec, moved.requires_grad, moved.is_leaf, moved.dtype, moved._local_tensor.tolist()),
        "node": (moved.grad_fn.name(), len(moved.grad_fn.next_functions)),  # type: ignore[union-attr]
        "grad": (leaf.grad._spec, leaf.grad.dtype, leaf.grad._local_tensor.stride(), once.tolist()),
        "twice": torch.equal(leaf.grad._local_tensor, 2 * once),
        "hook": seen,
        "with graph": (gradient._spec, gradient._local_tensor.tolist()),
    }
    if hasattr(torch_redistribute, "NestedRedistribute"):  # before torch 2.12 collectives of stock cut the graph here
        leaf.grad = None
        gradient.sum().backward()
        assert leaf.grad is not None
        looks["again"] = (leaf.grad._spec, leaf.grad._local_tensor.tolist())
    return looks


def _gradients_repeated(src: list[str], dst: list[str], kwargs: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    looks = [_look_at_backward(src, dst, **kwargs)]
    sw.reset_stats()
    with sw.enabled(strict=True):
        looks += [_look_at_backward(src, dst, **kwargs) for _ in range(3)]
    return looks, sw.stats()["cache_hits"]


@pytest.mark.parametrize(("src", "dst"), [pair for pair in PAIRS if "P(sum)" not in pair[0]])
@pytest.mark.parametrize("kwargs", [{}, {"async_op": True}, {"backward_dtype": torch.bfloat16}])
def test_repeated_gradients_equal_stock(pool: Pool, src: list[str], dst: list[str], kwargs: dict[str, Any]) -> None:
    for looks, hits in pool.run(_gradients_repeated, WORLD, src, dst, kwargs):
        for look in looks[1:]:
            assert look == looks[0]
        assert hits > 0


def _gradients_of_sums() -> None:
    """The gradient of a pending source is replicated, not pending."""
    source = _source(["P(sum)", "S(0)"])
    grads = []
    for engine in (contextlib.nullcontext(), sw.enabled(strict=True)):
        with engine:
            for _ in range(3):
                leaf = source.detach().requires_grad_()
                leaf.redistribute(placements=[Shard(1), Replicate()]).square().sum().backward()
                assert leaf.grad is not None
                grads.append((leaf.grad._spec, leaf.grad._local_tensor.tolist()))
    assert all(grad == grads[0] for grad in grads)
    assert grads[0][0].placements == (Replicate(), Shard(0))


def test_gradients_of_pending_sums_are_replicated(pool: Pool) -> None:
    pool.run(_gradients_of_sums, WORLD)


def _mode_of_the_call() -> None:
    """An autograd node keeps the mode of its own forward, not that of an earlier equal call."""
    leaf = _source(["S(0)", "S(1)"]).detach().requires_grad_()
    for strict in (False, False, True, True, False):
        with sw.enabled(strict=strict):
            moved = leaf.redistribute(placements=[Replicate(), Shard(0)])
        assert moved.grad_fn._shardwright_mode.strict == strict  # type: ignore[union-attr]


def test_backward_keeps_mode_of_its_forward(pool: Pool) -> None:
    pool.run(_mode_of_the_call, WORLD)


def _switched_off_before_backward() -> None:
    source = _source(["S(0)", "S(1)"])
    stock = source.detach().requires_grad_()
    stock.redistribute(placements=[Replicate(), Shard(0)]).sum().backward()
    assert stock.grad is not None
    sw.enable(strict=True)
    try:
        for _ in range(2):
            leaf = source.detach().requires_grad_()
            moved = leaf.redistribute(placements=[Replicate(), Shard(0)])
    finally:
        sw.disable()
    sw.reset_stats()
    moved.sum().backward()
    assert sw.stats()["calls"] == 0, "after disable every backward is PyTorch's"
    assert leaf.grad is not None and leaf.grad._spec == stock.grad._spec


def test_backward_after_disable_is_stock(pool: Pool) -> None:
    pool.run(_switched_off_before_backward, WORLD)


def _other_process_group() -> None:
    """A shortcut to executables of a destroyed process group would hang or fail."""
    source = _source(["S(0)", "R"])
    with sw.enabled(strict=True):
        source.redistribute(placements=[Replicate(), Replicate()])
    assert len(shortcut._cached) == 1, "what belonged to the earlier process group is forgotten"


def test_shortcuts_are_dropped_with_process_group(pool: Pool) -> None:
    pool.run(_gradients, WORLD)
    pool.run(dist.get_rank, 2)  # in a process group of its own
    pool.run(_other_process_group, WORLD)


def _pinned() -> None:
    mesh = get_mesh((2, 2))
    source = _source(["S(0)", "S(1)"])
    src, dst = (sw.Layout(mesh, SHAPE, p) for p in (["S(0)", "S(1)"], ["R", "R"]))
    detour = sw.plan(src, dst, backend="gloo", through=[sw.Layout(mesh, SHAPE, ["S(1)", "S(0)"])])
    received = []
    with sw.enabled(strict=True):
        for change in (lambda: None, lambda: sw.pin(detour), lambda: sw.unpin(detour)):
            change()
            for _ in range(2):
                with sw.debug.wire_meter() as meter:
                    result = source.redistribute(placements=[Replicate(), Replicate()])
                received.append(meter.received_bytes)
                assert torch.equal(result._local_tensor, oracle.global_tensor(SHAPE, torch.float32, 3, True))
    assert received[0] == received[1] == received[4] == received[5]
    assert detour.wire_bytes(dist.get_rank()) == received[2] == received[3]
    assert detour.wire_bytes_sum > sw.plan(src, dst, backend="gloo").wire_bytes_sum
    with pytest.raises(ValueError, match="plan must be a pinned plan .same layouts and lowering., got"):
        sw.unpin(detour)
    with pytest.raises(ValueError, match="plan must be a Plan, got"):
        sw.pin("R")


@pytest.mark.cpu_only("counts what Gloo's lowering sends")
def test_shortcut_uses_pinned_plans(pool: Pool) -> None:
    pool.run(_pinned, WORLD)
