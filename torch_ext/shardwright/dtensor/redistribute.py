"""The replacement for PyTorch's `redistribute_local_tensor`, which moves the local tensors of DTensors.

Redistributes that it does not handle are left to PyTorch's function, and counted by reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import CompileContext
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import assert_no_mixed_partial_types
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from .._native import _runtime
from ..graph import plans
from ..layouts.layout import Layout, Mesh
from ..planning import Plan
from ..runtime import counters, dynamo, executables, groups
from ..runtime.argument_checks import DEVICE_TYPES
from ..runtime.executables import Refusal
from ..runtime.plain_tensors import redistribute_local
from . import guards, masks
from .mode import Mode, mode_in_effect
from .specs import layout_of_spec

_original: Callable[..., torch.Tensor] | None = None  # PyTorch's function, while ours replaces it

# Called for each explicit asynchronous redistribute while `overlap` is on (matmul/overlapping.py).
explicit_gather_hook: Callable[[DTensorSpec, DTensorSpec], None] | None = None

# Executables that do the entire redistribute, with no work before or after them.
_cached: executables.PlanningCache[_runtime.Executable] = executables.PlanningCache(is_local=True)


def set_original(original: Callable[..., torch.Tensor] | None) -> None:
    """Records PyTorch's function, which this module now replaces. None records that it is restored."""
    global _original
    _original = original


def is_installed() -> bool:
    """Returns True while this module's function replaces PyTorch's."""
    return _original is not None


@dynamo.skipped
@functools.wraps(torch_redistribute.redistribute_local_tensor)
def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Replaces PyTorch's function of the same name. Runs shardwright's plan, or PyTorch's function if there is none."""
    original = _original or torch_redistribute.redistribute_local_tensor
    mode = mode_in_effect()
    is_plain = mode.on and type(local_tensor) is torch.Tensor and local_tensor.layout is torch.strided
    is_plain = is_plain and _runtime.is_plain_eager(True)
    if is_plain and not _autograd_records(local_tensor):
        known = _cached.get(_key(local_tensor, current_spec, target_spec, mode))
        if known is not None:
            return executables.run_cached(known, local_tensor, async_op)

    def run_torch() -> torch.Tensor:
        return original(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )

    if not mode.on:
        return run_torch()
    if mode.overlap and async_op and explicit_gather_hook is not None:  # async implies explicit
        explicit_gather_hook(current_spec, target_spec)
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    if current_spec.mesh is not target_spec.mesh and current_spec.mesh != target_spec.mesh:
        return run_torch()  # which raises
    is_traced = _are_we_tracing()
    if is_traced and _is_read_by_other_tools():
        return run_torch()
    call = _Request(local_tensor, current_spec, target_spec, mode, async_op, is_explicit)
    if any(map(masks.is_masked, (*current_spec.placements, *target_spec.placements))):
        moved = _run_masked(call)
    else:
        moved = _run_by_plan(call, is_traced)
    if not isinstance(moved, Refusal):
        return moved
    if mode.strict:
        raise RuntimeError(
            f"shardwright: {current_spec} -> {target_spec} would go to PyTorch's own path: "
            f"{moved.example or moved.reason} (strict=True)"
        )
    counters.count_fallback(*moved)
    return run_torch()


class _Request(NamedTuple):
    """The arguments of a redistribute that is not in the cache."""

    local: torch.Tensor  # this rank's part
    current: DTensorSpec  # the spec before the redistribute
    target: DTensorSpec  # the spec after it
    mode: Mode  # the options of `sw.enable` that apply
    async_op: bool
    is_explicit: bool  # passed to DebugMode

    def layouts(self, shape: Sequence[int]) -> tuple[Layout, Layout]:
        """Returns source and destination for a tensor of this shape. Raises ValueError for unknown placements."""
        dtype = self.local.dtype
        return layout_of_spec(self.current, shape, dtype), layout_of_spec(self.target, shape, dtype)


def _run_masked(call: _Request) -> torch.Tensor | Refusal:
    """Runs a redistribute with masked placements (masks.py): applies masks before it, and makes masks after it."""
    plain = masks.unmask(call.local, call.current, call.target)
    if isinstance(plain, str):
        return Refusal(plain)
    async_op = call.async_op and not plain.masks_to_make
    moved = redistribute_local_tensor(plain.local, plain.current_spec, plain.target_spec, async_op=async_op)
    return plain.mask(moved, call.target.placements)


