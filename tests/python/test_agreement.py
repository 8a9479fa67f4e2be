"""Reports of differences between ranks, and the exchange of texts through a store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwright.runtime.agreement import Statement, StoreTexts, error_text

WAIT = timedelta(seconds=20)


def _error(*statements: Statement) -> list[str]:
    return error_text(
        statements[0], {rank: statement.to_json() for rank, statement in enumerate(statements)}, " (here)"
    ).splitlines()


def test_report_lists_differing_fields() -> None:
    statement, other_size = (Statement("move", {"size": size, "dtype": "float32", "async_op": True}) for size in (4, 8))
    any_mode = Statement("move", {"size": 4, "dtype": "float32", "async_op": None})
    assert not _error(statement, statement, any_mode)
    head = "shardwright: move: the ranks differ, nothing was sent (here)"
    assert _error(statement, other_size, any_mode) == [head, "  size: 4 on ranks [0, 2]; 8 on ranks [1]"]
    assert _error(statement, Statement("sum", {"rows": 3})) == [head, "  call: move on ranks [0]; sum on ranks [1]"]
    fewer = Statement("move", {"size": 4, "async_op": True})
    assert _error(statement, fewer) == [head, "  dtype: float32 on ranks [0]; not given on ranks [1]"]


def test_report_lists_refused_arguments() -> None:
    fits, refusing = Statement("move", {"size": 4}, {"x": None}), Statement("move", errors={"x": "is None"})
    head = "shardwright: move: on ranks [1] the arguments are not allowed, nothing was sent (here)"
    assert _error(fits, refusing) == [head, "  x: is None on ranks [1]"]
    assert _error(refusing, refusing)[1:] == ["  x: is None on ranks [0, 1]"]


def test_long_reports_are_truncated() -> None:
    texts = ["x" * 1000 + end + "y" * 1000 for end in "ab"]
    _, line = _error(*(Statement("move", {"text": text}) for text in texts))
    assert "xa" in line and "xb" in line and len(line) < 700
    lines = _error(*(Statement("move", {str(i): rank for i in range(50)}) for rank in range(40)))
    assert len(lines) == 22 and lines[-1] == "  and 30 more"
    _, line = _error(*(Statement("move", {"a": rank == 0}) for rank in range(40)))
    assert line.endswith(", 15, 16, ... 39 in all]")


def _exchange(texts: list[StoreTexts], said: list[str]) -> list[dict[str, str]]:
    """Returns the texts that each of two processes receives in one round."""
    received: list[dict[str, str]] = [{}, {}]

    def exchange(own: int) -> None:
        received[own] = texts[own].exchange("a test", said[own], ("a", "b"), "ab"[own], WAIT)

    threads = [threading.Thread(target=exchange, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return received


def test_rounds_keep_few_store_keys() -> None:
    store = dist.HashStore()
    texts = [StoreTexts(store), StoreTexts(store)]
    counts = []
    for number in range(6):
        said = ["same", "same"] if number % 2 else [f"{number}", f"-{number}"]
        assert _exchange(texts, said) == [dict(zip("ab", said, strict=True))] * 2
        counts.append(store.num_keys())
    assert counts[1] == counts[-1] == 8


def test_timeout_names_missing_ranks() -> None:
    store, ranks = dist.HashStore(), (0, 1, 2, 3)
    text = r"rank 2 waited 0.1 s for ranks \[0, 1, 3\] to call move, number 1 on ranks \[0, 1, 2, 3\]"
    for rank in (2, 0, 1, 3):  # no rank succeeds after another has raised
        with pytest.raises(RuntimeError, match=rf"{text} \(this is rank {rank}\)$"):
            StoreTexts(store).exchange("move", "", ranks, rank, timedelta(seconds=0.1) if rank == 2 else WAIT)


def test_rounds_after_a_timeout_succeed() -> None:
    store = dist.HashStore()
    texts = [StoreTexts(store), StoreTexts(store)]
    for own, timeout in ((1, timedelta(seconds=0.1)), (0, WAIT)):
        with pytest.raises(RuntimeError, match=r"b waited 0.1 s for a to call a test, number 1 on a, b"):
            texts[own].exchange("a test", "text", ("a", "b"), "ab"[own], timeout)
    for said in (["same", "same"], ["one", "other"], ["same", "same"]):
        assert _exchange(texts, said) == [dict(zip("ab", said, strict=True))] * 2
