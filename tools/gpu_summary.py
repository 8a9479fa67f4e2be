"""Adds a part to the summary of tools/gpu_check and prints it: gpu_summary.py FILE NAME STATUS SECONDS.

It does not import torch, so that writing a summary after each part costs little time.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask_for(field: str) -> list[str]:
    """Returns this field of each GPU, from nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()


def version_of(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main(file: Path, name: str, status: int, seconds: int) -> None:
    if file.exists():
        summary: dict[str, Any] = json.loads(file.read_text())
    else:
        summary = {
            "gpus": ask_for("name"),
            "driver": next(iter(ask_for("driver_version")), None),
            "python": platform.python_version(),
            "torch": version_of("torch"),
            "nccl": version_of("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
            "parts": [],
        }
    # A part that is run again, in a later call, takes the place of what it was.
    summary["parts"] = [part for part in summary["parts"] if part["name"] != name]
    summary["parts"].append({"name": name, "status": status, "seconds": seconds})
    file.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"=== {name}: {'ok' if status == 0 else f'FAILED with status {status}'} after {seconds} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
