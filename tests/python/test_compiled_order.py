"""Redistributes run in the same order on all ranks, even if uneven shards make compiled graphs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._higher_order_ops.effects import with_effects
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import oracle
import shardwright as sw
from compilers import fresh_compilers, recording
from dtensors import distribute
from meshes import get_mesh
from pool import Pool
from shardwright.attention import scaled_dot_product_attention


def _whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return oracle.global_tensor(shape, torch.float64, seed, True)


def _pending(shape: tuple[int, ...], seed: int, mesh: Any) -> DTensor:
    """Returns a pending sum of parts that differ between ranks."""
    local = _whole(shape, seed) * (dist.get_rank() + 1)
    return DTensor.from_local(local, mesh, [Partial()], run_check=False)


def _sums(a: DTensor, b: DTensor) -> tuple[DTensor, ...]:
    """Reduces [1, 3000] and [2, 4000]: most ranks get no rows of one or both results."""
    return (a + 1).redistribute(placements=[Shard(0)]).cos(), (b * 2).redistribute(placements=[Shard(0)]).sin()


def _reduced_at_last(a: DTensor, b: DTensor) -> tuple[DTensor, ...]:
    """Reduces as `_sums`. A rank with an empty result has nothing to compute from it."""
    return a.redistribute(placements=[Shard(0)]).sum(1), b.redistribute(placements=[Shard(0)]).sum(1)


def _there_and_back(a: DTensor, b: DTensor) -> tuple[DTensor, ...]:
    """Several redistributes, and a product in which an empty part of one operand needs no part of the other."""
    rows, columns = a.redistribute(placements=[Shard(0)]), b.redistribute(placements=[Shard(1)])
    weight = columns.cos().redistribute(placements=[Replicate()])
    product = rows.sin().redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)]) @ weight[:, :3000].t()
    return product, columns.redistribute(placements=[Shard(0)]) * 2, product.redistribute(placements=[Replicate()])


def _checkpointed(a: DTensor, b: DTensor) -> tuple[DTensor, ...]:
    result: tuple[DTensor, ...] = checkpoint(_there_and_back, a, b, use_reentrant=False)
    return (*_sums(a, b), *(tensor.cos() for tensor in result))


def _one_order(function: Callable[..., tuple[DTensor, ...]], with_gradients: bool) -> None:
    mesh = get_mesh((dist.get_world_size(),))
    given = [_pending((1, 3000), 1, mesh), _pending((2, 4000), 2, mesh)]

    def run(call: Callable[..., tuple[DTensor, ...]]) -> list[torch.Tensor]:
        inputs = [tensor.detach().clone().requires_grad_(with_gradients) for tensor in given]
        results = call(*inputs)
        gradients: Any = ()
        if with_gradients:
            loss = sum(result.redistribute(placements=[Replicate()]).to_local().square().sum() for result in results)
            gradients = torch.autograd.grad(loss, inputs)
        return [tensor.full_tensor().detach() for tensor in (*results, *gradients)]

    expected = run(function)  # with PyTorch's redistributes
    with sw.enabled(strict=True), fresh_compilers():
        compiled = torch.compile(function, fullgraph=True)
        for _ in range(2):
            for result, right in zip(run(compiled), expected, strict=True):
                torch.testing.assert_close(result, right)


@pytest.mark.parametrize(
    ("function", "with_gradients", "world"),
    [
        (_sums, False, 2),
        (_reduced_at_last, True, 2),
        (_there_and_back, True, 4),
        (_checkpointed, True, 2),
        (_checkpointed, True, 4),
    ],
)
def test_inductor_keeps_one_order(pool: Pool, function: Callable[..., Any], with_gradients: bool, world: int) -> None:
    pool.run(_one_order, world, function, with_gradients, timeout_seconds=400)


def _starts_in_backward(rows: int) -> list[str]:
    """Returns the starts of redistributes in the backward graph of a checkpointed function."""
    mesh = get_mesh((2,))
    graphs: list[str] = []

    def block(x: DTensor, y: DTensor) -> DTensor:
        return x.sin().redistribute(placements=[Replicate()]).cos() * y.redistribute(placements=[Replicate()]).cos()

    def function(x: DTensor, y: DTensor) -> DTensor:
        result: DTensor = checkpoint(block, x, y, use_reentrant=False)
        return result.sin()

    given = [distribute(_whole((rows, 4), seed), mesh, ["S(0)"]).requires_grad_() for seed in (1, 2)]
    wanted = torch.autograd.grad(function(*given).square().sum().full_tensor(), given)
    with sw.enabled(strict=True), fresh_compilers():
        compiled = torch.compile(function, backend=recording(graphs), fullgraph=True)
        gradients = torch.autograd.grad(compiled(*given).square().sum().full_tensor(), given)
    for gradient, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.full_tensor(), right.full_tensor())
    forward, backward = graphs
    assert forward.count("redistribute_start") == forward.count("redistribute_wait") == 2
    return [word for word in backward.split() if "redistribute_start" in word]


def test_checkpoints_recompute_redistributes_only_if_all_ranks_do(pool: Pool) -> None:
    for even in pool.run(_starts_in_backward, 2, 6):
        assert sum("recomputable" in line for line in even) == 2
    for uneven in pool.run(_starts_in_backward, 2, 5):
        assert not any("recomputable" in line for line in uneven)


# ---- CUDA graphs


def _operator_of(node: BaseSchedulerNode) -> torch._ops.OpOverload | None:
    """Returns our operator that this node of inductor's runs, or takes a tensor of its results from."""
    traced = getattr(node.node, "fx_node", None)
    target = traced.args[1] if traced is not None and traced.target is with_effects else getattr(traced, "target", None)
    return target if getattr(target, "namespace", None) == "shardwright" else None