def _run_by_plan(call: _Request, is_traced: bool) -> torch.Tensor | Refusal:
    """Runs the redistribute, or records it in a trace. Returns a Refusal if it is left to PyTorch."""
    local, current, target, mode, async_op, _ = call
    if not is_traced and type(local) not in (torch.Tensor, torch.nn.Parameter):
        return Refusal(f"local tensor is a {type(local).__name__}")
    if local.layout is not torch.strided or local.is_nested:
        return Refusal(f"local tensor is {'nested' if local.is_nested else local.layout}")
    if local.device.type not in DEVICE_TYPES:
        return Refusal(f"device {local.device.type}")
    if current.tensor_meta is None:
        return Refusal("no tensor_meta")
    assert_no_mixed_partial_types(current.placements)
    assert_no_mixed_partial_types(target.placements)
    if not current.mesh._is_current_rank_part_of_mesh():
        return local
    key = _key(local, current, target, mode)
    if is_traced:
        return _trace(key, call)

    def build() -> _runtime.Executable | Refusal:
        plan = _plan(call, current.shape)
        return plan if isinstance(plan, Refusal) else executables.bind(plan, device_mesh=current.mesh)

    executable = executables.lookup(key, build)
    if isinstance(executable, Refusal):
        return executable
    if _autograd_records(local):
        # Autograd records below DTensor, as in the double backward of torch before 2.12. PyTorch's own collectives
        # would break its graph.
        return redistribute_local(local, *call.layouts(current.shape), device_mesh=current.mesh, async_op=async_op)
    must_copy = executable.is_identity and _torch_would_copy(current, target)
    if not must_copy:
        _cached.put(key, executable)
    with _debug_record(call, executable):
        if must_copy:
            counters.counts.calls += 1
            return local.clone(memory_format=torch.contiguous_format)
        return executables.run(executable, local, async_op)


def _key(local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, mode: Mode) -> Hashable:
    """Returns the cache key of an executable.

    It has the fields of the target spec instead of the spec, which is new in each call, so that its hash is not cached.
    """
    return (
        current_spec,
        target_spec.placements,
        target_spec.shard_order,
        target_spec.use_strided_shard_as_shard_order,
        current_spec.mesh is target_spec.mesh or target_spec.mesh,
        groups.key_of_mesh(current_spec.mesh),
        local_tensor.dtype,
        local_tensor.device,
        mode.make_groups or groups.state(current_spec.mesh),  # plans that use only existing groups depend on them
    )


def find_cached(local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec) -> _runtime.Executable | None:
    """Returns the cached executable for a local tensor and two specs, or None."""
    return _cached.get(_key(local, current_spec, target_spec, mode_in_effect()))


def _autograd_records(local_tensor: torch.Tensor) -> bool:
    """Returns True if autograd records operators on this local tensor. It does not inside an operator of DTensor."""
    return (
        local_tensor.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    )


@executables.cached
def _torch_would_copy(current_spec: DTensorSpec, target_spec: DTensorSpec) -> bool:
    """Returns True if PyTorch would make a new tensor for a redistribute whose plan has no steps.

    Mesh dims of size 1 may hide that two layouts are equal; PyTorch then gathers and shards again. Its callers may
    write to this copy, so the replacement must copy too.
    """
    try:
        infos = torch_redistribute._gen_transform_infos(current_spec, target_spec)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError):
        return True  # PyTorch cannot do it at all, so a new tensor is the safe choice
    for info in infos:
        source, target = info.src_dst_placements
        is_kept = source.is_replicate() and target.is_partial()  # P(avg), P(min) and P(max) need no new values
        if current_spec.mesh.size(info.mesh_dim) > 1 and not is_kept:
            return True
    return False


def _is_read_by_other_tools() -> bool:
    """Returns True while torch.export, make_fx or AOTAutograd makes a graph outside of torch.compile.

    Other tools read such graphs, and look for PyTorch's collectives in them.
    """
    if torch.compiler.is_exporting():
        return True
    return get_proxy_mode() is not None and CompileContext.current_compile_id() is None


# Cached results of `_trace_arguments`, by redistribute.
_cached_arguments: executables.PlanningCache[dict[str, Any] | Refusal] = executables.PlanningCache(is_local=True)


