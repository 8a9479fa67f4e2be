"""FSDP2's extension protocol: tensor subclasses, such as torchao's, that define which tensors are gathered.

    part.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> tensors to gather, metadata
    part.fsdp_post_all_gather(gathered, metadata, param_dtype) -> the full weight, tensors that it consists of
    part.fsdp_post_all_gather(gathered, metadata, param_dtype, out=the full weight) -> None

Ranks gather the tensors along their dim 0. The first gather makes the full weight. Later gathers write the memory of
the same tensors, because autograd keeps them. The gathered tensors are stored in the arena once their sizes are known.
Other tensors that `fsdp_post_all_gather` makes have their own memory, which schedules do not count.

Below, an *extension* is a pair of these two methods, and a *part* is this rank's shard, a tensor that has them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from .._native import _runtime
from ..layouts.layout import Layout
from ..runtime.agreement import MeshWords, Statement
from .formats import Dtypes
from .gather import Move
from .layouts import Layouts


def has_extension(local: torch.Tensor) -> bool:
    """Returns true if a local tensor has both methods of the protocol. Raises ValueError if it has only one."""
    methods = "fsdp_pre_all_gather", "fsdp_post_all_gather"
    has_each = [hasattr(local, method) for method in methods]
    if has_each[0] != has_each[1]:
        given = f"only {methods[has_each.index(True)]}"
        raise ValueError(f"a {type(local).__name__} must define both {' and '.join(methods)} or neither, got {given}")
    return has_each[0]


def is_subclass(local: torch.Tensor) -> bool:
    """Returns true if a local tensor is of a subclass, which only the protocol can gather."""
    return type(local) not in (torch.Tensor, nn.Parameter)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a plain copy of a tensor of a subclass; a plain tensor as it is. Uses copy_, as FSDP2 does."""
    if not is_subclass(tensor):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)  # its result may be of the subclass, so it is not returned
    return plain


def shard(local: torch.Tensor, layouts: Layouts) -> torch.Tensor:
    """Returns this rank's shard of a tensor subclass. Uses chunk, new_zeros, narrow and copy_, as FSDP2 does."""
    dim, count, index = _sharding_of(layouts)
    chunks = torch.chunk(local, count, dim)
    size = chunks[index].size(dim) if index < len(chunks) else 0
    part = local.new_zeros(chunks[0].size())
    if size > 0:
        part.narrow(dim, 0, size).copy_(chunks[index])
    return part.narrow(dim, 0, size)


def _sharding_of(layouts: Layouts) -> tuple[int, int, int]:
    """Returns the tensor dim that is sharded, the number of shards, and the index of this rank's shard."""
    mesh, at = layouts.mesh, layouts.data.shard_mesh_dim
    if at is None or isinstance(layouts.placements[at], Replicate):
        return 0, 1, 0
    return layouts.placements[at].dim, mesh.size(at), mesh.get_local_rank(at)  # type: ignore[attr-defined]


def check(name: str, layouts: Layouts, is_plain_policy: bool) -> None:
    """Raises ValueError for arguments that only plain tensors support."""
    data = layouts.data
    others = [p for i, p in enumerate(layouts.placements) if i in data.data_dims and i != data.shard_mesh_dim]
    if layouts.store is not layouts.shards or layouts.kept is not None or any(p != Replicate() for p in others):
        raise ValueError(
            f"{name} must be sharded along one mesh dim, because it has fsdp_pre_all_gather. Leave out "
            "Options.placements, store_placements, kept_placements and an integer reshard_after_forward"
        )
    if (dim := _sharding_of(layouts)[0]) != 0:  # gathers concatenate the sent tensors along their dim 0
        raise ValueError(
            f"{name} must be sharded along dim 0, because it has fsdp_pre_all_gather, got dim {dim}. Return None or "
            "Shard(0) for it from shard_placement_fn"
        )
    if not is_plain_policy:
        raise ValueError(
            f"message_format and matmul_format must be None for {name}, whose fsdp_pre_all_gather makes the messages"
        )


