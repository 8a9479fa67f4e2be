"""`checkpoint_cut`: activations that are equal on all ranks of a mesh, sharded from a forward to its backward.

If autograd saves a tensor in the block that is equal on all ranks, it is packed as this rank's shard, a slice of its
memory; slicing needs no communication. When a backward unpacks the tensor, the shards are gathered.

A *sequence* is a list of tensors that were packed without an unpack in between, such as the activations of one forward.
The first backward of a sequence gathers each activation when it is needed, and records the order. Later backwards of
equal sequences gather one activation ahead. Ranks compare a sequence when they see it for the first time. Gathers
depend only on counts that are equal on all ranks, never on the time at which a rank frees memory. Example: a forward
packs activations 0, 1 and 2.

    first backward    gather 2, unpack 2, gather 1, unpack 1, gather 0, unpack 0; recorded order: 2, 1, 0
    later backwards   gather 2 and 1, unpack 2, gather 0, unpack 1, unpack 0

In a step with a schedule of `fully_shard`, the schedule decides instead when gathers start (scheduler.py). A *span* is
the memory of an activation. Several saved tensors may be views of one span.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._native import _planner
from ..layouts.errors import argument_error
from ..layouts.layout import Layout, Mesh
from ..runtime import argument_checks, checking, counters, executables, groups
from ..runtime.agreement import MeshWords, Statement
from ..runtime.plain_tensors import redistribute_local
from . import reads, scheduler
from .units import is_in_backward


class checkpoint_cut(torch.autograd.graph.saved_tensors_hooks):
    """In this block, autograd saves only this rank's shard of activations that are equal on all ranks of a mesh.

        for layer in self.layers:
            with sw.fsdp.checkpoint_cut(mesh["tp"], x):                # x is the same on all tensor-parallel ranks
                x = layer(x)

    The backward gathers the activations again; from its second run on, one ahead of the one it needs. Results have the
    same bits as without the block. An activation is sharded evenly in memory, whatever its shape and strides, so no dim
    needs to be divisible.

    With recomputation, only the input of a layer is saved, and it is sharded:

            with sw.fsdp.checkpoint_cut(mesh["tp"], x):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    DTensors need not be passed: saved DTensors are sharded if they are replicated over the mesh, such as sequences that
    were gathered. Parameters are left as they are.

    Args:
        mesh: the ranks on which activations are equal, including this rank; any number of dims.
        tensors: plain tensors that are equal on all of these ranks, bit for bit. They and their views are sharded when
            they are saved. (``sw.debug.check_ranks()`` compares their values.)
        min_bytes: size below which a tensor is saved in full.

    All ranks of the mesh run the same blocks and backwards in the same order.

    Raises:
        ValueError: an argument has a wrong type, or a DTensor is not equal on these ranks. A backward raises it on all
            ranks if they have saved different activations.
    """

    def __init__(self, mesh: DeviceMesh, *tensors: torch.Tensor, min_bytes: int = 1 << 16) -> None:
        groups.check_initialized()
        argument_checks.check_device_mesh("mesh", mesh)
        if mesh is None or mesh.get_coordinate() is None:
            raise argument_error("mesh", f"a mesh that contains this rank ({dist.get_rank()})", mesh)
        if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
            raise argument_error("min_bytes", "an integer of at least 0", repr(min_bytes))
        self._mesh = mesh
        self._min_bytes = min_bytes
        # Spans of `tensors`, which are equal on all ranks.
        spans = [_span_of_argument(index, tensor, mesh) for index, tensor in enumerate(tensors)]
        self._equal_spans = [span for span in spans if span is not None]
        self._activations: dict[_Span, tuple[_ShardedActivation, _Sequence]] = {}  # those that the block has sharded
        super().__init__(self._pack, _unpack)

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._activations.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Hook: packs a tensor as a view of its sharded span, which the block shards once. Packs others in full."""
        found = self._span_of(tensor)
        if found is None or found.size_bytes < self._min_bytes:
            return reads.pack(tensor)
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        local = _local_of(tensor)
        if found not in self._activations:
            activation = self._shard(local, found)
            key = self._mesh, groups.key_of_mesh(self._mesh)
            sequences = _meshes.get_or_make(key, lambda: _MeshSequences(self._mesh))
            self._activations[found] = activation, sequences.add(activation)
        activation, sequence = self._activations[found]
        activation.num_saved += 1
        return _Saved(activation, sequence, local.size(), local.stride(), local.storage_offset() - found.begin, spec)

    def _span_of(self, tensor: torch.Tensor) -> _Span | None:
        """Returns the span to shard when this tensor is saved, or None to save the tensor in full."""
        if isinstance(tensor, DTensor):
            owner = tensor._base if tensor._is_view() else tensor
            if isinstance(owner, torch.nn.Parameter):
                return None
            spec = tensor._spec
            is_equal = has_equal_shards(spec.mesh, tuple(spec.placements), self._mesh)
            span = _span(_local_of(tensor)) if is_equal else None
            # A DTensor's operators count the versions of the DTensor, not those of its local tensor.
            return None if span is None else span._replace(version=(*span.version, tensor._version))
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        span = _span(tensor)
        return None if span is None else next((outer for outer in self._equal_spans if outer.holds(span)), None)

    def _shard(self, local: torch.Tensor, span: _Span) -> _ShardedActivation:
        """Returns this rank's shard of a span of the tensor's memory, as an activation."""
        memory = local.detach().as_strided((span.numel,), (1,), span.begin)
        full, sharded = _layouts(self._mesh, span.numel, span.dtype)
        if checking.is_on():
            _compare_values(self._mesh, local)
        part = redistribute_local(memory, full, sharded, device_mesh=self._mesh)
        if part.numel() and part.untyped_storage()._cdata == memory.untyped_storage()._cdata:
            part = part.clone()
        counters.counts.activations_cut += 1
        return _ShardedActivation(part, sharded, full, self._mesh)


