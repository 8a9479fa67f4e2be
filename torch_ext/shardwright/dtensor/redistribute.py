"""What stands in for PyTorch's `redistribute_local_tensor`: the redistribute of DTensors' local tensors by our plans.

What we do not take goes on to PyTorch's function and is counted with its reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import CompileContext
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import assert_no_mixed_partial_types
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _engine, _runtime, _stats
from .._arguments import DEVICE_TYPES
from .._engine import Refusal
from ..graphs import plans
from ..plain_tensors import redistribute_local
from ..planning import Plan
from . import masks
from .mode import Mode, deciding
from .specs import layout_of_spec

_original: Callable[..., torch.Tensor] | None = None  # PyTorch's, while ours is in its place

# Told of each explicit redistribute while operators of DTensors hide their own gathers behind products.
note_explicit_gather: Callable[[DTensorSpec, DTensorSpec], None] | None = None

# Executables whose result is the redistribute's, with nothing to be done around them.
_direct: _engine.Kept[_runtime.Executable] = _engine.Kept()


def stand_in_for(original: Callable[..., torch.Tensor] | None) -> None:
    """Takes the place of PyTorch's function, or None gives it back."""
    global _original
    _original = original


def is_in_place() -> bool:
    return _original is not None


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
    """What PyTorch's function of this name does, by a plan of ours."""
    original = _original or torch_redistribute.redistribute_local_tensor
    mode = deciding()
    is_plain = mode.on and type(local_tensor) is torch.Tensor and _runtime.nothing_watches(True)
    if is_plain and not _autograd_looks(local_tensor):
        known = _direct.get(_key(local_tensor, current_spec, target_spec, mode))
        if known is not None:
            return _engine.run_again(known, local_tensor, async_op)

    def by_torch() -> torch.Tensor:
        return original(
            local_tensor,
            current_spec,
            target_spec,
            async_op=async_op,
            use_graph_based_transform=use_graph_based_transform,
            is_explicit=is_explicit,
        )

    if not mode.on:
        return by_torch()
    if mode.overlap and async_op and note_explicit_gather is not None:  # only explicit ones are asynchronous
        note_explicit_gather(current_spec, target_spec)
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    if current_spec.mesh is not target_spec.mesh and current_spec.mesh != target_spec.mesh:
        return by_torch()  # raises
    is_traced = _are_we_tracing()
    if is_traced and _is_captured():
        return by_torch()
    if any(map(masks.is_masked, (*current_spec.placements, *target_spec.placements))):
        moved = _unmasked(local_tensor, current_spec, target_spec, async_op)
    else:
        moved = _by_plan(local_tensor, current_spec, target_spec, mode, async_op, is_explicit, is_traced)
    if not isinstance(moved, Refusal):
        return moved
    if mode.strict:
        raise RuntimeError(
            f"shardwright: {current_spec} -> {target_spec} would go to PyTorch's own path: "
            f"{moved.example or moved.reason} (strict=True)"
        )
    _stats.count_fallback(*moved)
    return by_torch()


def _unmasked(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, async_op: bool
) -> torch.Tensor | Refusal:
    """A redistribute with masks, as one without and what masks do before or after it."""
    plain = masks.unmask(local_tensor, current_spec, target_spec)
    if isinstance(plain, str):
        return Refusal(plain)
    async_op = async_op and not plain.masks_to_make
    moved = redistribute_local_tensor(plain.local, plain.current_spec, plain.target_spec, async_op=async_op)
    return plain.mask(moved, target_spec.placements)


def _by_plan(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    mode: Mode,
    async_op: bool,
    is_explicit: bool,
    is_traced: bool,
) -> torch.Tensor | Refusal:
    """The redistribute, run or recorded in a trace, or why it is left to PyTorch."""
    if not is_traced and type(local_tensor) not in (torch.Tensor, torch.nn.Parameter):
        return Refusal(f"local tensor is a {type(local_tensor).__name__}")
    if local_tensor.device.type not in DEVICE_TYPES:
        return Refusal(f"device {local_tensor.device.type}")
    if current_spec.tensor_meta is None:
        return Refusal("no tensor_meta")
    assert_no_mixed_partial_types(current_spec.placements)
    assert_no_mixed_partial_types(target_spec.placements)
    if not current_spec.mesh._is_current_rank_part_of_mesh():
        return local_tensor
    key = _key(local_tensor, current_spec, target_spec, mode)
    if is_traced:
        return _trace(key, local_tensor, current_spec, target_spec, mode)

    def build() -> _runtime.Executable | Refusal:
        plan = _plan(local_tensor, current_spec, target_spec, mode.make_groups, current_spec.shape)
        return plan if isinstance(plan, Refusal) else _engine.bind(plan, device_mesh=current_spec.mesh)

    executable = _engine.lookup(key, build)
    if isinstance(executable, Refusal):
        return executable
    if _autograd_looks(local_tensor):
        # Below DTensor, as in the double backward of torch before 2.12: PyTorch's collectives cut the graph here.
        src = layout_of_spec(current_spec, current_spec.shape, local_tensor.dtype)
        dst = layout_of_spec(target_spec, current_spec.shape, local_tensor.dtype)
        return redistribute_local(local_tensor, src, dst, device_mesh=current_spec.mesh, async_op=async_op)
    copies = executable.is_identity and _torch_would_copy(current_spec, target_spec)
    if not copies:
        _direct.put(key, executable)
    with _recorded(local_tensor, current_spec, target_spec, executable, is_explicit):
        if copies:
            _stats.counts.calls += 1
            return local_tensor.clone(memory_format=torch.contiguous_format)
        return _engine.run(executable, local_tensor, async_op)


