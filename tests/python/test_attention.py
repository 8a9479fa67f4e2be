"""Compares attention over a sequence that is sharded over ranks with unsharded attention in float64."""

from __future__ import annotations

import copy
import functools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import meshes
import shardwright as sw
from pool import Pool
from shardwright._native import _runtime
from shardwright.layouts import tables

METHODS = ("serial", "ring", "gather", "ulysses")
only_on_cpu = pytest.mark.cpu_only("others here show the same on the asynchronous device, which is slower")


def _inputs(batch: int, heads: int, kv_heads: int, length: int, depth: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(length * 10 + heads)
    shapes = [(batch, heads), (batch, kv_heads), (batch, kv_heads), (batch, heads)]
    return [torch.randn(*shape, length, depth, generator=generator).to(dtype) for shape in shapes]


def _visible(length: int, is_causal: bool, mask: sw.attention.Mask | None) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = distance >= 0 if is_causal else torch.ones(length, length, dtype=torch.bool)
    window, documents = mask or (None, None)
    if window is not None:
        seen = seen & (distance.abs() < window)
    if documents is not None:
        numbers = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        seen = seen & (numbers[:, None] == numbers)
    return seen


def _whole(inputs: list[torch.Tensor], seen: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns result and gradients of unsharded attention in `dtype`, then the log-sum-exp in float64."""
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in inputs[:3])
    times = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(times, 1) for t in (k, v))
    if dtype == torch.float64:
        scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        out = scores.softmax(-1) @ values
        lse = scores.logsumexp(-1)
    else:
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        lse = torch.empty(0)
    grads = torch.autograd.grad(out, [q, k, v], inputs[3].to(dtype))
    return [out.detach(), *grads, lse.detach()]


def _positions(layout: Any, length: int) -> torch.Tensor:
    """Returns this rank's positions of the sequence, in local order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout == "zigzag":
        layout = sw.placements.Pieces.zigzag(0, length, world)
    if isinstance(layout, sw.placements.Pieces):
        return torch.cat([torch.arange(0), *[torch.arange(a, b) for a, b in layout.lists[rank]]])
    chunks = torch.arange(length).chunk(world)
    return chunks[rank] if rank < len(chunks) else torch.arange(0)


def _worst(actual: torch.Tensor, right: torch.Tensor) -> float:
    assert actual.shape == right.shape
    return float((actual.cpu().double() - right).abs().max()) if actual.numel() else 0.0


def _check_case(
    sizes: tuple[int, int, int, int, int], is_causal: bool, mask: Any, layout: Any, dtype: torch.dtype, methods: Any
) -> None:
    inputs = _inputs(*sizes, dtype)
    length = sizes[3]
    seen = _visible(length, is_causal, mask)
    exact = _whole(inputs, seen, torch.float64)
    usual = _whole(inputs, seen, dtype) if length else exact
    positions = _positions(layout, length)
    for method in methods:
        local = [t[:, :, positions].to(meshes.device).requires_grad_() for t in inputs[:3]]
        out, lse = sw.attention.scaled_dot_product_attention(
            *local,
            is_causal=is_causal,
            mask=mask,
            enable_gqa=sizes[1] != sizes[2],
            method=method,
            return_lse=True,
            size=length,
            layout=layout,
        )
        grads = torch.autograd.grad(out, local, inputs[3][:, :, positions].to(meshes.device))
        for name, actual, right, stock in zip("oqkv", [out, *grads], exact, usual, strict=False):
            # Rounding errors of float32 grow with the number of terms. Those of bfloat16 are much larger.
            slack = 2e-3 if dtype == torch.bfloat16 else 4e-6
            allowed = 2.5 * _worst(stock, right) + slack
            error = _worst(actual, right[:, :, positions])
            assert error <= allowed, (name, method, error, allowed)
        torch.testing.assert_close(
            lse.cpu().double(), exact[-1][:, :, positions], atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
        )


CASES: list[tuple[tuple[int, int, int, int, int], bool, Any, Any]] = [
    ((2, 4, 2, 37, 8), True, None, None),
    ((1, 4, 4, 24, 16), False, None, None),
    ((2, 3, 1, 29, 8), True, None, "zigzag"),
    ((1, 2, 2, 31, 8), True, sw.attention.Mask(window=6), None),
    ((1, 2, 1, 31, 8), False, sw.attention.Mask(window=4, documents=(7, 0, 13, 11)), "zigzag"),
    ((1, 2, 2, 3, 8), True, None, None),
    ((1, 2, 2, 0, 8), False, None, None),
]


def _all_cases(dtype: torch.dtype) -> None:
    for case in CASES:
        _check_case(*case, dtype, METHODS)
    if dist.get_world_size() == 3:
        _check_case(
            (1, 2, 2, 10, 8), True, None, sw.placements.Pieces(2, [[(6, 10), (0, 1)], [], [(1, 6)]]), dtype, METHODS
        )


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=only_on_cpu), 2, 3, pytest.param(4, marks=only_on_cpu)])
def test_every_method_matches_unsharded_attention(pool: Pool, world_size: int) -> None:
    pool.run(_all_cases, world_size, torch.float32)
    pool.run(_all_cases, world_size, torch.bfloat16)


