"""Records what a loader of checkpoints writes: `record`.

The loader gets weights without memory (meta tensors). Views of them are allowed, and copies of them to parameters are
recorded instead of executed. A write is a box of a weight, and the elements of a parameter to which it is copied:

    qkv[4:8].copy_(k.narrow(0, 8, 4))    k: [8, 12) of dim 0, all of dim 1;  into qkv[4:8]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..layouts.errors import argument_error

Weights = Mapping[str, tuple[Sequence[int], torch.dtype]]  # shape and dtype of each weight, by name
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Intervals = tuple[tuple[int, int], ...]  # [begin, end) of indices along a dim

# Operators that make a copy, which is recorded as a view.
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
# Operators that write a constant.
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class Write(NamedTuple):
    """The part of a weight that a loader writes, and where: a view of a parameter with the weight's dims."""

    region: tuple[Intervals, ...]  # the intervals of each dim of the weight, in the order of the elements of `into`
    into: torch.Tensor


class _Memory(NamedTuple):
    """The memory of a weight, or of a copy of a view of one."""

    name: str
    shape: tuple[int, ...]  # its elements are contiguous
    dtype: torch.dtype
    parent: tuple[_Memory, _Strided] | None  # of a copy: the view that was copied


class _Strided(NamedTuple):
    """Sizes, strides and offset of a view."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def record(load: Load, weights: Weights) -> dict[str, Write]:
    """Runs a loader, and returns what it writes of each weight, without changing anything.

    Constants that the loader writes are ignored, unless they replace a weight that it has copied.

    Raises:
        ValueError: the loader does more with a weight than copying one box of it to a strided part of a parameter, or
            it changes a parameter in another way.
    """
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        load((name, recorder.weight(name, tuple(shape), dtype)) for name, (shape, dtype) in weights.items())
    return {name: _merged(name, writes) for name, writes in recorder.writes.items()}


class _Recorder(TorchDispatchMode):
    """Records the writes of weights. Errors name the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[str, list[Write]] = {}
        self._memories: dict[int, _Memory] = {}  # by storage
        self._made: set[int] = set()  # storages of other tensors that the loader has made
        self._alive: list[torch.Tensor] = []  # keeps these storages, so that no other gets the same identity

    def weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a weight without memory."""
        return self._meta_tensor(_Memory(name, shape, dtype, None))

    def _meta_tensor(self, memory: _Memory) -> torch.Tensor:
        """Returns a contiguous meta tensor whose storage stands for `memory`."""
        made = torch.empty(memory.shape, dtype=memory.dtype, device="meta")
        self._memories[_storage_of(made)] = memory
        self._alive.append(made)
        return made

    def _memory_of(self, value: Any) -> _Memory | None:
        """Returns the memory that a value is a view of, or None for values that come from no weight."""
        return self._memories.get(_storage_of(value)) if isinstance(value, torch.Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        found = next((memory for memory in map(self._memory_of, leaves) if memory is not None), None)
        if found is None:
            foreign = [x for x in _written(func, args, kwargs) if x.numel() and _storage_of(x) not in self._made]
            for tensor in foreign:
                self._check_fill(func, tensor)
            if foreign:
                return args[0]
            is_new = func is torch.ops.aten.lift_fresh.default  # the result of torch.tensor()
            return self._noted(func(*args, **kwargs), () if is_new else leaves)
        if func is torch.ops.aten.copy_.default and self._memory_of(args[0]) is None:
            self._record(args[0], args[1], found)
            return args[0]
        if func in _COPIES:
            dtype = kwargs.get("dtype") or args[0].dtype
            return self._meta_tensor(_Memory(found.name, tuple(args[0].shape), dtype, (found, _strides_of(args[0]))))
        if _is_view(func):
            return func(*args, **kwargs)
        raise ValueError(
            f"load must only copy parts of weights to parameters, got {func} of {found.name}. Weights that a loader "
            "computes with must be converted by the trainer"
        )

    def _noted(self, result: Any, given: Sequence[Any]) -> Any:
        """Returns `result`. Notes its tensors that have memory of their own, unlike views of `given`."""
        known = {_storage_of(x) for x in given if isinstance(x, torch.Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage_of(tensor) not in known:
                self._made.add(_storage_of(tensor))
                self._alive.append(tensor)
        return result

    def _check_fill(self, func: Any, into: torch.Tensor) -> None:
        """Raises ValueError unless `func` writes a constant to elements of a parameter that have no weight yet."""
        parts = [(name, write.into) for name, writes in self.writes.items() for write in writes]
        copied = [name for name, x in parts if _storage_of(x) == _storage_of(into) and num_written(into, [x])]
        if func not in _FILLS or copied:
            allowed = "a loader that changes parameters only by copies of weights, and by constants before the copies"
            where = f" that has {copied[0]}" if copied else ""
            raise argument_error("load", allowed, f"{func} of a tensor of shape {tuple(into.shape)}{where}")

    def _record(self, into: torch.Tensor, value: torch.Tensor, memory: _Memory) -> None:
        """Records a copy of `value`, a view of `memory`."""
        if into.numel() == 0:
            return
        if _storage_of(into) in self._made:
            raise ValueError(f"load must copy {memory.name} to parameters, got a copy to a tensor that load has made")
        if any(tensor.is_conj() or tensor.is_neg() for tensor in (into, value)):
            raise ValueError(f"load must copy {memory.name} as it is, got a conjugated or negated view")
        root, *others = [dtype for dtype, _ in itertools.groupby(reversed(_dtypes(memory)))]
        if others not in ([], [into.dtype]):
            casts = ", then ".join(map(str, others))
            raise ValueError(f"load must cast {memory.name} at most once, to the parameter's {into.dtype}, got {casts}")
        view = _strides_of(value.expand(into.shape))
        weight, view = _in_weight(memory, view)
        begins, lengths, strides = _box(weight, view, into.stride())
        part = into.detach().as_strided(lengths, strides, into.storage_offset())
        region = tuple(((begin, begin + length),) for begin, length in zip(begins, lengths))
        self.writes.setdefault(memory.name, []).append(Write(region, part))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors to which an operator writes."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
    values = [given.get(x.name) for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range [begin, end) of bytes of its storage that a tensor spans."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.storage_offset() * tensor.itemsize, (tensor.storage_offset() + last + 1) * tensor.itemsize


def num_written(tensor: torch.Tensor, parts: Iterable[torch.Tensor]) -> int:
    """Returns the number of elements of a tensor that are in at least one of these parts of its storage."""
    begin, end = span(tensor)
    near = sorted((part for part in parts if span(part)[0] < end and begin < span(part)[1]), key=span)
    limits = [(begin, begin), *map(span, near), (end, end)]
    is_dense = tensor.numel() * tensor.itemsize == end - begin
    if is_dense and all(a[1] <= b[0] for a, b in itertools.pairwise(limits)):
        return sum(part.numel() for part in near)
    low, high = min(limits)[0], max(x[1] for x in limits)
    mask = torch.zeros((high - low) // tensor.itemsize, dtype=torch.bool)
    for part in near:
        mask.as_strided(part.shape, part.stride(), (span(part)[0] - low) // part.itemsize).fill_(True)
    return int(mask.as_strided(tensor.shape, tensor.stride(), (begin - low) // tensor.itemsize).sum())


def _is_view(func: Any) -> bool:
    """Returns True if the operator's result is a view of its input, which it does not change."""
    if func is torch.ops.aten._unsafe_view.default:  # a view of the copy that `reshape` makes
        return True
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _storage_of(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's storage object, which identifies its memory."""
    return tensor.untyped_storage()._cdata


def _strides_of(tensor: torch.Tensor) -> _Strided:
    """Returns the sizes, strides and offset of a tensor."""
    return _Strided(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _dtypes(memory: _Memory) -> list[torch.dtype]:
    """Returns the dtypes of a memory and of those that it is a copy of, up to the weight."""
    dtypes = [memory.dtype]
    while memory.parent is not None:
        memory = memory.parent[0]
        dtypes.append(memory.dtype)
    return dtypes


def _in_weight(memory: _Memory, view: _Strided) -> tuple[_Memory, _Strided]:
    """Returns the memory of the weight, and a view of `memory` (a weight or a copy) as a view of it."""
    while memory.parent is not None:
        parent, copied = memory.parent
        steps, begins = _steps(memory, view), _coordinate(memory.shape, view.offset)
        offset = copied.offset + sum(begin * stride for begin, stride in zip(begins, copied.strides))
        strides = tuple(0 if dim < 0 else copied.strides[dim] * step for dim, step in steps)
        memory, view = parent, _Strided(view.sizes, strides, offset)
    return memory, view


def _steps(memory: _Memory, view: _Strided) -> list[tuple[int, int]]:
    """Returns (dim of the memory, step along it) for each dim of a view; (-1, 0) for a dim of size 1."""
    found = []
    begins = _coordinate(memory.shape, view.offset)
    for size, stride in zip(view.sizes, view.strides):
        if size == 1:
            found.append((-1, 0))
            continue
        dim = _dim_of(memory, stride)
        step, left = divmod(stride, math.prod(memory.shape[dim + 1 :]))
        if left or begins[dim] + (size - 1) * step >= memory.shape[dim]:
            raise _unsupported_error(memory.name, "reshapes a copy of it")
        found.append((dim, step))
    return found


def _dim_of(memory: _Memory, stride: int) -> int:
    """Returns the outermost dim whose elements are at most `stride` apart."""
    for dim, size in enumerate(memory.shape):
        if size > 1 and 0 < math.prod(memory.shape[dim + 1 :]) <= stride:
            return dim
    raise _unsupported_error(memory.name, "repeats its elements")


def _coordinate(shape: Sequence[int], offset: int) -> list[int]:
    """Returns the index along each dim of the element at an offset."""
    found = []
    for dim in range(len(shape)):
        index, offset = divmod(offset, max(math.prod(shape[dim + 1 :]), 1))
        found.append(index)
    return found


def _box(weight: _Memory, view: _Strided, into: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Returns the box of a weight that a view covers: begins and lengths by dim, and the strides of its destination.

    Dims of the view that form one dim of the weight are joined, if they form one dim of the destination too. A dim that
    spans several dims of the weight is split. `into` has the strides of the destination for each dim of the view.

    Example: elements 6 to 17 of a weight of 4 x 6 are the box with begins [1, 0] and lengths [2, 6].
    """
    dims = sorted(((s, n, t) for n, s, t in zip(view.sizes, view.strides, into) if n > 1), reverse=True)
    joined: list[tuple[int, int, int]] = []  # (stride in the weight, size, stride in the destination)
    for stride, size, to in dims:
        if joined and joined[-1][0] == size * stride and joined[-1][2] == size * to:
            size *= joined.pop()[1]
        joined.append((stride, size, to))
    begins = _coordinate(weight.shape, view.offset)
    lengths, strides = [1] * len(begins), [1] * len(begins)
    for stride, size, to in joined:
        while size > 1:
            dim = _dim_of(weight, stride)
            if stride != math.prod(weight.shape[dim + 1 :]) or lengths[dim] > 1:
                raise _unsupported_error(weight.name, "writes elements that are not adjacent in it")
            length = min(size, weight.shape[dim] - begins[dim])
            if size % length or (length < size and begins[dim]):
                raise _unsupported_error(weight.name, "writes a part of it that is no box")
            lengths[dim], strides[dim] = length, to
            stride, size, to = stride * length, size // length, to * length
    return begins, lengths, strides


def _merged(name: str, writes: Sequence[Write]) -> Write:
    """Joins writes to adjacent elements, such as the parts of a fused weight, into one with several intervals.

    Parts of a grid are first joined along the inner dim of the parameter, such as gate and up of each expert.
    """
    parts: list[Write] = []
    for write in sorted(writes, key=lambda write: write.into.storage_offset()):
        parts.append(write)
        while len(parts) > 1 and (both := _joined_pair(*parts[-2:])) is not None:
            parts[-2:] = [both]
    if len(parts) > 1:
        raise _unsupported_error(name, "writes it to several places")
    return parts[0]


def _joined_pair(first: Write, other: Write) -> Write | None:
    """Returns two writes as one, or None unless `other` follows `first` along one dim."""
    a, b = first.into, other.into
    dims = [d for d, (x, y) in enumerate(zip(first.region, other.region)) if x != y]
    if len(dims) != 1 or _storage_of(a) != _storage_of(b):
        return None
    (dim,) = dims
    step = _stride(a, b, dim)
    same = all(a.stride(d) == b.stride(d) for d in range(a.ndim) if d != dim or min(a.shape[d], b.shape[d]) > 1)
    if not same or b.storage_offset() != a.storage_offset() + a.shape[dim] * step:
        return None
    sizes, strides = list(a.shape), list(a.stride())
    sizes[dim], strides[dim] = a.shape[dim] + b.shape[dim], step
    region = list(first.region)
    region[dim] = _joined((*first.region[dim], *other.region[dim]))
    return Write(tuple(region), a.as_strided(sizes, strides, a.storage_offset()))


def _stride(a: torch.Tensor, b: torch.Tensor, dim: int) -> int:
    """Returns the stride of the dim along which b follows a. If both have size 1 there, it is their distance."""
    if a.shape[dim] > 1 or b.shape[dim] > 1:
        return a.stride(dim) if a.shape[dim] > 1 else b.stride(dim)
    return b.storage_offset() - a.storage_offset()


def _joined(intervals: Intervals) -> Intervals:
    """Joins adjacent intervals."""
    found: list[tuple[int, int]] = []
    for begin, end in intervals:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)


def _unsupported_error(name: str, what: str) -> ValueError:
    """Returns the error about a loader that does not write one box of a weight. `what` describes what it does."""
    return argument_error("load", f"a loader that writes one box of {name} on each rank", f"one that {what}")
