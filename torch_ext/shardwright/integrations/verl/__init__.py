"""A checkpoint engine for verl: weights move from the trainer's shards to the parameters of vLLM's workers.

Importing this package does not import verl. verl imports the modules that its configuration names:

- `checkpoint_engine` registers the backend "shardwright" (``checkpoint_engine.custom_backend_module``).
- `trainer` registers an FSDP2 engine that passes shards to it (``model.external_lib``).
- `worker` has the extension of vLLM's workers that receives them (``worker_extension_cls``).
"""

from __future__ import annotations

BACKEND = "shardwright"
