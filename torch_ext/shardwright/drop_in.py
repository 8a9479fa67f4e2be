"""The drop-in for DTensor: redistributes that PyTorch starts, explicit and implicit, run by shardwright.

PyTorch's own function `redistribute_local_tensor` is where all of them pass. `enable` binds ours in its place, in every
loaded module that holds it. What we do not take (tracing, fake and subclassed tensors, placements we do not know) goes
on to PyTorch's function and is counted with its reason.

Who decides: outside of autograd, the mode at the time. A backward keeps the mode that was on in its forward. The node
of an explicit redistribute remembers it; for implicit ones, the node's sequence number tells when it was made. These
numbers count per thread, so where several threads changed the mode, a backward goes by the changes of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import CompileContext
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import assert_no_mixed_partial_types
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from . import _binding, _compile_caches, _engine, _graph_plans, _runtime, _shortcut, _stats, masking
from ._arguments import DEVICE_TYPES
from .dtensor.specs import layout_of_spec
from .planning import Plan

_MAX_MODE_CHANGES = 4096
_REMEMBERED = "_shardwright_mode"


class _Mode(NamedTuple):
    on: bool
    strict: bool
    make_groups: bool
    overlap: bool = False


_OFF = _Mode(False, False, True)


class _Changes:
    """Mode changes of one thread, with the sequence number that its next autograd node got."""

    def __init__(self) -> None:
        self.numbers = [-1]
        self.modes = [_mode]

    def add(self, mode: _Mode) -> None:
        number = torch.autograd._get_sequence_nr()
        if self.numbers[-1] >= number:
            self.modes[-1] = mode
            return
        self.numbers.append(number)
        self.modes.append(mode)
        if len(self.numbers) > _MAX_MODE_CHANGES:
            del self.numbers[: _MAX_MODE_CHANGES // 2]
            del self.modes[: _MAX_MODE_CHANGES // 2]

    def mode_at(self, number: int) -> _Mode:
        return self.modes[max(bisect.bisect_right(self.numbers, number) - 1, 0)]


_mode = _OFF
_changes_by_thread: dict[int, _Changes] = {}  # by the number that autograd knows threads by

# Executables whose result is the redistribute's, with nothing to be done around them.
_direct: _engine.Kept[_runtime.Executable] = _engine.Kept()

_lock = threading.RLock()  # around all that changes what is on
_switch = _binding.Switch(_OFF)
_holders = _binding.Holders()
_original: Callable[..., torch.Tensor] | None = None
_undo: contextlib.ExitStack | None = None  # gives back what was taken; None where nothing is


def enable(strict: bool = False, make_groups: bool = True, overlap: bool = False) -> None:
    """Routes DTensor's redistributes through shardwright until `disable`.

    A switch for all threads of the process: the last call counts, whichever thread it comes from. Within an `enabled`
    block of its own thread it changes that block only. Blocks of other threads keep what they asked for.

    Args:
        strict: raise RuntimeError where a redistribute would go to PyTorch's own path.
        make_groups: whether process groups that are missing may be made, at first use and by their members. If not,
            plans keep to the groups of the mesh's dims, its flattened ones and those of `prepare`.
        overlap: whether `linear`, `matmul` and ``@`` of DTensors gather their operand behind the product where PyTorch
            would gather first (overlapping.py says which). The result is then cut in its last dim along those mesh
            dims. Not in code that is compiled.
    """
    with _lock:
        _install()
        _switch.mine = _Mode(True, strict, make_groups, overlap)
        _apply()


def disable() -> None:
    """Gives PyTorch its own function back, once no block of another thread needs ours.

    Raises RuntimeError if shardwright is not enabled, by `enable` or by the block that this thread is in.
    """
    with _lock:
        if not _switch.mine.on:
            raise RuntimeError("disable: shardwright is not enabled (disabled twice?)")
        _switch.mine = _OFF
        _apply()
        if not any(mode.on for mode in _switch.modes):
            _uninstall()


@contextlib.contextmanager
def enabled(strict: bool = False, make_groups: bool = True, overlap: bool = False) -> Iterator[None]:
    """`enable` for a block. The backward of what ran inside goes through shardwright too, whenever it runs.

    For all threads, as `enable` is. Blocks of several threads may overlap: the one that began last decides, and each
    takes back only what it asked for.
    """
    with _lock:
        _install()
        block = _switch.begin(_Mode(True, strict, make_groups, overlap))
        try:
            _apply()
        except BaseException:
            _switch.end(block)
            raise
    try:
        yield
    finally:
        with _lock:
            _switch.end(block)
            _apply()


def _apply() -> None:
    """What the switch says holds from now on."""
    global _mode
    mode = _switch.mode
    changes = _changes_by_thread.setdefault(_runtime.thread_id(), _Changes())
    if mode.overlap or _mode.overlap:
        from . import overlapping

        overlapping.install() if mode.overlap else overlapping.uninstall()
    _compile_caches.tell_apart(mode.on)
    _mode = mode
    changes.add(mode)


def _deciding_mode() -> _Mode:
    node = torch._C._current_autograd_node()
    if node is None:
        return _mode
    remembered: _Mode | None = getattr(node, _REMEMBERED, None)
    if remembered is not None:
        return remembered
    changes = _changes_by_thread.get(_runtime.thread_of_current_node())
    return _mode if changes is None else changes.mode_at(node._sequence_nr())


def _remember_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an autograd function whose node, which is its ctx, keeps the mode for its backward."""

    @functools.wraps(forward)
    def remembering(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(ctx, _REMEMBERED, _deciding_mode())
        return forward(ctx, *args, **kwargs)

    return remembering


def _install() -> None:
    """Puts ours in the place of PyTorch's: all of it or, where that fails, nothing."""
    global _undo
    if _undo is not None:
        return
    with contextlib.ExitStack() as undo:
        _bind_method(undo)
        _bind_forwards(undo)
        _bind_function(undo)
        _undo = undo.pop_all()


def _uninstall() -> None:
    global _undo
    if _undo is not None:
        undo, _undo = _undo, None
        undo.close()


def _bind_method(undo: contextlib.ExitStack) -> None:
    original = DTensor.redistribute
    undo.callback(_shortcut.forget)
    DTensor.redistribute = _shortcut.method(original, _may_take_shortcut, _find)  # type: ignore[method-assign]
    undo.callback(setattr, DTensor, "redistribute", original)


def _bind_forwards(undo: contextlib.ExitStack) -> None:
    nested = getattr(torch_redistribute, "NestedRedistribute", None)  # came with torch 2.12
    for function in filter(None, (torch_redistribute.Redistribute, nested, _shortcut.Redistribute)):
        original = function.forward
        function.forward = staticmethod(_remember_mode(original))
        undo.callback(setattr, function, "forward", staticmethod(original))


def _bind_function(undo: contextlib.ExitStack) -> None:
    original = torch_redistribute.redistribute_local_tensor
    _set_original(original)
    undo.callback(_set_original, None)

    def replace(by_ours: bool) -> None:
        _holders.replace(original, _redistribute_local_tensor, by_ours=by_ours, but_in=globals())

    undo.callback(replace, False)
    replace(True)


def _set_original(original: Callable[..., torch.Tensor] | None) -> None:
    global _original
    _original = original


@functools.wraps(torch_redistribute.redistribute_local_tensor)
def _redistribute_local_tensor(
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
    mode = _deciding_mode()
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
    if mode.overlap and async_op:  # which only explicit redistributes are
        from . import overlapping

        overlapping.note_explicit_gather(current_spec, target_spec)
    if isinstance(local_tensor, AsyncCollectiveTensor):
        local_tensor = local_tensor.wait()
    is_traced = _are_we_tracing()
    if is_traced and _is_captured():
        return by_torch()
    masked = None
    if any(map(masking.is_masked, (*current_spec.placements, *target_spec.placements))):
        masked = masking.unmask(local_tensor, current_spec, target_spec)
    if isinstance(masked, masking.Unmasked):
        moved = _redistribute_local_tensor(
            masked.local, masked.current_spec, masked.target_spec, async_op=async_op and not masked.masks_to_make
        )
        return masked.mask(moved, target_spec.placements)
    example = ""
    reason = masked or _why_not(local_tensor, current_spec, is_traced)
    if reason is None:
        if current_spec.mesh is not target_spec.mesh and current_spec.mesh != target_spec.mesh:
            return by_torch()  # raises
        assert_no_mixed_partial_types(current_spec.placements)
        assert_no_mixed_partial_types(target_spec.placements)
        if not current_spec.mesh._is_current_rank_part_of_mesh():
            return local_tensor
        key = _key(local_tensor, current_spec, target_spec, mode)
        if is_traced:
            traced = _trace(key, local_tensor, current_spec, target_spec, mode)
            if isinstance(traced, torch.Tensor):
                return traced
            reason, example = traced
    if reason is None:
        executable = _engine.lookup(key, lambda: _build(local_tensor, current_spec, target_spec, mode.make_groups))
        if isinstance(executable, _engine.Refusal):
            reason, example = executable
        elif _autograd_looks(local_tensor):
            return _differentiable(local_tensor, current_spec, target_spec, async_op)
        else:
            copies = executable.is_identity and _torch_would_copy(current_spec, target_spec)
            if not copies:
                _direct.put(key, executable)
            with _recorded(local_tensor, current_spec, target_spec, executable, is_explicit):
                if copies:
                    _stats.counts.calls += 1
                    return local_tensor.clone(memory_format=torch.contiguous_format)
                return _engine.run(executable, local_tensor, async_op)
    if mode.strict:
        raise RuntimeError(
            f"shardwright: {current_spec} -> {target_spec} would go to PyTorch's own path: {example or reason} "
            "(strict=True)"
        )
    _stats.count_fallback(reason, example)
    return by_torch()


def _key(local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, mode: _Mode) -> Hashable:
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


def _may_take_shortcut() -> bool:
    return _mode.on and _mode.make_groups


def _find(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec
) -> _runtime.Executable | None:
    return _direct.get(_key(local_tensor, current_spec, target_spec, _deciding_mode()))


def _autograd_looks(local_tensor: torch.Tensor) -> bool:
    """Whether a graph is being made at this level: not below one of DTensor's operators, whose graph is above it."""
    return (
        local_tensor.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    )


def _differentiable(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, async_op: bool
) -> torch.Tensor:
    """A redistribute below DTensor that autograd must see, as in the double backward of torch before 2.12.

    PyTorch's collectives cut the graph here; ours carry the gradient.
    """
    from .redistributing import redistribute_local

    dtype = local_tensor.dtype
    src = layout_of_spec(current_spec, current_spec.shape, dtype)
    dst = layout_of_spec(target_spec, current_spec.shape, dtype)
    return redistribute_local(local_tensor, src, dst, device_mesh=current_spec.mesh, async_op=async_op)


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


def _why_not(local_tensor: torch.Tensor, current_spec: DTensorSpec, is_traced: bool) -> str | None:
    if not is_traced and type(local_tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"local tensor is a {type(local_tensor).__name__}"
    if local_tensor.device.type not in DEVICE_TYPES:
        return f"device {local_tensor.device.type}"
    if current_spec.tensor_meta is None:
        return "no tensor_meta"
    return None


def _is_captured() -> bool:
    """Whether a graph is made that is not torch.compile's: by torch.export, make_fx or AOTAutograd alone.

    Others read such graphs, and look for PyTorch's collectives in them.
    """
    if torch.compiler.is_exporting():
        return True
    return get_proxy_mode() is not None and CompileContext.current_compile_id() is None


_arguments: _engine.Kept[dict[str, Any] | _engine.Refusal] = _engine.Kept()


def _trace(
    key: Hashable, local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, mode: _Mode
) -> torch.Tensor | _engine.Refusal:
    """What a trace records of a redistribute: our operators."""
    from . import operators

    is_symbolic = _graph_plans.is_symbolic((*current_spec.shape, *local_tensor.shape))
    arguments = None if is_symbolic else _arguments.get(key)  # symbols have no hash
    if arguments is None:
        with _disable_current_modes():  # nothing of this belongs into the trace
            arguments = _trace_arguments(local_tensor, current_spec, target_spec, mode.make_groups, is_symbolic)
        if not is_symbolic:
            _arguments.put(key, arguments)
    if isinstance(arguments, _engine.Refusal):
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
) -> dict[str, Any] | _engine.Refusal:
    """The operators' arguments; none of them where nothing is to be done."""
    from . import operators

    sizes = current_spec.shape
    example = _graph_plans.example_of(sizes)
    if example is None:
        return _engine.Refusal("tracing: a size is known only when the graph runs")
    plan = _plan(local_tensor, current_spec, target_spec, make_groups, example)
    if isinstance(plan, _engine.Refusal):
        return plan
    if any(step.op == "partition" for step in plan.steps) and not local_tensor.dtype.is_floating_point:
        return _engine.Refusal("tracing: PyTorch makes integers floating where it divides them")
    if not is_symbolic:
        return operators.arguments_of(plan, device_mesh=current_spec.mesh) if plan.steps else {}
    if plan.src == plan.dst:
        return {}
    if any(placement.startswith("SS") for placement in (*plan.src.placements, *plan.dst.placements)):
        return _engine.Refusal("tracing: a strided shard of symbolic size")
    return operators.arguments_for_sizes(plan, sizes, current_spec.mesh)


def _build(
    local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, make_groups: bool
) -> _runtime.Executable | _engine.Refusal:
    plan = _plan(local_tensor, current_spec, target_spec, make_groups)
    return plan if isinstance(plan, _engine.Refusal) else _engine.bind(plan, device_mesh=current_spec.mesh)


def _plan(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    make_groups: bool,
    shape: Sequence[int] | None = None,
) -> Plan | _engine.Refusal:
    reason = _engine.why_not_over_groups(local_tensor.device.type)
    if reason is not None:
        return _engine.Refusal(reason)
    shape = current_spec.shape if shape is None else shape
    try:
        src = layout_of_spec(current_spec, shape, local_tensor.dtype)
        dst = layout_of_spec(target_spec, shape, local_tensor.dtype)
        existing = None if make_groups else current_spec.mesh
        return _engine.make_plan(src, dst, local_tensor.device.type, existing_groups_of=existing)
    except ValueError as error:
        return _engine.Refusal(_stats.cause_of(error), str(error))


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
