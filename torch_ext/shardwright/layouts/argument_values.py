"""Converts torch's meshes, placements and dtypes to shardwright's, recognizing them by class name.

Nothing here imports torch, so that planning works without it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import placements
from .._native import _planner
from .errors import argument_error

ShardOrder = Mapping[int, Sequence["int | str"]]


def placement_text(placement: Any) -> str:
    """Returns `S(0)` for "S(0)" and for torch's Shard(0). Raises ValueError for unknown placements.

    A subclass is accepted only if it reduces as Partial does; others may mean something else.
    """
    if isinstance(placement, str):
        return placement
    placement = placements.of_others(placement)
    if (own := placements.text_of(placement)) is not None:
        return own
    kind = type(placement).__name__
    if kind == "Shard":
        return f"S({placement.dim})"
    if kind == "Replicate":
        return "R"
    if kind == "_StridedShard":
        return f"SS({placement.dim},{placement.split_factor})"
    if kind in ("Partial", "_Partial"):
        return f"P({placement.reduce_op})"
    if kind == "_NormPartial":
        return f"P(norm {placement.norm_type})"
    if _reduces_as_partial(type(placement)):
        return f"P({placement.reduce_op})"
    allowed = (
        "Replicate, Shard, Partial, _StridedShard, _NormPartial, Ragged, Blocks, Cyclic, Owned, Packed, Pieces or text "
        "such as 'S(0)'"
    )
    raise argument_error("placements", allowed, f"{placement!r}, a {kind}")


def _reduces_as_partial(kind: type) -> bool:
    """Returns True for a subclass of torch's Partial that overrides none of its reductions."""
    base = next((b for b in kind.__mro__[1:] if b.__name__ == "Partial" and b.__module__.startswith("torch.")), None)
    methods = ("_reduce_value", "_reduce_shard_value", "_partition_value")
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in methods)


def dim(value: Any, argument: str, ndim: int) -> int:
    """Returns the dim in [0, ndim); negative `value` counts from the end. Raises ValueError if it is out of range."""
    given_dim = integer(value, argument)
    if not -ndim <= given_dim < ndim:
        allowed = f"in [{-ndim}, {ndim - 1}]" if ndim else "a dim of the tensor, which has none"
        raise argument_error(argument, allowed, given_dim)
    return given_dim % ndim


def items(value: Any, argument: str, allowed: str) -> list[Any]:
    """Returns a list of any iterable except text. Otherwise raises ValueError with `argument` and `allowed`."""
    if not isinstance(value, (str, bytes)):
        try:
            return list(value)
        except TypeError:
            pass
        except Exception as error:
            raise ValueError(f"{argument}: its items cannot be read: {type(error).__name__}: {error}") from error
    raise argument_error(argument, allowed, _shown(value))


def placement_texts(placements: Any) -> list[str]:
    """Returns `placement_text` of each item. Raises ValueError if this is not a list of placements."""
    return [placement_text(p) for p in items(placements, "placements", "a list of one placement per mesh dim")]


