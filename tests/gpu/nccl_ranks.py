"""Runs on each of several NCCL ranks on one GPU: compares redistributes and products with the global tensors.
test_nccl.py starts it. test_peers.py starts it with arenas that peers copy from, on several GPUs if there are enough.

NCCL refuses two ranks on one GPU, unless their NCCL_HOSTID differ (2.28: they then communicate over sockets), or
NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30). All tasks also run on the asynchronous device (rank_device.py).
"""

from __future__ import annotations

import itertools
import os
import sys

import rank_device
import torch
import torch.distributed as dist
from rank_device import DEVICE

import shardwright as sw
from shardwright.runtime import groups, preparation

SHAPE = (9, 10)
PLACEMENTS = ("R", "S(0)", "S(1)", "P")


def part(tensor: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor:
    """Returns a rank's part of the global tensor. Every contribution to a pending sum is the global tensor."""
    for dim, intervals in enumerate(layout.region(rank)):
        tensor = torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in intervals or [(0, 0)]], dim)
    return tensor


def check(mesh: sw.Mesh, src: tuple[str, ...], dst: tuple[str, ...], rank: int) -> None:
    """Checks a redistribute: synchronous, asynchronous, and captured, with replays that read new input."""
    before, after = (sw.Layout(mesh, SHAPE, list(p)) for p in (src, dst))
    sums = 1
    for placement, size in zip(src, mesh.shape, strict=True):
        sums *= size if placement == "P" else 1
    full = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32, device=DEVICE).view(SHAPE)
    local, expected = part(full, before, rank).contiguous(), part(full * sums, after, rank)
    name = f"{src} -> {dst} on {mesh}"
    assert torch.equal(sw.redistribute_local(local, before, after), expected), name
    assert torch.equal(sw.redistribute_local(local, before, after, async_op=True) + 0, expected), name
    with rank_device.captured() as graph:
        result = sw.redistribute_local(local, before, after)
    for step in range(1, 4):
        local.copy_(part(full * step, before, rank))
        graph.replay()
        assert torch.equal(result, expected * step), f"{name}, replay {step}"


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns integers small enough that sums of products are exact, and the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE).to(dtype)


def share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    layout = sw.Layout(sw.Mesh({"group": dist.get_world_size()}), tensor.shape, [f"S({dim})"])
    return part(tensor.float(), layout, dist.get_rank()).to(tensor.dtype)


def check_products(rows: int, dtype: torch.dtype, scales: str | None) -> None:
    """Checks products with a gather or a reduce-scatter, even and uneven, by every method; gradients without scales."""
    k, n = 64, 64
    x, weight = integers((rows, k), 1, dtype), integers((k, n), 2, dtype)
    transposed = weight.t().contiguous().t()
    row_scales = 2.0 ** (torch.arange(rows, device=DEVICE) % 3 - 1).view(-1, 1)
    column_scales = 2.0 ** (torch.arange(n, device=DEVICE) % 2).view(1, -1)
    tensor_scale = torch.tensor(0.5, device=DEVICE)
    by, w_by = {None: (None, None), "tensor": (tensor_scale, tensor_scale), "row": (row_scales, column_scales)}[scales]
    expected = x.float() @ weight.float()
    out_dtype = dtype
    if by is not None and w_by is not None:
        expected, out_dtype = expected * by * w_by, torch.bfloat16
    for method, stored_weight in itertools.product(("serial", "ring", "collective"), (weight, transposed)):
        where = f"{dtype}, {rows} rows, scales {scales}, {method}"
        how: dict = {"size": rows, "columns": n, "method": method}
        local_x, local_weight = share(x, 0), share(stored_weight.t(), 0).t()
        if scales == "row":
            how |= {"x_scale": share(row_scales, 0), "weight_scales": share(column_scales, 1)}
        elif scales is not None:
            how |= {"x_scale": by, "weight_scales": w_by}
        actual = sw.all_gather_matmul(local_x.requires_grad_(scales is None), local_weight, **how)
        assert torch.equal(actual, share(expected.to(out_dtype), 1)), f"all_gather_matmul of {where}"
        if scales is None:
            (grad,) = torch.autograd.grad(actual.float().sum(), local_x)
            right = torch.ones(rows, n, device=DEVICE) @ weight.float().t()
            torch.testing.assert_close(grad.float(), share(right, 0), rtol=2e-2, atol=0.5)
        how = {"size": k, "method": method}
        if scales is not None:
            how |= {"x_scale": by, "weight_scale": w_by}
        actual = sw.matmul_reduce_scatter(share(x, 1), share(stored_weight.t(), 1).t(), **how)
        assert torch.equal(actual, share(expected.to(out_dtype), 0)), f"matmul_reduce_scatter of {where}"


def check_flags() -> None:
    """Checks products that wait for the flags of their chunks. With few tiles, even copies by kernels
    get a multiprocessor if ranks share a GPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank_device.IS_CUDA and torch.cuda.get_device_capability() != (9, 0):
        return
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if rank_device.IS_CUDA else None
    group = dist.new_group(list(range(world)), pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    preparation._make_arenas([group.group_name], DEVICE, 1 << 20, 0)
    for seed, chunks in enumerate((1, 2, 1)):
        rows, columns = world * chunks * 256, world * 64
        x, w = integers((rows, 64), seed, torch.bfloat16), integers((64, columns), seed + 9, torch.bfloat16)
        weight = w.chunk(world, 1)[rank].contiguous()
        for other in (weight, weight.t().contiguous().t()):
            actual = sw.all_gather_matmul(
                x.chunk(world)[rank], other, size=rows, columns=columns, group=group, method="flags", chunks=chunks
            )
            assert torch.equal(actual, x @ weight), f"flags of {chunks} chunks of each part"


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers = sys.argv[1] == "peers"
    device = rank_device.begin(prefers_own_gpu=peers)
    dist.all_reduce(torch.ones(1, device=DEVICE))
    rank_device.synchronize()
    if sys.argv[1] == "reach":
        rank_device.end()
        return
    shapes = {1: [(1,)], 2: [(2,)], 4: [(2, 2), (4,)]}[world]
    for sizes in shapes:
        mesh = sw.Mesh({f"m{d}": size for d, size in enumerate(sizes)})
        # Slots of at least 256 bytes, so parts are sent in several rounds.
        sw.prepare(mesh, peer_arena_bytes=512 * world if peers else None, peer_min_bytes=0)
        for src in itertools.product(PLACEMENTS, repeat=len(sizes)):
            for dst in itertools.product(PLACEMENTS[:-1], repeat=len(sizes)):
                if src != dst:
                    check(mesh, src, dst, rank)
    if world > 2 and rank in (0, world - 1):  # the others do not take part, though the default group is bound
        group = groups.find_or_make([0, world - 1])
        total = torch.ones(1, device=DEVICE)
        dist.all_reduce(total, group=group)
        assert total.item() == 2 and (group.bound_device_id == device or not rank_device.IS_CUDA)
    for rows in (32, 25):
        check_products(rows, torch.float32, None)
        check_products(rows, torch.bfloat16, None)
        check_products(rows, torch.float8_e4m3fn, "tensor")
        check_products(rows, torch.float8_e4m3fn, "row")
    assert sw.stats()["product_fallbacks"] == 0 or not rank_device.has_scaled_products(), sw.stats()
    if peers:
        check_flags()
    assert (sw.stats()["peer_bytes"] > 0) == peers, sw.stats()
    rank_device.end()


if __name__ == "__main__":
    main()