def _key(local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, mode: Mode) -> Hashable:
    """What an executable is kept under. Target specs are new ones in each call: hashing one whole is dear."""
    return (
        current_spec,
        target_spec.placements,
        target_spec.shard_order,
        target_spec.use_strided_shard_as_shard_order,
        current_spec.mesh is target_spec.mesh or target_spec.mesh,
        local_tensor.dtype,
        local_tensor.device,
        mode.make_groups,
    )


def find(local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec) -> _runtime.Executable | None:
    """What would run for a local tensor and two specs, if it has done so before."""
    return _direct.get(_key(local_tensor, current_spec, target_spec, deciding()))


def _autograd_looks(local_tensor: torch.Tensor) -> bool:
    """Whether a graph is being made at this level: not below one of DTensor's operators, whose graph is above it."""
    return (
        local_tensor.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    )


@_engine.kept
def _torch_would_copy(current_spec: DTensorSpec, target_spec: DTensorSpec) -> bool:
    """Whether PyTorch's own path makes a new tensor, where we find that nothing has to be done.

    It gathers and cuts again where mesh dims of size 1 hide that two layouts are one. Who gets a copy may write to it.
    """
    try:
        infos = torch_redistribute._gen_transform_infos(current_spec, target_spec)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError):
        return True  # it has no way at all, so a result of its own is the safe one
    for info in infos:
        source, target = info.src_dst_placements
        keeps = source.is_replicate() and target.is_partial()  # the same values stand for P(avg), P(min), P(max)
        if current_spec.mesh.size(info.mesh_dim) > 1 and not keeps:
            return True
    return False


def _is_captured() -> bool:
    """Whether a graph is made that is not torch.compile's: by torch.export, make_fx or AOTAutograd alone.

    Others read such graphs, and look for PyTorch's collectives in them.
    """
    if torch.compiler.is_exporting():
        return True
    return get_proxy_mode() is not None and CompileContext.current_compile_id() is None


_arguments: _engine.Kept[dict[str, Any] | Refusal] = _engine.Kept()


def _trace(
    key: Hashable, local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, mode: Mode
) -> torch.Tensor | Refusal:
    """What a trace records of a redistribute: our operators."""
    from .. import operators  # imports compilers

    is_symbolic = plans.is_symbolic((*current_spec.shape, *local_tensor.shape))
    arguments = None if is_symbolic else _arguments.get(key)  # symbols have no hash
    if arguments is None:
        with _disable_current_modes():  # nothing of this belongs into the trace
            arguments = _trace_arguments(local_tensor, current_spec, target_spec, mode.make_groups, is_symbolic)
        if not is_symbolic:
            _arguments.put(key, arguments)
    if isinstance(arguments, Refusal):
        return arguments
    _stats.counts.traced += 1
    if not arguments:
        would_copy = not is_symbolic and _torch_would_copy(current_spec, target_spec)
        return local_tensor.clone() if would_copy else local_tensor
    return operators.trace(local_tensor, **arguments)


def _trace_arguments(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    make_groups: bool,
    is_symbolic: bool,
) -> dict[str, Any] | Refusal:
    """The operators' arguments; none of them where nothing is to be done."""
    from .. import operators  # imports compilers

    sizes = current_spec.shape
    example = plans.example_of(sizes)
    if example is None:
        return Refusal("tracing: a size is known only when the graph runs")
    plan = _plan(local_tensor, current_spec, target_spec, make_groups, example)
    if isinstance(plan, Refusal):
        return plan
    if any(step.op == "partition" for step in plan.steps) and not local_tensor.dtype.is_floating_point:
        return Refusal("tracing: PyTorch makes integers floating where it divides them")
    if not is_symbolic:
        return operators.arguments_of(plan, device_mesh=current_spec.mesh) if plan.steps else {}
    if plan.src == plan.dst:
        return {}
    if any(placement.startswith("SS") for placement in (*plan.src.placements, *plan.dst.placements)):
        return Refusal("tracing: a strided shard of symbolic size")
    return operators.arguments_for_sizes(plan, sizes, current_spec.mesh)


def _plan(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    make_groups: bool,
    shape: Sequence[int],
) -> Plan | Refusal:
    reason = _engine.why_not_over_groups(local_tensor.device.type)
    if reason is not None:
        return Refusal(reason)
    try:
        src = layout_of_spec(current_spec, shape, local_tensor.dtype)
        dst = layout_of_spec(target_spec, shape, local_tensor.dtype)
        existing = None if make_groups else current_spec.mesh
        return _engine.make_plan(src, dst, local_tensor.device.type, existing_groups_of=existing)
    except ValueError as error:
        return Refusal(_stats.cause_of(error), str(error))


def _recorded(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, executable: Any, is_explicit: bool
) -> contextlib.AbstractContextManager[Any]:
    """DebugMode's record of the redistribute, as PyTorch's own function makes it."""
    debug_mode = get_active_debug_mode()
    if debug_mode is None:
        return contextlib.nullcontext()
    record: contextlib.AbstractContextManager[Any] = debug_mode.record_redistribute_calls(
        local_tensor, current_spec.placements, target_spec.placements, str(executable), is_explicit=is_explicit
    )
    return record
