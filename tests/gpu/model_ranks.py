"""What one of several ranks on one GPU does with whole models: attention over a cut sequence, weights that are gathered
when they are used, many tensors at once. Started by test_models.py, over NCCL; on other devices: rank_device.py.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import rank_device
import torch
import torch.distributed as dist
from nccl_ranks import part
from rank_device import DEVICE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwright as sw

STEPS = 4
OUTPUTS = ("out", "q", "k", "v")


# ---- attention


def check_attention() -> None:
    """Errors of at most 2.5 times those of unsharded attention in the same dtype, plus a little; gradients too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [
        (torch.float32, 2, False, None),
        (torch.bfloat16, 4, True, None),
        (torch.bfloat16, 2, True, None),
        (torch.bfloat16, 4, True, sw.attention.Mask(window=48)),
    ]
    length = 200 if world < 4 else 203  # multiples of 8, and uneven parts
    for (dtype, kv_heads, is_causal, mask), layout in itertools.product(cases, ("contiguous", "zigzag")):
        generator = torch.Generator().manual_seed(7)
        heads = (4, kv_heads, kv_heads, 4)
        whole = [torch.randn(2, n, length, 64, generator=generator).to(DEVICE, dtype) for n in heads]
        exact = whole_attention(whole, is_causal, mask, torch.float64)
        usual = whole_attention(whole, is_causal, mask, dtype)
        places = torch.arange(length).chunk(world)[rank]
        if layout == "zigzag":
            places = torch.cat(
                [torch.arange(a, b) for a, b in sw.placements.Pieces.zigzag(0, length, world).lists[rank]]
            )
        for method in ("serial", "ring", "gather", "ulysses"):
            mine = [t[:, :, places].contiguous().requires_grad_() for t in whole[:3]]
            out = sw.attention.scaled_dot_product_attention(
                *mine,
                is_causal=is_causal,
                mask=mask,
                enable_gqa=kv_heads != 4,
                method=method,
                size=length,
                layout=layout,
            )
            grads = torch.autograd.grad(out, mine, whole[3][:, :, places])
            name = f"attention by {method}, {dtype}, {kv_heads} heads of keys, {is_causal=}, {mask}, {layout}"
            for what, found, right, plain in zip(OUTPUTS, (out, *grads), exact, usual, strict=True):
                error = (found.double() - right[:, :, places]).abs().max().item()
                allowed = 2.5 * (plain.double() - right).abs().max().item() + (2e-3 if dtype.itemsize == 2 else 1e-5)
                assert error <= allowed, f"{name}: {what} is wrong by {error:.2e}; allowed is {allowed:.2e}"


def whole_attention(
    tensors: list[torch.Tensor], is_causal: bool, mask: sw.attention.Mask | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The result and the gradients, by products of whole matrices."""
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in tensors[:3])
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    distance = torch.arange(q.shape[2], device=DEVICE)[:, None] - torch.arange(q.shape[2], device=DEVICE)
    hidden = distance < 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if mask is not None and mask.window is not None:
        hidden = hidden | (distance.abs() >= mask.window)
    scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], tensors[3].to(dtype))]


# ---- weights that are gathered when they are used


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(96, 17)).to(DEVICE)


def train(model: torch.nn.Module, step_alone: bool) -> list[float]:
    """The sum over ranks of the losses of each step. Alone, a rank computes what all do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs = torch.randn(world, 8, 96).to(DEVICE)
        optimizer.zero_grad()
        if step_alone:
            loss = sum(model(one).square().mean() for one in inputs) / world
            loss.backward()
        else:
            loss = model(inputs[rank]).square().mean()
            loss.backward()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            loss /= world
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_fully_shard() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (world,))
    expected = make_model()
    right = train(expected, step_alone=True)
    bfloat16 = sw.fsdp.Options(message_format=torch.bfloat16)
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"options": sw.fsdp.Options(prefetch=0)}),
        ({"reshard_after_forward": False}, {}),
        ({"options": bfloat16}, {}),
    ]
    for everywhere, outermost in settings:
        model = make_model()
        for layer in model:
            sw.fully_shard(layer, mesh=mesh, **everywhere)
        sw.fully_shard(model, mesh=mesh, **{**everywhere, **outermost})
        found = train(model, step_alone=False)
        if everywhere.get("options") is bfloat16:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=2e-2, atol=1e-3)
            continue
        torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=1e-4, atol=1e-5)
        for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor()
            torch.testing.assert_close(whole, other, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        assert torch.isfinite(model(torch.ones(2, 96, device=DEVICE))).all()


# ---- many tensors


def check_many() -> None:
    """From all ranks to the last ones and back, in small buckets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everywhere, last = sw.Mesh({"fsdp": world}), sw.Mesh({"tp": max(1, world // 2)}, tuple(range(world // 2, world)))
    shapes = [(33, 20), (7,), (128, 64), (5, 3, 2)]
    pairs = [
        (sw.Layout(everywhere, shape, ["S(0)"]), sw.Layout(last, shape, [f"S({len(shape) - 1})"])) for shape in shapes
    ]
    whole = [torch.arange(math.prod(shape), dtype=torch.float32, device=DEVICE).view(shape) for shape in shapes]

    def parts(ends: list[sw.Layout]) -> list[torch.Tensor | None]:
        return [cut(tensor, layout, rank) for tensor, layout in zip(whole, ends, strict=True)]

    sources, destinations = ([pair[side] for pair in pairs] for side in (0, 1))
    for source, destination in ((sources, destinations), (destinations, sources)):
        items = list(zip(parts(source), source, destination, strict=True))
        found = sw.redistribute_many(items, bucket_bytes=4096, device=torch.device(DEVICE))
        for tensor, right in zip(found, parts(destination), strict=True):
            assert torch.equal(tensor, right) if right is not None else tensor.numel() == 0


def cut(whole: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor | None:
    return part(whole, layout, rank).contiguous() if rank in layout.mesh.ranks else None


TASKS: dict[str, Callable[[], None]] = {
    "attention": check_attention,
    "fully_shard": check_fully_shard,
    "many": check_many,
}


def main() -> None:
    rank_device.begin()
    TASKS[sys.argv[1]]()
    assert sw.stats()["fallbacks"] == 0, sw.stats()
    rank_device.end()


if __name__ == "__main__":
    main()
