"""`redistribute_many` of plain tensors, with autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._planner import gradient_layout
from ..runtime import dynamo, groups
from ..runtime.many import redistribute_parts


def redistribute(items: Sequence[Any], tracked: Sequence[int], options: Mapping[str, Any]) -> list[torch.Tensor]:
    """Runs `redistribute_many`, and gives the results of the items with indices `tracked` gradients.

    `options`: further arguments of `redistribute_parts`.
    """
    results: list[torch.Tensor] = []
    locals_ = [items[i][0] for i in tracked]
    outputs = _RedistributeMany.apply(items, tracked, options, results, *locals_)  # type: ignore[no-untyped-call]
    for i, output in zip(tracked, outputs, strict=True):
        results[i] = output
    return results


class _RedistributeMany(torch.autograd.Function):
    """Moves `items` and adds the results to `results`. Returns those of `tracked`, whose gradients move back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        items: Sequence[Any],
        tracked: Sequence[int],
        options: Mapping[str, Any],
        results: list[torch.Tensor],
        *locals_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        moved = redistribute_parts(items, tracked=tracked, **options)
        assert isinstance(moved, list)
        results += moved
        pairs = [items[i][1:] for i in tracked]
        ctx.pairs = [(gradient_layout(dst, "dst"), gradient_layout(src, "src")) for src, dst in pairs]
        ctx.shapes = [local.shape for local in locals_]  # outside the source mesh: of the empty tensor passed
        ctx.options = {**options, "group": groups.weakly(options["group"])}
        return tuple(x.view_as(x) if (x := moved[i]) is local else x for i, local in zip(tracked, locals_, strict=True))

    @staticmethod
    @dynamo.skipped
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        items = [(gradient, *pair) for gradient, pair in zip(gradients, ctx.pairs, strict=True)]
        options = {**ctx.options, "group": ctx.options["group"].get()}
        if torch.is_grad_enabled():  # ranks compare the tracked items, but not all may have gradients to differentiate
            moved: Any = redistribute(items, range(len(items)), options)
        else:
            moved = redistribute_parts(items, **options)
        return None, None, None, None, *(x.reshape(shape) for x, shape in zip(moved, ctx.shapes, strict=True))
