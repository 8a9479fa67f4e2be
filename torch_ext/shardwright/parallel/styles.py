"""The styles of `shardwright.parallel`, and the forwards of their layers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module
from torch.overrides import _get_current_function_mode_stack

from ..attention.context import AttentionMode, check_mesh
from ..matmul import tensors
from ..matmul.functions import linear

__all__ = ["ColwiseParallel", "ContextParallel", "RowwiseParallel", "SequenceParallel"]


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """Like PyTorch's style; `method`, `chunks`, `depth` and `save` are those of `shardwright.linear`.

    With ``input_layouts=Shard(d)`` the gather of the input overlaps with the product. Layers other than ``nn.Linear``
    keep PyTorch's implementation.

    With `shares_gather`, layers that get the same tensor object, such as query, key and value, gather it once: the
    first layer that runs gathers it during its product. The others use the gathered tensor, and their gradients are
    scattered together with the first layer's. The gathered tensor is kept until the backward, as with PyTorch's
    ``PrepareModuleInput``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
        depth: int | None = None,
        save: str = "shard",
        shares_gather: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._options = {"method": method, "chunks": chunks, "depth": depth, "save": save}
        self._shares_gather = shares_gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        return _distribute(self, module, device_mesh, self._options, self._shares_gather)


class ContextParallel(torch_parallel.ParallelStyle):
    """Replaces ``scaled_dot_product_attention`` within a module by shardwright's, over a mesh of one dim.

    Input and output of the module are shards of the sequence. All other operations in it must treat the positions of
    the sequence independently. A checkpoint within the module must call modules. If it calls a function that computes
    attention, forward and backward must run in `shardwright.attention.context_parallel`.

    Args:
        size: the length of the full sequence; not needed if queries are DTensors.
        layout, method: as in `shardwright.attention.scaled_dot_product_attention`.
    """

    def __init__(self, *, size: int | None = None, layout: Any = None, method: str = "auto") -> None:
        super().__init__()
        self._arguments = {"size": size, "layout": layout, "method": method}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh, "device_mesh")
        mode = partial(AttentionMode, group=device_mesh.get_group(), **self._arguments)
        for inner in module.modules():  # each, because a checkpoint calls the modules in it again in the backward
            if inner is module or type(inner).__module__.partition(".")[0] != "torch" or any(inner.children()):
                _call_within(mode, inner)
        return module


def _call_within(mode: Callable[[], AttentionMode], module: nn.Module) -> None:
    """Makes the forward of a module, and of its deep copies, run within a mode unless one is active."""
    before = module.forward
    method = before.__func__ if getattr(before, "__self__", None) is module else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_active = any(isinstance(active, AttentionMode) for active in _get_current_function_mode_stack())
        with contextlib.nullcontext() if is_active else mode():
            return before(*args, **kwargs) if method is None else method(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """Like PyTorch's style; `method`, `chunks` and `depth` are those of `shardwright.linear`.

    With ``output_layouts=Shard(d)`` or ``Replicate()`` the sum of the output overlaps with the product. Layers other
    than ``nn.Linear`` keep PyTorch's implementation.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._options = {"method": method, "chunks": chunks, "depth": depth}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        return _distribute(self, module, device_mesh, self._options)


class SequenceParallel(torch_parallel.SequenceParallel):
    """PyTorch's own style, which moves nothing."""


def _distribute(
    style: Any, module: nn.Linear, device_mesh: DeviceMesh, options: dict[str, Any], shares_gather: bool = False
) -> nn.Module:
    """Shards the weights of a linear layer as PyTorch's style does, and replaces its forward by ours."""
    distribute_module(
        module,
        device_mesh,
        style._partition_linear_fn,
        partial(annotate, style.input_layouts),
        partial(as_output, style.use_local_output),
    )
    install_forward(module, {"placements": style.output_layouts, **options}, shares_gather)
    return module


def install_forward(module: nn.Linear, options: dict[str, Any], shares_gather: bool) -> None:
    """Replaces the forward of a layer with sharded weights. `options` are the options of `shardwright.linear`."""
    # These are set on the instance, so that its class, its name and its state dict do not change.
    module._shardwright_options = options  # type: ignore[assignment]
    forward = _forward_sharing if shares_gather else _forward
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def annotate(
    layouts: tuple[Placement, ...], module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
) -> Any:
    """Returns the layer's input as a DTensor placed as `layouts`. Its `_shardwright_given` is the plain input."""
    x = inputs[0]
    if isinstance(x, DTensor):
        return x
    annotated = DTensor.from_local(x, device_mesh, layouts, run_check=False, **_uneven(module, x, layouts, device_mesh))
    annotated._shardwright_given = x
    return annotated


def _uneven(
    module: nn.Module, x: torch.Tensor, layouts: tuple[Placement, ...], device_mesh: DeviceMesh
) -> dict[str, Any]:
    """Returns shape and strides of the global tensor if its features are sharded unevenly.

    `from_local` alone would assume even shards. The number of features is known from the weight, so the result is equal
    on all ranks. For other dims it is unknown.
    """
    features = module.weight.shape[1]  # type: ignore[union-attr, index]
    (layout,) = layouts
    is_cut = x.ndim > 0 and isinstance(layout, Shard) and layout.dim in (-1, x.ndim - 1)
    if not is_cut or features % device_mesh.size() == 0:  # type: ignore[operator]
        return {}
    shape = torch.Size([*x.shape[:-1], features])  # type: ignore[list-item]
    return {"shape": shape, "stride": make_contiguous_strides_for(shape)}


def _forward(module: nn.Linear, x: DTensor) -> DTensor:
    """The forward of a layer without a shared gather."""
    return linear(x, module.weight, module.bias, **module._shardwright_options)  # type: ignore[arg-type]


class _Gathered(NamedTuple):
    """A gathered tensor, stored as an attribute of the tensor that was gathered."""

    whole: DTensor
    users: set[nn.Module]  # the layers that have used it; a layer that comes again begins another pass
    key: tuple[Any, ...]


def _forward_sharing(module: nn.Linear, x: DTensor) -> DTensor:
    """The forward of a layer that shares its gather with other layers of the same input."""
    # Each layer makes its own annotated DTensor, so the gathered tensor is stored on the module's original input.
    given = getattr(x, "_shardwright_given", x)
    # Tensors in graphs cannot hold attributes. Inference tensors have no version that shows writes.
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or given.is_inference():
        return _forward(module, x)
    held: _Gathered | None = getattr(given, "_shardwright_gathered", None)
    has_grad = torch.is_grad_enabled() and x.requires_grad
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = (given._version, has_grad, cast, x.device_mesh, x.placements)
    if held is not None and held.key == key and module not in held.users:
        held.users.add(module)
        return linear(held.whole, module.weight, module.bias, **module._shardwright_options)  # type: ignore[arg-type]
    # The gradient of the gathered tensor, if there is one, is scattered together with the gradient of this layer.
    options = {**module._shardwright_options, "save": "gathered", "with_gathered": True}  # type: ignore[dict-item]
    y, *gathered = tensors.multiply("linear", x, [module.weight], [module.bias], [None, None], **options)
    # Not for leaves that require gradients: leaf and graph would refer to each other, and never be freed.
    if gathered and not (given.is_leaf and given.requires_grad):
        # Without a gradient, the graph of the first layer, which has that of its weight, must not be kept.
        given._shardwright_gathered = _Gathered(gathered[0] if has_grad else gathered[0].detach(), {module}, key)
    return y


def as_output(use_local_output: bool, module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> torch.Tensor:
    """Returns the layer's output, as this rank's part if `use_local_output`."""
    return output.to_local() if use_local_output else output
