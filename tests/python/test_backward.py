"""Gradients of redistributes: first and second order, with other dtypes, and after the drop-in was disabled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.tensor import Replicate, Shard, _redistribute

import dtensors
import meshes
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4
MESHES = [(4,), (2, 2)]
Placements = tuple[str, ...]

# Before 2.15 PyTorch has no second derivative of a redistribute: autograd raises an error.
STOCK_IS_TWICE_DIFFERENTIABLE = hasattr(_redistribute, "NestedRedistribute")


def _pairs(ndim: int) -> list[tuple[Placements, Placements]]:
    sources = list(itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=ndim))
    targets = list(itertools.product(("R", "S(0)", "S(1)"), repeat=ndim))
    return [(src, dst) for src in sources for dst in targets]


def _replicated(placements: Placements) -> Placements:
    return tuple("R" if oracle.reduce_op(p) else p for p in placements)


def _check_gradients(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    mesh = get_mesh(mesh_shape)
    tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
    gradient = oracle.global_tensor(shape, torch.float32, 2)
    pairs = _pairs(len(mesh_shape))
    for src, dst in pairs:
        local = dtensors.my_local(tensor, mesh, src).requires_grad_()
        with sw.enabled(strict=True):
            moved = dtensors.wrap(local, mesh, shape, src).redistribute(mesh, dtensors.to_placements(dst))
            moved.to_local().backward(dtensors.my_local(gradient, mesh, dst))
        wrong = oracle.difference(local.grad, dtensors.my_local(gradient, mesh, _replicated(src)))
        assert wrong is None, f"{src} -> {dst}: {wrong}"
    return len(pairs)


@pytest.mark.parametrize("shape", [(8, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_gradients_of_every_pair(pool: Pool, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert pool.run(_check_gradients, WORLD, mesh_shape, shape)[0] >= 12


def _second_gradient(src: str, dst: str) -> torch.Tensor:
    """Returns d/dx of the squared gradient of sum(x ** 3)."""
    mesh = get_mesh((4,))
    tensor = oracle.global_tensor((5, 7), torch.float32, 3, reducible=True)
    local = dtensors.my_local(tensor, mesh, [src]).requires_grad_()
    moved = dtensors.wrap(local, mesh, tensor.shape, [src]).redistribute(mesh, dtensors.to_placements([dst])).to_local()
    (first,) = torch.autograd.grad((moved**3).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), local)
    return second


def _twice(src: str, dst: str) -> None:
    if not STOCK_IS_TWICE_DIFFERENTIABLE:
        # As in stock, autograd raises and never returns a wrong number. Strict mode would refuse the fallback to stock.
        with sw.enabled(), pytest.raises(RuntimeError, match="not have been used in the graph"):
            _second_gradient(src, dst)
        return
    with sw.enabled(strict=True):
        second = _second_gradient(src, dst)
    mesh = get_mesh((4,))
    tensor = oracle.global_tensor((5, 7), torch.float32, 3, reducible=True)
    # The first gradient is 3 x^2, so the square's gradient is 36 x^3.
    expected = dtensors.my_local(36 * tensor**3, mesh, _replicated((src,)))
    wrong = oracle.difference(second, expected, rounded=True)
    assert wrong is None, wrong


@pytest.mark.parametrize(
    ("src", "dst"),
    [("S(0)", "R"), ("S(0)", "S(1)"), ("S(1)", "R"), ("R", "S(0)"), ("P(sum)", "R"), ("P(sum)", "S(0)")],
)
def test_twice_differentiable(pool: Pool, src: str, dst: str) -> None:
    pool.run(_twice, WORLD, src, dst)


def _dtypes(src: str, dst: str, forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    mesh = get_mesh((4,))
    shape = (6, 7)
    tensor = oracle.global_tensor(shape, torch.float32, 4, reducible=True)
    gradient = oracle.global_tensor(shape, torch.float32, 5, reducible=True)
    results = []
    for engine in (False, True):
        local = dtensors.my_local(tensor, mesh, [src]).requires_grad_()

        def move(local: torch.Tensor = local) -> torch.Tensor:
            source = dtensors.wrap(local, mesh, shape, [src])
            target = dtensors.to_placements([dst])
            moved = source.redistribute(mesh, target, forward_dtype=forward, backward_dtype=backward)
            assert moved.dtype == moved.to_local().dtype == (forward or torch.float32)
            moved.to_local().backward(dtensors.my_local(gradient, mesh, [dst]).to(moved.dtype))
            return moved.to_local().detach()

        if engine:
            with sw.enabled(strict=True):
                result = move()
        else:
            result = move()
        assert local.grad is not None and local.grad.dtype == torch.float32
        results.append((result, local.grad))
    for ours, stock in zip(results[1], results[0], strict=True):
        wrong = oracle.difference(ours, stock, rounded=True)
        assert wrong is None, wrong
    expected = dtensors.my_local(tensor, mesh, [dst]).to(forward or torch.float32)
    assert oracle.difference(results[1][0], expected, rounded=True) is None


@pytest.mark.parametrize("forward", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backward", [None, torch.bfloat16], ids=str)
def test_gradients_with_dtype_arguments(pool: Pool, forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    for src, dst in [("S(0)", "R"), ("S(0)", "S(1)"), ("P(sum)", "S(0)"), ("P(sum)", "R"), ("R", "S(1)")]:
        pool.run(_dtypes, WORLD, src, dst, forward, backward)


def _full_tensor(mesh_shape: tuple[int, ...], src: Placements) -> None:
    mesh = get_mesh(mesh_shape, flatten="all")
    tensor = oracle.global_tensor((7, 9), torch.float32, 6, reducible=True)
    gradient = oracle.global_tensor((7, 9), torch.float32, 7)
    local = dtensors.my_local(tensor, mesh, src).requires_grad_()
    with sw.enabled(strict=True):
        full = dtensors.wrap(local, mesh, tensor.shape, src).full_tensor()
    assert type(full) is torch.Tensor and oracle.difference(full.detach(), tensor) is None
    full.backward(gradient.to(meshes.device))
    assert oracle.difference(local.grad, dtensors.my_local(gradient, mesh, _replicated(src))) is None


@pytest.mark.parametrize(
    ("mesh_shape", "src"),
    [
        ((4,), ("S(0)",)),
        ((4,), ("S(1)",)),
        ((4,), ("P(sum)",)),
        ((2, 2), ("S(0)", "S(0)")),
        ((2, 2), ("S(1)", "S(0)")),
        ((2, 2), ("P(sum)", "S(1)")),
        ((2, 2), ("R", "R")),
    ],
    ids=str,
)
def test_gradients_of_full_tensor(pool: Pool, mesh_shape: tuple[int, ...], src: Placements) -> None:
    pool.run(_full_tensor, WORLD, mesh_shape, src)


def _count(call: Callable[[], object]) -> tuple[int, int]:
    """Returns the numbers of engine calls and of stock's collectives that `call` makes."""
    sw.reset_stats()
    with sw.debug.wire_meter() as meter:
        call()
    stock = sum(calls for name, (calls, _) in meter.by_op.items() if name.startswith("_c10d_functional"))
    return int(sw.stats()["calls"]), stock


