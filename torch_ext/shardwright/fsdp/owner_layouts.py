"""Optimizers that compute with whole matrices, such as Muon and Shampoo: one rank, the owner, computes each matrix.

A *bucket* is a list of matrices that move together, in one batch of messages. While owners compute with one bucket, the
next one moves to its owners and the results of the previous one move back to shards.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..dtensor.specs import layout_of
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..placements import Owned
from ..runtime import argument_checks, groups
from ..runtime.agreement import GroupWords, Statement
from ..runtime.many import ManyHandle, redistribute_parts

Function = Callable[[int, torch.Tensor], torch.Tensor]  # (index of the matrix, whole tensor) -> whole result

_ITERATIONS = 5  # Newton-Schulz iterations that the default cost counts, as many as torch.optim.Muon runs


def owners(params: Any, *, cost: Callable[[DTensor], float] | None = None, bucket_bytes: int = 16 << 20) -> Owners:
    """Assigns the matrix of each sharded parameter to a rank of its mesh, the owner, so that costs are balanced.

        owners = sw.fsdp.owners(matrices)
        for i, update in owners.map(orthogonalize, directions):  # the owner runs orthogonalize(i, whole direction)
            matrices[i].add_(update, alpha=-lr)

    Matrices are assigned by descending cost, each to the rank whose costs have the lowest sum so far. All ranks of the
    mesh call, and compare the arguments.

    Args:
        params: DTensors of at least two dims on one mesh, replicated or sharded in any way, evenly or unevenly.
        cost: function from a parameter to the cost of its matrix, equal on all ranks. Default: the floating-point
            operations of five Newton-Schulz iterations; all dims but the last two are batch dims.
        bucket_bytes: maximum bytes of one rank's matrices in a bucket, in the parameters' dtypes. A larger matrix is
            the only one of its owner in a bucket.

    Raises:
        ValueError: an argument is not allowed, or arguments differ between ranks.
        RuntimeError: the arguments of another rank are not allowed; torch.distributed is not initialized.
    """
    groups.check_initialized()
    given = argument_values.items(params, "params", "a list of DTensors")
    if not given:
        raise argument_error("params", "a list of at least one DTensor", "none")
    _check_param("params[0]", given[0], getattr(given[0], "device_mesh", None))
    if given[0].device_mesh.get_coordinate() is None:
        raise argument_error("params[0]", f"on a mesh with this rank ({dist.get_rank()})", given[0].device_mesh)
    return Owners(given, cost, bucket_bytes)


class Owners:
    """The owners of matrices, and the moves between shards and owners. Made by `owners`.

    Attributes:
        ranks: for each parameter the global rank that owns its matrix.
        costs: for each parameter the cost of its matrix.
        buckets: for each bucket the indices of its matrices. `map` yields results in this order.
    """

    def __init__(self, params: list[Any], cost: Any, bucket_bytes: Any) -> None:
        self._params: list[DTensor] = params
        self._mesh = mesh = params[0].device_mesh
        names, sizes, ranks = argument_values.device_mesh_parts(mesh)
        group = groups.find_or_make(sorted(ranks), groups.owner_of(mesh))
        self._group = groups.weakly(group)
        # The mesh with ranks in the group, which layouts of `redistribute_many` have.
        members = dist.get_process_group_ranks(group)
        self._grid = Mesh(dict(zip(names, sizes, strict=True)), [members.index(rank) for rank in ranks])
        self._layouts: dict[tuple[int, torch.dtype], tuple[Layout, Layout]] = {}
        self._compared: set[Hashable] = set()  # dtypes of earlier calls of `map`, which ranks have compared
        self.costs: list[float] = []
        fields: dict[str, object] = {"number of params": len(params), "bucket_bytes": bucket_bytes}
        own_error = None
        try:
            bucket_bytes = argument_values.integer(bucket_bytes, "bucket_bytes")
            if bucket_bytes < 1:
                raise argument_error("bucket_bytes", "at least 1", bucket_bytes)
            for i, param in enumerate(params):
                _check_param(f"params[{i}]", param, mesh)
                self.costs.append(_cost_of(f"params[{i}]", param, cost))
                fields[f"params[{i}]"] = f"{layout_of(param._spec)} with cost {self.costs[-1]}"
        except ValueError as error:
            own_error = error
        GroupWords(group).compare(Statement("fsdp.owners", fields), own_error)
        order = sorted(range(len(params)), key=lambda i: (-self.costs[i], i))
        self._owners = _balanced(self.costs, order, len(ranks))  # by matrix: index of the owner in the mesh, row-major
        self.ranks = [ranks[index] for index in self._owners]
        self.buckets = _buckets([p.numel() * p.element_size() for p in params], order, self.ranks, bucket_bytes)

    def __repr__(self) -> str:
        loads = dict.fromkeys(self._mesh.mesh.flatten().tolist(), 0.0)
        for rank, cost in zip(self.ranks, self.costs, strict=True):
            loads[rank] += cost
        mean = sum(loads.values()) / len(loads)
        imbalance = max(loads.values()) / mean if mean else 1.0
        counts = f"matrices: {len(self.ranks)}, ranks: {len(loads)}, buckets: {len(self.buckets)}"
        return f"<Owners; {counts}, highest cost of a rank: {imbalance:.2f} times the mean>"

    def map(
        self, function: Function, tensors: Any, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[int, DTensor]]:
        """Moves tensors to the owners, calls the function there with each whole tensor, and moves results to shards.

        All ranks of the mesh call, and iterate to the end. Each element that the owner lacks is sent to it once, and
        each result once to every other rank that holds its element: the minimum of bytes for these owners.

        Args:
            function: called as ``function(i, whole)`` on the owner of matrix i. `whole` is a new plain tensor, which
                the function may write to and keep. It returns a tensor of the same shape, which must not change until
                the result is yielded. It must not communicate.
            tensors: for each parameter a DTensor with its mesh, placements and shape, in any dtype, such as a gradient
                or a momentum; None leaves the matrix out, on all ranks. They must not change until the result is
                yielded.
            dtype: dtype of the function's results, in which they are sent. Default: that of each tensor.

        Yields:
            ``(i, result)`` on all ranks, with the parameter's placements.

        Raises:
            ValueError: an argument or a result of the function is not allowed, or arguments differ between ranks. In
                the first iteration with these dtypes all ranks raise (a RuntimeError if the error is on another rank),
                also for any exception of the function. Later, only the rank with the error raises.
            torch.distributed.DistBackendError: a transfer failed or timed out.
        """
        given: list[Any] = []
        own_error = None
        try:
            argument_checks.check_dtype("dtype", dtype)
            if not callable(function):
                raise argument_error("function", "a function of an index and a whole tensor", _type_of(function))
            given = argument_values.items(tensors, "tensors", "a list of DTensors or None")
            if len(given) != len(self._params):
                raise argument_error("tensors", f"a list of {len(self._params)}, one for each parameter", len(given))
            for i, (tensor, param) in enumerate(zip(given, self._params, strict=True)):
                _check_like(f"tensors[{i}]", tensor, f"params[{i}]", param)
        except ValueError as error:
            own_error = error
            if self._compared:  # other ranks may not compare
                raise
        fields = {f"tensors[{i}]": getattr(tensor, "dtype", "left out") for i, tensor in enumerate(given)}
        key = dtype, *fields.values()
        if key in self._compared:
            return self._results(function, given, dtype, None, key)
        words = GroupWords(self._alive_group())
        words.compare(Statement("Owners.map", {"dtype": dtype or "that of each tensor", **fields}), own_error)
        return self._results(function, given, dtype, words, key)

    def _results(
        self, function: Function, tensors: list[Any], dtype: torch.dtype | None, words: GroupWords | None, key: Hashable
    ) -> Iterator[tuple[int, DTensor]]:
        """Yields the results of `map`. With `words`, ranks compare after each bucket whether the function has failed.

        While the owners compute with a bucket, the next one moves to its owners, and the results of the previous one
        move to shards.
        """
        buckets = [kept for bucket in self.buckets if (kept := [i for i in bucket if tensors[i] is not None])]
        next_inputs = self._to_owners(buckets[0] if buckets else [], tensors)
        previous, previous_results = list[int](), ManyHandle(None, [], [])
        for bucket, next_bucket in zip(buckets, [*buckets[1:], []], strict=True):
            inputs, next_inputs = next_inputs, self._to_owners(next_bucket, tensors)
            dtypes = [dtype or tensors[i].dtype for i in bucket]
            results, own_error = dict[int, torch.Tensor](), None
            try:
                for item, i in enumerate(bucket):
                    if self.ranks[i] == dist.get_rank():
                        results[i] = _computed(function, i, inputs.wait_for(item), dtypes[item])
            except Exception as error:
                if words is None:
                    raise
                own_error = error
            inputs.wait()
            if words is not None:
                words.compare(Statement("Owners.map"), own_error)
            moved_results = self._to_shards(bucket, results, dtypes)
            yield from self._as_parameters(previous, previous_results)
            previous, previous_results = bucket, moved_results
        yield from self._as_parameters(previous, previous_results)
        self._compared.add(key)

    def _to_owners(self, bucket: list[int], tensors: list[Any]) -> ManyHandle:
        """Starts to move a bucket from shards to the owners."""
        items = []
        for i in bucket:
            part = tensors[i]._local_tensor.detach()
            items.append((part, *self._layouts_of(i, part.dtype)))
        return self._start(items)

    def _to_shards(self, bucket: list[int], results: dict[int, torch.Tensor], dtypes: list[torch.dtype]) -> ManyHandle:
        """Starts to move the results of a bucket from the owners to shards."""
        items = []
        for i, dtype in zip(bucket, dtypes, strict=True):
            shards, owned = self._layouts_of(i, dtype)
            result = results.get(i)
            if result is None:
                rank = dist.get_rank(self._alive_group())
                result = torch.empty(owned.local_shape(rank), dtype=dtype, device=self._params[i].device)
            items.append((result.detach(), owned, shards))
        return self._start(items)

    def _start(self, items: list[tuple[torch.Tensor, Layout, Layout]]) -> ManyHandle:
        """Starts a batch. Results have memory of their own, even if nothing moves."""
        if not items:
            return ManyHandle(None, [], [])
        is_alone = self._mesh.size() == 1
        out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, _, _ in items] if is_alone else None
        handle = redistribute_parts(items, out=out, group=self._alive_group(), async_op=True)
        assert isinstance(handle, ManyHandle)
        return handle

    def _as_parameters(self, bucket: list[int], handle: ManyHandle) -> Iterator[tuple[int, DTensor]]:
        """Yields the results of a bucket with the placements of the parameters."""
        for i, local in zip(bucket, handle.wait(), strict=True):
            shape, placements = self._params[i].shape, self._params[i].placements
            stride = make_contiguous_strides_for(shape)
            yield i, DTensor.from_local(local, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def _alive_group(self) -> dist.ProcessGroup:
        """Returns the group of the mesh's ranks. Raises RuntimeError if it was destroyed."""
        group = self._group.get()
        assert group is not None
        return group

    def _layouts_of(self, i: int, dtype: torch.dtype) -> tuple[Layout, Layout]:
        """Returns the sharded and the owned layout of matrix i in a dtype."""
        if (i, dtype) not in self._layouts:
            given = layout_of(self._params[i]._spec)
            shards = Layout(self._grid, given.shape, given.placements, dtype, given.shard_order, "literal")
            coordinate = self._grid.coordinate(self._grid.ranks[self._owners[i]])
            assert coordinate is not None
            self._layouts[i, dtype] = shards, Layout(self._grid, given.shape, list(map(Owned, coordinate)), dtype)
        return self._layouts[i, dtype]


