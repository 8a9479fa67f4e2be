"""DTensor's operators after a view that cuts a dim in strides: right, or refused, whatever PyTorch's rules are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardwright as sw
import strided_operators
from meshes import IS_2_11, device, get_mesh
from pool import Pool
from shardwright.views import verified

Run = Callable[[Any], Any]

# Operators on a tensor [12, 5] whose first dim is cut in strides.
OPERATORS: dict[str, Run] = {
    "softmax(0)": lambda a: a.softmax(0),
    "softmax(1)": lambda a: a.softmax(1),
    "log_softmax(-1)": lambda a: a.log_softmax(-1),
    "logsumexp(0)": lambda a: a.logsumexp(0),
    "var(0)": lambda a: a.var(0),
    "cumsum(0)": lambda a: a.cumsum(0),
    "cumsum(1)": lambda a: a.cumsum(1),
    "a[2]": lambda a: a[2],
    "a[2:9]": lambda a: a[2:9] * 1,
    "a[:, 1:3]": lambda a: a[:, 1:3] * 1,
    "split": lambda a: torch.cat(a.split(4)[::-1]),
    "unbind": lambda a: torch.stack(a.unbind()[::-1]),
    "cat": lambda a: torch.cat((a, a)),
    "cat(1)": lambda a: torch.cat((a, 2 * a), 1),
    "stack": lambda a: torch.stack((a, a)),
    "a[[3, 0]]": lambda a: a[_replicated(torch.tensor([3, 0]), a)],
    "index_select": lambda a: a.index_select(1, _replicated(torch.tensor([3, 0]), a)),
    "norm": lambda a: a.norm(dim=0),
    "sum": lambda a: a.sum(0),
    "mean": lambda a: a.mean(),
    "amax": lambda a: a.amax(0),
    "max": lambda a: a.max(0).values,
    "sort": lambda a: a.sort(0).values,
    "topk": lambda a: a.topk(2, 0).values,
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 0),
    "tril": lambda a: a.tril(),
    "layer_norm": lambda a: F.layer_norm(a, (5,)),
    "cross_entropy": lambda a: F.cross_entropy(a, _replicated(torch.arange(12) % 5, a)),
    "masked_fill": lambda a: a.masked_fill(a > 0, 2.0),
    "squeeze": lambda a: a.unsqueeze(1).squeeze(1) * 2,
    "expand": lambda a: a.unsqueeze(0).expand(3, -1, -1) * 1,
    "add_": lambda a: (1 * a).add_(_replicated(torch.arange(60.0).view(12, 5), a)),
    "conv1d": lambda a: F.conv1d(a.unsqueeze(0), _replicated(torch.ones(2, 12, 3), a)),
}


# torch 2.11 raises for these. It has no rules for them or for the operators of their backwards (flip, index_add,
# scatter of a plain tensor), and refuses most convolutions.
UNKNOWN_TO_2_11 = {"flip", "roll", "conv1d"}
NO_BACKWARD_IN_2_11 = {"cumsum(0)", "cumsum(1)", "index_select", "max", "sort", "topk"}


def _replicated(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, as a replicated DTensor if `like` is a DTensor."""
    tensor = tensor.to(device)
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()], run_check=False)


def _full(result: torch.Tensor) -> torch.Tensor:
    return result.full_tensor() if isinstance(result, DTensor) else result


def _compare(name: str, compiles: bool) -> None:
    run = OPERATORS[name]
    full = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(device)
    source = distribute_tensor(full, get_mesh((2,)), [Shard(1)], src_data_rank=None).requires_grad_()
    plain = full.clone().requires_grad_()

    def both(x: torch.Tensor) -> torch.Tensor:
        return run(x.flatten(0, 1))  # type: ignore[no-any-return]

    called = torch.compile(both, backend="aot_eager") if compiles else both
    expected, actual = both(plain), called(source)
    torch.testing.assert_close(_full(actual), expected)
    if IS_2_11 and name in NO_BACKWARD_IN_2_11:
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (expected * weights).sum().backward()
    (actual * _replicated(weights, actual)).sum().backward()
    assert plain.grad is not None and source.grad is not None
    torch.testing.assert_close(_full(source.grad), plain.grad)


def _operators(names: list[str], compiles: bool) -> dict[str, int]:
    sw.reset_stats()
    failed = {}
    with sw.enabled(strict=True, views=True):
        for name in names:
            if IS_2_11 and name in UNKNOWN_TO_2_11:
                continue
            try:
                _compare(name, compiles)
            except Exception as error:
                failed[name] = str(error)
    assert not failed, failed
    return dict(sw.stats()["strided_gather_reasons"])


