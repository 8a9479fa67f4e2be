"""Runs on each of several ranks that share a GPU, with models: attention over a sharded sequence, sharded weights, many
tensors at once, compiled code. test_models.py starts it over NCCL; rank_device.py lists other devices.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import rank_device
import torch
import torch.distributed as dist
from nccl_ranks import part
from rank_device import DEVICE
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw

STEPS = 4
OUTPUTS = ("out", "q", "k", "v")


# ---- attention


class Case(NamedTuple):
    dtype: torch.dtype
    kv_heads: int = 4
    is_causal: bool = False
    window: int | None = None
    documents: int = 1
    tensor_mask: torch.dtype | None = None  # hides all keys from some queries
    depth: int = 64
    value_depth: int = 64


HALF = torch.bfloat16
CASES = [
    Case(torch.float32, 2),
    Case(HALF, is_causal=True),
    Case(HALF, 2, is_causal=True),
    *(Case(dtype, is_causal=True, window=48) for dtype in (HALF, torch.float16, torch.float32)),
    Case(HALF, 2, documents=3),
    Case(torch.float32, tensor_mask=torch.bool),
    Case(HALF, 2, tensor_mask=torch.bool),
    Case(HALF, tensor_mask=HALF),
    Case(HALF, 2, value_depth=32),
    Case(HALF, depth=32, tensor_mask=torch.bool),
    Case(torch.float32, 2, value_depth=24),
    Case(HALF, depth=20, value_depth=20),
]


def check_attention() -> None:
    """Checks each case by every method, in both layouts of the sequence."""
    world = dist.get_world_size()
    length = 200 if world < 4 else 203  # parts of multiples of 8, and uneven parts
    for case, layout in itertools.product(CASES, ("contiguous", "zigzag")):
        check_attention_of(case, length, layout)
    if rank_device.IS_CUDA:
        tensor = torch.zeros(1, 1, length, 8, dtype=torch.float64, device=DEVICE)
        with pytest.raises(ValueError, match="q must be .* on CUDA, got torch.float64"):
            sw.attention.scaled_dot_product_attention(tensor, tensor, tensor, size=length * world)


def check_attention_of(case: Case, length: int, layout: str) -> None:
    """Errors are at most 2.5 times those of unsharded attention in the same dtype, plus a little. Gradients too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    shapes = ((4, case.depth), (case.kv_heads, case.depth), (case.kv_heads, case.value_depth), (4, case.value_depth))
    full = [torch.randn(2, n, length, d, generator=generator).to(DEVICE, case.dtype) for n, d in shapes]
    hidden = hidden_pairs(case, length, generator)
    exact = unsharded_attention(full, hidden, torch.float64)
    usual = unsharded_attention(full, hidden, case.dtype)
    places = torch.arange(length).chunk(world)[rank]
    if layout == "zigzag":
        places = torch.cat([torch.arange(a, b) for a, b in sw.placements.Pieces.zigzag(0, length, world).lists[rank]])
    mask: sw.attention.Mask | torch.Tensor = sw.attention.Mask(case.window, document_lengths(case, length))
    methods = ["serial", "ring", "gather", "ulysses"]
    if case.tensor_mask is not None:
        mask = hidden[places.to(DEVICE)].logical_not()
        if case.tensor_mask != torch.bool:
            mask = torch.zeros_like(mask, dtype=case.tensor_mask).masked_fill(~mask, -math.inf)
        methods.remove("ulysses")
    for method in methods:
        local = [t[:, :, places].contiguous().requires_grad_() for t in full[:3]]
        out = sw.attention.scaled_dot_product_attention(
            *local,
            is_causal=case.is_causal,
            mask=mask,
            enable_gqa=case.kv_heads != 4,
            method=method,
            size=length,
            layout=layout,
        )
        grads = torch.autograd.grad(out, local, full[3][:, :, places])
        for what, actual, right, plain in zip(OUTPUTS, (out, *grads), exact, usual, strict=True):
            error = (actual.double() - right[:, :, places]).abs().max().item()
            least = 2e-3 if case.dtype.itemsize == 2 else 1e-5
            allowed = 2.5 * (plain.double() - right).abs().max().item() + least
            name = f"attention by {method}, {case}, {layout}: {what}"
            assert error <= allowed, (
                f"{name} must be within {allowed:.2e} of the exact result, got an error of {error:.2e}"
            )


