"""PyTorch's tensor-parallel styles, with what they move hidden behind the layer's product.

    from shardwright.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

For ``torch.distributed.tensor.parallel.parallelize_module``. Arguments, parameters and results are those of the
styles of these names in ``torch.distributed.tensor.parallel``; state dicts fit. A column-parallel layer takes a
sequence shard as it is and gathers it in chunks behind its product, a row-parallel one scatters its sums in chunks, and
their backwards do the same the other way round (`shardwright.linear`). Each layer gathers for itself: where several
share an operand, `all_gather_matmul` with a list of weights gathers once. Layers other than ``nn.Linear`` stay
PyTorch's.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_module

from .matmul import linear

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """As PyTorch's; `method`, `chunks` and `save` as in `shardwright.linear`."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
        save: str = "shard",
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._how = {"method": method, "chunks": chunks, "save": save}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        return _distribute(self, module, device_mesh, self._how)


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """As PyTorch's; `method` and `chunks` as in `shardwright.linear`."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        method: str | None = None,
        chunks: int | Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._how = {"method": method, "chunks": chunks}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        return _distribute(self, module, device_mesh, self._how)


class SequenceParallel(torch_parallel.SequenceParallel):
    """PyTorch's own: it moves nothing."""


def _distribute(style: Any, module: nn.Linear, device_mesh: DeviceMesh, how: dict[str, Any]) -> nn.Module:
    distribute_module(
        module,
        device_mesh,
        style._partition_linear_fn,
        partial(_annotate, style.input_layouts),
        partial(_hand_out, style.use_local_output),
    )
    # On the instance, so that its class, its name and its state dict stay what they are.
    module._shardwright_how = {"placements": style.output_layouts, **how}  # type: ignore[assignment]
    module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
    return module


def _annotate(
    layouts: tuple[Placement, ...], module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
) -> Any:
    x = inputs[0]
    return x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, layouts, run_check=False)


def _forward(module: nn.Linear, x: DTensor) -> DTensor:
    return linear(x, module.weight, module.bias, **module._shardwright_how)  # type: ignore[arg-type]


def _hand_out(use_local_output: bool, module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> torch.Tensor:
    return output.to_local() if use_local_output else output
