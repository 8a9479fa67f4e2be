"""An extension of vLLM's workers that registers the engines: vLLM's option ``--worker-extension-cls``.

Follows vllm/v1/worker/gpu_worker.py of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import register

register()

# Methods of vLLM's workers that replace or discard weights, and functions that tell from the arguments if they do.
REPLACES: dict[str, Callable[..., bool]] = {
    "sleep": lambda level=1, *_, **__: level > 1,
    "discard": lambda tags: "weights" in tags,
    "reload_weights": lambda *_, **__: True,
    "reset_weights": lambda: True,
}


class WorkerExtension:
    """Tells the engine of a worker when vLLM replaces or discards weights, so that the next update sends everything."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        worker: Any = super().__new__(cls)
        for name in REPLACES:  # as attributes of the worker, because vLLM lets no extension override a method
            if hasattr(worker, name):
                setattr(worker, name, partial(_note_and_call, worker, name, getattr(worker, name)))
        return worker


def _note_and_call(worker: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a worker, and notes before if it replaces weights: it may fail midway."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is not None and REPLACES[name](*args, **kwargs):
        engine.weights_replaced = True
    return method(*args, **kwargs)
