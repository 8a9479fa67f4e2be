"""Describes the machine and the versions, for every file of results."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def describe(*packages: str, date: str | None = None) -> dict:
    """Returns the date, the versions of shardwright, Python and these packages, and the machine."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    versions = {name: version(name) for name in ("shardwright", *packages)}
    return {
        "date": date or time.strftime("%Y-%m-%d"),
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "model": model},
    }


def write(path: str | Path, results: dict) -> None:
    """Writes results as JSON, with a line for each list item, and prints the path."""
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(results) + "\n")
    print(f"\nwritten to {path}")


def _text(value: object, indent: int = 0) -> str:
    """Returns JSON in which values of up to 120 characters, and all items of lists, have a line each."""
    line = json.dumps(value)
    if len(line) + indent <= 120 or not isinstance(value, dict | list):
        return line
    pad = " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + json.dumps(item) for item in value) + f"\n{' ' * indent}]"
    items = (f"{pad}{json.dumps(key)}: {_text(item, indent + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{' ' * indent}}}"
