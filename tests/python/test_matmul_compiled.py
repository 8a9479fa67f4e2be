"""Products in code that torch.compile compiles as one graph: results and gradients equal those of eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

import shardwright as sw
from dtensors import make_spec
from meshes import get_mesh
from pool import Pool
from shardwright.matmul import running
from shardwright.parallel import ColwiseParallel, RowwiseParallel

WORLD = 2


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns results, then gradients."""
    results = function(*inputs)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    leaves = [t for t in inputs if t.requires_grad]
    losses = [(r.to_local() if isinstance(r, DTensor) else r).float().square().sum() for r in results]
    gradients = torch.autograd.grad(sum(losses), leaves) if leaves else ()  # type: ignore[arg-type]
    return [_whole(t) for t in (*results, *gradients)]


def _agrees(function: Callable[..., Any], *inputs: torch.Tensor, backend: str = "aot_eager") -> None:
    torch._dynamo.reset()
    expected = _run(function, inputs)
    results = _run(torch.compile(function, backend=backend, fullgraph=True), inputs)
    for actual, right in zip(results, expected, strict=True):
        assert actual.dtype == right.dtype
        assert_close(actual, right, rtol=1e-5, atol=1e-5)


def _leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    return torch.randn(*shape, generator=generator).requires_grad_()


def _plain_tensors() -> None:
    rows, columns = 4, 5
    sizes: dict[str, Any] = {"size": WORLD * rows, "columns": WORLD * columns}
    x, weight, bias = _leaf(rows, 8), _leaf(8, columns, seed=1), _leaf(columns, seed=2)
    transposed = _leaf(columns, 8, seed=3)

    _agrees(lambda x, w, b: sw.all_gather_matmul(x * 2, w, b, **sizes).relu(), x, weight, bias)
    _agrees(lambda x, w, b: sw.all_gather_matmul(x * 2, w, b, **sizes).relu(), x, weight, bias, backend="inductor")
    _agrees(
        lambda x, w: sw.all_gather_matmul(x, w, group=dist.group.WORLD, method="ring", chunks=2, **sizes), x, weight
    )
    for save in ("shard", "gathered"):
        _agrees(
            lambda x, w, v, b, save=save: sw.all_gather_matmul(x, [w, v.t()], [None, b], save=save, **sizes),
            *(x, weight, transposed, bias),
        )
    _agrees(lambda x, w: sw.matmul_reduce_scatter(x * 2, w, size=8) + 1, _leaf(6, rows), _leaf(rows, 5))
    shared = torch.ones(5).requires_grad_()  # replicated
    _agrees(lambda x, w, b: sw.matmul_all_reduce(x, w, b, size=8), _leaf(6, rows), _leaf(rows, 5), shared)
    with torch.autocast("cpu", torch.bfloat16):
        _agrees(lambda x, w: sw.all_gather_matmul(x, w, **sizes), x, weight)
    with torch.no_grad():
        _agrees(lambda x, w: sw.all_gather_matmul(x, w, **sizes), x.detach(), weight.detach())
    _agrees(
        lambda x, w, s, t: sw.all_gather_matmul(x, w, x_scale=s, weight_scales=t, **sizes) * 2,
        *(x.detach().to(torch.float8_e4m3fn), weight.detach().to(torch.float8_e4m3fn)),
        *(torch.rand(rows, 1), torch.rand(1, columns)),
    )


def test_products_of_plain_tensors(pool: Pool) -> None:
    pool.run(_plain_tensors, WORLD)


def _dtensors() -> None:
    mesh = get_mesh((WORLD,))

    def leaf(shape: Sequence[int], placement: Any, seed: int) -> DTensor:
        full = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(full, mesh, [placement]).requires_grad_()

    column, bias = leaf((10, 8), Shard(0), 1), leaf((10,), Shard(0), 2)
    for placement in (Shard(0), Replicate(), Shard(1)):
        _agrees(lambda x, w, b: sw.linear(x * 2, w, b) * 1.0, leaf((6, 8), placement, 3), column, bias)
    row, cut = leaf((8, 10), Shard(1), 4), leaf((6, 10), Shard(1), 5)
    for to in (Shard(0), Replicate(), Partial()):
        _agrees(lambda x, w, to=to: sw.linear(x * 2, w, placements=[to]), cut, row)
    _agrees(lambda x, w: sw.all_gather_matmul(x, w), leaf((6, 8), Shard(0), 6), leaf((8, 10), Shard(1), 7))
    e4m3 = torch.float8_e4m3fn
    x = DTensor.from_local(torch.randn(4, 16).to(e4m3), mesh, [Shard(0)], run_check=False)
    weight = DTensor.from_local(torch.randn(5, 16).to(e4m3), mesh, [Shard(0)], run_check=False)
    scales = [distribute_tensor(torch.rand(rows, 1), mesh, [Replicate()]) for rows in (8, 10)]
    _agrees(lambda x, w, s, t: sw.linear(x, w, x_scale=s, weight_scale=t) * 2, x, weight, *scales)


