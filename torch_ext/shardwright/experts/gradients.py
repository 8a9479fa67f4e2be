"""The four pieces of a dispatch and a combine, with their gradients: rows sent, copied for experts, summed, returned.

Rows are sent by `Send` and copied by `Expand`; `Contract` sums what became of the copies, and `Collect` returns the
sums. The backward of `Send` returns sums, that of `Collect` sends rows. Both communicate on all ranks or on none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._native import _runtime


class Expansion(NamedTuple):
    """Rows that arrived, and the copies of them that experts of this rank get, in the order of experts."""

    pairs: torch.Tensor  # of each copy: the number of its row times top-k, plus the place among the token's experts
    rows: torch.Tensor  # of each copy: its row
    places: torch.Tensor  # [rows, top-k]: the copies of a row, -1 where there is none


class Send(torch.autograd.Function):
    """Parts of rows to the ranks that they are for. The gradients of the first two come back as one sum per row.

    The first output is empty. It requires gradients where any part does, and takes this rank into the backward also
    where no gradient comes by way of the rows.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, exchange: Any, step: str, gradients: tuple[bool, bool], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.step, ctx.gradients = exchange, step, gradients
        anchor = parts[0].new_empty(0, dtype=torch.float32)
        # All parts lie in one piece of memory, which is to go with the rows.
        rows, *others = exchange.send(step, list(parts))
        arrived = [rows, *(part.clone(memory_format=torch.contiguous_format) for part in others)]
        without = [arrived[i] for i in range(len(parts)) if i > 1 or not gradients[i]]
        ctx.mark_non_differentiable(*without, *([] if any(gradients) else [anchor]))
        return anchor, *arrived

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        asked = [i for i in range(2) if ctx.gradients[i]]
        returned: list[torch.Tensor | None] = [None] * (len(gradients) - 1)
        if asked:  # the same on all ranks
            back = ctx.exchange.send_back(f"backward of {ctx.step}", [gradients[1 + i] for i in asked])
            for i, gradient in zip(asked, back, strict=True):
                returned[i] = gradient
        return None, None, None, *returned


class Collect(torch.autograd.Function):
    """Answers to rows, summed where the rows came from. The second tensor only takes part in the backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, step: str, sums: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange, ctx.step, ctx.anchor = exchange, step, anchor
        return exchange.send_back(step, [sums])[0]  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = ctx.exchange.send(f"backward of {ctx.step}", [gradient])[0]
        return None, None, back, torch.zeros_like(ctx.anchor)


class Expand(torch.autograd.Function):
    """A copy of a row for each of its experts here."""

    @staticmethod
    def forward(ctx: Any, expansion: Expansion, received: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.places = expansion.places
        return _runtime.take_rows(received, expansion.rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, _runtime.sum_rows(gradient, ctx.places, None)


class Contract(torch.autograd.Function):
    """The sum of what the experts here made of a row, weighted."""

    @staticmethod
    def forward(ctx: Any, expansion: Expansion, y: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        ctx.expansion = expansion
        ctx.save_for_backward(y if scores is not None and scores.requires_grad else None, scores)
        return _runtime.sum_rows(y, expansion.places, scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, scores = ctx.saved_tensors
        expansion = ctx.expansion
        if scores is None:
            return None, _runtime.take_rows(gradient, expansion.rows), None
        of_scores = None if y is None else _runtime.dot_rows(y, expansion.places, gradient, scores)
        return None, _runtime.take_weighted_rows(gradient, expansion.pairs, scores), of_scores
