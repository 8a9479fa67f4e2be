"""Tests of `torch.ops.shardwright`: values, gradients, PyTorch's requirements for operators, and compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import oracle
import shardwright as sw
from compilers import recording
from meshes import get_mesh
from pairs import TWO_DIMS
from parts import part_of
from pool import Pool

WORLD = 4
SHAPE = (7, 6)
PAIRS = list(TWO_DIMS.values())


def _mesh() -> sw.Mesh:
    return sw.Mesh({"a": 2, "b": 2})


def _part(layout: sw.Layout) -> torch.Tensor:
    """Returns this rank's part of a global tensor, times coordinate + 1 for each mesh dim that has a pending sum."""
    rank = dist.get_rank()
    part = part_of(oracle.global_tensor(SHAPE, torch.float32, 5, True), layout, rank)
    pending = [d for d, placement in enumerate(layout.placements) if placement.startswith("P")]
    factors = [layout.mesh.coordinate(rank)[d] + 1 for d in pending]
    return part * torch.tensor(factors).prod() if factors else part


def _layouts(src: list[str], dst: list[str]) -> tuple[sw.Layout, sw.Layout]:
    return sw.Layout(_mesh(), SHAPE, src), sw.Layout(_mesh(), SHAPE, dst)


def _arguments(operator: Any, names: tuple[str, ...] = ("plan", "groups", "rank")) -> dict[str, Any]:
    return {name: operator.keywords[name] for name in names}


def _operator_values(src: list[str], dst: list[str]) -> None:
    before, after = _layouts(src, dst)
    operator = sw.graph.operator(before, after)
    local = _part(before)
    kept = local.clone()
    expected = _part(after) * 3 ** sum(placement == "P(sum)" for placement in src)
    for stored in (local, local.t().contiguous().t()):
        result = operator(stored)
        assert torch.equal(result, expected) and result.is_contiguous() and not result._is_view()
        assert result.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr() or result.numel() == 0
    out = torch.empty_like(expected)
    torch.ops.shardwright.redistribute_out(local, **_arguments(operator), out=out)
    assert torch.equal(out, expected) and out._version == 1
    handles = [torch.ops.shardwright.redistribute_start(local * n, **_arguments(operator)) for n in (1, 2)]
    for n, handle in reversed(list(enumerate(handles, 1))):  # a compiler may wait in another order
        result = torch.ops.shardwright.redistribute_wait(
            handle.clone(), local, **_arguments(operator, ("plan", "rank"))
        )
        assert torch.equal(result, n * expected)
    assert torch.equal(local, kept)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_operator_values(pool: Pool, src: list[str], dst: list[str]) -> None:
    pool.run(_operator_values, WORLD, src, dst)


