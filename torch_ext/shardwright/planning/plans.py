"""Makes and pins plans, which move a tensor from one layout to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._native import _planner
from .._planner import Plan, Step
from ..layouts import argument_values, tables
from ..layouts.errors import argument_error
from ..layouts.topology import Topology, named_topology, tables_now

__all__ = ["Plan", "Step", "pin", "plan", "unpin"]


def plan(
    src: _planner.Layout,
    dst: _planner.Layout,
    *,
    objective: str = "time",
    reduce: str = "fast",
    backend: str = "nccl",
    topology: Topology | str | None = None,
    groups: Iterable[Sequence[int | str]] | None = None,
    through: Sequence[_planner.Layout] | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """Returns the cheapest moves from `src` to `dst`. All ranks get the same plan, without communication.

    The last 4,096 plans are cached; repeated calls cost a lookup. `stats` counts hits and misses.

    Args:
        src, dst: layouts of one tensor, on one mesh or on two. Two meshes may share all, some or no ranks, in any shape
            and order; all pending reductions of `src` are then carried out on its mesh. The plan has one step
            ``cross`` from one mesh to the other.
        objective: ``"time"``, the least predicted time; or ``"bytes"``, the fewest bytes received by the worst rank,
            then steps, then messages. They differ because a small message costs more than its bytes.
        reduce: ``"fast"``, ``"ordered"`` or ``"float32"``. With ``"ordered"``, contributions are exchanged and summed
            in rank order, in one reduction over all pending mesh dims, so that the result does not depend on plan,
            topology or collective. ``"float32"`` means ``"ordered"`` for sums, averages and norms of 16-bit types,
            which are then accumulated in float32 and rounded once (collectives round after every addition), and
            ``"fast"`` for everything else. The bytes on the wire are those of a reduce-scatter and a gather in the
            tensor's own dtype.
        backend: ``"nccl"`` or ``"gloo"``: the lowering that the plan is for. Both move the same data; Gloo composes
            reductions and gathers from messages. A redistribute uses ``"gloo"`` if its process group's backend for the
            device of the tensor is Gloo, else ``"nccl"``.
        topology: latencies and bandwidths: a `Topology`, the path of a JSON file that holds one (it must end in
            ``.json``), or a name: ``"8xNVLink"``, one node; ``"64x8"``, nodes of eight ranks; ``"gloo-local"``, one
            machine over loopback. Default: the topology of the mesh of `src`, else of `dst`, else the
            measurement of `calibrate` on this job, else that of the environment variable ``SHARDWRIGHT_TOPOLOGY``, else
            ``"64x8"`` for nccl and ``"gloo-local"`` for gloo. It must be the same on all ranks.
        groups: the sets of mesh dims, by name or index, whose process groups the moves may use. Default: any. Not
            allowed between two meshes.
        through: intermediate layouts to use instead of searching, with one move between each two. Use it to cost or
            force a plan of your own, of at most 30 moves. Moves can only send data or reduce; ``[]`` requires a single
            move. Not together with `memory_limit`.
        memory_limit: maximum bytes that a rank allocates at once for its result and temporaries (``Plan.peak_bytes``).
            To meet it, exchanges are split into rounds, or smaller intermediate layouts are used. Default: temporaries
            may take the larger of source and destination plus 256 MiB, if some plan needs no more.

    Returns:
        A `Plan`. ``str(plan)`` is one line per move; bytes and messages are those received from other ranks;
        ``plan.simulate()`` runs every rank in this process and raises if any element is wrong.

    Raises:
        ValueError: the layouts differ in shape or dtype; PyTorch defines no such redistribution (from one reduction to
            another, ``S`` to a ``P`` other than sum, ``R`` to product, band, bor or bxor); an argument is invalid; the
            groups do not suffice; layouts of `through` are not one move apart; or no plan meets `memory_limit`; the
            message then has the smallest limit for which a plan was found.
    """
    check_layout("src", src)
    check_layout("dst", dst)
    allowed = []
    if groups is not None:
        sets = argument_values.items(groups, "groups", "a list of sets of mesh dims, such as [('dp', 'tp')]")
        allowed = [argument_values.mesh_dim_indices(src.mesh.dim_names, dims, "groups") for dims in sets]
        allowed = allowed or [[]]  # no groups at all; an empty list would mean any
    table = named_topology(topology)
    if through is not None:
        if memory_limit is not None:
            raise argument_error("memory_limit", "left out if through is given", memory_limit)
        layouts = [src, *argument_values.items(through, "through", "a list of Layouts"), dst]
        for layout in layouts:
            check_layout("through", layout)
        return _planner.plan_through(layouts, backend, objective, table, allowed, reduce, tables_now())
    return _planner.make_plan(src, dst, backend, objective, table, allowed, reduce, memory_limit, tables_now())


def pin(plan: Plan) -> None:
    """Makes redistributes of this pair of layouts over this backend use `plan`. All ranks must pin the same plan.

    This applies to `redistribute`, `redistribute_local` and the redistributes of DTensor while shardwright is enabled.
    The function `plan` ignores pins.

    Args:
        plan: made by the function `plan`, perhaps with ``through=``, or by ``Plan.from_bytes``.

    Raises:
        ValueError: `plan` is not a `Plan`.
    """
    _check_plan(plan)
    tables.change(tables.current.with_pin(plan))


def unpin(plan: Plan) -> None:
    """Undoes `pin`. Raises ValueError if no plan is pinned for this pair of layouts and backend."""
    _check_plan(plan)
    tables.change(tables.current.without_pin(plan))


def pinned(src: _planner.Layout, dst: _planner.Layout, backend: str) -> Plan | None:
    """Returns the plan that is pinned for a pair of layouts, whatever the topologies of their meshes, or None."""
    return tables.current.pinned(src, dst, backend)


def check_layout(argument: str, value: object) -> None:
    """Raises a ValueError that names `argument` unless a layout is given."""
    if not isinstance(value, _planner.Layout):
        raise argument_error(argument, "a Layout", f"a {type(value).__name__}")


def _check_plan(value: object) -> None:
    """Raises ValueError unless a plan is given."""
    if not isinstance(value, Plan):
        raise argument_error("plan", "a Plan", f"a {type(value).__name__}")
