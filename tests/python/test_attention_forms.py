"""Attention over ranks with values of another depth, keys of another sequence, tensor masks, and 3-D tensors."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshes
import shardwright as sw
from allocations import allocated_peak
from pool import Pool
from shardwright.attention import scaled_dot_product_attention
from test_attention import METHODS, _positions, _worst, only_on_cpu

MOVES_KEYS = ("serial", "ring", "gather")


class Case(NamedTuple):
    rows: int = 21
    keys: int | None = None  # None: the keys are of the queries' sequence
    depths: tuple[int, int] = (8, 8)  # depth of keys, depth of values
    heads: tuple[int, int] = (4, 2)
    layout: Any = None
    kv_layout: Any = None
    is_causal: bool = False
    window: int | None = None
    chunks: int | None = None
    mask: str = ""  # kind of mask, see _mask

    @property
    def num_keys(self) -> int:
        return self.rows if self.keys is None else self.keys


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    """Returns the mask of all queries. Some queries see no key."""
    seen = torch.rand(2, case.heads[0], case.rows, case.num_keys, generator=generator) < 0.5
    if case.mask == "padding":
        return seen[:, :1, :1]
    if case.mask == "rows":
        return seen[0, 0] & (torch.arange(case.rows) % 5 != 1)[:, None]
    if case.mask == "float":
        bias = torch.randn(seen.shape[1:], generator=generator)
        return bias.masked_fill(~seen[0], -math.inf).masked_fill((torch.arange(case.rows) == 3)[:, None], -math.inf)
    return None


class Whole(NamedTuple):
    inputs: list[torch.Tensor]  # q, k, v and the gradient of the result
    mask: torch.Tensor | None
    right: list[torch.Tensor]  # in float64: result, gradients, log-sum-exp
    stock: list[torch.Tensor]  # result and gradients of PyTorch


def _whole(case: Case, dtype: torch.dtype) -> Whole:
    generator = torch.Generator().manual_seed(case.rows * 100 + case.num_keys)
    (heads, kv_heads), (depth, value_depth) = case.heads, case.depths
    shapes = [
        (heads, case.rows, depth),
        (kv_heads, case.num_keys, depth),
        (kv_heads, case.num_keys, value_depth),
        (heads, case.rows, value_depth),
    ]
    inputs = [torch.randn(2, *shape, generator=generator).to(dtype) for shape in shapes]
    mask = _mask(case, generator)
    distance = torch.arange(case.rows)[:, None] - torch.arange(case.num_keys)
    seen = distance >= 0 if case.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        seen = seen & (distance.abs() < case.window)
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask

    # The result of a query that sees no key is zeros.
    is_blind = bias.amax(-1, keepdim=True) == -math.inf if case.num_keys else torch.ones(case.rows, 1, dtype=torch.bool)
    bias = bias.masked_fill(is_blind, 0)

    def attend(stock: bool) -> list[torch.Tensor]:
        q, k, v = (t.to(dtype if stock else torch.float64, copy=True).requires_grad_() for t in inputs[:3])
        keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        if stock:
            out, lse = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias.to(dtype)), torch.empty(0)
        else:
            scores = q @ keys.mT / math.sqrt(depth) + bias
            out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1).masked_fill(is_blind.squeeze(-1), -math.inf)
        out = out.masked_fill(is_blind, 0)
        return [out.detach(), *torch.autograd.grad(out, [q, k, v], inputs[3].to(q.dtype)), lse.detach()]

    return Whole(inputs, mask, attend(False), attend(True))


def _positions_of_case(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's positions of queries and of keys."""
    rows = _positions(case.layout, case.rows)
    if case.kv_layout == "whole":
        return rows, torch.arange(case.num_keys)
    if case.kv_layout is None and case.keys is None:
        return rows, rows
    return rows, _positions(case.kv_layout, case.num_keys)