class _Span(NamedTuple):
    """A range of elements of a storage, at one version of the tensor."""

    storage: StorageWeakRef
    dtype: torch.dtype
    begin: int  # in elements
    numel: int
    version: tuple[int, ...]  # changes when the memory is written

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def holds(self, other: _Span) -> bool:
        """Returns true if the other range is a part of this one, at the same version."""
        return (
            self.storage == other.storage
            and (self.dtype, self.version) == (other.dtype, other.version)
            and self.begin <= other.begin
            and other.begin + other.numel <= self.begin + self.numel
        )


def _span(tensor: torch.Tensor) -> _Span | None:
    """Returns the span from the first to the last element of a tensor.

    Returns None for empty tensors, for tensors with conj or neg bits, whose memory has other values, and for inference
    tensors, which have no version and which autograd does not save.
    """
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None
    numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    version = (tensor._version,)
    return _Span(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, tensor.storage_offset(), numel, version)


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, after its collective has ended; a plain tensor as it is."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _span_of_argument(index: int, tensor: Any, mesh: DeviceMesh) -> _Span | None:
    """Returns the span of argument `tensors[index]`; None for a DTensor. Raises ValueError for invalid tensors."""
    name = f"tensors[{index}]"
    if isinstance(tensor, DTensor):
        if not has_equal_shards(tensor.device_mesh, tuple(tensor.placements), mesh):
            placed = f"{tuple(tensor.placements)} on {tensor.device_mesh}"
            raise argument_error(name, f"a DTensor that is replicated over {mesh}", placed)
        return None  # `_span_of` recognizes it when it is saved, like all DTensors
    argument_checks.check_tensor(name, tensor)
    return _span(tensor)


@executables.cached
def has_equal_shards(of: DeviceMesh, placements: tuple[Any, ...], over: DeviceMesh) -> bool:
    """Returns true if DTensors with `placements` on mesh `of` have equal shards on all ranks of mesh `over`."""
    mesh = Mesh(of)
    coordinates = [mesh.coordinate(rank) for rank in Mesh(over).ranks]
    if any(coordinate is None for coordinate in coordinates):
        return False
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    return len({tuple(coordinate[dim] for dim in dims) for coordinate in coordinates if coordinate is not None}) == 1


