"""An extension of vLLM's workers that registers the engines: vLLM's option ``--worker-extension-cls``."""

from __future__ import annotations

from . import register

register()


class WorkerExtension:
    """Adds nothing to a worker: importing this module was enough."""