SHAPE = (8, 8)


def _moved(mesh_shape: tuple[int, ...]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Moves rows to columns. Returns this rank's rows and a function that runs the backward."""
    mesh = get_mesh(mesh_shape)
    local = dtensors.my_local(oracle.global_tensor(SHAPE, torch.float32, 1), mesh, ["S(0)"]).requires_grad_()
    moved = dtensors.wrap(local, mesh, SHAPE, ["S(0)"]).redistribute(placements=[Shard(1)]).to_local()
    gradient = dtensors.my_local(_gradient(), mesh, ["S(1)"])
    return local, lambda: moved.backward(gradient)


def _gradient() -> torch.Tensor:
    return oracle.global_tensor(SHAPE, torch.float32, 2)


def _check_moved(local: torch.Tensor, mesh_shape: tuple[int, ...]) -> None:
    wrong = oracle.difference(local.grad, dtensors.my_local(_gradient(), get_mesh(mesh_shape), ["S(0)"]))
    assert wrong is None, wrong


def _mode_of_forward() -> None:
    """A forward with the engine has a backward with the engine, wherever that runs. Without it, neither has."""
    with sw.enabled(strict=True):
        local, backward = _moved((4,))
    calls, stock = _count(backward)
    assert calls == 1 and stock == 0, "the backward forgot the engine of its forward"
    _check_moved(local, (4,))
    local, backward = _moved((4,))
    with sw.enabled(strict=True):
        calls, stock = _count(backward)
    assert calls == 0 and stock == 1, "the backward of a stock forward was taken over"
    _check_moved(local, (4,))


@pytest.mark.cpu_only("meters do not see what runs on autograd's threads")
def test_backward_uses_the_mode_of_its_forward(pool: Pool) -> None:
    pool.run(_mode_of_forward, WORLD)


def _in_another_thread() -> None:
    with sw.enabled(strict=True):
        local, backward = _moved((4,))
    thread = threading.Thread(target=backward)
    sw.reset_stats()
    thread.start()
    thread.join()
    _check_moved(local, (4,))
    assert sw.stats()["calls"] == 1


def test_backward_in_another_thread(pool: Pool) -> None:
    pool.run(_in_another_thread, WORLD)


def _checkpointed() -> None:
    """A checkpoint runs the forward again inside the backward. Compared with autograd of the global tensors."""
    mesh = get_mesh((4,))
    full, weights, gradient = (oracle.global_tensor(SHAPE, torch.float32, seed) for seed in (3, 4, 5))
    weight = weights.to(meshes.device).requires_grad_()
    local = dtensors.my_local(full, mesh, ["S(0)"]).requires_grad_()

    def block(local: torch.Tensor) -> torch.Tensor:
        source = dtensors.wrap(local, mesh, SHAPE, ["S(0)"])
        gathered = source.redistribute(placements=[Replicate()]).to_local()
        return (gathered @ weight).relu()

    with sw.enabled(strict=True):
        result = torch.utils.checkpoint.checkpoint(block, local, use_reentrant=False)
        result.backward(gradient.to(meshes.device))
    for tensor in (full, weights):
        tensor.requires_grad_()
    (full @ weights).relu().backward(gradient)
    torch.testing.assert_close(local.grad.cpu(), dtensors.my_local(full.grad, mesh, ["S(0)"]).cpu())
    torch.testing.assert_close(weight.grad.cpu(), weights.grad)


def test_checkpointed_block(pool: Pool) -> None:
    pool.run(_checkpointed, WORLD)
