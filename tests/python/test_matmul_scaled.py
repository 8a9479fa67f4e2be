"""Products of scaled 8-bit floats, on real ranks, against products of the values that they represent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshes
import shardwright as sw
from meshes import get_mesh
from parts import part_in_group as _part
from parts import part_of
from pool import Pool
from shardwright.matmul import running

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCHEDULES = [(None, None), ("serial", 1), ("ring", 2), ("ring", 4), ("collective", 3)]
PLACEMENTS = {"S(0)": Shard(0), "S(1)": Shard(1), "S(2)": Shard(2), "R": Replicate()}


def _integers(shape: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes values for which every sum of products with scales of at most 2 is exact, in bfloat16 too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).float().to(dtype)


def _scales(shape: Sequence[int], seed: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed))


def _kinds(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Returns scales of x and of weights: one each, one by row or column, and mixtures."""
    one = torch.tensor(0.5)
    ones = [torch.tensor([2.0]) for _ in weights]
    if x.ndim == 1:
        return [(one, ones)]
    rows = _scales((*x.shape[:-1], 1), 5)
    columns = [_scales((1, w.shape[1]), 6 + j) for j, w in enumerate(weights)]
    return [(one, ones), (rows, columns), (rows, ones), (one, columns)]


def _gathers(shape: tuple[int, ...], columns: tuple[int, ...], dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    x_dtype, w_dtype, out_dtype = dtypes
    x = _integers(shape, 1, x_dtype)
    weights = [_integers((shape[-1], n), 2 + j, w_dtype) for j, n in enumerate(columns)]
    bias = _integers((columns[0],), 9, out_dtype)
    result_on = f"S({len(shape) - 1})"
    for x_scale, w_scales in _kinds(x, weights):
        right = [(x.float() @ w.float()) * x_scale * s for w, s in zip(weights, w_scales, strict=True)]
        right[0] = right[0] + bias.float()
        # All parts of a row that is split have its scale.
        cut_x = _part(x_scale, f"S({dim})") if x_scale.ndim > 1 and dim < len(shape) - 1 else x_scale.to(meshes.device)
        cut_w = [_part(s, "S(1)") if s.ndim > 1 else s.to(meshes.device) for s in w_scales]
        for (method, chunks), transposed in itertools.product(SCHEDULES, (False, True)):
            local_weights = [_part(w, "S(1)") for w in weights]
            found = sw.all_gather_matmul(
                _part(x, f"S({dim})"),
                [w.t().contiguous().t() for w in local_weights] if transposed else local_weights,
                [_part(bias, "S(0)"), *[None] * (len(columns) - 1)],
                gather_dim=dim,
                size=shape[dim],
                columns=columns,
                method=method,
                chunks=chunks,
                x_scale=cut_x,
                weight_scales=cut_w,
                out_dtype=out_dtype,
            )
            for result, full in zip(found, right, strict=True):
                assert result.dtype == out_dtype
                assert torch.equal(result, _part(full.to(out_dtype), result_on)), (method, chunks, x_scale.shape)


CASES = [
    ((8, 6), (8,), 0),
    ((7, 5), (6, 9), 0),
    ((7, 5), (8,), 1),
    ((2, 5, 6), (8, 3), 1),
    ((2, 3, 7), (5,), 2),
    ((1, 3), (2,), 0),
    ((0, 3), (2,), 0),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_all_gather_matmul(pool: Pool, world: int) -> None:
    dtypes = [(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.float32), (E4M3, E5M2, torch.bfloat16)]
    for number, (shape, columns, dim) in enumerate(CASES):
        pool.run(_gathers, world, shape, columns, dim, dtypes[number % 3])


def _sums(shape: tuple[int, ...], columns: int, dim: int | None, out_dtype: torch.dtype) -> None:
    """Each rank has its own scales for its parts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, weight = _integers(shape, 1, E4M3), _integers((shape[-1], columns), 2, E4M3)
    bias = _integers((columns,), 3, out_dtype)
    last = f"S({len(shape) - 1})"
    for by_row in (False, True):
        x_scales = [_scales((*shape[:-1], 1) if by_row else (), 20 + r) for r in range(world)]
        w_scales = [_scales((1, columns) if by_row else (), 40 + r) for r in range(world)]
        right = bias.float()
        for r in range(world):
            mine, ours = (
                part_of(t.float(), sw.Layout(sw.Mesh({"group": world}), t.shape, [cut]), r)
                for t, cut in ((x, last), (weight, "S(0)"))
            )
            right = right + (mine @ ours) * x_scales[r] * w_scales[r]
        for method, chunks in SCHEDULES:
            if dim is None and method == "ring":
                continue
            how: dict[str, Any] = {
                "size": shape[-1],
                "method": method,
                "chunks": chunks,
                "x_scale": x_scales[rank].to(meshes.device),
                "weight_scale": w_scales[rank].to(meshes.device),
                "out_dtype": out_dtype,
            }
            given = (_part(x, last), _part(weight, "S(0)"), bias.to(meshes.device))
            if dim is None:
                found = sw.matmul_all_reduce(*given, **how)
            else:
                found = sw.matmul_reduce_scatter(*given, scatter_dim=dim, **how)
            assert torch.equal(found, _part(right.to(out_dtype), "R" if dim is None else f"S({dim})")), (method, by_row)


@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_matmul_reduce_scatter_and_all_reduce(pool: Pool, world: int) -> None:
    cases = [((8, 6), 8, 0), ((7, 5), 9, 0), ((7, 5), 9, 1), ((2, 5, 6), 4, 1), ((1, 3), 2, 0), ((2, 5, 6), 4, None)]
    for number, (shape, columns, dim) in enumerate(cases):
        pool.run(_sums, world, shape, columns, dim, (torch.bfloat16, torch.float32)[number % 2])


def _distributed(tensor: torch.Tensor, mesh: Any, placements: Sequence[str]) -> DTensor:
    layout = sw.Layout(sw.Mesh(mesh), tensor.shape, placements)
    local = part_of(tensor, layout, dist.get_rank())
    strides = tensor.contiguous().stride()
    on = [PLACEMENTS[p] for p in placements]
    return DTensor.from_local(local, mesh, on, run_check=False, shape=tensor.shape, stride=strides)


def _linears(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = get_mesh(sizes)
    x, weight = _integers(shape, 1, E4M3), _integers((5, shape[-1]), 2, E4M3)
    bias = _integers((5,), 3, torch.bfloat16)
    x_options = ["R", *(f"S({d})" for d in range(len(shape)))]
    cases = list(
        itertools.product(
            itertools.product(x_options, repeat=len(sizes)),
            itertools.product(["R", "S(0)", "S(1)"], repeat=len(sizes)),
            itertools.product(x_options, repeat=len(sizes)),
        )
    )
    for number, (from_x, from_w, to) in enumerate(cases[:: max(len(cases) // 40, 1)]):
        by_row = number % 2 == 1
        x_scale = _scales((*shape[:-1], 1) if by_row else (), 4)
        w_scale = _scales((5, 1) if by_row else (), 5)
        right = (torch.nn.functional.linear(x.float(), weight.float()) * x_scale * w_scale.t() + bias).to(bias.dtype)
        given_scales: tuple[torch.Tensor, torch.Tensor] = (x_scale.to(meshes.device), w_scale.to(meshes.device))
        if by_row:
            on_x = ["R" if p == f"S({len(shape) - 1})" else p for p in from_x]
            on_w = ["R" if p == "S(1)" or number % 4 == 1 else p for p in from_w]  # even if its operand is not
            given_scales = (_distributed(x_scale, mesh, on_x), _distributed(w_scale, mesh, on_w))
        found = sw.linear(
            _distributed(x, mesh, from_x),
            _distributed(weight, mesh, from_w),
            _distributed(bias, mesh, ["R"] * len(sizes)),
            placements=[PLACEMENTS[p] for p in to],
            x_scale=given_scales[0],
            weight_scale=given_scales[1],
        )
        assert found.dtype == torch.bfloat16 and found.placements == tuple(PLACEMENTS[p] for p in to)
        assert torch.equal(found.full_tensor(), right), (from_x, from_w, to)


@pytest.mark.parametrize("shape", [(8, 6), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
def test_linear_of_dtensors(pool: Pool, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    pool.run(_linears, math.prod(sizes), sizes, shape)


def _invalid_scales() -> None:
    mesh = get_mesh((2,))
    x, weight = _integers((4, 6), 1, E4M3), _integers((6, 3), 2, E4M3)
    whole_x, whole_weight = _integers((8, 6), 1, E4M3), _integers((6, 6), 2, E4M3)
    scale, rows, columns = torch.tensor(1.0), torch.ones(4, 1), torch.ones(1, 3)
    how: dict[str, Any] = {"size": 8, "columns": 6}

    def gather(
        x: torch.Tensor = x, weight: torch.Tensor = weight, bias: torch.Tensor | None = None, **given: Any
    ) -> Callable[[], Any]:
        return lambda: sw.all_gather_matmul(x, weight, bias, **how, **given)

    dx, dw = _distributed(whole_x, mesh, ["S(0)"]), _distributed(whole_weight, mesh, ["S(0)"])

    def linear(**given: Any) -> Callable[[], Any]:
        return lambda: sw.linear(dx, dw, **given)

    partial = DTensor.from_local(torch.ones(4, 1), mesh, [Partial()], run_check=False)
    for call, said in [
        (gather(), "x_scale must be given together with weight_scales for x of torch.float8_e4m3fn"),
        (gather(x_scale=scale), "weight_scales must be given together with x_scale, got None"),
        (gather(weight_scales=scale), "x_scale must be given together with weight_scales, got None"),
        (
            gather(x.float(), weight.float(), out_dtype=torch.bfloat16),
            "out_dtype must be None without scales, .*, got torch.bfloat16",
        ),
        (gather(x.float(), x_scale=scale, weight_scales=scale), "x must have dtype .* with scales, got torch.float32"),
        (
            gather(weight=weight.float(), x_scale=scale, weight_scales=scale),
            r"weights\[0\] must have dtype .* with scales, got torch.float32",
        ),
        (
            gather(x.to(E5M2), weight.to(E5M2), x_scale=scale, weight_scales=scale),
            r"weights\[0\] must have dtype .*e4m3fn if .*, got .*e5m2",
        ),
        (
            gather(x_scale=scale, weight_scales=scale, out_dtype=torch.float16),
            "out_dtype must be .* with scales, got torch.float16",
        ),
        (
            gather(x_scale=scale, weight_scales=[scale, scale]),
            "weight_scales must have one entry for each of 1 weights, got 2",
        ),
        (
            gather(bias=torch.ones(3), x_scale=scale, weight_scales=scale),
            r"biases\[0\] must have the dtype of the result .*, got torch.float32",
        ),
        (gather(x_scale=rows[:2], weight_scales=columns), r"x_scale must have shape \(\) .* \(4, 1\) .*, got \(2, 1\)"),
        (gather(x_scale=rows, weight_scales=columns.t()), r"weight_scales\[0\] must have shape .*, got \(3, 1\)"),
        (
            gather(x_scale=rows.double(), weight_scales=columns),
            "x_scale must be torch.float32 on .*, got torch.float64",
        ),
        (linear(x_scale=torch.ones(4, 1), weight_scale=scale), r"x_scale must have shape .*, got \(4, 1\)"),
        (
            linear(x_scale=torch.ones(8, 1), weight_scale=scale),
            "x_scale must be a DTensor, .*, got a plain tensor of 8 rows",
        ),
        (linear(x_scale=scale), "weight_scale must be given together with x_scale, got None"),
        (linear(x_scale=scale, weight_scale=1.0), "weight_scale must be a tensor, got 1.0"),
        (
            linear(bias=dw, x_scale=scale, weight_scale=scale),
            "bias must have the dtype of the result .*, got torch.float8_e4m3fn",
        ),
        (
            gather(weight=weight[0], x_scale=scale, weight_scales=scale),
            r"weights\[0\] must have two dims, got shape \(3,\)",
        ),
        (
            gather(x_scale=scale.clone().requires_grad_(), weight_scales=scale),
            "and scales must be False with scales, got True",
        ),
        (linear(x_scale=partial, weight_scale=scale), "x_scale must have placements Replicate"),
    ]:
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="have no gradients"):
        sw.all_gather_matmul(x.requires_grad_(), weight, x_scale=scale, weight_scales=scale, **how)
    with pytest.raises(ValueError, match="x_scale must be given together with weight_scale for x of .*e4m3fn"):
        sw.linear(dx, dw)


@pytest.mark.cpu_only("what is refused does not depend on the device")
def test_invalid_scales_raise(pool: Pool) -> None:
    pool.run(_invalid_scales, 2)


def _operator() -> None:
    """Fake tensors get the dtype of results, autocast does not cast operands, and scales are sent once."""
    x, weight = _integers((3, 4), 1, E4M3), _integers((4, 5), 2, E4M3)
    rows, columns = _scales((3, 1), 3), _scales((1, 5), 4)
    how: dict[str, Any] = {"size": 6, "columns": 10, "x_scale": rows, "weight_scales": columns}
    sw.reset_stats()
    with running.listening() as calls, torch.autocast("cpu", torch.bfloat16):
        found = sw.all_gather_matmul(x, weight, method="ring", chunks=2, **how)
    assert found.dtype == torch.bfloat16
    assert sw.stats()["bytes"] == 3 * 4 + 3 * 4  # of the other rank: elements of one byte, four bytes of scale per row
    assert sw.stats()["product_fallbacks"] == 0
    call = calls[0]
    inputs = [x, weight, rows[:, 0], columns[0]]
    (again,) = torch.ops.shardwright.matmul(inputs, call.program, list(call.groups), call.rank)
    assert torch.equal(again, found)
    exact = sw.all_gather_matmul(x, weight, out_dtype=torch.float32, **how)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sw.all_gather_matmul(x, weight, out_dtype=torch.float32, **how), exact)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in inputs]
        (y,) = torch.ops.shardwright.matmul(fake, call.program, list(call.groups), call.rank)
        assert y.dtype == torch.bfloat16 and tuple(y.shape) == (6, 5)
    with pytest.raises(ValueError, match="input 2 must have dtype float32, got Double"):
        torch.ops.shardwright.matmul(
            [x, weight, rows[:, 0].double(), columns[0]], call.program, list(call.groups), call.rank
        )


def test_matmul_is_an_operator_with_scales(pool: Pool) -> None:
    pool.run(_operator, 2)