def _operator_gradients(src: list[str], dst: list[str]) -> None:
    before, after = _layouts(src, dst)
    operator = sw.graph.operator(before, after)
    grads = []
    for move in (operator, lambda x: sw.redistribute_local(x, before, after)):
        x = _part(before).requires_grad_()
        (grad,) = torch.autograd.grad(move(x).square().sum(), x)
        grads.append(grad)
    assert torch.equal(*grads)
    if "P(sum)" not in src:
        x = _part(before).requires_grad_()
        (grad,) = torch.autograd.grad(operator(x).square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(grad.sum(), x)
        x = _part(before).requires_grad_()
        (grad,) = torch.autograd.grad(sw.redistribute_local(x, before, after).square().sum(), x, create_graph=True)
        assert torch.equal(again, torch.autograd.grad(grad.sum(), x)[0])


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_operator_gradients_equal_redistribute_local(pool: Pool, src: list[str], dst: list[str]) -> None:
    pool.run(_operator_gradients, WORLD, src, dst)


def _opcheck() -> None:
    before, after = _layouts(["S(0)", "S(1)"], ["S(1)", "R"])
    operator = sw.graph.operator(before, after)
    ops, arguments = torch.ops.shardwright, _arguments(operator)
    local, out = _part(before), torch.empty_like(_part(after))
    torch.library.opcheck(ops.redistribute.default, (local,), operator.keywords)
    torch.library.opcheck(ops.redistribute.default, (local.clone().requires_grad_(),), operator.keywords)
    torch.library.opcheck(ops.redistribute_out.default, (local,), {**arguments, "out": out})
    # Each start returns its own handle, valid for one wait. The omitted check test_aot_dispatch_dynamic ignores that.
    first = ops.redistribute_start(local, **arguments)
    for check in ("test_schema", "test_autograd_registration", "test_faketensor"):
        for more in ({}, {"sizes": list(SHAPE)}):
            ordered = {**arguments, **more, "after": first[:1]}
            waiting = {**_arguments(operator, ("plan", "rank")), **more}
            for overload in ("default", "recomputable"):
                start, wait = getattr(ops.redistribute_start, overload), getattr(ops.redistribute_wait, overload)
                torch.library.opcheck(start, (local,), ordered, test_utils=check)
                torch.library.opcheck(wait, (start(local, **ordered), local), waiting, test_utils=check)


def _other_sizes() -> None:
    """Runs a plan's layouts on a tensor of another size."""
    before, after = _layouts(["S(0)", "S(1)"], ["S(1)", "R"])
    operator = sw.graph.operator(before, after)
    ops, arguments = torch.ops.shardwright, _arguments(operator)
    full = oracle.global_tensor((9, 4), torch.float32, 7, True)
    src, dst = (sw.Layout(_mesh(), (9, 4), side.placements) for side in (before, after))
    local = part_of(full, src, dist.get_rank())
    groups = sw.graph.operator(src, dst).keywords["groups"]
    handle = ops.redistribute_start(local, arguments["plan"], groups, dist.get_rank(), sizes=[9, 4])
    result = ops.redistribute_wait(handle, local, arguments["plan"], dist.get_rank(), sizes=[9, 4])
    assert torch.equal(result, part_of(full, dst, dist.get_rank()))
    with pytest.raises(ValueError, match="local tensor must have shape"):
        ops.redistribute_start(local[:1], arguments["plan"], groups, dist.get_rank(), sizes=[90, 4])


def test_operators_take_other_sizes(pool: Pool) -> None:
    pool.run(_other_sizes, WORLD)


def test_opcheck(pool: Pool) -> None:
    pool.run(_opcheck, WORLD)


def _bad_input() -> None:
    before, after = _layouts(["S(0)", "R"], ["R", "R"])
    operator = sw.graph.operator(before, after)
    ops, arguments = torch.ops.shardwright, _arguments(operator)
    local, out = _part(before), torch.empty(SHAPE)
    with pytest.raises(ValueError, match=r"local tensor must have shape .* on rank ., got \[1\]"):
        operator(torch.zeros(1))
    with pytest.raises(ValueError, match="plan must be a text made by shardwright .*, got 'nonsense'"):
        ops.redistribute_start(local, "nonsense", arguments["groups"], 0)
    with pytest.raises(ValueError, match="plan bytes"):
        ops.redistribute_start(local, "a|AAAA", arguments["groups"], 0)
    with pytest.raises(ValueError, match="rank must be on the mesh .*, got 9"):
        ops.redistribute_start(local, arguments["plan"], arguments["groups"], 9)
    for wrong, message in (
        (torch.empty(6, 7), r"out must be .* of shape .*, got shape \[6, 7\]"),
        (torch.empty(6, 7).t(), r"out must be .* of shape .*, got shape \[7, 6\] and strides \[1, 7\]"),
        (torch.empty(SHAPE, dtype=torch.float64), "out must have .* dtype .*, Float on cpu, got Double on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.redistribute_out(local, **arguments, out=wrong)
    handle = ops.redistribute_start(local, **arguments)
    ops.redistribute_wait(handle, local, **_arguments(operator, ("plan", "rank")))
    with pytest.raises(ValueError, match="handle must be of a redistribute under way, got number"):
        ops.redistribute_wait(handle, local, **_arguments(operator, ("plan", "rank")))
    most = sw.graph.operator(*_layouts(["P(max)", "R"], ["R", "R"]))
    with pytest.raises(NotImplementedError, match="backward_plan must be a plan .*, got ''"):
        most(out.zero_().requires_grad_()).sum().backward()


def test_bad_input(pool: Pool) -> None:
    pool.run(_bad_input, WORLD)


# ------------------------------------------------------------------------------------------------- compiled code


def _compiled(kind: str) -> None:
    torch._dynamo.reset()
    mesh = get_mesh((2, 2))
    x = distribute_tensor(oracle.global_tensor((8, 6), torch.float32, 1, True), mesh, [Shard(0), Shard(1)])
    weight = distribute_tensor(oracle.global_tensor((6, 4), torch.float32, 2, True), mesh, [Replicate(), Shard(0)])

    def block(x: DTensor, weight: DTensor) -> DTensor:
        hidden = torch.relu(x @ weight)  # the product is a pending sum, which relu reduces
        return hidden.redistribute(placements=[Shard(1), Replicate()]).cos().redistribute(placements=[Shard(0)] * 2)

    def checkpointed(x: DTensor, weight: DTensor) -> DTensor:
        result: DTensor = checkpoint(block, x, weight, use_reentrant=False)
        return result

    function = checkpointed if kind == "checkpointed" else block
    results = []
    graphs: list[str] = []
    with sw.enabled(strict=True):
        compiled = torch.compile(function, backend=recording(graphs), fullgraph=True)
        for run in (block, compiled, compiled):
            inputs = [t.detach().clone().requires_grad_() for t in (x, weight)]
            result = run(*inputs)
            grads = torch.autograd.grad(result.square().sum(), inputs)
            results.append([t.full_tensor() for t in (result, *grads)])
            assert result.placements == (Shard(0), Shard(0))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected)
    assert len(graphs) == 2, "one forward and one backward"
    for graph in graphs:
        assert graph.count("redistribute_start") == graph.count("redistribute_wait") > 0
        assert "_c10d_functional" not in graph


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_compiled_dtensors(pool: Pool, kind: str) -> None:
    pool.run(_compiled, WORLD, kind)


class _Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return result


def _tensor_parallel_block() -> None:
    """Runs a tensor-parallel block under Inductor: 10 columns and 8 rows over 2 ranks."""
    torch._dynamo.reset()
    mesh = get_mesh((2,))
    torch.manual_seed(0)
    unsharded = _Mlp()
    sharded = _Mlp()
    sharded.load_state_dict(unsharded.state_dict())
    parallelize_module(
        sharded,
        mesh,
        {
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    x = oracle.global_tensor((8, 6), torch.float32, 3, True)
    expected = unsharded(x)
    expected.square().sum().backward()
    sw.reset_stats()
    with sw.enabled(strict=True):
        compiled = torch.compile(sharded, fullgraph=True)
        local = x.chunk(2)[dist.get_rank()]
        result = compiled(local)
        result.square().sum().backward()
    torch.testing.assert_close(result, expected.chunk(2)[dist.get_rank()])
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), unsharded.get_parameter(name).grad)
    assert sw.stats()["traced"] > 0 and sw.stats()["fallbacks"] == 0


@pytest.mark.cpu_only("Inductor does not know the device")
def test_inductor_compiles_tensor_parallel_block(pool: Pool) -> None:
    pool.run(_tensor_parallel_block, 2)


def _compiled_on_plain_tensors() -> None:
    torch._dynamo.reset()
    before, after = _layouts(["S(0)", "R"], ["R", "S(1)"])
    operator = sw.graph.operator(before, after)
    compiled = torch.compile(lambda x: operator(x * 2) + 1, backend="aot_eager", fullgraph=True)
    x = _part(before).requires_grad_()
    result = compiled(x)
    assert torch.equal(result, _part(after) * 2 + 1)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_compiled_on_plain_tensors(pool: Pool) -> None:
    pool.run(_compiled_on_plain_tensors, WORLD)


def _fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh = get_mesh((2, 2))
    with FakeTensorMode(), sw.enabled(strict=True):
        x = DTensor.from_local(torch.empty(4, 6), mesh, [Shard(0), Replicate()], run_check=False)
        moved = x.redistribute(placements=[Shard(1), Shard(1)])
        assert moved._local_tensor.shape == (8, 2 if mesh.get_local_rank(1) == 0 else 1)
        pending = DTensor.from_local(torch.empty(4, 6), mesh, [Partial(), Partial()], run_check=False)
        assert pending.redistribute(placements=[Replicate(), Shard(0)])._local_tensor.shape == (2, 6)


def test_fake_tensors(pool: Pool) -> None:
    pool.run(_fake_tensors, WORLD)
