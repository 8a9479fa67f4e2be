"""Runs torchtitan's own training program on Gloo ranks of this machine, and returns what it logged.

torchtitan runs on accelerators only. In each rank, this script is the program: it names the CPU as the device and calls
`torchtitan.train.main`. Two operations of torchtitan alone are not in Gloo, and get an equal one: FSDP2 sums gradients
without a factor (`set_force_sum_reduction_for_comms`), and `all_to_all` of parts of different sizes sends one tensor.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python"))

from allocations import peak_bytes, profiled  # noqa: E402

NUM_RANKS = 4
LENGTH = 64  # tokens of a sequence


def make_assets(folder: Path, characters: int = 2000) -> None:
    """Makes a tokenizer and a dataset of texts of this length from the documents of this repository."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [path.read_text() for path in sorted(HERE.parents[1].glob("docs/*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<bos>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    for name in ("tokenizer", "text"):
        (folder / name).mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    parts = [text[at : at + characters] for text in texts for at in range(0, len(text), characters)]
    (folder / "text" / "train.json").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))


def train(
    folder: Path,
    module: str,
    config: str,
    *arguments: str,
    steps: int = 20,
    layers: int = 0,
    ranks: int = NUM_RANKS,
    attention: str | None = "attention",
    profiled: bool = False,
) -> dict[str, Any]:
    """Trains in float32. Returns lists by step, of rank 0: losses, norms, seconds, counters.

    With `profiled`, the last step is slower, and the result has its "received_bytes", and its "peak_bytes" allocated.

    Args:
        folder: with the files of `make_assets`.
        module, config, arguments: torchtitan's arguments.
        layers: the number of layers to keep, and of narrow experts; 0: the model as configured.
        ranks: the number of ranks. Weights start with the same values on any number.
        attention: the override of FlexAttention, a function of titan_overrides; None: not overridden.
    """
    record = folder / "record.json"
    record.unlink(missing_ok=True)
    overrides = [f"titan_overrides.{name}" for name in (attention, "narrow_experts" if layers else None) if name]
    options = {
        "--module": module,
        "--config": config,
        "--hf_assets_path": folder / "tokenizer",
        "--dataloader.dataset_path": folder / "text",
        "--dump_folder": folder / "dump",
        "--training.seq_len": LENGTH,
        "--training.local_batch_size": 2,
        "--training.steps": steps,
        "--training.mixed_precision_param": "float32",
        "--debug.seed": 42,
        "--comm.trace_buf_size": 0,
    }
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks, HERE / "titan.py"]
    given = [word for option in options.items() for word in option]
    command = [sys.executable, "-m", *launcher, *given, "--training.disable_cuda_graphs", *arguments]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TITAN_RECORD": str(record),
        "TITAN_LAYERS": str(layers),
        "TITAN_PROFILED_STEP": str(steps if profiled else 0),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [str(word) for word in [*command, *(["--override.imports", *overrides] if overrides else [])]],
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    if done.returncode != 0 or not record.exists():
        raise RuntimeError(f"torchtitan has failed:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def use_cpu() -> None:
    """Makes the CPU torchtitan's device. Other modules of torchtitan must not be imported before."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )


class GlooDistributed:
    """`torch.distributed`, with an `all_to_all` that takes parts of any sizes on Gloo."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any) -> None:
        sizes = [[len(part) for part in parts] for parts in (outputs, inputs)]
        received = outputs[0].new_empty(sum(sizes[0]), *outputs[0].shape[1:])
        dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
        for output, part in zip(outputs, received.split(sizes[0])):
            output.copy_(part)


def count_attention() -> dict[str, int]:
    """Returns the number of calls of our attention, forward and backward, which later calls increase."""
    from shardwright.attention import operators

    counts = {"attended": 0, "attended_backward": 0}
    run = operators._run

    def counted(inputs: list[torch.Tensor], *others: Any) -> list[torch.Tensor]:
        counts["attended_backward" if len(inputs) > 4 else "attended"] += 1
        return run(inputs, *others)

    operators._run = counted
    return counts


def initialize_by_global_shape() -> None:
    """Makes the initial values of weights independent of their shards."""
    from torchtitan.protocols.module import Module

    initialize, numbers = Module._init_param, itertools.count()

    def initialize_full(self: Any, name: str, parameter: torch.Tensor) -> None:
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(next(numbers))
            initialize(self, name, full)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full = distribute_tensor(full, mesh, placements, src_data_rank=None)
        parameter.copy_(full)

    Module._init_param = initialize_full


def main() -> None:
    """Trains on this rank, with torchtitan's arguments from the command line."""
    use_cpu()
    import spmd_types
    from torchtitan import train as program
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import fsdp
    from torchtitan.models.common import attention as attention_masks

    import shardwright as sw

    steps: list[tuple[float, ...]] = []
    profile, meter, profiled_step = profiled(), sw.debug.wire_meter(), int(os.environ["TITAN_PROFILED_STEP"])
    log, divide, parse = (
        MetricsProcessor.log,
        fsdp.disable_fsdp_gradient_division,
        program.ConfigManager.parse_args,
    )

    def log_and_keep(self: Any, step: int, loss: float, largest: float, norm: float, **rest: Any) -> None:
        counts = sw.stats()
        assert counts["fallbacks"] == 0, counts["fallback_reasons"]
        clocks = time.perf_counter(), time.process_time()
        counters = (counts["calls"], counts["dispatches"], counts["products"], *attention.values())
        steps.append((loss, norm, *clocks, *counters))
        if step == profiled_step - 1:
            profile.__enter__()
            meter.__enter__()
        elif step == profiled_step:
            meter.__exit__(None, None, None)
            profile.__exit__(None, None, None)
        log(self, step, loss, largest, norm, **rest)

    def sum_gradients(model: Any) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def shortened(self: Any) -> Any:
        config = parse(self)
        if os.environ["TITAN_LAYERS"] != "0":
            del config.model_spec.model.layers[int(os.environ["TITAN_LAYERS"]) :]
        return config

    attention_masks._compiled_create_block_mask = create_block_mask  # compilation takes longer than the steps
    attention = count_attention()
    initialize_by_global_shape()
    MetricsProcessor.log = log_and_keep
    fsdp.disable_fsdp_gradient_division = sum_gradients
    program.ConfigManager.parse_args = shortened
    spmd_types.set_dist(GlooDistributed())
    program.main()
    if os.environ["RANK"] == "0":
        names = ("losses", "norms", "seconds", "cpu_seconds", "calls", "dispatches", "products", *attention)
        found: dict[str, Any] = {name: list(values) for name, values in zip(names, zip(*steps))}
        if profiled_step:
            found |= {"received_bytes": meter.received_bytes, "peak_bytes": peak_bytes(profile)}
        Path(os.environ["TITAN_RECORD"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