def placement_texts_of(
    mesh: _planner.Mesh, shape: Sequence[int], passed_placements: list[Any], order: dict[int, list[int]], flattened: int
) -> tuple[list[str], dict[int, list[int]], int]:
    """Converts a tensor's placements to texts. The units of a Ragged become sizes, which depend on earlier cuts.

    Returns:
        The texts, the shard order, and the number of flattened leading dims. Tensor dims in the texts and the order are
        indices after flattening.
    """
    read = [placements.of_others(p) for p in passed_placements]
    ragged = {d: p for d, p in enumerate(read) if isinstance(p, placements.Ragged)}
    if not ragged:
        return list(map(placement_text, read)), order, flattened
    with_dims = {d: len(p.dims) for d, p in ragged.items() if p.dims is not None}
    flattened = max([flattened, *with_dims.values()])
    if odd := [d for d, count in with_dims.items() if count != flattened]:
        raise argument_error("dims of each Ragged", f"equal: the first {flattened} dims", repr(ragged[odd[0]]))
    sized = {d: placements.Ragged(p.dim, p.sizes or p.units) for d, p in ragged.items()}  # units become sizes below
    texts = [placement_text(sized.get(d, p)) for d, p in enumerate(read)]
    in_rows = flattened > 1 and bool(with_dims)  # then others count tensor dims as `shape` does
    if in_rows:
        order = {_flattened_dim(dim, flattened): mesh_dims for dim, mesh_dims in order.items()}
        texts = [
            text if d in with_dims else _with_flattened_dim(text, flattened, len(shape)) for d, text in enumerate(texts)
        ]
    cuts = _Cuts(mesh, shape, texts, order, flattened)
    if len(texts) == mesh.ndim:  # else Layout raises
        cuts.put_ragged_shards_last(passed_placements)
        for dim, mesh_dim in cuts.in_order():
            if mesh_dim in ragged:
                texts[mesh_dim] = cuts.text_with_sizes(mesh_dim, dim, ragged[mesh_dim])
            elif in_rows and dim == 0:
                cuts.check_rows(mesh_dim)
    return texts, cuts.order, flattened


def check_units(layout: _planner.Layout, passed_placements: list[Any]) -> None:
    """Raises ValueError if a part of a layout begins or ends within a unit of one of the given placements."""
    for text, placement in zip(layout.placements, passed_placements):
        unit = getattr(placement, "unit", 1) if placements.is_cut(placement) else 1
        if unit > 1 and (cut := _parse_cut(text)) is not None:
            layout.check_blocks_are_whole(cut[1], unit)


def _parse_cut(text: str) -> tuple[str, int, str] | None:
    """Returns kind, tensor dim and the rest of a placement text: ("Blocks", 0, ",128") for "Blocks(0,128)".

    Returns None for placements that cut no dim.
    """
    found = re.fullmatch(r"(?!P\(|Partial|_Norm)(\w+)\((?:dim=)?\s*(-?\d+)(.*)\)", text.strip())
    if found is None:
        return None
    if found[1] == "Owned" and not found[3]:  # its tensor dim is left out
        return "Owned", 0, f",{found[2]}"
    return found[1], int(found[2]), found[3]


def _flattened_dim(dim: int, flattened: int) -> int:
    """Returns the index that a tensor dim of a shard order has after the first dims are flattened.

    Example: with 2 flattened dims, dims 0, 2 and 3 become 0, 1 and 2.
    """
    if 0 < dim < flattened:
        raise argument_error("shard_order: tensor dim", f"0 or at least {flattened} next to Ragged with dims", dim)
    return min(dim, max(dim - flattened + 1, 0))


def _with_flattened_dim(text: str, flattened: int, ndim: int) -> str:
    """Returns a placement text whose tensor dim is its index after the first dims are flattened."""
    cut = _parse_cut(text)
    if cut is None:
        return text
    kind, dim, rest = cut
    dim += ndim if dim < 0 else 0
    if dim < flattened and not (kind == "Owned" and dim >= 0) and not (kind in ("S", "Shard") and dim == 0):
        raise ValueError(
            f"placements: tensor dim of {text} must be at least {flattened} next to a Ragged that flattens dims 0 to "
            f"{flattened - 1}, got {dim}. S(0) and Owned may have any dim. For other cuts, pass flattened={flattened} "
            "and Ragged(0, sizes); then dim 0 is all of these dims in every placement"
        )
    return f"{kind}({max(dim - flattened + 1, 0)}{rest})"