def _reasons_against_cuda_graphs() -> None:
    """Asks inductor about each operator of ours as if it were on a GPU, in code compiled with CUDA graphs."""
    mesh, world = get_mesh((2,)), dist.get_world_size()
    reasons: dict[tuple[str, str], str | None] = {}
    decide = Scheduler.should_partition

    def recorded(scheduler: Scheduler, node: BaseSchedulerNode) -> Any:
        if operator := _operator_of(node):
            with mock.patch.object(BaseSchedulerNode, "is_gpu", lambda _: True):
                reasons[operator.name(), type(node.node).__name__] = decide(scheduler, node)
        return decide(scheduler, node)

    def multiply(x: DTensor, weight: torch.Tensor) -> torch.Tensor:
        part = x.redistribute(placements=[Shard(0)]).to_local()
        gathered: torch.Tensor = sw.all_gather_matmul(part, weight, size=4, columns=8 * world)
        attended = scaled_dot_product_attention(*[gathered.view(1, 1, -1, 8)] * 3, size=8)
        assert isinstance(attended, torch.Tensor)
        return attended.sum()

    units = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for unit in (*units, units):
        sw.fully_shard(unit, mesh=mesh)
    with (
        mock.patch.object(Scheduler, "should_partition", recorded),
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        fresh_compilers(),
        sw.enabled(strict=True),
    ):
        x = distribute(_whole((4, 6), 1).float(), mesh, ["S(1)"])
        torch.compile(multiply)(x, torch.ones(6, 8, requires_grad=True)).backward()
        torch.compile(units)(torch.ones(4, 8)).sum().backward()
    assert all(reasons.values()), reasons
    assert ("shardwright::multiply", "MultiOutput") in reasons
    found = {name.removeprefix("shardwright::") for name, _ in reasons}
    events = {f"fsdp_{event}" for event in ("begin_forward", "end_forward", "begin_backward", "end_backward", "after")}
    others = {"redistribute_start", "redistribute_wait", "multiply", "multiply_backward", "attention"}
    assert found >= events | others | {"attention_backward"}, found


def test_operators_stay_out_of_cuda_graphs(pool: Pool) -> None:
    """A replay of a CUDA graph would not run their code on the host."""
    pool.run(_reasons_against_cuda_graphs, 2)


def _graphs_on_some_ranks() -> None:
    mesh = get_mesh((4,))

    def function(pending: DTensor) -> DTensor:
        columns = pending.redistribute(placements=[Shard(0)]).sin().redistribute(placements=[Shard(1)])
        return (columns * 2).redistribute(placements=[Replicate()]) + pending.redistribute(placements=[Replicate()])

    full = oracle.global_tensor((6, 9), torch.float64, 3, True)
    pending = DTensor.from_local(full.clone(), mesh, [Partial()], run_check=False).requires_grad_()
    run = torch.compile(function, backend="aot_eager") if dist.get_rank() % 2 else function
    with sw.enabled(strict=True):
        result = run(pending)
        result.full_tensor().square().sum().backward()
    expected = (4 * full).requires_grad_()
    plain = expected.sin() * 2 + expected
    plain.square().sum().backward()
    torch.testing.assert_close(result.full_tensor(), plain)
    torch.testing.assert_close(pending.grad.full_tensor(), expected.grad)


def test_ranks_with_and_without_graphs_match(pool: Pool) -> None:
    """A rank leaves its graphs if its own values need more of them than Dynamo compiles."""
    pool.run(_graphs_on_some_ranks, 4)
