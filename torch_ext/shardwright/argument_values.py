"""Converts torch's meshes, placements and dtypes to shardwright's, recognising them by class name.

Nothing here imports torch, so that planning works without it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import placements

ShardOrder = Mapping[int, Sequence["int | str"]]


def placement_text(placement: Any) -> str:
    """Returns `S(0)` for "S(0)" and for torch's Shard(0). Raises ValueError for unknown placements.

    The only subclasses accepted are those of Partial that reduce as Partial does, because others may mean something
    else.
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
    raise ValueError(
        f"placements: {placement!r} is a {kind}, which shardwright does not know; "
        "allowed are Replicate, Shard, Partial, _StridedShard, _NormPartial, shardwright's Ragged, Blocks, Cyclic, "
        "Owned, Packed and Pieces, and texts such as 'S(0)'"
    )


def _reduces_as_partial(kind: type) -> bool:
    base = next((b for b in kind.__mro__[1:] if b.__name__ == "Partial" and b.__module__.startswith("torch.")), None)
    methods = ("_reduce_value", "_reduce_shard_value", "_partition_value")
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in methods)


def dim(given: Any, argument: str, ndim: int) -> int:
    """Returns a dim of a tensor of `ndim` dims, counted from 0; negative ones are counted from the end."""
    number = integer(given, argument)
    if not -ndim <= number < ndim:
        allowed = f"{-ndim} to {ndim - 1}" if ndim else "tensors that have dims"
        raise ValueError(f"{argument}: {number} for a tensor of {ndim} dims; allowed are {allowed}")
    return number % ndim


def items(given: Any, argument: str, allowed: str) -> list[Any]:
    """Makes a list of any iterable but text; otherwise raises ValueError with `argument` and what is allowed."""
    if not isinstance(given, (str, bytes)):
        try:
            return list(given)
        except TypeError:
            pass
    raise ValueError(f"{argument}: got {_shown(given)}; allowed is {allowed}")


def placement_texts(placements: Any) -> list[str]:
    """Returns `placement_text` of each item. Raises ValueError if this is not a list of placements."""
    return [placement_text(p) for p in items(placements, "placements", "a list of one per mesh dim")]


def placement_texts_of(given: Any, shape: Sequence[int]) -> tuple[list[str], int]:
    """Returns the texts of the placements of a tensor, and how many of its leading dims they flatten.

    Texts count tensor dims as they are once these are one.
    """
    all_of = [placements.of_others(p) for p in items(given, "placements", "a list of one per mesh dim")]
    flattened = max((p.flattened() for p in all_of if isinstance(p, placements.Ragged)), default=1)
    texts = []
    for one in all_of:
        if isinstance(one, placements.Ragged):
            if one.flattened() not in (1, flattened):
                raise ValueError(
                    f"placements: {one!r} next to others that flatten {flattened} dims; allowed are as many"
                )
            flattens = one.dims is not None
            dim = one.dim + (len(shape) if one.dim < 0 else 0)
            held = shape[: one.flattened()] if flattens else shape[dim : dim + 1] if dim >= 0 else ()
            texts.append(one.text(math.prod(held) if held or flattens else None))
            if flattens:
                continue
        else:
            texts.append(placement_text(one))
        if flattened > 1:
            texts[-1] = _with_dim_behind(texts[-1], flattened, len(shape))
    return texts, flattened


def _with_dim_behind(text: str, flattened: int, ndim: int) -> str:
    """Counts the tensor dim of a placement with the first dims as one."""
    found = re.fullmatch(r"(?!P\(|Partial|_Norm)(\w+\((?:dim=)?)\s*(-?\d+)(.*)", text)
    if found is None:
        return text
    dim = int(found[2]) + (ndim if int(found[2]) < 0 else 0)
    if dim < flattened:
        raise ValueError(
            f"placements: {text} names tensor dim {dim} next to a Ragged that sees dims 0 to {flattened - 1} as one; "
            f"allowed are dims from {flattened} on"
        )
    return f"{found[1]}{dim - flattened + 1}{found[3]}"


def integer(given: Any, argument: str) -> int:
    """Returns a 64-bit int; raises a ValueError that names `argument` otherwise."""
    try:
        value = operator.index(given)
    except TypeError:
        raise ValueError(f"{argument}: got {_shown(given)}; allowed are integers") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{argument}: got {value}; allowed are integers of 64 bits")
    return value


def _shown(given: Any) -> str:
    text = ascii(given)
    return f"{text if len(text) <= 80 else text[:80] + '...'} (of type {type(given).__name__})"


def dtype_text(dtype: Any) -> str:
    """Returns `float32` for "float32" and for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_device_mesh(mesh: Any) -> bool:
    """Returns whether this is torch's DeviceMesh, recognised by its attributes."""
    return hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "device_type")


def device_mesh_parts(mesh: Any) -> tuple[list[str], list[int], list[int]]:
    """Returns names, sizes and row-major ranks of a DeviceMesh; dims without names are called dim0, dim1, ..."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():  # compilers ask about tensors without values, but the mesh's ranks are values
        ranks = mesh.mesh
        names = mesh.mesh_dim_names or [f"dim{d}" for d in range(ranks.ndim)]
        return list(names), list(ranks.shape), ranks.flatten().tolist()


def mesh_dim_index(names: Sequence[str], mesh_dim: int | str, argument: str) -> int:
    """Returns the index of a mesh dim given by index or name; raises a ValueError that names `argument` otherwise."""
    if isinstance(mesh_dim, str):
        if mesh_dim not in names:
            raise ValueError(f"{argument}: there is no mesh dim {mesh_dim!r}; allowed are {', '.join(names)}")
        return list(names).index(mesh_dim)
    index = integer(mesh_dim, argument)
    if not 0 <= index < len(names):
        raise ValueError(f"{argument}: mesh dim {index} is out of range; allowed are 0 to {len(names) - 1}")
    return index


def mesh_dim_indices(names: Sequence[str], mesh_dims: Any, argument: str) -> list[int]:
    """Returns `mesh_dim_index` of each item. Raises ValueError if this is not a list of mesh dims; text is not one."""
    allowed = "a list of mesh dims, by name or index"
    return [mesh_dim_index(names, d, argument) for d in items(mesh_dims, argument, allowed)]


def order_dict(names: Sequence[str], shard_order: ShardOrder | Iterable[Any] | None) -> dict[int, list[int]]:
    """Makes {tensor dim: mesh dim indices} from a mapping or from DTensorSpec's tuple of ShardOrderEntry."""
    if shard_order is None:
        return {}
    allowed = "{tensor dim: [mesh dims, first cut first]}"
    entries: list[tuple[Any, Any]]
    if isinstance(shard_order, Mapping):
        entries = list(shard_order.items())
    else:
        given = items(shard_order, "shard_order", allowed)
        if not all(hasattr(entry, "tensor_dim") and hasattr(entry, "mesh_dims") for entry in given):
            raise ValueError(f"shard_order: got {_shown(shard_order)}; allowed is {allowed}")
        entries = [(entry.tensor_dim, entry.mesh_dims) for entry in given]
    order: dict[int, list[int]] = {}
    for dim, mesh_dims in entries:
        tensor_dim = integer(dim, "shard_order: tensor dim")
        if tensor_dim in order:
            raise ValueError(f"shard_order: tensor dim {tensor_dim} has two entries; allowed is one per tensor dim")
        order[tensor_dim] = mesh_dim_indices(names, mesh_dims, "shard_order")
    return order