def _computed(function: Function, i: int, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the result of the function for a whole tensor. Raises ValueError if it is not allowed."""
    shape, device = whole.shape, whole.device
    result = function(i, whole)
    name = f"result of function for tensors[{i}]"
    argument_checks.check_tensor(name, result)
    if result.shape != shape:
        raise argument_error(name, f"of shape {tuple(shape)}", tuple(result.shape))
    if result.dtype != dtype:
        raise argument_error(name, f"of dtype {dtype} (pass dtype= to map for another)", result.dtype)
    if result.device != device:
        raise argument_error(name, f"on {device}", result.device)
    return result


def _check_param(name: str, param: Any, mesh: DeviceMesh | None) -> None:
    """Raises ValueError if a parameter has no matrix that can be assigned to a rank of the mesh."""
    if not isinstance(param, DTensor):
        raise argument_error(name, "a DTensor, such as a parameter under fully_shard", _type_of(param))
    if param.device_mesh != mesh:
        allowed = "on the mesh of params[0] (call `owners` once for each mesh)"
        raise argument_error(name, allowed, f"{param.device_mesh} instead of {mesh}")
    if param.dim() < 2:
        allowed = "of at least two dims (leave others to an optimizer such as AdamW)"
        raise argument_error(name, allowed, f"shape {tuple(param.shape)}")
    if any(placement.is_partial() for placement in param.placements):
        raise argument_error(name, "sharded or replicated", f"placements {param.placements}")


def _check_like(name: str, tensor: Any, param_name: str, param: DTensor) -> None:
    """Raises ValueError unless a tensor is None or a DTensor that is sharded like the parameter."""
    if tensor is None:
        return
    if not isinstance(tensor, DTensor):
        raise argument_error(name, f"a DTensor like {param_name}, or None", _type_of(tensor))
    for what in ("shape", "device_mesh", "placements", "device"):
        got, expected = getattr(tensor, what), getattr(param, what)
        if got != expected:
            raise argument_error(f"{what} of {name}", f"that of {param_name}, {expected}", got)


def _cost_of(name: str, param: DTensor, cost: Callable[[DTensor], float] | None) -> float:
    """Returns the cost of a parameter's matrix. Raises ValueError unless it is a finite number of at least 0."""
    if cost is None:
        *batch, rows, columns = param.shape
        m, n = min(rows, columns), max(rows, columns)
        return float(_ITERATIONS * math.prod(batch) * (4 * m * m * n + 2 * m**3))
    try:
        value = float(cost(param))
    except Exception as error:
        allowed = "a function from a parameter to a number"
        raise argument_error("cost", allowed, f"{type(error).__name__} for {name}: {error}") from error
    if not 0 <= value < math.inf:
        raise argument_error(f"cost of {name}", "a finite number of at least 0", value)
    return value


def _balanced(costs: list[float], order: list[int], count: int) -> list[int]:
    """Returns the owner of each matrix, in [0, count): in the given order, the one with the lowest sum of costs so far.

    Of equal sums, the owner with the fewest matrices, then the lowest index. Example: costs 4, 3, 3 and 2 in this
    order, two owners: 0 (sum 4), 1 (3), 1 (6), 0 (6).
    """
    owner = [0] * len(costs)
    loads = [(0.0, 0, index) for index in range(count)]  # a heap of (sum of costs, number of matrices, index)
    for i in order:
        load, number, owner[i] = loads[0]
        heapq.heapreplace(loads, (load + costs[i], number + 1, owner[i]))
    return owner


def _buckets(sizes: list[int], order: list[int], ranks: list[int], bucket_bytes: int) -> list[list[int]]:
    """Returns the matrices in this order, in buckets in which each rank has at most `bucket_bytes`, or one matrix.

    Example: matrices of 6, 5 and 4 bytes of ranks 0, 1 and 0, buckets of 8 bytes: [[0, 1], [2]], because rank 0 would
    have 10 bytes in the first bucket.
    """
    buckets: list[list[int]] = [[]]
    held: dict[int, int] = {}  # by rank: bytes in the last bucket
    for i in order:
        if ranks[i] in held and held[ranks[i]] + sizes[i] > bucket_bytes:
            buckets.append([])
            held = {}
        buckets[-1].append(i)
        held[ranks[i]] = held.get(ranks[i], 0) + sizes[i]
    return buckets


def _type_of(value: Any) -> str:
    """Returns the type of a value, for errors."""
    return f"a {type(value).__name__}"
