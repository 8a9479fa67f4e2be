"""The iterator over the tensors of a running transfer: `Receiving`."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any


class Receiving(Generator[tuple[str, Any], None, None]):
    """The result of `Transfer.receive`. `close` completes the transfer."""

    def __init__(self, tensors: Generator[tuple[str, Any], None, None]) -> None:
        self._tensors = tensors
        self._completed_by = ""  # the method that completed the transfer before the end of the iteration, if any

    def send(self, value: None) -> tuple[str, Any]:
        if self._completed_by:
            completed = f"receive: {self._completed_by}() was called before the end, and completed the transfer"
            raise RuntimeError(f"{completed}; call it after the end of the iteration")
        return self._tensors.send(value)

    def throw(self, *error: Any) -> tuple[str, Any]:
        return self._tensors.throw(*error)

    def close(self) -> None:
        self._tensors.close()

    def complete(self, by: str) -> None:
        """Completes the transfer, after which iterating raises RuntimeError. `by` is the method that calls."""
        if inspect.getgeneratorstate(self._tensors) != inspect.GEN_CLOSED:  # type: ignore[arg-type]
            self.close()
            self._completed_by = by
