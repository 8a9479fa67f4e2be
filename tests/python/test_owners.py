"""`sw.fsdp.owners`: whole matrices on one rank each, balanced; updates, bytes, overlap and errors.

Training is compared with torch.optim.Muon on the unsharded model, moves with the global tensors.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import random
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import meshes
import oracle
import shardwright as sw
from dtensors import to_placements
from fsdp_models import Mlp, full, shard
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import owner_layouts

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import muon

# ------------------------------------------------------------------------------------------------------------ training


def _batch(step: int, width: int = 10) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(meshes.device)


def _train(model: nn.Module, optimizer_of: Any, steps: int = 3) -> list[torch.Tensor]:
    """Trains on the same batches on all ranks, so that averages of gradients are exact on 1, 2 and 4 ranks."""
    matrices, others = muon.split(model)
    optimizers = [optimizer_of(matrices), torch.optim.AdamW(others, lr=0.01)]
    for step in range(steps):
        model(_batch(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [full(parameter).detach() for parameter in model.parameters()]


def _muon_is_torchs(mesh_shape: tuple[int, ...], is_stock: bool, options: dict[str, int]) -> None:
    def by_owners(params: list[DTensor]) -> torch.optim.Optimizer:
        return muon.Muon(params, lambda given: muon.by_owners(given, **options))

    mesh = get_mesh(mesh_shape)
    plain = Mlp(tied=False).to(meshes.device)
    model = shard(Mlp(tied=False).to(meshes.device), stock_fully_shard if is_stock else sw.fully_shard, mesh)
    expected = _train(plain, lambda params: torch.optim.Muon(params, **muon.SETTINGS))
    found = _train(model, by_owners)
    for (name, start), a, b in zip(Mlp(tied=False).named_parameters(), found, expected, strict=True):
        assert not torch.equal(start.to(meshes.device), b), f"{name} was not trained"
        assert torch.equal(a, b), f"{name} differs by up to {(a - b).abs().max()}"


@pytest.mark.parametrize(
    "is_stock", [False, pytest.param(True, marks=pytest.mark.cpu_only("FSDP2 needs a device with streams in Python"))]
)
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2)])
def test_muon_trains_like_torchs_on_the_unsharded_model(
    pool: Pool, mesh_shape: tuple[int, ...], is_stock: bool
) -> None:
    """The layers have 21 rows or columns, and the outer matrices 10. A bucket of 1 byte is one matrix for each rank."""
    for options in ({}, {"bucket_bytes": 1}):
        pool.run(_muon_is_torchs, math.prod(mesh_shape), mesh_shape, is_stock, options)


def _different_batches() -> None:
    """The mean of the ranks' losses is the loss of all batches: gradients differ in the last bits."""
    mesh, rank = get_mesh((4,)), dist.get_rank()
    plain, model = Mlp(tied=False).to(meshes.device), Mlp(tied=False).to(meshes.device)
    shard(model, sw.fully_shard, mesh)
    ours = muon.Muon(muon.split(model)[0], muon.by_owners)
    theirs = torch.optim.Muon(muon.split(plain)[0], **muon.SETTINGS)
    pairs = list(zip(muon.split(model)[0], muon.split(plain)[0], strict=True))
    for step in range(3):
        starts = [b.detach().clone() for _, b in pairs]
        plain(torch.cat([_batch(10 * step + r) for r in range(4)])).square().mean().backward()
        model(_batch(10 * step + rank)).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for (a, b), start in zip(pairs, starts, strict=True):
            sharded, whole = (o.state[p]["momentum_buffer"] for o, p in ((ours, a), (theirs, b)))
            torch.testing.assert_close(full(sharded), whole)
            # In bfloat16, a last bit of a gradient changes the update along small singular values.
            assert (full(a) - b).norm() < (b - start).norm() / 3
            with torch.no_grad():
                a.copy_(distribute_tensor(b.detach(), mesh, a.placements))


