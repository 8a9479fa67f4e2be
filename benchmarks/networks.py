"""Runs a benchmark on ranks over limited links (tools/testnet) and returns its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTNET = Path(__file__).resolve().parent.parent / "tools" / "testnet"


class Network(NamedTuple):
    nodes: int
    per_node: int
    gbit: float

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node}, {self.gbit} Gbit/s"

    @staticmethod
    def parse(numbers: Sequence[str]) -> Network:
        """Parses the arguments that `run` passes."""
        nodes, per_node, gbit = numbers
        return Network(int(nodes), int(per_node), float(gbit))


def run(script: str, network: Network, options: Sequence[str]) -> Any:
    """Returns the JSON that the first rank writes.

    Each rank runs ``script --on-a-rank NODES PER_NODE GBIT OUT`` with these options. Ends this process if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        nodes, per_node, gbit = map(str, network)
        on_a_rank = ["--on-a-rank", nodes, per_node, gbit, out, *options]
        command = [str(TESTNET), nodes, per_node, f"{round(1000 * network.gbit)}mbit", "--", sys.executable, script]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns if it cannot look up host names
        status = subprocess.run([*command, *on_a_rank], env=quiet).returncode
        if status:
            sys.exit(status)
        return json.loads(Path(out).read_text())
