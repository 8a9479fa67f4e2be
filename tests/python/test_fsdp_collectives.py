"""FSDP2 with our all-gather and reduce-scatter: results and bytes equal those of stock FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import meshes
import shardwright as sw
from meshes import get_mesh
from pool import Pool

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _gathers() -> None:
    """Gathers in place, as FSDP2 does, and out of place, synchronously and asynchronously, in a subgroup."""
    group, rank = get_mesh((2, 2)).get_group("b"), dist.get_rank()
    gather = sw.fsdp.AllGather()
    for dtype in (*DTYPES, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for count in (0, 1, 5, 1024):
            pattern = torch.arange(2 * count, device=meshes.device) % 100 + 100 * (rank // 2)
            full = pattern.to(dtype) if dtype is not torch.bool else pattern % 3 == 0
            own_range = slice(rank % 2 * count, (rank % 2 + 1) * count)
            for in_place in (True, False):
                for async_op in (True, False):
                    out = gather.allocate((2 * count,), dtype=dtype, device=torch.device(meshes.device))
                    out.view(torch.uint8).fill_(1)
                    given = out[own_range] if in_place else full[own_range].clone()
                    given.copy_(full[own_range])
                    work = gather(out, given, group, async_op)
                    assert work is None or (async_op and isinstance(work, dist.Work))
                    if work is not None:
                        work.wait()
                    assert torch.equal(out.view(torch.uint8), full.view(torch.uint8)), (dtype, count, async_op)
                    assert torch.equal(given.view(torch.uint8), full[own_range].view(torch.uint8))


def test_all_gather_in_place_and_out_of_place(pool: Pool) -> None:
    pool.run(_gathers, 4)


def _sums(world: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    scatter = sw.fsdp.ReduceScatter()
    parts = [torch.randn(world * 7, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for dtype in DTYPES:
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            given = [part.to(dtype) for part in parts]
            total = given[0].to(wide)
            for other in given[1:]:  # in the order of ranks
                total = torch.maximum(total, other.to(wide)) if op == dist.ReduceOp.MAX else total + other.to(wide)
            if op == dist.ReduceOp.AVG:
                total = total / world
            expected = total.to(dtype)[rank * 7 : (rank + 1) * 7]
            for async_op in (True, False):
                own = given[rank].to(meshes.device)
                out = scatter.allocate((7,), dtype=dtype, device=own.device)
                with sw.debug.wire_meter() as meter:
                    work = scatter(out, own, group, op, async_op)
                if work is not None:
                    work.wait()
                if meshes.device == "cpu":
                    assert torch.equal(out, expected), (dtype, op)
                else:  # on devices the process group reduces, and may round after each addition
                    tolerance = 0.05 if dtype.itemsize == 2 else 1e-5
                    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
                assert torch.equal(own.cpu(), given[rank]), "the input was written to"
                needed = (world - 1) * 7 * dtype.itemsize
                assert (meter.received_bytes, meter.sent_bytes) == (needed, needed)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reduce_scatter_sums_in_rank_order(pool: Pool, world: int) -> None:
    pool.run(_sums, world, world)


def _model(exact: bool) -> nn.Module:
    """Returns a model whose weights are uneven on any world size above 1. Some ranks have none of one weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 13), nn.ReLU(), nn.Linear(13, 1))
    if exact:  # sums of small integers are the same in every order
        for weight in model.parameters():
            weight.data = torch.randint(-1, 2, weight.shape).float()
    return model


