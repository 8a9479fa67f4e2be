"""Makes DTensor's own `linear` and `matmul` gather their operand during the product: ``sw.enable(overlap=True)``.

PyTorch first redistributes an operand, then multiplies. While overlap is on, `torch.nn.functional.linear`,
`torch.matmul`, `torch.mm` and ``@`` of a DTensor and a DTensor weight of two dims go to `shardwright.linear` and
`shardwright.all_gather_matmul` if a mesh dim cuts the operand before its last dim and the weight in its columns. The
operand is then gathered along that mesh dim, and the result is sharded in its last dim. All other calls go to PyTorch.

If an explicit redistribute gathers the operand before the product, as in `torch.distributed.tensor.parallel`, nothing
is left to overlap with the product, which is logged once. The styles of `shardwright.parallel` leave the gather to
the product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..runtime import dynamo, executables
from . import functions

_log = logging.getLogger("shardwright")
_warned = False

_original: Any = None  # DTensor's own __torch_function__, while it is replaced


def install() -> None:
    """Replaces `DTensor.__torch_function__`. Does nothing if it is replaced already."""
    global _original
    if _original is None:
        _original = DTensor.__dict__["__torch_function__"]
        DTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]


def uninstall() -> None:
    """Restores DTensor's own function."""
    global _original
    if _original is not None:
        DTensor.__torch_function__ = _original
        _original = None


def note_explicit_gather(current_spec: DTensorSpec, target_spec: DTensorSpec) -> None:
    """Warns once that an explicit gather does not overlap with the product that may follow."""
    global _warned
    pairs = zip(current_spec.placements, target_spec.placements, strict=True)
    if not _warned and any(type(a) is Shard and a.dim < current_spec.ndim - 1 and b.is_replicate() for a, b in pairs):
        _warned = True
        _log.warning(
            "enable(overlap=True): %s -> %s was gathered by an explicit redistribute, which does not overlap with the "
            "product that follows. PyTorch's ColwiseParallel and RowwiseParallel gather like this; the styles of "
            "shardwright.parallel leave the gather to the product",
            current_spec,
            target_spec,
        )


@dynamo.skipped
def _torch_function(cls: type, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Replaces `DTensor.__torch_function__`. Calls the function in `_REPLACEMENTS`, or PyTorch's if it returns None."""
    with torch._C.DisableTorchFunctionSubclass():
        replacement = _REPLACEMENTS.get(function)
        result = None if replacement is None else replacement(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if result is None else result


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Replaces `torch.nn.functional.linear`."""
    if _should_gather(input, weight, 0) and (bias is None or isinstance(bias, DTensor)):
        return functions.linear(input, weight, bias)
    return None


def _matmul(input: Any, other: Any, **options: Any) -> Any:
    """Replaces `torch.matmul` and its other names."""
    return functions.all_gather_matmul(input, other) if not options and _should_gather(input, other, 1) else None


def _mm(input: Any, mat2: Any, **options: Any) -> Any:
    """Replaces `torch.mm`."""
    return _matmul(input, mat2, **options) if input.ndim == 2 else None


# The types of local tensors that hold data. Compilers pass fake tensors; on torch 2.11 is_compiling() is False then.
_REAL_TYPES = (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor)


def _should_gather(x: Any, weight: Any, column: int) -> bool:
    """Returns True if `x` is to be gathered during its product with a weight whose columns are sharded.

    `column` is the weight's dim of columns: 0 in `linear`, 1 in `matmul`.
    """
    if type(x) is not DTensor or not isinstance(weight, DTensor) or torch.compiler.is_compiling():
        return False
    if type(x._local_tensor) not in _REAL_TYPES or type(weight._local_tensor) not in _REAL_TYPES:
        return False
    if weight.ndim != 2 or x.ndim < 2 or x.shape[-1] != weight.shape[1 - column]:
        return False
    if x.dtype != weight.dtype or not x.dtype.is_floating_point or x.device_mesh != weight.device_mesh:
        return False
    pairs = list(zip(x.placements, weight.placements, strict=True))
    if not all(type(placement) is Shard or placement.is_replicate() for pair in pairs for placement in pair):
        return False
    last = x.ndim - 1
    return (
        any(a.is_shard() and not a.is_shard(last) and b.is_shard(column) for a, b in pairs)
        and x.device_mesh.get_coordinate() is not None
        and executables.why_left_to_torch(x.device.type) is None
    )


# The function that replaces each function of PyTorch. It returns None for arguments that it leaves to PyTorch.
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
}