@only_on_cpu
def test_methods_on_eight_ranks(pool: Pool) -> None:
    pool.run(_check_case, 8, (1, 2, 2, 50, 8), True, None, "zigzag", torch.float32, ("ring", "ulysses", "auto"))


def _result(method: str, dtype: torch.dtype, is_causal: bool, layout: Any) -> list[torch.Tensor]:
    """Returns the global result and gradients, computed in 24 chunks of two positions."""
    length = 48
    inputs = _inputs(2, 4, 2, length, 16, dtype)
    positions = _positions(layout, length)
    local = [t[:, :, positions].to(meshes.device).requires_grad_() for t in inputs[:3]]
    out = sw.attention.scaled_dot_product_attention(
        *local, is_causal=is_causal, enable_gqa=True, method=method, chunks=24, size=length, layout=layout
    )
    grads = torch.autograd.grad(out, local, inputs[3][:, :, positions].to(meshes.device))
    found = []
    for part, like in zip([out.detach(), *grads], [inputs[0], *inputs[:3]], strict=True):
        full = torch.zeros_like(like)
        full[:, :, positions] = part.cpu()
        dist.all_reduce(full)
        found.append(full)
    return found


@only_on_cpu
def test_bits_do_not_depend_on_the_number_of_ranks(pool: Pool) -> None:
    for dtype, is_causal in ((torch.float32, True), (torch.bfloat16, False)):
        first = pool.run(_result, 1, "serial", dtype, is_causal, None)[0]
        for world_size in (2, 3, 4):
            for method in METHODS:
                layout = "zigzag" if method == "ring" and world_size != 3 else None
                for found in pool.run(_result, world_size, method, dtype, is_causal, layout):
                    same = [torch.equal(result, right) for result, right in zip(found, first, strict=True)]
                    assert all(same), (world_size, method, same)