def _check_case(case: Case, dtype: torch.dtype, methods: Any) -> None:
    unsharded = _whole(case, dtype)
    rows, keys = _positions_of_case(case)
    cuts = [rows, keys, keys]
    local_mask = unsharded.mask
    if local_mask is not None:
        local_mask = (local_mask if local_mask.shape[-2] == 1 else local_mask[..., rows, :]).to(meshes.device)
    for method in methods:
        local = [
            t[:, :, cut].to(meshes.device).requires_grad_() for t, cut in zip(unsharded.inputs, cuts, strict=False)
        ]
        out, lse = scaled_dot_product_attention(
            *local,
            is_causal=case.is_causal,
            mask=sw.attention.Mask(window=case.window) if local_mask is None else local_mask,
            enable_gqa=True,
            method=method,
            chunks=case.chunks,
            return_lse=True,
            size=case.rows,
            layout=case.layout,
            kv_size=case.keys,
            kv_layout=case.kv_layout,
        )
        grads = torch.autograd.grad(out, local, unsharded.inputs[3][:, :, rows].to(meshes.device))
        of_each = zip("oqkv", [out, *grads], unsharded.right, unsharded.stock, [rows, *cuts], strict=False)
        for name, actual, right, stock, cut in of_each:
            slack = 2e-3 if dtype == torch.bfloat16 else 6e-6
            allowed = 2.5 * _worst(stock, right) + slack
            error = _worst(actual, right[:, :, cut])
            assert error <= allowed, (case, name, method, error, allowed)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(lse.cpu().double(), unsharded.right[-1][:, :, rows], atol=tolerance, rtol=0)


def _check_cases(cases: list[Case], methods: Any) -> None:
    for case in cases:
        # Products of float64 are not supported on CUDA. Kernels treat blocks of at least 16 keys differently.
        is_wide = case.mask == "float" and case.rows > 21 and meshes.device == "cpu"
        for dtype in (torch.float32, torch.bfloat16, *[torch.float64] * is_wide):
            _check_case(case, dtype, methods)


VALUES = [
    Case(depths=(12, 8), is_causal=True, layout="zigzag"),
    Case(depths=(8, 20), window=6),
    Case(depths=(16, 8), rows=3, is_causal=True, chunks=2),
]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=only_on_cpu), 3])
def test_values_may_have_another_depth_than_keys(pool: Pool, world_size: int) -> None:
    pool.run(_check_cases, world_size, VALUES, METHODS)


CROSS = [
    Case(rows=21, keys=13, is_causal=True, layout="zigzag", kv_layout="zigzag"),
    Case(rows=5, keys=30, depths=(8, 12), is_causal=True, chunks=4),
    Case(rows=17, keys=9, window=4),  # queries from position 12 on see no key
    Case(rows=9, keys=0),
    Case(rows=16, kv_layout="zigzag", is_causal=True),  # same length, different cuts
]
PIECES = Case(
    rows=10, keys=8, layout=sw.placements.Pieces(2, [[(6, 10), (0, 1)], [], [(1, 6)]]), kv_layout="zigzag", window=5
)
WHOLE = [
    Case(rows=21, keys=13, kv_layout="whole", is_causal=True, layout="zigzag"),
    Case(rows=2, keys=11, depths=(8, 4), kv_layout="whole", chunks=3),
]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=only_on_cpu), pytest.param(2, marks=only_on_cpu), 3])
def test_keys_may_be_of_another_sequence(pool: Pool, world_size: int) -> None:
    pool.run(_check_cases, world_size, [*CROSS, *([PIECES] if world_size == 3 else [])], METHODS)
    pool.run(_check_cases, world_size, WHOLE, MOVES_KEYS)


MASKS = [
    Case(mask="rows", layout="zigzag"),
    Case(rows=9, keys=14, mask="padding", heads=(4, 4)),
    Case(rows=16, keys=7, depths=(8, 12), mask="float", kv_layout="whole"),
    Case(rows=2, mask="float", chunks=2),  # a rank without rows
    Case(rows=70, mask="float", heads=(1, 1)),
]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=only_on_cpu), 3])
def test_masks_may_be_tensors(pool: Pool, world_size: int) -> None:
    pool.run(_check_cases, world_size, MASKS, (*MOVES_KEYS, "auto"))


