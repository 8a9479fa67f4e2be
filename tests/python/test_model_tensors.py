"""The model tables of benchmarks have the published numbers of tensors and parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardwright as sw

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from model_tensors import Weight, llama_8b, qwen3_moe  # noqa: E402

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize(
    ("weights", "tensors", "parameters"), [(llama_8b(1), 291, 8_030_261_248), (qwen3_moe(1), 18_867, 30_532_122_624)]
)
def test_numbers_of_tensors_and_parameters(weights: list[Weight], tensors: int, parameters: int) -> None:
    assert len({weight.name for weight in weights}) == len(weights) == tensors
    assert sum(weight.elements for weight in weights) == parameters


def test_server_layouts_are_even() -> None:
    server = sw.Mesh({"tp": 2}, [2, 3])
    for weight in {(w.shape, w.served) for w in (*llama_8b(8), *qwen3_moe(16))}:
        layout = sw.Layout(server, weight[0], [weight[1]])
        assert layout.has_equal_parts or weight[1].startswith("Owned")