def _two_level_on_nodes(per_node: int) -> None:
    described = {"version": 1, "name": "nodes", "ranks_per_node": per_node, "step_ps": 0, "memory_ps_per_kib": 1}
    links = {"inside": {"message_ps": 1, "ps_per_kib": 1}, "between": {"message_ps": 1, "ps_per_kib": 100}}
    topology = sw.planning.load_topology({**described, **links, "mesh_dims": {}})
    before = tables.current
    tables.change(before.with_environment(topology))
    try:
        for sizes, is_causal, layout in (
            ((2, 5, 1, 37, 8), True, "zigzag"),  # neither number of ranks divides the heads
            ((1, 4, 4, 24, 8), False, None),
            ((1, 2, 2, 3, 8), True, None),
        ):
            _check_case(sizes, is_causal, None, layout, torch.float32, ("two_level",))
        q, k, v, _ = _inputs(1, 4, 4, 64, 8, torch.float32)
        local = [t[:, :, _positions(None, 64)] for t in (q, k, v)]
        assert "two_level: forward" in sw.attention.explain(*local, size=64)
        # The ranks of this group are on one node, so it has no two levels.
        mesh = meshes.get_mesh((dist.get_world_size() // per_node, per_node))
        with pytest.raises(ValueError, match="two_level"):
            sw.attention.scaled_dot_product_attention(*local, size=32, group=mesh.get_group(1), method="two_level")
    finally:
        tables.change(before)


@only_on_cpu
def test_two_level_method_on_nodes(pool: Pool) -> None:
    pool.run(_two_level_on_nodes, 4, 2)
    pool.run(_two_level_on_nodes, 8, 4)


def _traced(method: str) -> list[tuple[str, str, int, float, float]]:
    q, k, v, _ = _inputs(1, 4, 4, 2048, 32, torch.float32)
    local = [t.chunk(4, 2)[dist.get_rank()].contiguous() for t in (q, k, v)]
    call = lambda: sw.attention.scaled_dot_product_attention(*local, method=method, size=2048)  # noqa: E731
    call()
    with sw.debug.trace() as events:
        call()
    return [(event.lane, event.instruction, event.chunk, event.start, event.end) for event in events]


@only_on_cpu
def test_ring_overlaps_key_transfers_with_products(pool: Pool) -> None:
    for events in pool.run(_traced, 4, "ring"):
        attends = [event for event in events if event[1].startswith("attend")]
        transfers = [event for event in events if event[0] == "communication"]
        assert len(attends) == 4 and len(transfers) == 3
        # Each transfer begins before the product of the previous keys, and is waited for after that product.
        for (_, _, _, begin, end), (_, _, _, start, stop) in zip(transfers, attends, strict=False):
            assert begin <= start and stop <= end
    for events in pool.run(_traced, 4, "serial"):
        last = max(event[4] for event in events if event[0] == "communication")
        assert all(event[3] >= last for event in events if event[1].startswith("attend"))


def _with_dtensors() -> None:
    mesh = meshes.get_mesh((2, 2))
    q, k, v, dout = _inputs(2, 4, 2, 13, 8, torch.float32)
    exact = _whole([q, k, v, dout], _visible(13, True, None), torch.float64)
    for placements in ([Shard(1), Shard(2)], [Shard(0), Shard(2)], [Replicate(), Shard(2)], [Shard(1), Replicate()]):
        given = [distribute_tensor(t, mesh, placements).requires_grad_() for t in (q, k, v)]
        out, lse = sw.attention.scaled_dot_product_attention(
            *given, is_causal=True, enable_gqa=True, method="ring", return_lse=True
        )
        assert out.placements == tuple(placements) and out.shape == q.shape
        out.backward(distribute_tensor(dout, mesh, placements))
        actual = [out.full_tensor(), *[t.grad.full_tensor() for t in given], lse.full_tensor()]  # type: ignore[union-attr]
        for result, right in zip(actual, exact, strict=True):
            torch.testing.assert_close(result.cpu().double(), right, atol=2e-5, rtol=0)


def test_dtensor_placements_define_the_layout(pool: Pool) -> None:
    pool.run(_with_dtensors, 4)


def _invalid_arguments() -> list[str]:
    q, k, v, _ = _inputs(1, 4, 2, 8, 8, torch.float32)
    rank = dist.get_rank()
    q, k, v = (t.chunk(2, 2)[rank] for t in (q, k, v))
    mesh = meshes.get_mesh((2,))
    cut = [distribute_tensor(t, mesh, [Shard(3)]) for t in (q, q, q)]
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((q, k, v), {"size": 8}),
        ((q, k, v), {"enable_gqa": True}),
        ((q, k, v), {"enable_gqa": True, "size": 10}),
        ((q, k[:, :, :1], v[:, :, :1]), {"enable_gqa": True, "size": 8}),
        ((q, k, v[:, :1]), {"enable_gqa": True, "size": 8}),
        ((q, k.double(), v), {"enable_gqa": True, "size": 8}),
        ((q[0], k, v), {"size": 8}),
        ((q, q, q), {"size": 8, "method": "rings"}),
        ((q, q, q), {"size": 8, "mask": "causal"}),
        ((q, q, q), {"size": 8, "mask": sw.attention.Mask(documents=(3, 4))}),
        ((q, q, q), {"size": 8, "mask": sw.attention.Mask(window=0)}),
        ((q, q, q), {"size": 8, "layout": "spiral"}),
        ((q, q, q), {"size": 8, "chunks": 0}),
        ((q, q, q), {"size": 8, "merge": "bfloat16"}),
        ((q.int(), q.int(), q.int()), {"size": 8}),
        (cut, {}),
    ]
    said = []
    for tensors, arguments in calls:
        with pytest.raises(ValueError) as raised:
            sw.attention.scaled_dot_product_attention(*tensors, **arguments)
        said.append(re.split(":| ", str(raised.value))[0])
    return said


@only_on_cpu
def test_errors_name_the_invalid_argument(pool: Pool) -> None:
    expected = [
        "k",
        "size",
        "q",
        "k",
        "v",
        "k",
        "q",
        "method",
        "mask",
        "documents",
        "window",
        "layout",
        "chunks",
        "merge",
        "q",
        "q",
    ]
    assert pool.run(_invalid_arguments, 2) == [expected, expected]


def _differing_arguments() -> list[str]:
    q, k, v, _ = _inputs(1, 4, 4, 8, 8, torch.float32)
    rank = dist.get_rank()
    q, k, v = (t.chunk(2, 2)[rank] for t in (q, k, v))
    calls: list[tuple[Any, dict[str, Any]]] = [
        ([t[:, :, rank:] for t in (q, k, v)], {}),  # one row is missing on rank 1
        ((q, k, v[:, rank:]), {}),
        ((q, k, v), {"is_causal": rank == 0}),
        ((q, k, v), {"chunks": 2 + rank}),
        ((q, k, v), {"scale": 1.0 + rank}),
        ([t.to((torch.float32, torch.float64)[rank]) for t in (q, k, v)], {}),
    ]
    said = []
    for tensors, arguments in calls:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            sw.attention.scaled_dot_product_attention(*tensors, size=8, method="ring", **arguments)
        said.append(str(raised.value))
    assert (
        sw.attention.scaled_dot_product_attention(q, k, v, size=8, method="ring").shape == q.shape
    )  # nothing is left in flight
    return said


@only_on_cpu
def test_all_ranks_raise_if_arguments_are_invalid_or_differ(pool: Pool) -> None:
    first, second = pool.run(_differing_arguments, 2)
    assert all("on ranks [1] the arguments are not allowed" in text for text in first[:2])
    assert second[0].startswith("q must be of 4 rows on rank 1") and second[1].startswith("v must be of the shape of k")
    for texts in (first, second):
        assert all(" on ranks [0]; " in text and text.endswith(" on ranks [1]") for text in texts[2:])


def _heads_apart() -> None:
    for q_heads, kv_heads in ((12, 3), (1, 1)):  # rank 0: q heads [0, 6) use k heads 0 and 1; or rank 1 has none
        given = [
            distribute_tensor(torch.randn(1, heads, 6, 4), meshes.get_mesh((2,)), [Shard(1)])
            for heads in (q_heads, kv_heads, kv_heads)
        ]
        with pytest.raises(ValueError, match="k must have on each rank the heads that"):
            sw.attention.scaled_dot_product_attention(*given, enable_gqa=True)


@only_on_cpu
def test_key_heads_must_be_on_the_ranks_of_their_query_heads(pool: Pool) -> None:
    pool.run(_heads_apart, 2)


def _differing_calls() -> None:
    q, k, v, _ = _inputs(1, 2, 2, 8, 8, torch.float32)
    local = [t.chunk(2, 2)[dist.get_rank()] for t in (q, k, v)]
    sw.debug.check_ranks(True)
    try:
        sw.attention.scaled_dot_product_attention(*local, size=8, method="ring", is_causal=True)
        with pytest.raises(RuntimeError, match="attention: the ranks differ"):
            sw.attention.scaled_dot_product_attention(*local, size=8, method="ring", is_causal=dist.get_rank() == 0)
    finally:
        sw.debug.check_ranks(False)


@only_on_cpu
def test_check_ranks_reports_differing_attention_calls(pool: Pool) -> None:
    pool.run(_differing_calls, 2)


def _explained() -> str:
    q, k, v, _ = _inputs(1, 4, 2, 64, 8, torch.float32)
    local = [t.chunk(4, 2)[dist.get_rank()] for t in (q, k, v)]
    return sw.attention.explain(*local, is_causal=True, enable_gqa=True, size=64, method="ring")


@only_on_cpu
def test_explain_attention(pool: Pool) -> None:
    texts = pool.run(_explained, 4)
    assert len(set(texts)) == 1
    for rank in range(4):
        assert f"rank {rank} holds [{16 * rank}, {16 * rank + 16}): {rank + 1} block product" in texts[0]
    assert all(f"  {method}: forward " in texts[0] for method in METHODS) and texts[0].count("<- this one") == 1


def _in_a_context() -> None:
    length = 21
    q, k, v, dout = _inputs(1, 2, 2, length, 8, torch.float32)
    exact = _whole([q, k, v, dout], _visible(length, True, None), torch.float64)
    mesh = meshes.get_mesh((3,))
    before = [t.clone() for t in (q, k, v)]
    with sw.attention.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        assert torch.equal(q, before[0][:, :, _positions("zigzag", length)])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with pytest.raises(ValueError, match="dropout_p must be 0, got 0.5"):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert all(torch.equal(t, old) for t, old in zip((q, k, v), before, strict=True))
    (full,) = sw.attention.context_parallel_unshard(mesh, [out], [2], size=length)
    torch.testing.assert_close(full.double(), exact[0], atol=1e-5, rtol=0)
    again = sw.attention.redistribute_sequence(out, "zigzag", "contiguous", dim=2, size=length)
    torch.testing.assert_close(again.double(), exact[0][:, :, _positions(None, length)], atol=1e-5, rtol=0)


def _in_pytorchs_layers() -> None:
    mesh = meshes.get_mesh((2,))
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 13, 16)
    for training in (True, False):
        layer.train(training)
        with torch.set_grad_enabled(training):
            right = layer(x).detach()
            local = x.clone()
            with sw.attention.context_parallel(mesh, buffers=[local], buffer_seq_dims=[1]):
                out = layer(local).detach()
                with pytest.raises(ValueError, match="need_weights must be False .*, got True"):
                    layer.self_attn(local, local, local)
        (full,) = sw.attention.context_parallel_unshard(mesh, [out], [1], size=13)
        torch.testing.assert_close(full, right, atol=1e-5, rtol=0)