@executables.cached
def _layouts(mesh: DeviceMesh, numel: int, dtype: torch.dtype) -> tuple[_planner.Layout, _planner.Layout]:
    """Returns two layouts of `numel` elements of memory: replicated, and sharded over all dims of a mesh."""
    on = Mesh(mesh)
    return Layout(on, [numel], ["R"] * mesh.ndim, dtype), Layout(on, [numel], ["S(0)"] * mesh.ndim, dtype)


def _compare_values(mesh: DeviceMesh, local: torch.Tensor) -> None:
    """Raises an error if the tensor's bits differ between the ranks of the mesh (sw.debug.check_ranks)."""
    bits = local.detach().contiguous().cpu().flatten().view(torch.uint8)
    digest = hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]
    fields = {"tensor": f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}", "values": digest}
    checking.compare_calls(Statement("cut of an activation", fields), Mesh(mesh).ranks, dist.get_rank())


class _ShardedActivation:
    """An activation of which this rank keeps a shard between forward and backward."""

    def __init__(self, part: torch.Tensor, sharded: _planner.Layout, full: _planner.Layout, mesh: DeviceMesh) -> None:
        self._part, self._sharded_layout, self._full_layout, self._mesh = part, sharded, full, mesh
        self._gathered: torch.Tensor | None = None  # the full activation, gathered or being gathered
        self._num_unpacked = 0  # number of its views that this backward has unpacked
        self.num_saved = 0  # number of its views that autograd has saved
        self.index = 0  # its index in its sequence
        self.was_unpacked = False  # a backward has unpacked it
        # Dtype and size, to compare ranks.
        self.signature = f"{str(part.dtype).removeprefix('torch.')}[{full.shape[0]}]"
        # The step of `fully_shard` that saves it, if any, and its number in that step.
        self._step = scheduler.current_activations
        info = scheduler.ActivationInfo(self.signature, part.nbytes, part.device.type, sharded, full)
        self._number = 0 if self._step is None else self._step.save(self, info)

    def start_gather(self) -> None:
        """Starts to gather, unless the activation is gathered or being gathered."""
        if self._gathered is None:
            counters.counts.activation_gathers += 1
            self._gathered = redistribute_local(
                self._part, self._sharded_layout, self._full_layout, device_mesh=self._mesh, async_op=True
            )

    def unpack(self, sequence: _Sequence) -> torch.Tensor:
        """Returns the full activation, and starts gathers ahead. Drops it after the unpack of its last saved view."""
        step = None if self._step is None or self._step.is_over else self._step
        ahead: list[Any] = []
        if self._num_unpacked == 0:
            following = sequence.begin_unpack(self, self._part.device)
            planned = None if step is None else step.begin_turn(self._number)
            ahead = planned if planned is not None else [] if following is None else [following]
        self.start_gather()
        for other in ahead:
            other.start_gather()
        found = self._gathered
        assert found is not None
        self._gathered = found = found.wait() if isinstance(found, AsyncCollectiveTensor) else found
        self._num_unpacked += 1
        if self._num_unpacked >= self.num_saved:
            self._num_unpacked, self._gathered = 0, None
            if step is not None:
                step.note_freed(self._number)
        return found


class _Saved(NamedTuple):
    """The object that autograd holds for a saved tensor: a view of a sharded activation."""

    activation: _ShardedActivation
    sequence: _Sequence  # kept alive while any tensor of it can be unpacked
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the activation
    spec: Any  # the DTensor's spec; None for a plain tensor


