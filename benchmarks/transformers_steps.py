"""Training steps and checkpoints of transformers on Gloo ranks of this machine: stock, and with shardwright.

    make bench-transformers                                       # results/transformers-torch<version>.json
    make bench-transformers ARGS="--turns 2 --out /tmp/quick.json"

A row compares two calls, which alternate; README.md describes the statistics. A step is forward and backward of a small
random model. Bytes are the bytes received, by sw.debug.wire_meter, and memory is the peak of PyTorch's allocator above
the state before the call; both are of the worst rank. The exit status is 1 if losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.checkpoint import _load_model_checkpoint_distributed  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import say  # noqa: E402
from shardwright.integrations.transformers import fully_sharded, tp_plan  # noqa: E402
from state_dict import allocated_peak  # noqa: E402

NUM_RANKS = 4
BATCH, SEQUENCE = 2, 256
WAYS = ("stock", "ours")
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LLAMA = LlamaForCausalLM, LlamaConfig(**SIZES)
MIXTRAL = MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=16, num_experts_per_tok=4)
COUNTERS = ("calls", "products", "dispatches", "combines")

Model = Any
Call = Callable[[], Any]


def ids_of(data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data_rank)
    return torch.randint(0, SIZES["vocab_size"], (BATCH, SEQUENCE), generator=generator)


def step(model: Model, ids: torch.Tensor) -> float:
    """Runs forward and backward. Returns the loss."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


class Models:
    """Makes models of the same weights in both ways."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, (make, config) in (("llama", LLAMA), ("mixtral", MIXTRAL)):
            if dist.get_rank() == 0:
                torch.manual_seed(0)
                make(config).save_pretrained(folder / name)
        dist.barrier()

    def make(self, name: str, **options: Any) -> Model:
        make = (LLAMA if name == "llama" else MIXTRAL)[0]
        return make.from_pretrained(self.folder / name, distributed_config=DistributedConfig(**options))

    def steps(self, name: str, sizes: dict[str, int], **ours: Any) -> dict[str, Call]:
        """Returns a step of each way; `ours` are further options of our `DistributedConfig`."""
        ids = ids_of(dist.get_rank() // sizes.get("tp_size", 1))
        made = (self.make(name, **sizes), self.make(name, **sizes, **ours))
        return {way: functools.partial(step, model, ids) for way, model in zip(WAYS, made, strict=True)}


def cases(models: Models) -> dict[str, tuple[str, Call]]:
    """Returns for each row the lines to change and a function that makes its two calls."""
    both = {"fsdp_size": 2, "tp_size": 2}
    enabled = "`with sw.enabled():`"

    def training() -> dict[str, Call]:
        return models.steps("llama", both)

    def checkpoint(loads: bool) -> dict[str, Call]:
        model = models.make("llama", **both)
        saved = models.folder / "saved"
        model.save_pretrained(saved, distributed_checkpoint=True)
        if loads:
            call = functools.partial(_load_model_checkpoint_distributed, model, saved)
        else:
            call = functools.partial(model.save_pretrained, saved, distributed_checkpoint=True)
        return dict.fromkeys(WAYS, call)

    def overlapped(is_sequence: bool) -> dict[str, Call]:
        plan = tp_plan(*LLAMA, sequence_parallel=is_sequence)
        return models.steps("llama", {"tp_size": 4}, tp_plan=plan)

    def sharded() -> dict[str, Call]:
        ids = ids_of(dist.get_rank())
        stock = models.make("llama", fsdp_size=4)
        with fully_sharded():
            ours = models.make("llama", fsdp_size=4)
        return {way: functools.partial(step, model, ids) for way, model in zip(WAYS, (stock, ours), strict=True)}

    def experts() -> dict[str, Call]:
        return models.steps("mixtral", {"fsdp_size": 4, "ep_size": 4}, ep_implementation="shardwright")

    return {
        "step, FSDP 2 x TP 2": (enabled, training),
        "saving, FSDP 2 x TP 2": (enabled, functools.partial(checkpoint, False)),
        "loading, FSDP 2 x TP 2": (enabled, functools.partial(checkpoint, True)),
        "step, TP 4": ("`tp_plan=tp_plan(LlamaForCausalLM, config)`", functools.partial(overlapped, False)),
        "step, TP 4, over the sequence": (
            "`tp_plan=tp_plan(LlamaForCausalLM, config, sequence_parallel=True)`",
            functools.partial(overlapped, True),
        ),
        "step, FSDP 4": ("`with fully_sharded():`", sharded),
        "step, FSDP 4 x EP 4": ('`ep_implementation="shardwright"`', experts),
    }


def around(way: str) -> contextlib.AbstractContextManager:
    return sw.enabled(strict=True) if way == "ours" else contextlib.nullcontext()


def compare(name: str, lines: str, calls: dict[str, Call], turns: int) -> dict:
    """Returns one row, the same on every rank."""
    results = {}
    for way, call in calls.items():
        with around(way):
            call()
            results[way] = call()
    is_right = results["stock"] is None or abs(results["stock"] - results["ours"]) < 1e-4
    right = bool(over_ranks([float(is_right)], dist.ReduceOp.MIN)[0])
    row: dict[str, Any] = {"case": name, "change": lines, "right": right}
    for way, call in calls.items():
        with around(way):
            sw.reset_stats()
            with sw.debug.wire_meter() as meter:
                call()
            counts = sw.stats()
            values = [float(meter.received_bytes), float(meter.calls), allocated_peak(call)]
        received, collectives, peak = over_ranks(values, dist.ReduceOp.MAX)
        row[way] = {"received_bytes": int(received), "collectives": int(collectives), "peak_bytes": int(peak)}
        row[way]["our_calls"] = {counter: counts[counter] for counter in COUNTERS if counts[counter]}
    times = timing.among_ranks(calls, around=around).of_count(turns)
    for way in WAYS:
        row[way]["ms"] = round(1e3 * times.low[way], 1)
    return {**row, "stock_over_ours": round(times.low["stock"] / times.low["ours"], 3)}


def run_rank(folder: str, turns: int, out: str, head: dict) -> None:
    """Runs everything on one rank; rank 0 prints and writes."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    rows = []
    say(f"{'':<32}{'stock ms':>10}{'ours ms':>10}{'MiB received':>16}{'peak MiB':>16}")
    for name, (lines, make) in cases(Models(Path(folder))).items():
        row = compare(name, lines, make(), turns)
        rows.append(row)
        pairs = [[f"{row[way][key] / 2**20:.1f}" for way in WAYS] for key in ("received_bytes", "peak_bytes")]
        texts = "".join(f"{' / '.join(pair):>16}" for pair in pairs)
        say(f"{name:<32}{row['stock']['ms']:>10}{row['ours']['ms']:>10}{texts}")
    if dist.get_rank() == 0:
        machine.write(out, {**head, "rows": rows})
    if not all(row["right"] for row in rows):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=8, help="calls of each way (default: %(default)s)")
    default = HERE / "results" / f"transformers-torch{torch.__version__.partition('+')[0]}.json"
    parser.add_argument("--out", default=str(default), help="where the results go (default: %(default)s)")
    arguments = parser.parse_args()
    setting = {"ranks": NUM_RANKS, "batch": BATCH, "sequence": SEQUENCE, "dtype": "float32", **SIZES}
    head = {**machine.describe("torch", "transformers"), "setting": setting}
    with tempfile.TemporaryDirectory() as folder:
        launch(NUM_RANKS, run_rank, folder, arguments.turns, arguments.out, head)


if __name__ == "__main__":
    main()
