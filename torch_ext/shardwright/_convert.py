"""From torch's words to ours: meshes, placements and dtypes, recognised by what they are called.

Nothing here imports torch, so that planning works without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ShardOrder = Mapping[int, Sequence["int | str"]]


def placement_text(placement: Any) -> str:
    """`S(0)` for "S(0)" and for torch's Shard(0); raises ValueError for what has no such name.

    Of subclasses, those of Partial that reduce as it does: others may mean something else.
    """
    if isinstance(placement, str):
        return placement
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
        "allowed are Replicate, Shard, Partial, _StridedShard, _NormPartial and texts such as 'S(0)'"
    )


def _reduces_as_partial(kind: type) -> bool:
    base = next((b for b in kind.__mro__[1:] if b.__name__ == "Partial" and b.__module__.startswith("torch.")), None)
    methods = ("_reduce_value", "_reduce_shard_value", "_partition_value")
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in methods)


def dtype_text(dtype: Any) -> str:
    """`float32` for "float32" and for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_device_mesh(mesh: Any) -> bool:
    """Whether it is torch's DeviceMesh, told by what it offers."""
    return hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "device_type")


def device_mesh_parts(mesh: Any) -> tuple[list[str], list[int], list[int]]:
    """Names, sizes and ranks (row-major) of a DeviceMesh; dims without names are called dim0, dim1, ..."""
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or [f"dim{d}" for d in range(ranks.ndim)]
    return list(names), list(ranks.shape), ranks.flatten().tolist()


def mesh_dim_index(names: Sequence[str], mesh_dim: int | str, argument: str) -> int:
    """The index of a mesh dim given by index or name; raises ValueError naming `argument`."""
    if isinstance(mesh_dim, str):
        if mesh_dim not in names:
            raise ValueError(f"{argument}: there is no mesh dim {mesh_dim!r}; allowed are {', '.join(names)}")
        return list(names).index(mesh_dim)
    if not 0 <= mesh_dim < len(names):
        raise ValueError(f"{argument}: mesh dim {mesh_dim} is out of range; allowed are 0 to {len(names) - 1}")
    return mesh_dim


def order_dict(names: Sequence[str], shard_order: ShardOrder | Iterable[Any] | None) -> dict[int, list[int]]:
    """{tensor dim: mesh dim indices} from a mapping or from DTensorSpec's tuple of ShardOrderEntry."""
    if shard_order is None:
        return {}
    entries: list[tuple[int, Sequence[Any]]]
    if isinstance(shard_order, Mapping):
        entries = list(shard_order.items())
    else:
        entries = [(entry.tensor_dim, entry.mesh_dims) for entry in list[Any](shard_order)]
    return {dim: [mesh_dim_index(names, d, "shard_order") for d in mesh_dims] for dim, mesh_dims in entries}