def test_muon_with_different_batches(pool: Pool) -> None:
    pool.run(_different_batches, 4)


def _shampoo(states: dict[int, list[torch.Tensor]], i: int, gradient: torch.Tensor) -> torch.Tensor:
    """Returns L^(-1/4) G R^(-1/4); L and R are sums over all steps, which the owner keeps."""
    state = states.setdefault(i, [1e-3 * torch.eye(n, device=gradient.device) for n in gradient.shape])
    state[0] += gradient @ gradient.T
    state[1] += gradient.T @ gradient
    roots = []
    for matrix in state:
        values, vectors = torch.linalg.eigh(matrix.cpu().double())
        roots.append(((vectors * values**-0.25) @ vectors.T).float().to(gradient.device))
    return roots[0] @ gradient @ roots[1]


def _shampoo_is_unsharded() -> None:
    mesh = get_mesh((dist.get_world_size(),))
    shapes = [(5, 3), (4, 6), (7, 7)]
    start = [oracle.global_tensor(shape, torch.float32, i).to(meshes.device) for i, shape in enumerate(shapes)]
    params = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in start]
    owners = sw.fsdp.owners(params)
    states: dict[int, list[torch.Tensor]] = {}
    states_there: dict[int, list[torch.Tensor]] = {}
    for step in range(3):
        gradients = [oracle.global_tensor(x.shape, torch.float32, 10 * step + i) for i, x in enumerate(start)]
        gradients = [gradient.to(meshes.device) for gradient in gradients]
        there = [distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in gradients]
        for i, update in owners.map(lambda i, whole: _shampoo(states, i, whole), there):
            expected = _shampoo(states_there, i, gradients[i])
            torch.testing.assert_close(update.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    assert sorted(states) == [i for i, rank in enumerate(owners.ranks) if rank == dist.get_rank()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_owners_keep_the_state_of_shampoo(pool: Pool, world_size: int) -> None:
    pool.run(_shampoo_is_unsharded, world_size)


# --------------------------------------------------------------------------------------------------- elements and bytes

# Mesh shape, mesh dims that the tensors are on (all others have copies of their own), and placements.
CASES: list[tuple[tuple[int, ...], tuple[str, ...], list[tuple[str, ...]]]] = [
    ((1,), ("a",), [("S(0)",), ("R",)]),
    ((3,), ("a",), [("S(0)",), ("S(1)",), ("R",)]),
    ((2, 2), ("a", "b"), [("R", "S(0)"), ("SS(0,2)", "S(0)"), ("S(0)", "S(1)"), ("S(0)", "S(0)"), ("R", "R")]),
    ((2, 2), ("b",), [("S(0)",), ("S(1)",)]),
]
SHAPES = [(8, 6), (5, 7), (2, 3), (1, 1), (0, 4), (3, 4, 5), (9, 2), (6, 6)]


def _elements(mesh_shape: tuple[int, ...], keep: tuple[str, ...], all_placements: list[tuple[str, ...]]) -> list[Any]:
    mesh = get_mesh(mesh_shape, keep=keep)
    place, ranks = mesh.get_coordinate(), mesh.mesh.flatten().tolist()
    assert place is not None

    def part(whole: torch.Tensor, placements: tuple[str, ...], coordinate: Any = place) -> torch.Tensor:
        strided = "literal" if any(map(oracle.is_strided, placements)) else "order"
        return oracle.local(whole, mesh.mesh.shape, placements, coordinate, strided=strided)

    def sharded(whole: torch.Tensor, placements: tuple[str, ...]) -> DTensor:
        stride = torch.empty(whole.shape, device="meta").stride()
        local = part(whole, placements).to(meshes.device)
        return DTensor.from_local(
            local, mesh, to_placements(placements), run_check=False, shape=whole.shape, stride=stride
        )

    cases = [(shape, all_placements[i % len(all_placements)]) for i, shape in enumerate(SHAPES * 2)]
    wholes = [oracle.global_tensor(shape, torch.float32, i) for i, (shape, _) in enumerate(cases)]
    params = [sharded(whole, placements) for whole, (_, placements) in zip(wholes, cases, strict=True)]
    owners = sw.fsdp.owners(params, bucket_bytes=200)
    mine: list[int] = []

    def function(i: int, whole: torch.Tensor) -> torch.Tensor:
        assert owners.ranks[i] == dist.get_rank()
        assert torch.equal(whole.cpu(), wholes[i])
        mine.append(i)
        result = (whole + i).bfloat16()
        whole.fill_(torch.nan)  # its memory belongs to the function
        return result

    for _ in range(2):
        mine.clear()
        given = [None if i == 3 else tensor for i, tensor in enumerate(params)]
        order = []
        with sw.debug.wire_meter() as meter:
            for i, result in owners.map(function, given, dtype=torch.bfloat16):
                order.append(i)
                expected = part((wholes[i] + i).bfloat16(), cases[i][1])
                assert torch.equal(result.to_local().cpu(), expected), f"{i}: {cases[i]}"
                assert result.placements == params[i].placements and result.shape == wholes[i].shape
        for param, whole, (_, placements) in zip(params, wholes, cases, strict=True):
            assert torch.equal(param.to_local().cpu(), part(whole, placements))
    assert order == [i for bucket in owners.buckets for i in bucket if i != 3]
    assert sorted(mine) == [i for i, rank in enumerate(owners.ranks) if rank == dist.get_rank() and i != 3]

    # Elements that the owner lacks are received once, and results by all ranks other than the owner.
    coordinate = [int(c) for c in place]
    least = 0
    for i, (whole, (_, placements)) in enumerate(zip(wholes, cases, strict=True)):
        if i == 3:
            continue
        held = part(whole, placements, coordinate).numel()
        least += 4 * (whole.numel() - held) if owners.ranks[i] == dist.get_rank() else 2 * held
    assert meter.received_bytes == least
    return [ranks, owners.ranks, owners.buckets, owners.costs, repr(owners)]


@pytest.mark.parametrize(("mesh_shape", "keep", "placements"), CASES)
def test_every_element_and_the_minimum_of_bytes(
    pool: Pool, mesh_shape: tuple[int, ...], keep: tuple[str, ...], placements: list[tuple[str, ...]]
) -> None:
    found = pool.run(_elements, math.prod(mesh_shape), mesh_shape, keep, placements)
    by_mesh: dict[tuple[int, ...], Any] = {}
    for ranks, *assigned in found:
        assert by_mesh.setdefault(tuple(ranks), assigned) == assigned  # equal on all ranks of a mesh
        assert set(assigned[0]) <= set(ranks)


def _ranks_in_any_order() -> None:
    """The second rank of the mesh is not global rank 1."""
    mesh = DeviceMesh(meshes.device, torch.tensor([2, 0, 1]))
    whole = oracle.global_tensor((7, 4), torch.float32, 0).to(meshes.device)
    place = mesh.get_coordinate()
    assert place is not None
    local = oracle.local(whole.cpu(), (3,), ("S(0)",), place).to(meshes.device)
    param = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    owners = sw.fsdp.owners([param, param])
    assert owners.ranks == [2, 0]
    for _, result in owners.map(lambda i, whole: 2 * whole, [param, param]):
        assert torch.equal(result.to_local(), 2 * local)


def test_meshes_whose_ranks_do_not_ascend(pool: Pool) -> None:
    pool.run(_ranks_in_any_order, 3)


# -------------------------------------------------------------------------------------------------- owners and buckets


def _assignments() -> list[Any]:
    """Returns costs, owners, sizes, buckets and their limit, for random matrices."""
    draw = random.Random(5)
    mesh, found = get_mesh((3,)), []
    for count in (1, 2, 5, 8):
        shapes = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
        costs = [float(draw.randint(0, 20)) for _ in range(count)]
        params = [distribute_tensor(torch.zeros(shape, device=meshes.device), mesh, [Shard(0)]) for shape in shapes]
        numbers = {id(param): cost for param, cost in zip(params, costs, strict=True)}
        owners = sw.fsdp.owners(params, cost=lambda param, numbers=numbers: numbers[id(param)], bucket_bytes=150)
        assert owners.costs == costs
        found.append((costs, owners.ranks, [4 * rows * columns for rows, columns in shapes], owners.buckets, 150))
    return found


def test_costs_are_balanced(pool: Pool) -> None:
    """The highest cost of a rank is within the bound of Graham (1969), 4/3 - 1/(3 ranks) times the optimum."""
    all_found = pool.run(_assignments, 3)
    assert all_found[0] == all_found[1] == all_found[2]
    for costs, ranks, sizes, buckets, bucket_bytes in all_found[0]:

        def highest(choice: Any, costs: list[float] = costs) -> float:
            loads: Counter[int] = Counter()
            for rank, cost in zip(choice, costs, strict=True):
                loads[rank] += cost  # type: ignore[assignment]
            return max(loads.values())

        best = min(map(highest, itertools.product(range(3), repeat=len(costs))))
        assert highest(ranks) <= (4 / 3 - 1 / 9) * best
        assert sorted(i for bucket in buckets for i in bucket) == list(range(len(costs)))
        for bucket in buckets:
            for rank in range(3):
                owned = [sizes[i] for i in bucket if ranks[i] == rank]
                assert len(owned) <= 1 or sum(owned) <= bucket_bytes


def _default_costs() -> None:
    """The default cost is proportional to the multiplications in torch's Newton-Schulz iterations."""
    mesh = get_mesh((1,))
    shapes = [(8, 8), (4, 16), (16, 4), (3, 4, 4)]
    params = [distribute_tensor(torch.zeros(shape, device=meshes.device), mesh, [Shard(0)]) for shape in shapes]
    counted = []
    for shape in shapes:
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            for matrix in torch.randn(shape).reshape(-1, *shape[-2:]):
                muon.orthogonalize(matrix)
        counted.append(float(counter.get_total_flops()))
    assert sw.fsdp.owners(params).costs == counted


def test_default_costs_are_operations_of_newton_schulz(pool: Pool) -> None:
    pool.run(_default_costs, 1)


# ------------------------------------------------------------------------------------------------------------- overlap


def _overlap() -> None:
    """While the function runs for bucket b, bucket b + 1 arrives, and results of bucket b - 1 return to shards.

    Each call of the function waits until both transfers are done, which only other threads can achieve.
    """
    mesh = get_mesh((2,))
    params = [distribute_tensor(torch.randn(64, 32, device=meshes.device), mesh, [Shard(0)]) for _ in range(8)]
    owners = sw.fsdp.owners(params, bucket_bytes=1)
    assert [len(bucket) for bucket in owners.buckets] == [2, 2, 2, 2]
    for _, _ in owners.map(lambda i, whole: whole, params):  # compares
        pass
    bucket_of = {i: number for number, bucket in enumerate(owners.buckets) for i in bucket}
    handles: list[Any] = []
    order: list[int] = []
    start = owner_layouts.redistribute_parts

    def started(*args: Any, **options: Any) -> Any:
        handles.append(start(*args, **options))
        return handles[-1]

    def function(i: int, whole: torch.Tensor) -> torch.Tensor:
        # Calls in order: bucket 0 and 1 to owners, 0 to shards, 2 to owners, 1 to shards, 3 to owners, ...
        number = bucket_of[i]
        assert len(handles) == min(2 * number + 2, 7)
        assert {bucket_of[j] for j in order} == set(range(number - 1))  # bucket number - 1 is on its way
        deadline = time.monotonic() + 30
        while not all(handle.is_done() for handle in handles):
            assert time.monotonic() < deadline, f"transfers wait for the function, bucket {number}"
            time.sleep(0.001)
        return whole

    owner_layouts.redistribute_parts = started  # type: ignore[assignment]
    try:
        for i, _ in owners.map(function, params):
            order.append(i)
    finally:
        owner_layouts.redistribute_parts = start
    assert len(handles) == 8 and len(order) == 8


def test_transfers_overlap_with_the_function(pool: Pool) -> None:
    pool.run(_overlap, 2)


# -------------------------------------------------------------------------------------------------------------- errors


def _raised(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _params() -> list[DTensor]:
    return [distribute_tensor(torch.ones(5, 3, device=meshes.device), get_mesh((2,)), [Shard(0)]) for _ in range(2)]


def _wrong_params() -> list[str]:
    good = _params()
    other = DeviceMesh(meshes.device, torch.tensor([1, 0]))
    elsewhere = DTensor.from_local(torch.ones(5, 3, device=meshes.device), other, [Replicate()], run_check=False)
    one_dim = distribute_tensor(torch.ones(7, device=meshes.device), get_mesh((2,)), [Shard(0)])
    pending = DTensor.from_local(torch.ones(5, 3, device=meshes.device), get_mesh((2,)), [Partial()], run_check=False)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (3, {}),
        ([], {}),
        ([torch.ones(2, 2)], {}),
        ([good[0], torch.ones(2, 2)], {}),
        ([good[0], one_dim], {}),
        ([good[0], elsewhere], {}),
        ([good[0], pending], {}),
        (good, {"bucket_bytes": 0}),
        (good, {"bucket_bytes": "big"}),
        (good, {"cost": 5}),
        (good, {"cost": lambda param: math.nan}),
        (good, {"cost": lambda param: -1}),
    ]
    found = [_raised(lambda params=params, more=more: sw.fsdp.owners(params, **more)) for params, more in wrong]
    # Only rank 1 passes a wrong argument, or another cost.
    bad = dist.get_rank() == 1
    found.append(_raised(lambda: sw.fsdp.owners(good, bucket_bytes=-1 if bad else 100)))
    found.append(_raised(lambda: sw.fsdp.owners(good, cost=lambda param: 7 + bad)))
    found.append(_raised(lambda: sw.fsdp.owners(good[: 2 - bad])))
    assert len(sw.fsdp.owners(good).ranks) == 2
    return found


def test_wrong_params(pool: Pool) -> None:
    texts = (
        "params must be a list of DTensors, got 3 (of type int)",
        "params must be a list of at least one DTensor, got none",
        "params[0] must be a DTensor, such as a parameter under fully_shard, got a Tensor",
        "params[1] must be a DTensor, such as a parameter under fully_shard, got a Tensor",
        "params[1] must be of at least two dims (leave others to an optimizer such as AdamW), got shape (7,)",
        "params[1] must be on the mesh of params[0] (call `owners` once for each mesh), got DeviceMesh(",
        "params[1] must be sharded or replicated, got placements (Partial(sum),)",
        "bucket_bytes must be at least 1, got 0",
        "bucket_bytes must be an integer, got 'big'",
        "cost must be a function from a parameter to a number, got TypeError for params[0]: 'int' object",
        "cost of params[0] must be a finite number of at least 0, got nan",
        "cost of params[0] must be a finite number of at least 0, got -1.0",
    )
    found = pool.run(_wrong_params, 2)
    for errors in found:
        for error, text in zip(errors, texts, strict=False):
            assert error.startswith(f"ValueError: {text}"), error
    assert found[1][12].startswith("ValueError: bucket_bytes must be at least 1, got -1")
    assert found[0][12].startswith("RuntimeError") and "bucket_bytes must be at least 1, got -1" in found[0][12]
    for errors in found:
        assert errors[13].startswith("ValueError: shardwright: fsdp.owners: the ranks differ"), errors[13]
        assert "params[0]: " in errors[13] and "cost 7.0 on ranks [0]" in errors[13], errors[13]
        assert "number of params: 2 on ranks [0]; 1 on ranks [1]" in errors[14], errors[14]


def _wrong_calls() -> list[str]:
    good, rank = _params(), dist.get_rank()
    owners = sw.fsdp.owners(good)
    replicated = distribute_tensor(torch.ones(5, 3, device=meshes.device), get_mesh((2,)), [Replicate()])
    smaller = distribute_tensor(torch.ones(4, 3, device=meshes.device), get_mesh((2,)), [Shard(0)])

    def doubled(i: int, whole: torch.Tensor) -> torch.Tensor:
        return 2 * whole

    def failing(i: int, whole: torch.Tensor) -> torch.Tensor:
        if i == 1:
            raise OverflowError("too large")
        return whole

    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (doubled, 3, {}),
        (doubled, good[:1], {}),
        (doubled, [good[0], torch.ones(5, 3)], {}),
        (doubled, [good[0], smaller], {}),
        (doubled, [good[0], replicated], {}),
        (5, good, {}),
        (doubled, good, {"dtype": "float32"}),
        (lambda i, whole: whole[:1], good, {}),
        (lambda i, whole: whole.bfloat16(), good, {}),
        (lambda i, whole: None, good, {}),
        (failing, good, {}),
        (doubled, good if rank else [good[0], None], {}),
        (doubled, good, {"dtype": torch.float64 if rank else torch.float32}),
    ]
    found = [_raised(lambda call=call: list(owners.map(call[0], call[1], **call[2]))) for call in calls]
    results = [result.to_local() for _, result in owners.map(doubled, good)]
    assert all(torch.equal(result, torch.full_like(result, 2)) for result in results)
    # All ranks have now compared these dtypes: a wrong argument on one rank raises there alone, before any transfer.
    found.append(_raised(lambda: owners.map(doubled, 3)) if rank else "")
    assert len(list(owners.map(doubled, good))) == 2
    return found


def test_wrong_calls(pool: Pool) -> None:
    same = (
        "tensors must be a list of DTensors or None, got 3 (of type int)",
        "tensors must be a list of 2, one for each parameter, got 1",
        "tensors[1] must be a DTensor like params[1], or None, got a Tensor",
        "shape of tensors[1] must be that of params[1], torch.Size([5, 3]), got torch.Size([4, 3])",
        "placements of tensors[1] must be that of params[1], (Shard(dim=0),), got (Replicate(),)",
        "function must be a function of an index and a whole tensor, got a int",
        "dtype must be a torch.dtype, got 'float32' (a str)",
        "result of function for tensors[0] must be of shape (5, 3), got (1, 3)",
        "result of function for tensors[0] must be of dtype torch.float32 (pass dtype= to map for another), got",
        "result of function for tensors[0] must be a plain torch.Tensor, got a NoneType",
    )
    first, second = pool.run(_wrong_calls, 2)
    for a, b, text in zip(first, second, same, strict=False):
        assert a.startswith(f"ValueError: {text}"), a
        assert b.startswith(f"ValueError: {text.replace('tensors[0]', 'tensors[1]')}"), b
    overflow = "on ranks [1] the arguments are not allowed"
    assert first[10].startswith("RuntimeError") and overflow in first[10] and "too large" in first[10], first[10]
    for errors in (first, second):
        assert "Owners.map: the ranks differ" in errors[11], errors[11]
        assert "tensors[1]: left out on ranks [0]; torch.float32 on ranks [1]" in errors[11], errors[11]
        assert "dtype: torch.float32 on ranks [0]; torch.float64 on ranks [1]" in errors[12], errors[12]
    assert second[13].startswith("ValueError: tensors must be a list of DTensors or None, got 3")