def _recomputed() -> None:
    mesh = meshes.get_mesh((2,))
    inputs = _inputs(1, 2, 2, 12, 8, torch.float32)
    right = _whole(inputs, _visible(12, True, None), torch.float64)[1]
    positions = _positions("zigzag", 12)
    for use_reentrant in (False, True):
        for how in ("grad", "backward"):
            q, k, v, dout = (t.clone() for t in inputs)
            with sw.attention.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
                local_q = q.clone().requires_grad_()
                attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
                out = checkpoint(attend, local_q, k, v, use_reentrant=use_reentrant)
                if how == "grad" and not use_reentrant:
                    (found,) = torch.autograd.grad(out, local_q, dout)
                else:
                    out.backward(dout)
                    assert local_q.grad is not None
                    found = local_q.grad
            torch.testing.assert_close(found.double(), right[:, :, positions], atol=2e-5, rtol=0)


def _views_as_buffers() -> None:
    mesh = meshes.get_mesh((2,))
    batch = torch.arange(2 * 14).view(2, 14)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    before, positions = batch.clone(), _positions("zigzag", 13)
    with sw.attention.context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        assert torch.equal(tokens, before[:, :-1][:, positions]) and torch.equal(labels, before[:, 1:][:, positions])
    assert torch.equal(batch, before) and torch.equal(tokens, before[:, :-1]) and torch.equal(labels, before[:, 1:])
    weight = torch.nn.Parameter(torch.ones(13))
    cut = sw.attention.context_parallel(mesh, buffers=[tokens, weight], buffer_seq_dims=[1, 0])
    with pytest.raises(ValueError, match="gradient"), cut:
        pass
    assert tokens.shape == (2, 13)
    # The end of the block writes to the buffer, so a tensor that autograd saved of it is no longer valid.
    scale, x = torch.ones(13), torch.ones(7 - dist.get_rank(), requires_grad=True)
    with sw.attention.context_parallel(mesh, buffers=[scale], buffer_seq_dims=[0], layout="contiguous"):
        product = x * scale
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def _dtypes_and_placements_like_stock() -> None:
    q, k, v, _ = _inputs(1, 4, 4, 8, 8, torch.float32)
    local = [t.chunk(2, 2)[dist.get_rank()] for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found = sw.attention.scaled_dot_product_attention(
            local[0], local[1].bfloat16(), local[2], size=8, method="ring"
        )
        right = F.scaled_dot_product_attention(q, k, v)
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(found, right.chunk(2, 2)[dist.get_rank()], atol=2e-2, rtol=0)
    mesh = meshes.get_mesh((2,))
    heads = [distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)]  # a rank would attend only to its own part
    refused = pytest.raises(
        ValueError, match="query must be a plain tensor, or a DTensor whose sequence is sharded over ranks"
    )
    with sw.attention.context_parallel(mesh, size=16), refused:
        F.scaled_dot_product_attention(*heads)
    without_heads = [distribute_tensor(t[0], mesh, [Shard(1)]) for t in (q, k, v)]
    with sw.attention.context_parallel(mesh, size=8, layout="contiguous"):
        found = F.scaled_dot_product_attention(*without_heads)
    torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(q[0], k[0], v[0]))


