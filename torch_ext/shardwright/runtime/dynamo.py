"""Keeps Dynamo out of functions that run eagerly.

After a graph break, Dynamo may run a frame eagerly and compile the frames that this frame calls. It skips those of
PyTorch's own code, but not those of the code that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])

_SKIP_WITH_CALLEES = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def skipped(function: F) -> F:
    """Returns the function. Dynamo compiles neither its frames nor those that they call.

    In contrast to ``torch.compiler.disable``, this costs no time in a call. Dynamo still traces the function as a part
    of compiled callers.
    """
    set_code_exec_strategy(function.__code__, _SKIP_WITH_CALLEES)
    return function


def outside_graphs(function: F) -> F:
    """Like `skipped`, but a call in compiled code breaks the graph."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it runs eagerly"  # type: ignore[attr-defined]
    return skipped(function)
