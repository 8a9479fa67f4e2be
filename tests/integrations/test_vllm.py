"""Tests of the weight transfer engines with a vLLM server on CPU, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

WORKERS = 2
STEPS = 3
PROCESS_SECONDS = 1800  # limit of starting the server, and of training, on a busy machine
ANSWER_SECONDS = 1000  # longer than vLLM's own limit, so that its log has the reason
# In its first step vLLM compiles functions and waits for this: minutes on a busy machine.
VLLM_TIMEOUTS = {"VLLM_ENGINE_READY_TIMEOUT_S": str(PROCESS_SECONDS), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900"}
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "vllm_weight_sync.py"


def save_model(folder: pathlib.Path, tied: bool) -> None:
    """Saves a small random Llama and a tokenizer of as many words."""
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,  # vLLM pads it to 512
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(500)}, unk_token="t0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="t0").save_pretrained(
        folder
    )


@contextlib.contextmanager
def _server(model: pathlib.Path, log: pathlib.Path, *more: str) -> Iterator[Callable[..., Any]]:
    """Runs `vllm serve` with `more` options and yields a function that posts to a route and returns the answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # for the routes of weight transfer
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(WORKERS)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **VLLM_TIMEOUTS,
    }
    options = [f"--port={port}", f"--tensor-parallel-size={WORKERS}", "--enforce-eager", "--max-model-len=128"]
    options += ["--dtype=bfloat16", '--weight-transfer-config={"backend": "shardwright"}']
    options += ["--worker-extension-cls=shardwright.integrations.vllm.worker.WorkerExtension"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *options, *more]
    url = f"http://127.0.0.1:{port}"

    def post(route: str, **payload: Any) -> Any:
        data = json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/{route}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"vLLM failed in {route}:\n{log.read_text()[-8000:]}") from error

    with open(log, "w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        _wait(url, server, log)
        post.url = url  # type: ignore[attr-defined]
        yield post
    finally:
        server.terminate()
        server.wait(60)


def _wait(url: str, server: subprocess.Popen[str], log: pathlib.Path) -> None:
    """Waits until the server answers."""
    deadline = time.monotonic() + PROCESS_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
        time.sleep(1)


def _answer(post: Callable[..., Any], model: pathlib.Path) -> Any:
    """Returns the logarithms of probabilities of a prompt's tokens and of those that the server generates."""
    prompt = list(range(1, 40))
    options = {"max_tokens": 8, "temperature": 0, "logprobs": 5, "prompt_logprobs": 5}
    choice = post("v1/completions", model=str(model), prompt=prompt, **options)["choices"][0]
    return choice["prompt_logprobs"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


def test_server_answers_with_the_trained_weights(tmp_path: pathlib.Path) -> None:
    """After syncs, a server answers like one that starts from the trained checkpoint. On CPU vLLM packs weights.

    Embeddings are tied here, and not in test_verl.py. vLLM's own `reload_weights` is no reference for them: where it
    packs the output layer, it packs it again only for a checkpoint with `lm_head.weight`.
    """
    model, trained = tmp_path / "model", tmp_path / "trained"
    save_model(model, tied=True)
    with _server(model, tmp_path / "server.log") as post:
        before = _answer(post, model)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
        command += [f"--model={model}", f"--server={post.url}", f"--workers={WORKERS}"]  # type: ignore[attr-defined]
        command += [f"--steps={STEPS}", f"--save={trained}"]
        trainer = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS)
        assert trainer.returncode == 0, trainer.stderr[-4000:] + (tmp_path / "server.log").read_text()[-4000:]
        synced = _answer(post, model)
    assert synced != before
    with _server(trained, tmp_path / "reference.log", f"--tokenizer={model}") as post:
        assert _answer(post, trained) == synced
    sent = [int(line.split()[-2].replace(",", "")) for line in trainer.stdout.splitlines() if line.startswith("step")]
    assert len(sent) == STEPS and max(sent[1:]) < 0.7 * sent[0]  # only what changed