@only_on_cpu
def test_replaced_attention_behaves_like_pytorchs(pool: Pool) -> None:
    pool.run(_in_pytorchs_layers, 2)
    pool.run(_recomputed, 2)
    pool.run(_views_as_buffers, 2)
    pool.run(_dtypes_and_placements_like_stock, 2)


class _Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class _Checkpointed(torch.nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant, self.attention = is_reentrant, _Layer()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attention, q * self.scale, k, v, use_reentrant=self.is_reentrant)


def _in_a_layer() -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from shardwright.parallel import ContextParallel

    q, k, v, dout = _inputs(1, 2, 2, 20, 8, torch.float32)
    exact = _whole([q, k, v, dout], _visible(20, False, None), torch.float64)
    layer = parallelize_module(_Layer(), meshes.get_mesh((3,)), ContextParallel(size=20, method="gather"))
    positions = _positions(None, 20)
    out = layer(*(t[:, :, positions] for t in (q, k, v)))
    torch.testing.assert_close(out.double(), exact[0][:, :, positions], atol=1e-5, rtol=0)
    for is_reentrant in (True, False):
        first = parallelize_module(_Checkpointed(is_reentrant), meshes.get_mesh((3,)), ContextParallel(size=20))
        layer = copy.deepcopy(first)
        with torch.no_grad():
            first.scale.zero_()  # the copy has a weight of its own
        leaves = [t[:, :, positions].requires_grad_() for t in (q, k, v)]
        out = layer(*leaves)
        out.backward(dout[:, :, positions])
        for actual, right in zip((out, *(leaf.grad for leaf in leaves)), exact[:4], strict=True):
            torch.testing.assert_close(actual.double(), right[:, :, positions], atol=1e-5, rtol=0)


