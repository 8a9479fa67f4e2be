"""Scripts of `shardwright completion`, run by the shells."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from shardwright.cli import main as cli
from shardwright.cli import parsers

pytestmark = pytest.mark.any_torch


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def _options(command: str) -> set[str]:
    """Returns the long options in the help of a command."""
    words = parsers.parser_of(command).format_help().replace(",", " ").replace("[", " ").replace("]", " ").split()
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["shardwright", "pl"], {"plan"}),
        (["shardwright", ""], set(parsers.COMMANDS)),
        (["shardwright", "plan", "--back"], {"--backend"}),
        (["shardwright", "plan", "--backend", ""], {"nccl", "gloo"}),
        (["shardwright", "plan", "--backend", "gloo", "--ob"], {"--objective"}),
        (["shardwright", "plan", "--topology", "8"], {"8xNVLink"}),
        (["shardwright", "plan", "--load", ""], set()),  # bash then completes file names
        (["shardwright", "calibrate", "--device", "c"], {"cpu", "cuda"}),
        (["shardwright", "completion", "z"], {"zsh"}),
        (["shardwright", "unknown", ""], set()),
    ],
)
def test_bash_completes(words: list[str], completions: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    quoted = " ".join(f"'{word}'" for word in words)
    after = f'\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shardwright; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    ran = subprocess.run(["bash", "-c", _script("bash", capsys) + after], capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    assert set(ran.stdout.split()) == completions


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_scripts_have_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(shell, capsys)
    for command in parsers.COMMANDS:
        assert isinstance(parsers.parser_of(command), argparse.ArgumentParser)
        assert [option for option in _options(command) if option not in script] == []


# Types a line and two tabs into an interactive zsh, and prints what it shows once all completions are there.
_TYPED = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'autoload -U compinit; compinit -u -D; source {script}; PS1=; setopt list_packed; echo read"y"'
zpty -r shell shown '*ready*'
zpty -w -n shell $'shardwright {line}\\t\\t'
for _ in {{1..100}}; do
  sleep 0.1
  while zpty -r -t shell part; do shown+=$part; done
  if [[ {found} ]]; then break; fi
done
print -r -- "$shown"
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("", list(parsers.COMMANDS)),
        ("plan --backend ", ["nccl", "gloo"]),
        ("plan --topology ", ["8xNVLink", "gloo-local"]),
        ("completion ", ["bash", "zsh"]),
    ],
)
def test_zsh_completes(
    line: str, completions: list[str], capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("zsh") / "_shardwright"
    script.write_text(_script("zsh", capsys))
    found = " && ".join(f"$shown == *{word}*" for word in completions)
    typed = _TYPED.format(script=script, line=line, found=found)
    ran = subprocess.run(["zsh", "-f", "-c", typed], capture_output=True, text=True, timeout=60)
    assert [word for word in completions if word not in ran.stdout] == [], ran.stdout + ran.stderr


def test_completion_imports_no_torch() -> None:
    code = (
        "import sys, shardwright.cli.main as cli\n"
        "cli.main(['completion', 'bash'])\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0