class _Cuts:
    """The cuts of a tensor. Tensor dims in `texts` are indices after flattening."""

    def __init__(
        self, mesh: _planner.Mesh, shape: Sequence[int], texts: list[str], order: dict[int, list[int]], flattened: int
    ) -> None:
        self.mesh, self.shape, self.texts, self.order, self.flattened = mesh, shape, texts, order, flattened
        self.ndim = len(shape) - flattened + 1
        found = map(_parse_cut, texts)
        # The tensor dim that each mesh dim cuts, or None.
        self.dims = [None if cut is None else cut[1] + (self.ndim if cut[1] < 0 else 0) for cut in found]

    def mesh_dims_of(self, dim: int) -> list[int]:
        """Returns the mesh dims that cut a tensor dim, first cut first."""
        cutting = [d for d, cut_dim in enumerate(self.dims) if cut_dim == dim]
        ordered = [d for d in self.order.get(dim, ()) if d in cutting]
        return ordered + [d for d in cutting if d not in ordered]

    def in_order(self) -> list[tuple[int, int]]:
        """Returns (tensor dim, mesh dim) of all cuts, each after the earlier cuts of its tensor dim."""
        return [(dim, d) for dim in range(self.ndim) for d in self.mesh_dims_of(dim)]

    def put_ragged_shards_last(self, passed_placements: list[Any]) -> None:
        """Puts veScale's ragged shards last in the shard order, where veScale applies them.

        Mesh order would apply them before the cuts of later mesh dims. The split factor of a ``_StridedRaggedShard``
        tells that it comes last; for a RaggedShard, the shard order must be given. Raises ValueError otherwise.
        """
        for d, placement in enumerate(passed_placements):
            if not placements.is_ragged_shard(placement):
                continue
            others = [other for other in self.mesh_dims_of(0) if other != d]
            count = math.prod(self.mesh.shape[other] for other in others if other > d)
            is_strided = hasattr(placement, "split_factor")
            if 0 in self.order:
                has_this_order = not is_strided or self.mesh_dims_of(0) == [*others, d]
            else:
                has_this_order = getattr(placement, "split_factor", 1) == count
            if not has_this_order:
                names = [self.mesh.dim_names[other] for other in (*others, d)]
                raise ValueError(
                    f"placements: the placement of mesh dim {names[-1]!r} must be a RaggedShard with a shard_order, or "
                    f"a _StridedRaggedShard with split factor {count} and shard_order {{0: {names}}}, got "
                    f"{placement!r}. Later mesh dims cut the same dim into {count}"
                )
            if is_strided:
                self.order[0] = [*others, d]

    def lengths(self, mesh_dim: int, dim: int) -> list[int]:
        """Returns the distinct lengths, ascending, of the parts of a tensor dim that a mesh dim cuts."""
        earlier = self.mesh_dims_of(dim)[: self.mesh_dims_of(dim).index(mesh_dim)]
        texts = [text if d in earlier else "R" for d, text in enumerate(self.texts)]
        parts = _planner.Layout(self.mesh, self.shape, texts, "uint8", {dim: earlier}, "literal", self.flattened)
        ranks = self.mesh.group_ranks(self.mesh.ranks[0], earlier)
        return sorted({parts.local_shape(rank)[dim] for rank in ranks})

    def text_with_sizes(self, mesh_dim: int, dim: int, ragged: placements.Ragged) -> str:
        """Returns the text of a Ragged, with sizes in place of units."""
        if ragged.units is None:
            return self.texts[mesh_dim]
        lengths = self.lengths(mesh_dim, dim)
        if len(lengths) > 1:
            where = f"{ragged!r} on mesh dim {self.mesh.dim_names[mesh_dim]!r}"
            raise argument_error(f"placements: parts for {where}", "of one length", f"{lengths[0]} to {lengths[-1]}")
        return str(ragged.of_length(dim, lengths[0]))

    def check_rows(self, mesh_dim: int) -> None:
        """Raises ValueError if S(0) of rows differs from S(0) of elements of the flattened dims."""
        lengths = self.lengths(mesh_dim, 0)
        row, count = math.prod(self.shape[1 : self.flattened]), self.mesh.shape[mesh_dim]
        is_owned = self.texts[mesh_dim].startswith("Owned")
        if not is_owned and min(row, count) > 1 and any(length % (row * count) for length in lengths):
            raise ValueError(
                f"placements: parts that S(0) on mesh dim {self.mesh.dim_names[mesh_dim]!r} cuts must be multiples of "
                f"{count} rows of {row} elements in dims 0 to {self.flattened - 1}, got {lengths[0]} to {lengths[-1]} "
                f"elements. Otherwise pass flattened={self.flattened} and Ragged(0, sizes), with 'S(0)' for chunks of "
                f"elements or 'Blocks(0,{row})' for chunks of rows"
            )