@only_on_cpu
def test_context_parallel_block_and_layer(pool: Pool) -> None:
    pool.run(_in_a_context, 3)
    pool.run(_in_a_layer, 3)


def _compiled() -> None:
    """Graphs are compiled before attention is called for the first time."""
    inputs = [t.to(meshes.device) for t in _inputs(1, 2, 2, 18, 8, torch.float32)[:3]]
    local = [t[:, :, _positions("zigzag", 18)].requires_grad_() for t in inputs]
    mesh = meshes.get_mesh((2,))
    placed = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in inputs]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = sw.attention.scaled_dot_product_attention(
            q * 1.5, k, v, is_causal=True, size=18, layout=sw.placements.Pieces.zigzag(2, 18, 2)
        )
        return out.square().sum()

    group = mesh.get_group()

    def loss_in_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sw.attention.scaled_dot_product_attention(q, k, v, size=18, layout="zigzag", group=group).square().sum()

    def loss_of_dtensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = sw.attention.scaled_dot_product_attention(q, k, v, chunks=3, method="ring")
        return out.to_local().float().square().sum()

    for function, given in ((loss, local), (loss_in_group, local), (loss_of_dtensors, placed)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
        grads = torch.autograd.grad(compiled, given)
        eager = function(*given)
        assert torch.equal(compiled, eager)
        for actual, right in zip(grads, torch.autograd.grad(eager, given), strict=True):
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (actual, right)))