def _train(comms: bool, mesh_shape: tuple[int, ...], exact: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    mesh = get_mesh(mesh_shape)
    model = _model(exact)
    unshards_ahead = options.pop("unshards_ahead", False)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():
        if comms and hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(sw.fsdp.AllGather())
            module.set_custom_reduce_scatter(sw.fsdp.ReduceScatter())
        if unshards_ahead and hasattr(module, "_set_unshard_async_op"):
            module._set_unshard_async_op(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    results = []
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(1 if exact else 3):  # later steps have fractions: averages over three ranks
        x = torch.randint(-1, 2, (4, 6), generator=g).float() if exact else torch.randn(4, 6, generator=g)
        loss = model(x).sum() if exact else model(x).square().mean()
        loss.backward()
        results += [loss.detach(), *(weight.grad.to_local().clone() for weight in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(weight.to_local().clone() for weight in model.parameters())]


def _same_as_stock(mesh_shape: tuple[int, ...], exact: bool, options: dict[str, Any]) -> None:
    with sw.debug.wire_meter() as stock_meter:
        stock = _train(False, mesh_shape, exact, dict(options))
    with sw.debug.wire_meter() as meter:
        ours = _train(True, mesh_shape, exact, dict(options))
    same = all(map(torch.equal, stock, ours))
    # The order does not matter for sums of two contributions or of small integers.
    assert same or not (exact or mesh_shape[-1] <= 2), [
        float((a.detach().float() - b.detach().float()).abs().max()) for a, b in zip(stock, ours) if a.numel()
    ]
    for a, b in zip(stock, ours, strict=True):
        torch.testing.assert_close(a, b)
    assert meter.received_bytes == stock_meter.received_bytes
    assert meter.sent_bytes == stock_meter.sent_bytes
    if mesh_shape[-1] > 1:
        named = {name.partition(".")[2] for name in meter.by_op}
        assert "_allgather_base_" in stock_meter.by_op.keys() | {n.partition(".")[2] for n in stock_meter.by_op}
        assert not named & {"_allgather_base_", "_reduce_scatter_base_"}, named


@pytest.mark.cpu_only("stock FSDP2 needs streams that asyncdev does not register with it")
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
def test_training_equals_stock_fsdp(pool: Pool, mesh_shape: tuple[int, ...], exact: bool) -> None:
    pool.run(_same_as_stock, torch.Size(mesh_shape).numel(), mesh_shape, exact, {})


@pytest.mark.cpu_only("stock FSDP2 needs streams that asyncdev does not register with it")
@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"reshard_after_forward": False},
        {"unshards_ahead": True},
    ],
    ids=["mixed precision", "no reshard after forward", "async unshard"],
)
def test_training_with_options_equals_stock_fsdp(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_same_as_stock, 2, (2,), False, options)


def _bad_arguments() -> None:
    group = dist.group.WORLD
    assert group is not None
    full, part = torch.zeros(8, device=meshes.device), torch.zeros(4, device=meshes.device)
    gather, scatter = sw.fsdp.AllGather(), sw.fsdp.ReduceScatter()
    with pytest.raises(ValueError, match="output_tensor must be a tensor with 2 times the elements .*, got 7 elements"):
        gather(full[:7], part, group)
    with pytest.raises(ValueError, match="output_tensor must be torch.float32, as input_tensor is, got torch.float64"):
        gather(full.double(), part, group)
    with pytest.raises(ValueError, match="output_tensor must be contiguous, got strides"):
        gather(torch.zeros(16, device=meshes.device)[::2], part, group)
    own_begin = dist.get_rank() * 4
    for async_op in (True, False):
        with pytest.raises(ValueError, match="out must not share memory with the input"):
            gather(full, full[4 - own_begin : 8 - own_begin], group, async_op)
        with pytest.raises(ValueError, match="out must not share memory with the input"):
            scatter(full[own_begin : own_begin + 4], full, group, dist.ReduceOp.SUM, async_op)
    with pytest.raises(ValueError, match="op must be .* PRODUCT, got .*set_force_sum_reduction_for_comms"):
        scatter(part, full, group, dist._make_nccl_premul_sum(0.5))
    with pytest.raises(ValueError, match="op must be .* PRODUCT, got"):
        scatter(part, full, group, dist.ReduceOp.BAND)
    assert not full.any()


def test_collectives_reject_bad_arguments(pool: Pool) -> None:
    pool.run(_bad_arguments, 2)


def _different_sizes() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    sw.debug.check_ranks()
    try:
        for async_op in (True, False):
            part = torch.zeros(4 + rank, device=meshes.device)
            with pytest.raises(RuntimeError, match="redistribute: the ranks differ"):
                sw.fsdp.AllGather()(part.new_zeros(2 * part.numel()), part, group, async_op)
    finally:
        sw.debug.check_ranks(False)


def test_check_ranks_reports_different_sizes(pool: Pool) -> None:
    pool.run(_different_sizes, 2)