def test_operators_after_views(pool: Pool) -> None:
    gathers = pool.run(_operators, 2, list(OPERATORS), False)[0]
    assert gathers["aten.unbind.int"] > 0  # along the cut dim, which PyTorch refuses


def test_compiled_operators_after_views(pool: Pool) -> None:
    pool.run(_operators, 2, ["softmax(0)", "logsumexp(0)", "a[2:9]", "cat", "add_"], True)


def _pending() -> None:
    mesh = get_mesh((2, 2))
    with sw.enabled(strict=True, views=True):
        local = torch.ones(3, 2, 5, device=device)
        a = DTensor.from_local(local, mesh, [Partial(), Shard(1)], run_check=False).flatten(0, 1)
        assert a.placements[0].is_partial() and isinstance(a.placements[1], _StridedShard)
        for made, value in ((torch.ones_like(a), 1), (a.new_ones(12, 5), 1), (a + a, 4), (a.clone(), 2), (a + 1, 3)):
            assert torch.equal(made.full_tensor(), torch.full((12, 5), float(value), device=device)), value
        assert (a + a).placements == a.placements


def test_pending_values_after_views(pool: Pool) -> None:
    pool.run(_pending, 4)


def _writes() -> None:
    mesh = get_mesh((2,))
    full = torch.arange(60.0, device=device).view(3, 4, 5)
    with sw.enabled(strict=True, views=True):
        a = distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None).flatten(0, 1)
        assert any(isinstance(placement, _StridedShard) for placement in a.placements)
        rows = _replicated(torch.tensor([3, 0]), a)
        with pytest.raises(
            RuntimeError, match=r"self must not be a strided shard if .*index_fill_.* writes to it, got"
        ):
            a.index_fill_(0, rows, 1.0)
        assert torch.equal(a.full_tensor(), full.flatten(0, 1))
        # Optimizers write to lists of parameters, whose gradients may have other placements.
        for foreach in (True, False):
            cut, plain = torch.nn.Parameter(a.detach().clone()), torch.nn.Parameter(full.flatten(0, 1).clone())
            optimizers = [torch.optim.AdamW([parameter], lr=0.1, foreach=foreach) for parameter in (cut, plain)]
            for gradient in (_replicated(torch.ones(12, 5), a), a.detach() * 2):
                cut.grad, plain.grad = gradient, _full(gradient)
                for optimizer in optimizers:
                    optimizer.step()
            torch.testing.assert_close(_full(cut.detach()), plain.detach())


def test_writes_to_strided_tensors(pool: Pool) -> None:
    pool.run(_writes, 2)


# Functions whose samples call every operator in the lists of `verified`.
SAMPLED = """ __getitem__ addmm cat cumprod cumsum flip gather index_put index_select linalg.vector_norm log_softmax
    logsumexp max mean narrow nn.functional.embedding nn.functional.linear nn.functional.scaled_dot_product_attention
    norm prod roll scatter scatter_add select slice slice_scatter softmax sort split split_with_sizes
    split_with_sizes_copy squeeze stack std sum svd topk torch.ops.aten._safe_softmax.default tril unbind unflatten
    var """
PARTS = 6
MOST_CALLS = 3  # of each operator, of 16: PyTorch searches for up to a second for the rule of a new call


def _generated_lists(path: str, part: int) -> None:
    listed = sorted(verified.anywhere() | verified.along_other_dims())[part::PARTS]
    if dist.get_rank() == 0:
        others = verified.along_other_dims()  # few of their calls are of the verified kind
        most_calls = {name: strided_operators.MOST_CALLS if name in others else MOST_CALLS for name in listed}
        strided_operators.save(path, SAMPLED.split(), most_calls)
    dist.barrier()
    with sw.enabled(strict=True, views=True):
        found = strided_operators.of_all_ranks(strided_operators.verdicts(path, trusts=True))
    assert sorted(found) == listed, "an operator has no samples"
    anywhere, others = strided_operators.lists(found)
    wrong = {name: {text for text in said["all"] if text != "right"} for name, said in found.items()}
    right = {*anywhere, *(name for name in others if name in verified.along_other_dims())}
    assert not set(listed) - right, {name: wrong[name] for name in set(listed) - right}


@pytest.mark.cpu_only("PyTorch's samples are on CPU")
@pytest.mark.parametrize("part", range(PARTS))
def test_lists_of_verified_operators(pool: Pool, tmp_path: Path, part: int) -> None:
    """The operators in `shardwright.views.verified` for this torch are right for calls of PyTorch's samples."""
    pool.run(_generated_lists, 4, str(tmp_path / "calls"), part, timeout_seconds=300)