def integer(given: Any, argument: str) -> int:
    """Returns a 64-bit int; raises a ValueError that names `argument` otherwise."""
    try:
        value = operator.index(given)
    except TypeError:
        raise argument_error(argument, "an integer", _shown(given)) from None
    if not -(1 << 63) <= value < 1 << 63:
        raise argument_error(argument, "a 64-bit integer", value)
    return value


def _shown(value: Any) -> str:
    """Returns a text with a value, shortened, and its type, for errors."""
    text = ascii(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} (of type {type(value).__name__})"


def dtype_text(dtype: Any) -> str:
    """Returns `float32` for "float32" and for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_device_mesh(mesh: Any) -> bool:
    """Returns True for torch's DeviceMesh, recognized by its attributes."""
    return hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "device_type")


def device_mesh_parts(mesh: Any) -> tuple[list[str], list[int], list[int]]:
    """Returns names, sizes and row-major ranks of a DeviceMesh; dims without names are called dim0, dim1, ..."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():  # the ranks must be real values, also while tensors are traced
        ranks = mesh.mesh
        names = mesh.mesh_dim_names or [f"dim{d}" for d in range(ranks.ndim)]
        return list(names), list(ranks.shape), ranks.flatten().tolist()


def mesh_dim_index(names: Sequence[str], mesh_dim: int | str, argument: str) -> int:
    """Returns the index of a mesh dim given by index or name; raises a ValueError that names `argument` otherwise."""
    if isinstance(mesh_dim, str):
        if mesh_dim not in names:
            raise argument_error(f"{argument}: mesh dim", f"one of {', '.join(names)}", repr(mesh_dim))
        return list(names).index(mesh_dim)
    index = integer(mesh_dim, argument)
    if not 0 <= index < len(names):
        raise argument_error(f"{argument}: mesh dim", f"in [0, {len(names) - 1}]", index)
    return index


def mesh_dim_indices(names: Sequence[str], mesh_dims: Any, argument: str) -> list[int]:
    """Returns `mesh_dim_index` of each item. Raises ValueError if this is not a list of mesh dims, for example text."""
    allowed = "a list of mesh dims, by name or index"
    return [mesh_dim_index(names, d, argument) for d in items(mesh_dims, argument, allowed)]


def order_dict(names: Sequence[str], shard_order: ShardOrder | Iterable[Any] | None) -> dict[int, list[int]]:
    """Returns {tensor dim: mesh dim indices} from a mapping or from DTensorSpec's tuple of ShardOrderEntry."""
    if shard_order is None:
        return {}
    allowed = "{tensor dim: [mesh dims, first cut first]}"
    entries: list[tuple[Any, Any]]
    if isinstance(shard_order, Mapping):
        entries = list(shard_order.items())
    else:
        pairs = items(shard_order, "shard_order", allowed)
        if not all(hasattr(entry, "tensor_dim") and hasattr(entry, "mesh_dims") for entry in pairs):
            raise argument_error("shard_order", allowed, _shown(shard_order))
        entries = [(entry.tensor_dim, entry.mesh_dims) for entry in pairs]
    order: dict[int, list[int]] = {}
    for dim, mesh_dims in entries:
        tensor_dim = integer(dim, "shard_order: tensor dim")
        if tensor_dim in order:
            raise ValueError(f"shard_order must have one entry per tensor dim, got two for {tensor_dim}")
        order[tensor_dim] = mesh_dim_indices(names, mesh_dims, "shard_order")
    return order
