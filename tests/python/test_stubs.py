"""The stubs of the compiled modules match the modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STUBS = ROOT / "torch_ext" / "shardwright"


def _check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "stubs"), "--check", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_stubs_are_up_to_date() -> None:
    checked = _check(STUBS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_changed_stub_is_reported(tmp_path: Path) -> None:
    for name in ("_planner.pyi", "_runtime.pyi"):
        shutil.copy(STUBS / name, tmp_path / name)
    path = tmp_path / "_planner.pyi"
    path.write_text(path.read_text().replace("class Mesh:", "class Grid:"))
    checked = _check(tmp_path)
    assert checked.returncode == 1
    assert "-class Grid:\n+class Mesh:" in checked.stdout