def _bias_is_bounded() -> None:
    """Attends in one block, with a window or a mask. A bias of all its pairs would take 100 MiB."""
    rows = 5120
    q, k, v = (torch.randn(1, 1, rows, 8, requires_grad=True) for _ in range(3))
    whole_mask = torch.ones(rows, rows, dtype=torch.bool)
    arguments: dict[str, Any]
    for arguments in ({"is_causal": True, "mask": sw.attention.Mask(window=rows // 2)}, {"mask": whole_mask}):
        out, forward = allocated_peak(scaled_dot_product_attention, q, k, v, method="serial", **arguments)
        _, backward = allocated_peak(torch.autograd.grad, out.sum(), [q, k, v])
        # A bias of 16 MiB, and tensors with one row per position.
        assert 12 * 2**20 < forward < 20 * 2**20, forward
        assert 12 * 2**20 < backward < 20 * 2**20, backward
        text = sw.attention.explain(q, k, v, method="serial", **arguments)
        planned = int(re.findall(r"serial: .* and (\d+) allocated per rank", text)[0])
        assert planned - 2**20 < forward < planned + 2**20, (planned, forward)


@only_on_cpu
def test_memory_of_the_bias_is_bounded(pool: Pool) -> None:
    pool.run(_bias_is_bounded, 1)


def _with_dtensors() -> None:
    mesh = meshes.get_mesh((2, 2))
    case = Case(rows=13, keys=9, depths=(8, 12), heads=(4, 4), mask="rows")
    unsharded = _whole(case, torch.float32)
    assert unsharded.mask is not None
    cut = [Shard(1), Shard(2)]
    masks = (
        distribute_tensor(unsharded.mask, mesh, [Replicate(), Shard(0)]),
        unsharded.mask.chunk(2)[mesh.get_local_rank(1)].to(meshes.device),
    )
    of_heads = distribute_tensor(unsharded.mask.repeat(1, 4, 1, 1), mesh, cut)
    for mask, of_keys in ((masks[0], cut), (masks[1], [Shard(1), Replicate()]), (of_heads, cut)):
        placed = zip(unsharded.inputs, (cut, of_keys, of_keys, cut), strict=True)
        *given, dout = (distribute_tensor(t, mesh, placements) for t, placements in placed)
        for tensor in given:
            tensor.requires_grad_()
        out, lse = scaled_dot_product_attention(*given, mask=mask, return_lse=True)
        assert out.placements == tuple(cut) and out.shape == unsharded.right[0].shape
        out.backward(dout)
        actual = [out.full_tensor(), *[t.grad.full_tensor() for t in given], lse.full_tensor()]  # type: ignore[union-attr]
        for result, right in zip(actual, unsharded.right, strict=True):
            torch.testing.assert_close(result.cpu().double(), right, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="mask must be plain or placed like q"):
        scaled_dot_product_attention(*given, mask=distribute_tensor(unsharded.mask, mesh, [Replicate(), Shard(1)]))


def test_dtensors_of_two_sequences(pool: Pool) -> None:
    pool.run(_with_dtensors, 4)


def _three_dims() -> None:
    mesh = meshes.get_mesh((2,))
    unsharded = _whole(Case(rows=11, keys=7, heads=(1, 1), mask="rows"), torch.float32)
    assert unsharded.mask is not None
    q, k, v, dout = (t[:, 0] for t in unsharded.inputs)
    rows, keys = _positions(None, 11), _positions(None, 7)
    plain = [t[:, cut].to(meshes.device) for t, cut in ((q, rows), (k, keys), (v, keys))]
    placed = [distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)]
    mask = unsharded.mask[None, rows].to(meshes.device)
    for given, arguments in ((plain, {"size": 11, "kv_size": 7}), (placed, {})):
        local_inputs = [t.detach().requires_grad_() for t in given]
        out, lse = scaled_dot_product_attention(*local_inputs, mask=mask, method="ring", return_lse=True, **arguments)
        grad = dout[:, rows].to(meshes.device)
        actual = [
            out,
            *torch.autograd.grad(
                out, local_inputs, grad if given is plain else distribute_tensor(dout, mesh, [Shard(1)])
            ),
            lse,
        ]
        for result, right, cut in zip(actual, unsharded.right, (rows, rows, keys, keys, rows), strict=True):
            local = result.to_local() if isinstance(result, DTensor) else result
            torch.testing.assert_close(local.cpu().double(), right[:, 0, cut], atol=1e-5, rtol=0)


def test_tensors_may_have_three_dims(pool: Pool) -> None:
    pool.run(_three_dims, 2)


def _compiled() -> None:
    unsharded = _whole(Case(rows=12, keys=9, depths=(8, 12), heads=(2, 2), mask="float"), torch.float32)
    assert unsharded.mask is not None
    rows, keys = _positions(None, 12), _positions("zigzag", 9)
    given = [
        t[:, :, cut].to(meshes.device).requires_grad_()
        for t, cut in zip(unsharded.inputs, (rows, keys, keys), strict=False)
    ]
    mask = unsharded.mask[:, rows].to(meshes.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        how = {"size": 12, "kv_size": 9, "kv_layout": sw.placements.Pieces.zigzag(2, 9, 2)}
        flat = scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], mask=mask[0], **how)  # type: ignore[arg-type]
        return scaled_dot_product_attention(q * 1.5, k, v, mask=mask, **how).square().sum() + flat.sum()  # type: ignore[arg-type]

    mesh = meshes.get_mesh((2,))
    places = ([Shard(2)], [Replicate()], [Replicate()])
    placed = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(unsharded.inputs, places, strict=False)]
    placed_mask = distribute_tensor(unsharded.mask, mesh, [Shard(1)])

    def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(q, k, v, mask=mask) + scaled_dot_product_attention(
            q, k, v, is_causal=True, method="ring"
        )
        return out.to_local().square().sum()  # type: ignore[attr-defined]

    for function, tensors, of_function in ((attend, given, mask), (attend_whole, placed, placed_mask)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors, of_function)
        eager = function(*tensors, of_function)
        assert torch.equal(compiled, eager)
        for actual, right in zip(*(torch.autograd.grad(output, tensors) for output in (compiled, eager)), strict=True):
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (actual, right)))