def check_protocol(name: str, part: torch.Tensor) -> None:
    """Raises RuntimeError if a tensor subclass does not have the protocol when it is about to be gathered."""
    if is_subclass(part) and not has_extension(part):
        raise RuntimeError(
            f"{name} must have the methods fsdp_pre_all_gather and fsdp_post_all_gather when it is gathered, got a "
            f"{type(part).__name__} without them"
        )


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor: those of its inner tensors if it is of a subclass with __tensor_flatten__."""
    if tensor.layout is not torch.strided:
        return []
    if not is_subclass(tensor):
        return [tensor.untyped_storage()]
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    inner = [getattr(tensor, name) for name in names]  # a DTensor has its mesh among them
    return [storage for part in inner if isinstance(part, torch.Tensor) for storage in storages_of(part)]


def storages_by_address(full: torch.Tensor, extension: Extension | None) -> dict[int, torch.UntypedStorage]:
    """Returns the storages of a full weight, by the addresses of their StorageImpls."""
    tensors = [full] if extension is None else [full, *extension._outputs, *extension._inner]
    return {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}


class Extension:
    """The gathers of one weight whose shard has an extension. `start` and `finish` make a gather."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        layouts: Layouts,
        move: Move,  # starts the moves of the gather
        device: torch.device,
        dtypes: Dtypes,
        read_error: str,  # text of the error that a read of released memory raises
    ) -> None:
        self._name = name
        self._module = weakref.ref(module)
        self._layouts = layouts
        self._move = move
        self._dtypes = dtypes
        self._device = device
        self._read_error = read_error
        self._outputs: list[torch.Tensor] = []  # flat gathered tensors; they have memory from `start` to `release`
        self._inner: list[torch.Tensor] = []  # other tensors that the full weight consists of, in their own memory
        self._sizes: list[tuple[torch.Size, torch.dtype]] = []  # sizes and dtypes of the tensors that each rank sends
        self._part: torch.Tensor | None = None  # the shard, while it is gathered
        self._sent: list[torch.Tensor] = []  # the tensors that this rank sends in the running gather
        self._metadata: Any = None  # result of fsdp_pre_all_gather, for fsdp_post_all_gather
        self._works: list[Any] = []  # by output: its move in progress; None if done
        self._is_made = False  # the first gather has made the full weight

    @property
    def output_bytes(self) -> list[int]:
        """Sizes of the gathered tensors; empty before the first gather."""
        return [output.numel() * output.itemsize for output in self._outputs]

    def start(self, part: torch.Tensor, buffers: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Calls fsdp_pre_all_gather, and starts to gather the tensors that it returns.

        Args:
            part: this rank's shard.
            buffers: memory (bytes) and an offset in it, for each gathered tensor; empty in the first gather.
        """
        self._part = part.to(self._device)
        inputs, self._metadata = self._pre_all_gather(self._part)
        self._sent = [as_plain(each).contiguous() for each in inputs]
        self._check_sizes([(each.size(), each.dtype) for each in self._sent])
        at, count = self._layouts.data.shard_mesh_dim, _sharding_of(self._layouts)[1]
        if not self._outputs:
            self._outputs = [each.new_empty(each.numel() * count) for each in self._sent]
        else:
            for output, (memory, offset) in zip(self._outputs, buffers or self._own_buffers(), strict=True):
                _runtime.view_arena(output, memory, offset)
        self._works = []
        for sent, output in zip(self._sent, self._outputs, strict=True):
            # The plan moves bytes, so any dtype can be gathered.
            size = sent.numel() * sent.itemsize
            replicated: list[Placement] = [Replicate()] * self._layouts.mesh.ndim
            parts = [Shard(0) if dim == at and count > 1 else each for dim, each in enumerate(replicated)]
            src, dst = (Layout(self._layouts.use.mesh, [size * count], p, torch.uint8) for p in (parts, replicated))
            self._works.append(self._move(src, dst, sent.view(-1).view(torch.uint8), output.data.view(torch.uint8)))

    def _own_buffers(self) -> list[tuple[torch.Tensor, int]]:
        """Returns newly allocated memory for each gathered tensor, outside the arena."""
        return [(torch.empty(size, dtype=torch.uint8, device=self._device), 0) for size in self.output_bytes]

    def _pre_all_gather(self, part: Any) -> Any:
        """Returns the tensors to send and the metadata. Raises ValueError if the method has another signature."""
        data, layouts = self._layouts.data, self._layouts
        names = data.mesh.mesh_dim_names or ()
        mesh = data.mesh if data.mesh.ndim == 1 else data.mesh[names[data.shard_mesh_dim or 0]]
        count = len(inspect.signature(part.fsdp_pre_all_gather).parameters)
        if count == 1:  # FSDP2's older signature
            return part.fsdp_pre_all_gather(mesh)
        if count != 5:
            raise ValueError(
                f"fsdp_pre_all_gather of {self._name} must take (mesh, outer_size, outer_stride, module, mp_policy) or "
                f"(mesh), got {inspect.signature(part.fsdp_pre_all_gather)}"
            )
        shape = torch.Size(layouts.use.local_shape(dist.get_rank()))
        stride = torch.empty(shape, device="meta").stride()
        return part.fsdp_pre_all_gather(mesh, shape, stride, self._module(), self._dtypes.mp_policy)

    def _check_sizes(self, sizes: list[tuple[torch.Size, torch.dtype]]) -> None:
        """Compares the sizes of sent tensors between ranks in the first gather. Raises if a later gather has others."""
        if self._sizes:
            if sizes != self._sizes:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {self._name} must return tensors of the same sizes and dtypes in each "
                    f"gather, {self._sizes}, got {sizes}"
                )
            return
        mismatch = "get different tensors from fsdp_pre_all_gather"
        remedy = "Return the same sizes and dtypes on all ranks; pad shards of dims that are not divisible by the ranks"
        mine = Statement("sw.fully_shard", {self._name: sizes}, mismatch=mismatch, remedy=remedy)
        MeshWords(self._layouts.mesh, self._device).compare(mine)
        self._sizes = sizes

    def finish(self, full: nn.Parameter) -> torch.Tensor | None:
        """Waits for the gather, and writes the full weight to `full`. The first gather returns a new one instead."""
        part: Any = self._part
        if part is None:
            return None
        for work in self._works:
            if work is not None:
                work.wait()
        gathered = tuple(
            output.view(-1, *size[1:]) for output, (size, _) in zip(self._outputs, self._sizes, strict=True)
        )
        weight = None
        with torch.no_grad():
            if not self._is_made:
                weight, inner = part.fsdp_post_all_gather(gathered, self._metadata, self._dtypes.use)
                own = {output.untyped_storage()._cdata for output in self._outputs}
                self._inner = [each for each in inner if each.untyped_storage()._cdata not in own]
                weight, self._is_made = self._in_shape(weight), True
            else:
                for tensor in self._inner:
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
                # Version counters stay, so that autograd does not see a gather as a change of saved tensors.
                with torch.autograd._unsafe_preserve_version_counter((full, *self._inner)):
                    part.fsdp_post_all_gather(gathered, self._metadata, self._dtypes.use, out=full)
        self._part, self._sent, self._works, self._metadata = None, [], [], None
        if getattr(part, "fsdp_should_release_all_gather_outputs_after_post_all_gather", bool)():
            self._free_outputs()
        return weight

    def _in_shape(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the full weight without the padding of uneven shards."""
        shape = torch.Size(self._layouts.use.local_shape(dist.get_rank()))
        return full if full.shape == shape else full.as_strided(shape, torch.empty(shape, device="meta").stride(), 0)

    def release(self) -> None:
        """Frees the gathered tensors and the full weight's other tensors."""
        self._free_outputs()
        for tensor in self._inner:
            tensor.untyped_storage().resize_(0)

    def _free_outputs(self) -> None:
        """Frees the memory of the gathered tensors."""
        for output in self._outputs:
            _runtime.release_memory(output, self._read_error)
