"""Compares DTensor's operators on strided shards with the same operators on the global tensors.

    python tests/python/strided_operators.py [NAME ...]      # prints this torch's lines for verified.py, in minutes

Operators are called as PyTorch's own samples call them (`op_db`), forward and backward, one ATen call at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import shardwright as sw
from shardwright.views import strided

FACTOR = 2
MOST_CALLS = 16  # recorded calls of each ATen operator
SIZES = {"L": 16, "M": 8, "S": 4, "XS": 4}  # sizes of PyTorch's samples, by the names of its constants


class Call(NamedTuple):
    """A call of an ATen operator with plain tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def copied(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class _Recording(TorchDispatchMode):
    def __init__(self, calls: dict[Any, dict[str, Call]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not func._schema.name.startswith("aten::"):
            return func(*args, **kwargs)
        known = self._calls.setdefault(func, {})
        if len(known) < MOST_CALLS and any(_dims(tensor) for tensor in tensors) and "out" not in kwargs:
            shown = str(tree_map(lambda leaf: leaf.ndim if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)))
            if shown not in known:
                known[shown] = Call(copied(args), copied(kwargs))
        return func(*args, **kwargs)


def _dims(tensor: torch.Tensor) -> list[int]:
    """Returns the dims that two ranks can cut evenly into strided shards."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_small = is_plain and 0 < tensor.numel() <= 4096
    return [dim for dim, size in enumerate(tensor.shape) if size % (2 * FACTOR) == 0] if is_small else []


def recorded(names: list[str]) -> dict[Any, list[Call]]:
    """Records the ATen calls of PyTorch's samples: of all functions, or only of those in `names`."""
    from torch.testing._internal import common_methods_invocations as samples

    for module in [module for name, module in sys.modules.items() if name.startswith("torch.testing._internal")]:
        vars(module).update({name: size for name, size in SIZES.items() if isinstance(getattr(module, name, 0.5), int)})
    calls: dict[Any, dict[str, Call]] = {}
    torch.manual_seed(0)
    for op in [op for op in samples.op_db if not names or op.name in names]:
        for dtype in (torch.float32, torch.int64):
            if not op.supports_dtype(dtype, "cpu"):
                continue
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                needs_grad = dtype.is_floating_point and op.supports_autograd
                for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=needs_grad)):
                    if i >= 8:
                        break
                    with contextlib.suppress(Exception), _Recording(calls):
                        _run(op, sample)
            if dtype.is_floating_point:
                break
    with _Recording(calls):
        _call_lists()
    return {func: list(known.values()) for func, known in calls.items() if known}


def _can_be_saved(call: Call) -> bool:
    try:
        torch.save(call, io.BytesIO())
    except (TypeError, AttributeError, pickle.PicklingError):  # an argument is a module
        return False
    return True


def _call_lists() -> None:
    """Calls the foreach functions of optimizers and gradient clipping, which PyTorch's samples omit."""
    ones, twos, threes = ([torch.rand(4, 8) + i for _ in range(2)] for i in range(3))
    torch._foreach_norm(ones, 2.0)
    torch._foreach_sqrt(ones)
    torch._foreach_add(ones, twos)
    torch._foreach_mul(ones, 2.0)
    torch._foreach_add_(ones, twos, alpha=2)
    torch._foreach_lerp_(ones, twos, 0.5)
    torch._foreach_mul_(ones, torch.tensor(2.0))
    torch._foreach_addcdiv_(ones, twos, threes, 0.1)
    states = [torch.zeros(()) for _ in range(2)]
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(ones, twos, threes, [three.clone() for three in threes], [], states, **how)


def _run(op: Any, sample: Any) -> None:
    results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    results = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


class Case(NamedTuple):
    """The placements of the tensors of a call, in order."""

    placements: list[tuple[Placement, ...]]
    dim: int


def cases(call: Call, mesh: DeviceMesh) -> Iterator[Case]:
    """Yields strided placements of a call: of one tensor alone, and of all tensors of the same shape."""
    tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
    replicated = (Replicate(),) * mesh.ndim
    for i, tensor in enumerate(tensors):
        for dim in _dims(tensor):
            for cut in _cuts(dim):
                alike = [j for j, other in enumerate(tensors) if other.shape == tensor.shape]
                yield Case([cut if j == i else replicated for j in range(len(tensors))], dim)
                if len(alike) > 1 and i == alike[0]:
                    yield Case([cut if j in alike else replicated for j in range(len(tensors))], dim)


def _cuts(dim: int) -> list[tuple[Placement, ...]]:
    strided = _StridedShard(dim, split_factor=FACTOR)
    return [(strided, Shard(dim)), (Replicate(), strided)]


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Cuts a tensor index by index. Split factors encode a shard order only if another mesh dim cuts the same dim."""
    is_order = len(placements) == 2 and type(placements[1]) is Shard
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    spec = DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=is_order)
    if any(isinstance(placement, _StridedShard) for placement in placements):
        strided = "order" if is_order else "literal"
        layout = sw.Layout(mesh, tensor.shape, placements, tensor.dtype, strided=strided)
        tensor = _part(tensor, layout)
    else:
        spec = DTensorSpec(mesh, placements, meta)
        tensor = tensor.clone()
    return DTensor(tensor, spec, requires_grad=False)  # type: ignore[call-arg]


def outcome(func: Any, call: Call, case: Case, mesh: DeviceMesh) -> str:
    """Returns "right", "wrong" or the error on this rank. All ranks of the mesh must call it."""
    try:
        expected = func(*copied(call.args), **copied(call.kwargs))
    except Exception as error:
        return f"plain: {error}"
    placed = iter(case.placements)
    leaves, tree = tree_flatten(copied((call.args, call.kwargs)))
    given = [distributed(leaf, mesh, next(placed)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    try:
        args, kwargs = tree_unflatten(given, tree)
        agrees = list(_agree(func(*args, **kwargs), expected))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right" if all(agrees) else "wrong"


def _agree(actual: Any, expected: Any) -> Iterator[bool]:
    """Reduces pending sums, then compares this rank's parts with parts of the global results."""
    results, right = tree_leaves(actual), tree_leaves(expected)
    yield len(results) == len(right)
    for result, wanted in zip(results, right, strict=False):
        if not isinstance(wanted, torch.Tensor):
            yield result == wanted
            continue
        yield result.shape == wanted.shape and result.dtype == wanted.dtype
        if isinstance(result, DTensor):
            if any(placement.is_partial() for placement in result.placements):
                result = result.redistribute(placements=[Replicate()] * result.device_mesh.ndim)
            strided = "order" if result._spec.use_strided_shard_as_shard_order else "literal"
            layout = sw.Layout(result.device_mesh, result.shape, result.placements, result.dtype, strided=strided)
            result, wanted = result.to_local(), _part(wanted, layout)
        yield result.shape == wanted.shape and torch.allclose(
            result, wanted.to(result.dtype), 1e-4, 1e-4, equal_nan=True
        )


