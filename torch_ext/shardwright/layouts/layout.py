"""Meshes and layouts. They work without torch, and accept torch's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._native import _planner
from ..placements import Pieces
from . import argument_values
from .errors import argument_error
from .topology import Topology, named_topology


class Mesh(_planner.Mesh):
    """A grid of ranks with named dims.

    Args:
        dims: names and sizes, outermost first, e.g. ``{"dp": 2, "tp": 4}``; or a torch ``DeviceMesh``, whose dims are
            called ``dim0``, ``dim1``, ... if they have no names.
        ranks: the global ranks, row-major; default 0, 1, 2, ... Not given together with a ``DeviceMesh``.
        topology: the latencies and bandwidths between the ranks, as in `plan`, for plans on this mesh.

    Raises:
        ValueError: names repeat, are empty or are not UTF-8; a size is below 1; there are more than 2**20 ranks; ranks
            repeat, are negative or have the wrong number.
    """

    _made = False

    def __init__(
        self,
        dims: Mapping[str, int] | Any,
        ranks: Sequence[int] | None = None,
        topology: Topology | str | None = None,
    ) -> None:
        table = named_topology(topology)
        if argument_values.is_device_mesh(dims):
            if ranks is not None:
                raise argument_error("ranks", "left out if dims is a DeviceMesh, which has its own", ranks)
            super().__init__(*argument_values.device_mesh_parts(dims), table)
        elif isinstance(dims, Mapping):
            super().__init__(list(dims.keys()), list(dims.values()), ranks, table)
        else:
            raise argument_error("dims", "a dict of names and sizes or a DeviceMesh", repr(dims))
        self._made = True

    def __repr__(self) -> str:
        # Debuggers also print a mesh whose constructor raised.
        return super().__repr__() if self._made else "<Mesh that was not made>"


class Layout(_planner.Layout):
    """A global tensor's shape and dtype, and how it is placed on a mesh.

    Args:
        mesh: a `Mesh`, or a torch ``DeviceMesh``.
        shape: the shape of the global tensor, in elements; ``()`` for a scalar. Sizes may be 0.
        placements: one per mesh dim: ``"R"``, ``"S(0)"``, ``"SS(0,2)"`` (strided), ``"P"`` or ``"P(max)"``; torch's
            placement objects, or their printed form; ``sw.placements.Shard`` (with a unit), ``Ragged``, ``Blocks``,
            ``Cyclic``, ``Owned``, ``Packed`` and ``Pieces``, or their texts, such as ``"Ragged(0,3:1:4)"``; RaggedShard
            of veScale and of flex_shard, veScale's _StridedRaggedShard, and flex_shard's BlockShard and Owned.
        dtype: a ``torch.dtype`` or a name, such as ``"bfloat16"``, or a short one: ``"bf16"``, ``"fp16"``, ``"half"``,
            ``"fp32"``, ``"f64"``, ``"i32"``, ``"long"``, ``"u8"``, ``"cfloat"``.
        shard_order: ``{tensor dim: [mesh dims, first cut first]}`` with mesh dims by index or name. A tensor dim
            that is not listed is cut in mesh order, except that veScale's ``_StridedRaggedShard`` cuts last.
        strided: the meaning of strided shards. ``"order"``: they only encode the order of plain cuts. ``"literal"``:
            the dim is split into pieces, each of which is chunked. ``"auto"``: ``"order"`` if the split factors encode
            an order, else ``"literal"``. Compare ``DTensorSpec.use_strided_shard_as_shard_order``.
        flattened: number of leading tensor dims that are flattened into one, row-major, in placements and in local
            tensors. A `Ragged` with `dims` implies it; other placements and `shard_order` then count tensor dims as
            `shape` does.

    Raises:
        ValueError: there are too few or too many placements; a tensor dim is out of range; a split factor is below 1,
            or encodes no order under ``"order"``; reductions do not mix; the dtype is unknown or has no such reduction;
            `shard_order` does not list each cutting mesh dim once; the sizes of a placement do not fit the length that
            it cuts. The message has the argument's name, the values it must have and the given value.
    """

    _made = False

    def __init__(
        self,
        mesh: _planner.Mesh | Any,
        shape: Sequence[int],
        placements: Sequence[Any],
        dtype: Any = "float32",
        shard_order: argument_values.ShardOrder | None = None,
        strided: str = "auto",
        flattened: int = 1,
    ) -> None:
        if not isinstance(mesh, _planner.Mesh):
            mesh = Mesh(mesh)
        sizes = argument_values.items(shape, "shape", "a list of integers")
        order = argument_values.order_dict(mesh.dim_names, shard_order)
        flattened = argument_values.integer(flattened, "flattened")
        passed_placements = argument_values.items(placements, "placements", "a list of one placement per mesh dim")
        texts, order, flattened = argument_values.placement_texts_of(mesh, sizes, passed_placements, order, flattened)
        super().__init__(mesh, sizes, texts, argument_values.dtype_text(dtype), order, strided, flattened)
        argument_values.check_units(self, passed_placements)
        self._made = True

    @classmethod
    def nearest(cls, src: _planner.Layout, ranks: Sequence[int]) -> Layout:
        """Returns the layout on these ranks to which the fewest bytes move, e.g. after some ranks left.

        Candidates have a mesh of one dim, "ranks", and cut one tensor dim by rows (`Pieces`): each row is on one rank,
        and no rank has more than ``ceil(n / len(ranks))`` of n rows. No candidate has fewer bytes received by all ranks
        together. Rows are not balanced further, and the number of messages is not minimized. A tensor without dims is
        replicated.

        Args:
            src: the current layout, without pending reductions, on any ranks.
            ranks: global ranks, each once.

        Raises:
            ValueError: `src` has pending reductions, or `ranks` is empty or repeats a rank.
        """
        if not isinstance(src, _planner.Layout):
            raise argument_error("src", "a Layout", f"a {type(src).__name__}")
        if src.has_pending:
            raise argument_error("src", "a layout without pending reductions", src)
        passed_ranks = argument_values.items(ranks, "ranks", "a list of ranks")
        if not passed_ranks:
            raise argument_error("ranks", "a list of at least one rank", "none")
        mesh = Mesh({"ranks": len(passed_ranks)}, passed_ranks)
        if not src.shape:
            return cls(mesh, (), ["R"], src.dtype)
        dim, lists = _planner.nearest_cut(src, mesh.ranks)
        return cls(mesh, src.shape, [Pieces(dim, lists)], src.dtype, flattened=src.flattened)

    def __repr__(self) -> str:
        return super().__repr__() if self._made else "<Layout that was not made>"


_MAX_RANKS = 16  # ranks shown in a text


def layout_text(layout: _planner.Layout) -> str:
    """Returns a layout and its mesh as text, with everything that must be equal on the ranks that use it."""
    return f"{layout}, {mesh_text(layout.mesh)}"


def mesh_text(mesh: _planner.Mesh) -> str:
    """Returns the ranks and the topology of a mesh as text. Long lists of ranks are shortened, with a hash."""
    shown = str(mesh.ranks)
    if len(mesh.ranks) > _MAX_RANKS:
        first = ", ".join(map(str, mesh.ranks[:_MAX_RANKS]))
        shown = f"[{first}, ... {len(mesh.ranks)} in all, with hash {hash(tuple(mesh.ranks))}]"
    return f"ranks {shown}" + (
        "" if mesh.topology is None else f", topology {' '.join(mesh.topology.to_json().split())}"
    )