def _compiles_once() -> None:
    """Forward and backward are one program each, compiled on first use and then cached. 128 programs are kept."""
    positions = _positions(None, 22)
    local = [t[:, :, positions].requires_grad_() for t in _inputs(1, 2, 2, 22, 8, torch.float32)[:3]]
    packed = [(i, j, 22 - i - j) for i in range(1, 6) for j in range(1, 15)]  # 70 lists of documents

    def compiled(documents: tuple[int, ...] | None) -> int:
        """Returns the number of programs that are compiled by a forward and a backward."""
        before = _runtime.counters()["compiled"]
        mask = None if documents is None else sw.attention.Mask(documents=documents)
        sw.attention.scaled_dot_product_attention(*local, size=22, method="ring", mask=mask).sum().backward()
        return _runtime.counters()["compiled"] - before

    assert [compiled(documents) for documents in (None, None, *packed, packed[-1], None)] == [2, 0, *[2] * 70, 0, 2]


@only_on_cpu
def test_forward_and_backward_programs_are_compiled_once(pool: Pool) -> None:
    pool.run(_compiles_once, 3)


def _invalid_argument_in_a_graph() -> None:
    local = [t[:, :, _positions(None, 8)] for t in _inputs(1, 2, 2, 8, 8, torch.float32)[:3]]
    attend = torch.compile(
        lambda *given, **how: sw.attention.scaled_dot_product_attention(*given, **how) + 1, backend="eager"
    )
    with pytest.raises(ValueError, match="q must be of [56] rows on rank ., for a sequence of 10, got 4"):
        attend(*local, size=10, chunks=5)
    assert torch.equal(attend(*local, size=8), sw.attention.scaled_dot_product_attention(*local, size=8) + 1)


def test_compiled_attention(pool: Pool) -> None:
    pool.run(_compiled, 2)
    pool.run(_invalid_argument_in_a_graph, 2)
