"""The four autograd functions of dispatch and combine.

A row is a token and its data. `exchange` is a `RowExchange` of csrc, `step` the name of the exchange in errors.

In a dispatch, `Send` sends rows to ranks, and `Expand` copies them for experts. In a combine, `Contract` sums the
experts' results of each row, and `Collect` returns the sums. The backward of `Send` returns sums, the backward of
`Collect` sends rows. Both communicate on all ranks or on none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._native import _runtime


class Expansion(NamedTuple):
    """The map between received rows and their copies for experts of this rank, in the order of experts.

    Example with top-k 2: row 0 goes to experts b and a of this rank, row 1 only to a, by its second choice. The copies
    are 0: row 0 for a, 1: row 1 for a, 2: row 0 for b. So pairs = [1, 3, 0], rows = [0, 1, 0], copies = [[2, 0],
    [-1, 1]].
    """

    pairs: torch.Tensor  # [copies]: the index of the copy's row times top-k, plus the index among the token's experts
    rows: torch.Tensor  # [copies]: the index of the copy's row
    copies: torch.Tensor  # [rows, top-k]: the index of the copy for each expert of the token, -1 for experts elsewhere


class Send(torch.autograd.Function):
    """Sends the parts of rows to other ranks. Gradients of the first two parts are returned as one sum per row.

    The first output is empty. It requires a gradient if any part does, so that this rank takes part in the backward
    even if its rows get no gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, exchange: Any, step: str, gradients: tuple[bool, bool], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.step, ctx.gradients = exchange, step, gradients
        anchor = parts[0].new_empty(0, dtype=torch.float32)
        # All parts share one storage. Cloning the others lets it be freed with the rows.
        rows, *others = exchange.send(step, list(parts))
        received = [rows, *(part.clone(memory_format=torch.contiguous_format) for part in others)]
        not_differentiable = [received[i] for i in range(len(parts)) if i > 1 or not gradients[i]]
        ctx.mark_non_differentiable(*not_differentiable, *([] if any(gradients) else [anchor]))
        return anchor, *received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = [i for i in range(2) if ctx.gradients[i]]
        returned: list[torch.Tensor | None] = [None] * (len(gradients) - 1)
        if needed:  # the same on all ranks
            sums = ctx.exchange.send_back(f"backward of {ctx.step}", [gradients[1 + i] for i in needed])
            for i, gradient in zip(needed, sums, strict=True):
                returned[i] = gradient
        return None, None, None, *returned


class Collect(torch.autograd.Function):
    """Returns one sum per row to the row's rank, and adds them there. `anchor` is empty; only the backward needs it."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, step: str, sums: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange, ctx.step = exchange, step
        ctx.save_for_backward(anchor)  # so that a checkpoint is recomputed on all ranks, also those without rows
        return exchange.send_back(step, [sums])[0]  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        rows = ctx.exchange.send(f"backward of {ctx.step}", [gradient])[0]
        return None, None, rows, torch.zeros_like(anchor)


class Expand(torch.autograd.Function):
    """Copies a row for each of its experts on this rank."""

    @staticmethod
    def forward(ctx: Any, expansion: Expansion, received: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.copies = expansion.copies
        return _runtime.take_rows(received, expansion.rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, _runtime.sum_rows(gradient, ctx.copies, None)


class Contract(torch.autograd.Function):
    """Sums the results of this rank's experts for each row, weighted by scores."""

    @staticmethod
    def forward(ctx: Any, expansion: Expansion, y: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        ctx.expansion = expansion
        ctx.save_for_backward(y if scores is not None and scores.requires_grad else None, scores)
        return _runtime.sum_rows(y, expansion.copies, scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, scores = ctx.saved_tensors
        expansion = ctx.expansion
        if scores is None:
            return None, _runtime.take_rows(gradient, expansion.rows), None
        score_gradient = None if y is None else _runtime.dot_rows(y, expansion.copies, gradient, scores)
        return None, _runtime.take_weighted_rows(gradient, expansion.pairs, scores), score_gradient
