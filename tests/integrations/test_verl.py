"""Tests of the checkpoint engine with verl, Ray and vLLM from PyPI on CPU: `make test-vllm`.

The doubles of verl_double.py, which other tests use, are compared with verl's classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import verl_double
from test_vllm import VLLM_TIMEOUTS, save_model

pytest.importorskip("ray")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

HERE = pathlib.Path(__file__).parent
JOB_SECONDS = 3600
PLUGIN = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
MODULES = {
    "verl.checkpoint_engine.base": ("CheckpointEngineRegistry", "CheckpointEngine", "CheckpointEngineWorker"),
    "verl.workers.engine.base": ("EngineRegistry",),
    "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngineWithLMHead",),
    "verl.workers.engine.fsdp.utils": ("unfuse_moe_params",),
    "verl.workers.rollout.vllm_rollout.utils": ("vLLMColocateWorkerExtension",),
    "verl.utils.device": ("get_device_name", "get_vendor"),
    "verl.utils.model": ("convert_weight_keys",),
}


def _run_job(model: pathlib.Path, folder: pathlib.Path) -> Any:
    """Runs verl_job.py and returns the server's answers."""
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        **PLUGIN,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(2)),  # of two workers
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **VLLM_TIMEOUTS,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(HERE / "verl_job.py"), str(model), str(folder)]
    with open(folder / "job.log", "w") as log:
        job = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=JOB_SECONDS)
    assert job.returncode == 0, (folder / "job.log").read_text()[-8000:]
    return json.loads((folder / "answers.json").read_text())


def test_server_answers_with_the_trained_weights(tmp_path: pathlib.Path) -> None:
    """After each update, answers are those of the trainer's checkpoint, bit for bit. On CPU vLLM packs weights."""
    save_model(tmp_path / "model", tied=False)
    told = _run_job(tmp_path / "model", tmp_path)
    answers = [told["before"], *told["synced"]]
    assert all(answer not in answers[:i] for i, answer in enumerate(answers))  # each update changes them
    assert told["synced"] == told["loaded"]
    assert told["again"] == told["before"]
    sent, full = ([x[f"checkpoint_engine/rank0_{kind}_mbytes"] for x in told["sent"]] for kind in ("sent", "full"))
    assert sent[0] == full[0]
    # Then only what changed, also after vLLM's sleep: as on CPU all layers convert weights, the second set is kept.
    assert len(sent) == 3 and all(0 < some < 0.5 * every for some, every in zip(sent[1:], full[1:], strict=True))


@pytest.fixture
def _verl_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLUGIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(HERE)


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Returns the name, kind and default of each parameter, without the one that Ray adds to methods of actors."""
    given = inspect.signature(function).parameters.values()
    return [(x.name, x.kind, x.default) for x in given if x.name != "_ray_trace_ctx"]


@pytest.mark.usefixtures("_verl_on_cpu")
@pytest.mark.parametrize("module", MODULES)
def test_doubles_have_verls_signatures(module: str) -> None:
    real = importlib.import_module(module)
    for name in MODULES[module]:
        double = getattr(verl_double, name)
        if not inspect.isclass(double):
            assert _parameters(double) == _parameters(getattr(real, name)), name
            continue
        methods = [x for x, value in vars(double).items() if callable(getattr(double, x)) and not x.startswith("__")]
        assert methods
        for method in methods:
            ours, verls = getattr(double, method), getattr(getattr(real, name), method)
            assert _parameters(ours) == _parameters(verls), f"{name}.{method}"
            assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(verls), f"{name}.{method}"


@pytest.mark.usefixtures("_verl_on_cpu")
def test_every_double_is_compared() -> None:
    defined = {x for x, value in vars(verl_double).items() if getattr(value, "__module__", "") == verl_double.__name__}
    assert {name for names in MODULES.values() for name in names} == defined - {"install", "_stand_for"}