def document_lengths(case: Case, length: int) -> list[int]:
    return [len(part) for part in torch.arange(length).chunk(case.documents)]


def hidden_pairs(case: Case, length: int, generator: torch.Generator) -> torch.Tensor:
    at = torch.arange(length)
    distance = at[:, None] - at
    hidden = distance < 0 if case.is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if case.window is not None:
        hidden |= distance.abs() >= case.window
    document = torch.arange(case.documents).repeat_interleave(torch.tensor(document_lengths(case, length)))
    hidden |= document[:, None] != document
    if case.tensor_mask is not None:
        hidden |= torch.rand(length, length, generator=generator) < 0.4
        hidden[3] = hidden[length - 2] = True
    return hidden.to(DEVICE)


def unsharded_attention(tensors: list[torch.Tensor], hidden: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the result and the gradients of unsharded attention; zeros for a query without visible keys."""
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in tensors[:3])
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    blind = hidden.all(-1, keepdim=True)
    scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(hidden & ~blind, -math.inf)
    out = scores.softmax(-1).masked_fill(blind, 0) @ values
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], tensors[3].to(dtype))]


# ---- sharded weights


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(96, 17)).to(DEVICE)


def train(model: torch.nn.Module, step_alone: bool) -> list[float]:
    """Returns the mean of all ranks' losses for each step. With `step_alone`, this rank computes all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs = torch.randn(world, 8, 96).to(DEVICE)
        optimizer.zero_grad()
        if step_alone:
            loss = sum(model(batch).square().mean() for batch in inputs) / world
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
        actual = train(model, step_alone=False)
        if everywhere.get("options") is bfloat16:
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(right), rtol=2e-2, atol=1e-3)
            continue
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(right), rtol=1e-4, atol=1e-5)
        for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            full = parameter.full_tensor()
            torch.testing.assert_close(full, other, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        assert torch.isfinite(model(torch.ones(2, 96, device=DEVICE))).all()


# ---- many tensors


def check_many() -> None:
    """Moves many tensors from all ranks to the second half of them and back, in small buckets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everywhere, last = sw.Mesh({"fsdp": world}), sw.Mesh({"tp": max(1, world // 2)}, tuple(range(world // 2, world)))
    shapes = [(33, 20), (7,), (128, 64), (5, 3, 2)]
    pairs = [
        (sw.Layout(everywhere, shape, ["S(0)"]), sw.Layout(last, shape, [f"S({len(shape) - 1})"])) for shape in shapes
    ]
    full = [torch.arange(math.prod(shape), dtype=torch.float32, device=DEVICE).view(shape) for shape in shapes]

    def parts(ends: list[sw.Layout]) -> list[torch.Tensor | None]:
        return [cut(tensor, layout, rank) for tensor, layout in zip(full, ends, strict=True)]

    sources, destinations = ([pair[side] for pair in pairs] for side in (0, 1))
    for source, destination in ((sources, destinations), (destinations, sources)):
        items = list(zip(parts(source), source, destination, strict=True))
        found = sw.redistribute_many(items, bucket_bytes=4096, device=torch.device(DEVICE))
        for tensor, right in zip(found, parts(destination), strict=True):
            assert torch.equal(tensor, right) if right is not None else tensor.numel() == 0


def cut(full: torch.Tensor, layout: sw.Layout, rank: int) -> torch.Tensor | None:
    return part(full, layout, rank).contiguous() if rank in layout.mesh.ranks else None


# ---- compiled code


def check_compiled() -> None:
    """Compares compiled with eager code: results and gradients, also for sizes that the ranks do not divide."""
    compilers: list[dict[str, Any]] = [{"backend": "aot_eager"}]
    if rank_device.IS_CUDA:
        compilers = [{}, {"mode": "reduce-overhead"}]  # the second runs all of it in CUDA graphs
    elif DEVICE == "cpu":
        compilers = [{}]
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    with sw.enabled(strict=True):
        for options, function in itertools.product(compilers, (move, multiply, multiply_plain)):
            check_compiled_function(function, mesh, options)
    for options in compilers:
        check_compiled_training(mesh, options)


def move(x: DTensor, weight: DTensor) -> torch.Tensor:
    x = x.sin().redistribute(placements=[Shard(1)]).cos().redistribute(placements=[Replicate()])
    return x.to_local() * weight.redistribute(placements=[Replicate()]).to_local().sum()


def multiply(x: DTensor, weight: DTensor) -> torch.Tensor:
    return sw.linear(x.cos(), weight).to_local().square()


def multiply_plain(x: DTensor, weight: DTensor) -> torch.Tensor:
    part, world = weight.to_local().t(), dist.get_world_size()
    gathered = sw.all_gather_matmul(part.t().cos(), part, size=20, columns=part.shape[1] * world, method="ring")
    return gathered.sum() * x.to_local()


def check_compiled_function(
    function: Callable[[DTensor, DTensor], torch.Tensor], mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    # Products of uneven parts run between graphs.
    compiled = torch.compile(function, fullgraph=function is move, **options)
    replays = mock.patch.object(
        CUDAGraphTreeManager, "execute_node", autospec=True, side_effect=CUDAGraphTreeManager.execute_node
    )
    with replays as replay:
        compare_with_eager(function, compiled, mesh, str(options))
    if options.get("mode") == "reduce-overhead":
        assert replay.called, f"{function.__name__} must replay CUDA graphs, got none"


def compare_with_eager(
    function: Callable[[DTensor, DTensor], torch.Tensor],
    compiled: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    options: str,
) -> None:
    for rows in (24, 23, 31):
        generator = torch.Generator().manual_seed(rows)
        tensors = [torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((rows, 16), (20, 16))]
        leaves = [distribute_tensor(t, mesh, [Shard(0)]).detach().requires_grad_() for t in tensors]
        expected = results_of(function, leaves)
        for call in range(3):  # with CUDA graphs: a warm-up, a capture, a replay
            name = f"{function.__name__}, {rows} rows, {options}, call {call}"
            for actual, right in zip(results_of(compiled, leaves), expected, strict=True):
                torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def results_of(function: Callable[..., torch.Tensor], leaves: list[DTensor]) -> list[torch.Tensor]:
    """Returns the result and the local gradients, as copies that later calls do not overwrite."""
    torch.compiler.cudagraph_mark_step_begin()
    result = function(*leaves)
    gradients = torch.autograd.grad(result.sum(), leaves)
    return [result.detach().clone(), *(gradient.to_local().clone() for gradient in gradients)]


def check_compiled_training(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Trains a model whose blocks are compiled, and one that is compiled as a whole."""
    right = train(make_model(), step_alone=True)
    for compile_blocks in (True, False):
        torch._dynamo.reset()
        model = make_model()
        for i, layer in enumerate(model):
            if compile_blocks:
                model[i] = layer = torch.compile(layer, **options)  # type: ignore[assignment]
            sw.fully_shard(layer, mesh=mesh)
        sw.fully_shard(model, mesh=mesh)
        run = model if compile_blocks else torch.compile(model, **options)
        actual = train(run, step_alone=False)
        message = f"losses with compiled {'blocks' if compile_blocks else 'model'}, {options}"
        torch.testing.assert_close(
            torch.tensor(actual), torch.tensor(right), rtol=1e-4, atol=1e-5, msg=lambda m, n=message: f"{n}: {m}"
        )


TASKS: dict[str, Callable[[], None]] = {
    "attention": check_attention,
    "compiled": check_compiled,
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