def _trace(key: Hashable, call: _Request) -> torch.Tensor | Refusal:
    """Records a redistribute in a trace as operators of shardwright. Returns a Refusal if it is left to PyTorch."""
    from ..graph import operators

    local, current, target = call[:3]
    is_symbolic = plans.is_symbolic(current.shape)  # by global sizes, which are the same on all ranks
    key = key, groups.flattened_names(current.mesh)
    arguments = None if is_symbolic else _cached_arguments.get(key)  # symbols cannot be hashed
    if arguments is None:
        with _disable_current_modes():  # none of this belongs in the trace
            arguments = _trace_arguments(call, is_symbolic)
        if not is_symbolic:
            _cached_arguments.put(key, arguments)
    if isinstance(arguments, Refusal):
        return arguments
    counters.counts.traced += 1
    guards.mark_graph()
    if not arguments:
        return local.clone() if not is_symbolic and _torch_would_copy(current, target) else local
    return operators.trace(local, **arguments)


def _trace_arguments(call: _Request, is_symbolic: bool) -> dict[str, Any] | Refusal:
    """Returns the arguments of the operators for a redistribute in a trace; an empty dict if nothing moves."""
    from ..graph import operators

    sizes, mesh = call.current.shape, call.current.mesh
    example = plans.example_of(sizes)
    if example is None:
        return Refusal("tracing: a size is known only when the graph runs")
    plan = _plan(call, example)
    if isinstance(plan, Refusal):
        return plan
    if any(step.op == "partition" for step in plan.steps) and not call.local.dtype.is_floating_point:
        return Refusal("tracing: PyTorch divides integers into floating-point values")
    is_strided = any(placement.startswith("SS") for placement in (*plan.src.placements, *plan.dst.placements))
    if is_symbolic and is_strided:
        sizes = plans.fixed(sizes)
    if plan.src == plan.dst or not (plan.steps or plans.is_symbolic(sizes)):
        return {}
    return operators.arguments_for_sizes(plan, sizes, mesh, call.mode.make_groups)


def _plan(call: _Request, shape: Sequence[int]) -> Plan | Refusal:
    """Returns the plan for a tensor of this global shape, or the reason to leave the redistribute to PyTorch."""
    device_type = call.local.device.type
    reason = executables.why_left_to_torch(device_type)
    if reason is not None:
        return Refusal(reason)
    existing = None if call.mode.make_groups else call.current.mesh
    try:
        return executables.make_plan(*call.layouts(shape), device_type, existing_groups_of=existing)
    except ValueError as error:
        _check_reducible(call, error)
        return Refusal(counters.cause_of(error), str(error))


def _check_reducible(call: _Request, error: ValueError) -> None:
    """Raises ValueError on all ranks if Gloo cannot reduce the pending values because of their dtype.

    PyTorch's function uses the same backend, so some of its ranks would fail while others wait. `error` is the
    planner's, which is quoted.
    """
    lowering = executables.lowering(call.local.device.type, None)
    if lowering.name != "gloo":
        return
    dtype, mesh = call.local.dtype, call.current.mesh
    for mesh_dim, (source, target) in enumerate(zip(call.current.placements, call.target.placements, strict=True)):
        if not source.is_partial() or source == target or mesh.size(mesh_dim) == 1:
            continue
        if not _is_reducible(source, dtype) and any(_is_reducible(source, d) for d in (torch.float32, torch.int32)):
            raise ValueError(
                f"dtype must be one that {lowering.name} reduces with {source}, got {dtype}. Convert the "
                f"tensor before it is redistributed from {tuple(call.current.placements)}: {error}"
            )


@functools.cache
def _is_reducible(placement: Placement, dtype: torch.dtype) -> bool:
    """Returns True if a layout may have this pending reduction with this dtype."""
    try:
        Layout(Mesh({"ranks": 2}), (2,), [placement], dtype)
    except ValueError:
        return False
    return True


def _debug_record(call: _Request, executable: _runtime.Executable) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which DebugMode, if active, records the redistribute, as in PyTorch's function."""
    debug_mode = get_active_debug_mode()
    if debug_mode is None:
        return contextlib.nullcontext()
    ends = call.current.placements, call.target.placements
    record: contextlib.AbstractContextManager[Any] = debug_mode.record_redistribute_calls(
        call.local, *ends, str(executable), is_explicit=call.is_explicit
    )
    return record
