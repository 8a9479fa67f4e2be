"""The layouts of a weight, from the sharded parameter to its use and back.

    store    the sharded parameter that optimizers and state dicts see; equal to `shards` without `store_placements`
    shards   the shards that are held between steps, from which the weight is gathered
    use      the gathered weight; parameters that were DTensors keep their own (such as tensor-parallel) placements
    keep     an optional copy that a release keeps between two uses; later gathers read it instead of the shards
    grad     the gradient that a backward computes: a pending average over data-parallel mesh dims, or replicated over
             those along which all ranks have the same data; over a parameter's own mesh dims as autograd returns it

All are on one mesh, except that `keep` may be on the mesh with one mesh dim split in two. Each arrow is a plan:

    store -> shards -> use -> keep -> use          grad -> store
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..layouts.layout import Layout, Mesh
from ..spmd.parameters import GRADIENT
from .offload import HostCopies


class DataMesh(NamedTuple):
    """The mesh of sharded parameters: data-parallel mesh dims, and those of the parameters' own mesh, if they have one.

    Example: a weight that is tensor-parallel over tp is sharded further over dp: mesh (dp, tp), own (None, 0),
    shard_mesh_dim 0.
    """

    mesh: DeviceMesh
    own: tuple[int | None, ...]  # by mesh dim: its index in the parameters' own mesh; None: data-parallel
    shard_mesh_dim: int | None  # mesh dim to shard over by default; None: parameters are replicated over all data dims
    same: frozenset[int] = frozenset()  # data-parallel mesh dims along which all ranks have the same data
    own_mesh: DeviceMesh | None = None  # the parameters' own mesh; None: all mesh dims are data-parallel

    @property
    def data_dims(self) -> list[int]:
        """The data-parallel dims of `mesh`."""
        return [dim for dim, own in enumerate(self.own) if own is None]

    def with_own(self, own_mesh: DeviceMesh) -> DataMesh:
        """Returns the mesh with the dims of a DTensor's mesh added. Raises ValueError if torch cannot combine them."""
        try:
            mesh = DeviceMesh._concatenate([self.mesh, own_mesh])
        except (RuntimeError, AssertionError) as error:  # AssertionError if mesh dims have no names
            raise ValueError(
                f"must be on other dims of the root mesh than {self.mesh}, got {own_mesh}: {error}. If parameters are "
                "on all dims of mesh, pass dp_mesh_dims"
            ) from error
        return self._replace(mesh=mesh, own=(*self.own, *range(own_mesh.ndim)), own_mesh=own_mesh)


class ChosenPlacements(NamedTuple):
    """The chosen placements of a parameter on its data-parallel mesh dims."""

    shards: Sequence[Placement]
    store: Sequence[Placement] | None = None  # None: as `shards`
    keep: Sequence[Placement] | None = None  # None: no kept copy, unless `keep_ranks` is given
    keep_ranks: int | None = None  # instead of `keep`: shard as `shards`, but over groups of so many consecutive ranks