def _unpack(saved: Any) -> torch.Tensor:
    """Hook: returns a saved tensor, after a gather if it was sharded."""
    if type(saved) is not _Saved:
        return reads.unpack(saved)
    with torch.no_grad():
        local = saved.activation.unpack(saved.sequence).as_strided(saved.size, saved.stride, saved.offset)
    return local if saved.spec is None else DTensor(local, saved.spec, requires_grad=False)  # type: ignore[call-arg]


class _Sequence:
    """The activations of one mesh that were packed without an unpack in between."""

    def __init__(self, mesh_sequences: _MeshSequences, is_in_backward: bool) -> None:
        self.is_in_backward = is_in_backward
        self.is_closed = False  # an activation of it was unpacked
        self._mesh_sequences = mesh_sequences
        self._signatures: list[str] = []  # dtype and size of each activation, by index
        # Activations that are not gathered yet. They are held here so that a rank takes part in a gather even if its
        # autograd has freed the activation. A sequence that is longer than any that a backward has unpacked holds none,
        # so forwards without backwards do not accumulate memory.
        self._held: dict[int, _ShardedActivation] = {}
        self._order: list[int] = []  # indices of activations, in the order in which this backward needs them
        # The order of the last backward of an equal sequence; empty without one. None once this backward differs.
        self._expected_order: list[int] | None = []

    def add(self, activation: _ShardedActivation) -> None:
        """Adds an activation that was packed, and sets its index."""
        activation.index = len(self._signatures)
        self._signatures.append(activation.signature)
        if len(self._signatures) <= self._mesh_sequences.longest:
            self._held[activation.index] = activation
        else:
            self._held.clear()

    def begin_unpack(self, activation: _ShardedActivation, device: torch.device) -> _ShardedActivation | None:
        """Records that a backward needs this activation. Returns the activation to gather ahead, if any."""
        if not self.is_closed:
            self.is_closed = True
            self._expected_order = self._mesh_sequences.order_of(tuple(self._signatures), device)
        self._held.pop(activation.index, None)
        if activation.was_unpacked:  # by an earlier backward through the same graph
            return None
        activation.was_unpacked = True
        at = len(self._order)
        if self._expected_order is not None and self._expected_order[at : at + 1] != [activation.index]:
            self._expected_order = None
            self._mesh_sequences.orders[tuple(self._signatures)] = self._order
        self._order.append(activation.index)
        following = [] if self._expected_order is None else self._expected_order[at + 1 : at + 2]
        return self._held.get(following[0]) if following else None


class _MeshSequences:
    """The sequences of one mesh. They are the same on all ranks of the mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._current = _Sequence(self, False)
        self.orders: dict[tuple[str, ...], list[int]] = {}  # by signatures of a sequence: order of its last backward
        self.longest = 0  # length of the longest sequence in `orders`

    def add(self, activation: _ShardedActivation) -> _Sequence:
        """Adds an activation to the sequence that is being packed, or to a new one. Returns the sequence."""
        if self._current.is_closed or self._current.is_in_backward != is_in_backward():
            self._current = _Sequence(self, is_in_backward())
        self._current.add(activation)
        return self._current

    def order_of(self, signatures: tuple[str, ...], device: torch.device) -> list[int]:
        """Returns the order of the last backward of an equal sequence; empty if there was none.

        Raises ValueError on all ranks of the mesh if their sequences differ.
        """
        known = self.orders.get(signatures)
        if known is not None:
            return list(known)
        fields = {"number of activations": str(len(signatures)), "activations": ", ".join(signatures)}
        text = "have saved different activations"
        remedy = "Run the same blocks with the same tensors, in the same order, on all ranks of a mesh"
        MeshWords(self._mesh, device).compare(Statement("sw.fsdp.checkpoint_cut", fields, mismatch=text, remedy=remedy))
        if len(self.orders) >= _MAX_ORDERS:
            del self.orders[next(iter(self.orders))]
        self.longest = max(self.longest, len(signatures))
        return []


_MAX_ORDERS = 1024  # maximum number of recorded orders for each mesh (FIFO)
_meshes: executables.PlanningCache[_MeshSequences] = executables.PlanningCache()