def _part(tensor: torch.Tensor, layout: sw.Layout) -> torch.Tensor:
    """Returns this rank's part of a tensor, taken index by index."""
    for dim, intervals in enumerate(layout.region(dist.get_rank())):
        index = torch.tensor([i for begin, end in intervals for i in range(begin, end)], dtype=torch.int64)
        tensor = tensor.index_select(dim, index)
    return tensor


def verdicts(path: str, trusts: bool) -> dict[str, dict[str, list[str]]]:
    """Returns outcomes by ATen operator: of all cases ("all"), and of cases cut only along dims that the operator does
    not work along ("other"). With `trusts`, PyTorch's rules are used for operators without a rule of ours."""
    found: dict[str, dict[str, list[str]]] = {}
    mesh = init_device_mesh("cpu", (2, 2))
    known = strided.is_verified
    for name, calls in torch.load(path, weights_only=False).items():
        func = getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2])
        if torch.Tag.nondeterministic_seeded in func.tags or not _has_rule(func):
            continue
        name = func.name().removeprefix("aten::")
        if dist.get_rank() == 0 and "-v" in sys.argv:
            print(name, file=sys.stderr, flush=True)
        for call in calls:
            for case in cases(call, mesh):
                asks_others: list[bool] = []

                def is_verified(schema: Any, heard: list[bool] = asks_others) -> bool:
                    heard.append(strided.works_along_other_dims(schema))
                    return trusts or known(schema)

                strided.is_verified = is_verified
                said = outcome(func, call, case, mesh)
                if asks_others or name in found or not trusts:
                    entry = found.setdefault(name, {"all": [], "other": []})
                    entry["all"].append(said)
                    entry["other"] += [said] if asks_others and all(asks_others) else []
    strided.is_verified = known
    return found


def _has_rule(func: Any) -> bool:
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = "op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs"
    return any(func in getattr(propagator, table, ()) for table in tables)


def _are_right(said: list[str]) -> bool:
    return len(said) > 1 and set(said) == {"right"}


def save(path: str, names: list[str], most_calls: Mapping[str, int] | None = None) -> None:
    """Saves the recorded calls of PyTorch's samples for `verdicts`: of all ATen operators, or of those in `most_calls`,
    and of these an evenly spaced choice of at most so many calls."""
    known = {}
    for func, calls in recorded(names).items():
        name = func.name().removeprefix("aten::")
        if most_calls is None or name in most_calls:
            calls = [call for call in calls if _can_be_saved(call)]
            step = 1 if most_calls is None else max(-(-len(calls) // most_calls[name]), 1)
            known[f"{func._schema.name[6:]}.{func._overloadname}"] = calls[::step]
    torch.save(known, path)


def of_all_ranks(local_verdicts: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """Returns for each case "right", or an outcome of a rank that is not. All ranks must call it."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, local_verdicts)
    return {
        name: {
            kind: [
                next((text for text in of_ranks if text != "right"), "right") for of_ranks in zip(*parts, strict=True)
            ]
            for kind, parts in ((kind, [outcomes[name][kind] for outcomes in of_all]) for kind in ("all", "other"))
        }
        for name in local_verdicts
    }


def lists(found: dict[str, dict[str, list[str]]]) -> tuple[list[str], list[str]]:
    """Returns the operators that are right for any strided shards, and those that are right along other dims only."""
    anywhere = sorted(name for name, said in found.items() if _are_right(said["all"]))
    return anywhere, sorted(name for name in found.keys() - set(anywhere) if _are_right(found[name]["other"]))


def main() -> None:
    with sw.enabled(strict=True, views=True):
        found = of_all_ranks(verdicts(sys.argv[-1], trusts="--as-is" not in sys.argv))
    if dist.get_rank() == 0:
        if "--as-is" in sys.argv or "-v" in sys.argv:
            for name, said in sorted(found.items()):
                counts = Counter(text.partition("\n")[0][:150] for text in said["all"])
                if set(counts) != {"right"}:
                    print(name, dict(counts), "other:", dict(Counter(text[:8] for text in said["other"])))
        for names in lists(found):
            print(textwrap.fill(" ".join(names), 112, initial_indent="        ", subsequent_indent="        "))


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        main()
        dist.destroy_process_group()
    else:
        # PyTorch's samples are run once, not on every rank.
        path = os.path.join(tempfile.mkdtemp(), "calls")
        save(path, [argument for argument in sys.argv[1:] if not argument.startswith("-")])
        sys.argv.append(path)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)