class Layouts:
    """The layouts of one parameter. `placements` are those of `store`; `kept` has layout `keep`."""

    def __init__(self, parameter: torch.Tensor, data: DataMesh, choice: ChosenPlacements) -> None:
        self.data = data
        self.mesh = data.mesh
        self._shape = parameter.shape
        self._dtype = parameter.dtype
        self._own_placements = tuple(parameter.placements) if isinstance(parameter, DTensor) else ()
        # If the weight is a plain tensor in use: placements of its gradient on the own mesh dims. None for a DTensor.
        self._plain_gradient: tuple[Placement, ...] | None = getattr(parameter, GRADIENT, None)
        self._own_shape_stride = (parameter.shape, parameter.stride())
        self._chosen = choice
        self._make()

    def with_dtype(self, dtype: torch.dtype) -> Layouts:
        """Returns the layouts of the same parameter in another dtype."""
        layouts = copy.copy(self)
        layouts._dtype = dtype
        layouts._make()
        return layouts

    def _make(self) -> None:
        """Sets all layouts from the choice and the dtype."""
        data, choice = self.data, self._chosen
        sizes = tuple(data.mesh.shape)
        replicated: list[Placement] = [Replicate()] * len(data.data_dims)
        self.placements = self._placements(choice.shards if choice.store is None else choice.store, data.own, sizes)
        mesh = Mesh(data.mesh)
        self._layout_mesh = mesh
        self.use = self._layout(mesh, self._placements(replicated, data.own, sizes))
        self.shards = self._layout(mesh, self._placements(choice.shards, data.own, sizes))
        self.store = self.shards if choice.store is None else self._layout(mesh, self.placements)
        # Layout `keep`, and layout `use` on the mesh of `keep`; None without a kept copy.
        self.kept: tuple[Layout, Layout] | None = None
        if choice.keep is not None:
            self.kept = self._layout(mesh, self._placements(choice.keep, data.own, sizes)), self.use
        elif choice.keep_ranks is not None:
            self.kept = self._kept_over(choice.keep_ranks, choice.shards)
        self._gradients: dict[tuple[Placement, ...], Layout] = {}  # results of `gradient_layout`

    def as_parameter(self, part: torch.Tensor, host_copies: HostCopies | None) -> DTensor:
        """Returns a shard in layout `store` as the DTensor that modules have, in host memory with `host_copies`."""
        shape = torch.Size(self._shape)
        stride = tuple(torch.empty(shape, device="meta").stride())
        full = DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)
        if host_copies is None:
            return full
        # `from_local` would copy it back to the device.
        on_host = part if part.is_meta else host_copies.to_host_memory(part)
        return DTensor(on_host, full._spec, requires_grad=False)  # type: ignore[call-arg]

    def as_used(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a local tensor in layout `use` as modules get it: a DTensor if the parameter was one."""
        if self.data.own_mesh is None or self._plain_gradient is not None:
            return local
        shape, stride = self._own_shape_stride
        return DTensor.from_local(
            local, self.data.own_mesh, self._own_placements, run_check=False, shape=shape, stride=stride
        )

    def gradient_and_layout(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        """Returns the local tensor and the layout of a gradient of the tensor that `as_used` returned."""
        own = self._plain_gradient or ()
        if isinstance(gradient, DTensor):
            own = tuple(gradient.placements)
            gradient = gradient._local_tensor
        if isinstance(gradient, AsyncCollectiveTensor):
            gradient = gradient.wait()
        return gradient, self.gradient_layout(own)

    @property
    def usual_gradient(self) -> Layout:
        """The layout of a gradient with the placements of the weight in use."""
        return self.gradient_layout(self.usual_gradient_placements)

    @property
    def usual_gradient_placements(self) -> tuple[Placement, ...]:
        """The placements of the weight in use on the parameter's own mesh dims, as gradients have them."""
        return self._plain_gradient or self._own_placements

    def gradient_layout(self, own: tuple[Placement, ...]) -> Layout:
        """Returns layout `grad`. `own`: the gradient's placements on the parameter's own mesh dims."""
        layout = self._gradients.get(own)
        if layout is None:
            pending: list[Placement] = []
            for dim, index in enumerate(self.data.own):
                if index is not None:
                    pending.append(own[index])
                else:
                    pending.append(Replicate() if dim in self.data.same else Partial("avg"))
            layout = self._gradients[own] = self._layout(self._layout_mesh, pending)
        return layout

    def _layout(self, mesh: Mesh, placements: Sequence[Placement]) -> Layout:
        """Returns a layout with the parameter's shape and dtype."""
        return Layout(mesh, self._shape, placements, self._dtype)

    def _placements(
        self, chosen: Sequence[Placement], own: Sequence[int | None], sizes: Sequence[int]
    ) -> tuple[Placement, ...]:
        """Returns placements on all mesh dims: `chosen` on data-parallel dims, the parameter's own on its own dims.

        If both shard a tensor dim, the parameter's own shards are sharded further. DTensor expresses this by a strided
        shard. Its split factor is the number of the parameter's own shards on later mesh dims.

        Example: a weight of 16 rows is Shard(0) over tp, and is sharded further by Shard(0) over dp, on a mesh (dp, tp)
        of 2 x 4. The rank at dp 1, tp 2 has rows 10 and 11: the second half of shard 2, which is rows 8 to 11. So the
        placement over dp is _StridedShard(0, split_factor=4).
        """
        data_placements = iter(chosen)
        all_placements = [next(data_placements) if index is None else self._own_placements[index] for index in own]
        for i, (placement, index) in enumerate(zip(all_placements, own)):
            if index is not None or not isinstance(placement, (Shard, _StridedShard)):
                continue
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            for j in range(i + 1, len(own)):
                later = all_placements[j]
                if own[j] is not None and isinstance(later, (Shard, _StridedShard)) and later.dim == placement.dim:
                    factor *= sizes[j]
            if factor > 1:
                all_placements[i] = _StridedShard(placement.dim, split_factor=factor)
        return tuple(all_placements)

    def _kept_over(self, ranks: int, shards: Sequence[Placement]) -> tuple[Layout, Layout]:
        """Returns layout `keep`, sharded over groups of `ranks` consecutive ranks, and layout `use` on the same mesh.

        Its mesh has the shard mesh dim split in two. Example: 8 ranks, groups of 2: the mesh is 4 x 2, and `keep` is
        [R, S(0)], where `shards` is [S(0)] on the mesh of 8.
        """
        shard_dim = self.data.shard_mesh_dim
        assert shard_dim is not None
        sizes = list(self.mesh.shape)
        sizes[shard_dim : shard_dim + 1] = [sizes[shard_dim] // ranks, ranks]
        own = list(self.data.own)
        own.insert(shard_dim, None)
        mesh = Mesh({f"dim{i}": size for i, size in enumerate(sizes)}, self.mesh.mesh.flatten().tolist())
        chosen: list[Placement] = [Replicate()] * len(shards)
        replicated = [*chosen, Replicate()]
        at = self.data.data_dims.index(shard_dim)
        chosen[at] = shards[at]
        chosen.insert(at, Replicate())
        kept = self._layout(mesh, self._placements(chosen, own, sizes))
        return kept, self._layout(mesh, self._placements(replicated, own, sizes))


def most_bytes(layout: Layout) -> int:
    """Returns the bytes of the largest shard: the first rank's, because chunks along each mesh dim descend in size."""
    return torch.Size(layout.local_shape(layout.mesh.ranks[0])).numel() * int(getattr(torch, layout.dtype).itemsize)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Returns true for floating and complex dtypes, except those of one byte, which have no sums and products."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def empty(layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns uninitialized memory for this rank's tensor of a layout."""
    return torch.empty(layout.local_shape(dist.get_rank()), dtype=dtype, device=device)