def test_compiled_attention_with_masks(pool: Pool) -> None:
    pool.run(_compiled, 2)


def _in_a_context() -> None:
    mesh = meshes.get_mesh((2,))
    unsharded = _whole(Case(rows=14, heads=(2, 2), mask="rows"), torch.float32)
    assert unsharded.mask is not None
    rows = _positions("zigzag", 14)
    q, k, v = (t[:, :, rows].to(meshes.device) for t in unsharded.inputs[:3])
    mask = unsharded.mask[rows].to(meshes.device)
    with sw.attention.context_parallel(mesh, size=14):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        with pytest.raises(ValueError, match=r"mask must be broadcastable to .*this rank's rows of q, 14\], got"):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, rows])
    torch.testing.assert_close(out.cpu().double(), unsharded.right[0][:, :, rows], atol=1e-5, rtol=0)


def _forms_differ() -> None:
    """Two masks of different forms have the same shape on rank 1, which has one row. No rank waits for a new plan."""
    q, k, v = (torch.randn(1, 2, 4 - 3 * dist.get_rank(), 8, device=meshes.device) for _ in range(3))
    layout = sw.placements.Pieces(2, [[(0, 4)], [(4, 5)]])
    attend = functools.partial(scaled_dot_product_attention, q, k, v, size=5, layout=layout, method="ring")
    everything = torch.ones(5, dtype=torch.bool, device=meshes.device)
    by_row = attend(mask=everything.expand(q.shape[2], 5).clone())
    assert torch.equal(attend(mask=everything[None]), by_row) and torch.equal(attend(mask=everything), by_row)
    with pytest.raises(ValueError, match="mask must be a tensor without a gradient"):
        attend(mask=torch.zeros(5, device=meshes.device, requires_grad=True))