def test_products_of_dtensors(pool: Pool) -> None:
    pool.run(_dtensors, WORLD)


def _styles() -> None:
    mesh = get_mesh((WORLD,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    styles = {
        "0": ColwiseParallel(input_layouts=Shard(0), shares_gather=True),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, styles)
    _agrees(lambda x, *_: model(x), _leaf(4, 8), *model.parameters())


def test_modules_with_parallel_styles(pool: Pool) -> None:
    pool.run(_styles, WORLD)


def _other_sizes() -> None:
    """Each size has its own graph."""
    torch._dynamo.reset()
    weight = _leaf(8, 4)
    compiled = torch.compile(
        lambda x: sw.all_gather_matmul(x, weight, size=WORLD * x.shape[0], columns=WORLD * 4), backend="aot_eager"
    )
    for rows in (3, 5, 4):
        x = _leaf(rows, 8)
        expected = sw.all_gather_matmul(x, weight, size=WORLD * rows, columns=WORLD * 4)
        with running.listening() as calls:
            assert_close(compiled(x), expected)
        assert len(calls) == 1


def test_each_size_has_its_own_graph(pool: Pool) -> None:
    pool.run(_other_sizes, WORLD)


def _errors() -> None:
    def compute(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return sw.all_gather_matmul(x, weight, size=6, columns=10)

    x, weight = torch.randn(3, 4), torch.randn(6, 5)
    with pytest.raises(Exception, match=r"weights\[0\] must have shape \(4, n\) .*, got \(6, 5\)"):
        torch.compile(compute, backend="aot_eager", fullgraph=True)(x, weight)
    e4m3, model = torch.float8_e4m3fn, sw.planning.GemmModel.named("h100")
    right = torch.randn(4, 5)
    too_many: Any = (None, 0, 6, 10)
    for call, error, said in [
        (compute, ValueError, "weights"),
        (lambda x, w: sw.all_gather_matmul(x, right, *too_many), TypeError, "by position|positional"),
    ]:
        torch._dynamo.reset()
        with pytest.raises(error, match=said):
            torch.compile(call, backend="aot_eager")(x, weight)
    torch._dynamo.reset()
    timed = torch.compile(
        lambda x, w: sw.all_gather_matmul(x, right, size=6, columns=10, gemm_model=model) + 1, backend="aot_eager"
    )
    assert_close(timed(x, weight), sw.all_gather_matmul(x, right, size=6, columns=10) + 1)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="x_scale must be given together with"):
        torch.compile(lambda x, w: sw.all_gather_matmul(x, w, size=6, columns=10))(x.to(e4m3), right.to(e4m3))
    torch._dynamo.reset()
    leaves = [x.clone().requires_grad_(), right.clone().requires_grad_()]
    y = torch.compile(lambda x, w: sw.all_gather_matmul(x, w, size=6, columns=10), backend="eager")(*leaves)
    (first,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(first.square().sum(), leaves)
    with pytest.raises(ValueError, match="product must be a text made by shardwright .*, got 'nothing'"):
        torch.ops.shardwright.multiply(x, [weight], [], [], "nothing", dist.group.WORLD.group_name, 0)


def test_errors_in_compiled_code(pool: Pool) -> None:
    pool.run(_errors, WORLD)


def _overlap_enabled() -> None:
    """``sw.enable(overlap=True)`` does not affect compiled code: Dynamo may run DTensor on fake tensors."""
    mesh = get_mesh((WORLD,))
    x, weight = (distribute_tensor(torch.randn(n, 8), mesh, [Shard(0)]).requires_grad_() for n in (7, 9))
    bias = distribute_tensor(torch.randn(9), mesh, [Shard(0)]).requires_grad_()
    sw.enable(overlap=True)
    try:
        _agrees(lambda x, w, b: nn.functional.linear(x * 2, w, b).relu(), x, weight, bias)
        _agrees(lambda x, w: x @ w.t(), x, weight)
        torch._dynamo.reset()
        with running.listening() as calls:
            torch.compile(nn.functional.linear, backend="aot_eager", fullgraph=True)(x, weight, bias)
        assert not calls
    finally:
        sw.disable()


def test_overlap_does_not_affect_compiled_code(pool: Pool) -> None:
    pool.run(_overlap_enabled, WORLD)


def _opcheck() -> None:
    x, weight, bias = _leaf(4, 8), _leaf(8, 5), _leaf(5)
    names = []

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return sw.all_gather_matmul(x, weight, bias, size=8, columns=10)

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(node.args[-3:] for node in graph.graph.nodes if node.target is torch.ops.shardwright.multiply)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(compute, backend=note, fullgraph=True)(x, weight, bias)
    (name,) = names
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.shardwright.multiply.default, (x, [weight], [bias], [], *name), test_utils=tests)
    backward = (x.detach(), [weight.detach()], [torch.randn(8, 5)], [True, True, True], *name)
    torch.library.opcheck(torch.ops.shardwright.multiply_backward.default, backward, test_utils=tests[::2])


def test_multiply_passes_opcheck(pool: Pool) -> None:
    pool.run(_opcheck, WORLD)


def _without_groups() -> None:
    """The mesh is new: its process groups do not exist yet."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fresh_rows", "fresh_columns"))
    torch.manual_seed(0)
    x, weight = torch.randn(8, 8), torch.randn(12, 8)
    dx, dw = (distribute_tensor(t, mesh, [Shard(0), Shard(0)]).requires_grad_() for t in (x, weight))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: sw.linear(x, w, placements=[Shard(1), Shard(1)]), backend="aot_eager", fullgraph=True
    )
    y = compiled(dx, dw)
    gradients = torch.autograd.grad(y.to_local().sum(), [dx, dw])
    assert_close(y.full_tensor(), x @ weight.t())
    full = [t.clone().requires_grad_() for t in (x, weight)]
    for actual, expected in zip(gradients, torch.autograd.grad((full[0] @ full[1].t()).sum(), full), strict=True):
        assert_close(actual.full_tensor(), expected)


def test_compiles_before_groups_exist(pool: Pool) -> None:
    pool.run(_without_groups, 4)


def _uneven() -> None:
    """Uneven products stay out of graphs: a compiler orders collectives by sizes, which differ by rank."""
    rank = dist.get_rank()
    x, weight = _leaf((4, 3)[rank], 8), _leaf(8, 5)

    def compute(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return sw.all_gather_matmul(x * 2, weight, size=7, columns=10).relu()

    torch._dynamo.reset()
    expected = _run(compute, [x, weight])
    for actual, right in zip(_run(torch.compile(compute, backend="aot_eager"), [x, weight]), expected, strict=True):
        assert_close(actual, right)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="parts that differ in size among ranks"):
        torch.compile(compute, backend="aot_eager", fullgraph=True)(x, weight)


def test_uneven_products_stay_out_of_graphs(pool: Pool) -> None:
    pool.run(_uneven, WORLD)


def _ordered() -> None:
    """The second mesh dim cuts the rows of x before the first one does."""
    mesh = get_mesh((2, 2))
    torch.manual_seed(0)
    full, weight = torch.randn(8, 6), distribute_tensor(torch.randn(4, 6), mesh, [Replicate(), Replicate()])
    rank = dist.get_rank()
    spec = make_spec(mesh, full.shape, ["S(0)", "S(0)"], full.dtype, {0: [1, 0]})
    x = DTensor(full.chunk(4)[2 * (rank % 2) + rank // 2], spec, requires_grad=False)
    expected = full @ weight.to_local().t()
    torch._dynamo.reset()
    for compute in (sw.linear, torch.compile(sw.linear, backend="aot_eager")):
        assert_close(compute(x, weight, placements=[Replicate()] * 2).to_local(), expected)
        with pytest.raises(ValueError, match="group must be None for DTensors"):
            sw.matmul_all_reduce(x, weight, group=dist.group.WORLD)
    spec = make_spec(mesh, (8, 1, 3, 2), ["S(0)", "S(0)"], x.dtype, {0: [1, 0]})
    q = DTensor(x.to_local().reshape(2, 1, 3, 2), spec, requires_grad=False)
    with pytest.raises(ValueError, match="q must be in the default shard order"):
        sw.attention.scaled_dot_product_attention(q, q, q)


def test_other_shard_orders_stay_out_of_graphs(pool: Pool) -> None:
    pool.run(_ordered, 4)
