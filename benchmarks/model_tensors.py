"""The tensors of published models: names, shapes, and placements on a trainer and a server, without values.

Shapes are those of the models' configurations on the Hugging Face hub (meta-llama/Llama-3.1-8B, Qwen/Qwen3-30B-A3B),
with every width divided by the same number. A trainer cuts dim 0 of every tensor (FSDP2). A server is tensor-parallel:
columns of q, k, v, gate and up, rows of o and down, the vocabulary; norms and routers on every rank. It holds whole
experts, round robin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TRAINED = "S(0)"
COLUMNS, ROWS, EVERYWHERE = "S(0)", "S(1)", "R"


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    served: str  # placement on the server's ranks; the trainer's is TRAINED

    @property
    def elements(self) -> int:
        elements = 1
        for length in self.shape:
            elements *= length
        return elements


def llama_8b(divide: int = 8) -> list[Weight]:
    """Returns 291 tensors."""
    hidden, ffn, kv, vocab = (n // divide for n in (4096, 14336, 1024, 128256))
    layers: list[Weight] = []
    for i in range(32):
        attention = _attention(f"model.layers.{i}.self_attn", hidden, hidden, kv)
        mlp = _mlp(f"model.layers.{i}.mlp", hidden, ffn)
        layers += [*attention, *mlp, *_norms(f"model.layers.{i}", hidden)]
    return [*_ends(hidden, vocab), *layers]


def qwen3_moe(divide: int = 16, servers: int = 2) -> list[Weight]:
    """Returns 18,867 tensors, of which 18,432 belong to experts."""
    hidden, expert, q, kv, head, vocab = (n // divide for n in (2048, 768, 4096, 512, 128, 151936))
    layers: list[Weight] = []
    for i in range(48):
        layer = f"model.layers.{i}"
        layers += [*_attention(f"{layer}.self_attn", hidden, q, kv), *_norms(layer, hidden)]
        layers += [Weight(f"{layer}.self_attn.{name}_norm.weight", (head,), EVERYWHERE) for name in ("q", "k")]
        layers.append(Weight(f"{layer}.mlp.gate.weight", (128, hidden), EVERYWHERE))
        for e in range(128):
            whole = f"Owned(0,{e % servers})"
            experts = _mlp(f"{layer}.mlp.experts.{e}", hidden, expert)
            layers += [Weight(weight.name, weight.shape, whole) for weight in experts]
    return [*_ends(hidden, vocab), *layers]


def _attention(name: str, hidden: int, q: int, kv: int) -> Iterator[Weight]:
    yield Weight(f"{name}.q_proj.weight", (q, hidden), COLUMNS)
    yield Weight(f"{name}.k_proj.weight", (kv, hidden), COLUMNS)
    yield Weight(f"{name}.v_proj.weight", (kv, hidden), COLUMNS)
    yield Weight(f"{name}.o_proj.weight", (hidden, q), ROWS)


def _mlp(name: str, hidden: int, ffn: int) -> Iterator[Weight]:
    yield Weight(f"{name}.gate_proj.weight", (ffn, hidden), COLUMNS)
    yield Weight(f"{name}.up_proj.weight", (ffn, hidden), COLUMNS)
    yield Weight(f"{name}.down_proj.weight", (hidden, ffn), ROWS)


def _norms(name: str, hidden: int) -> Iterator[Weight]:
    yield Weight(f"{name}.input_layernorm.weight", (hidden,), EVERYWHERE)
    yield Weight(f"{name}.post_attention_layernorm.weight", (hidden,), EVERYWHERE)


def _ends(hidden: int, vocab: int) -> Iterator[Weight]:
    yield Weight("model.embed_tokens.weight", (vocab, hidden), COLUMNS)
    yield Weight("lm_head.weight", (vocab, hidden), COLUMNS)
    yield Weight("model.norm.weight", (hidden,), EVERYWHERE)