def _invalid_forms() -> None:
    q = torch.zeros(2, 2, 4, 8, device=meshes.device)
    mask = torch.zeros(4, 8, device=meshes.device)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((q, q, q), {"mask": mask, "is_causal": True}, "mask must be None or a sw.attention.Mask if is_causal is True"),
        (
            (q, q, q),
            {"mask": mask, "method": "ulysses"},
            "method must be .* with a mask that is a tensor, got 'ulysses'",
        ),
        ((q, q, q), {"mask": mask.clone().requires_grad_()}, "mask must be a tensor without a gradient"),
        ((q, q, q), {"mask": torch.zeros(3, 8, device=meshes.device)}, "mask must be of 1 or 4 rows, .* got 3"),
        ((q, q, q), {"mask": torch.zeros(4, 8, device=meshes.device).int()}, "mask must have dtype bool"),
        ((q, q, q), {"kv_size": 12}, "k must be of 6 rows on rank ., for a sequence of 12, got 4"),
        ((q, q, q), {"kv_layout": "whole"}, "k must be of 8 rows on rank ., for a sequence of 8, got 4"),
        ((q, q[:1], q[:1]), {}, "k must be of q's batch size and depth, as in .*, got shape"),
        ((q, q[..., :4], q), {}, "k must be of q's batch size and depth, as in .*, got shape"),
    ]
    wide = torch.zeros(2, 2, 6, 8, device=meshes.device)
    cases += [
        ((q, wide, wide), {"kv_size": 12, "mask": sw.attention.Mask(documents=(3, 5))}, "documents must be left out"),
        (
            (q, wide, wide),
            {"kv_size": 6, "kv_layout": "whole", "method": "ulysses"},
            "method must be .* holds all keys",
        ),
        ((q, wide, wide), {"kv_size": 12, "kv_layout": "spiral"}, "kv_layout must be 'contiguous', .*, got 'spiral'"),
    ]
    for tensors, arguments, match in cases:
        with pytest.raises(ValueError, match=match):
            scaled_dot_product_attention(*tensors, size=8, **arguments)
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(2)]
    with pytest.raises(ValueError, match=f"group must be a group with this rank, got one without rank {rank}"):
        scaled_dot_product_attention(q, q, q, size=8, group=own[1 - rank])
    with pytest.raises(ValueError, match="group must be a group with this rank"):
        sw.attention.redistribute_sequence(q, "contiguous", "whole", dim=2, size=8, group=own[1 - rank])
    unsorted = DeviceMesh(meshes.device, [1, 0])
    block = sw.attention.context_parallel(unsorted, size=8)
    with pytest.raises(ValueError, match=r"mesh must be a DeviceMesh with ascending ranks, got \[1, 0\]"), block:
        pass
    sw.debug.check_ranks(True)
    try:
        with pytest.raises(RuntimeError, match="tensor: .* to 12 keys"):
            scaled_dot_product_attention(q, wide, wide, size=8, kv_size=12 - rank, method="ring")
    finally:
        sw.debug.check_ranks(False)
    text = sw.attention.explain(q, wide, wide[..., :4], size=8, kv_size=12, mask=torch.zeros(4, 12))
    assert "12 tokens of keys, values of depth 4, a tensor" in text and "ulysses" not in text
    assert f"rank {rank} holds [{4 * rank}, {4 * rank + 4}) and the keys [{6 * rank}, {6 * rank + 6})" in text


@only_on_cpu
def test_context_parallel_block_and_invalid_forms(pool: Pool) -> None:
    pool.run(_in_a_context, 2)
    pool.run(_forms_differ, 2)
    pool.run(_invalid_forms, 2)
