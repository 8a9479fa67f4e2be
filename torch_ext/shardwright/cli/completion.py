"""The command `shardwright completion`: prints a script for a shell, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from .._native import _planner
from .parsers import COMMANDS, parser_of

SHELLS = ("bash", "zsh")


def main(argv: Sequence[str]) -> int:
    """Prints the script for the shell."""
    shell = parser().parse_args(argv).shell
    print(_bash() if shell == "bash" else _zsh())
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(
        prog="shardwright completion",
        description='Prints a completion script. For bash: eval "$(shardwright completion bash)". For zsh: write it '
        "to a file _shardwright in a folder of $fpath.",
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that will run the script")
    return made


def _actions(command: str) -> list[argparse.Action]:
    """Returns the options and positional arguments of a command."""
    return list(parser_of(command)._actions)


def _words(action: argparse.Action) -> list[str]:
    """Returns the values that an argument may have or often has."""
    if "--topology" in action.option_strings:
        return _planner.Topology.names()
    return [str(choice) for choice in action.choices or ()]


def _takes_file(action: argparse.Action) -> bool:
    """Returns True if the argument is the name of a file."""
    return "--topology" in action.option_strings or any(
        word in str(action.metavar or "") for word in ("FILE", ".json", "FOLDER")
    )


def _bash() -> str:
    """Returns the script for bash, which completes file names where the script has no words."""
    values: dict[str, list[str]] = {}  # options by the text of their values
    lines = []
    for command in COMMANDS:
        words: list[str] = []
        for action in _actions(command):
            words += action.option_strings or _words(action)
            if action.option_strings and action.nargs != 0:
                patterns = [f'"{command} {option}"' for option in action.option_strings]
                values.setdefault(" ".join(_words(action)), []).extend(patterns)
        lines.append(f"    {command}) words={shlex.quote(' '.join(words))} ;;")
    of_values = [f"    {'|'.join(patterns)}) words={shlex.quote(words)} ;;" for words, patterns in values.items()]
    return "\n".join(
        (
            "_shardwright() {",
            '  local command="${COMP_WORDS[1]}" words',
            '  if [ "$COMP_CWORD" -eq 1 ]; then command=; fi',
            '  case "$command ${COMP_WORDS[COMP_CWORD-1]}" in',
            *of_values,
            '    *) case "$command" in',
            f'    "") words={shlex.quote(" ".join(COMMANDS))} ;;',
            *lines,
            "    esac ;;",
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _shardwright shardwright",
        )
    )


def _zsh() -> str:
    """Returns the script for zsh."""
    lines = ["#compdef shardwright", "_shardwright() {", "  local -a commands=("]
    lines += [f"    {shlex.quote(f'{name}:{help_text}')}" for name, help_text in COMMANDS.items()]
    lines += ["  )", "  if (( CURRENT == 2 )); then _describe command commands; return; fi"]
    lines += ["  local command=$words[2]", "  shift words; (( CURRENT-- ))", "  case $command in"]
    for command in COMMANDS:
        specs = [shlex.quote(spec) for action in _actions(command) for spec in _zsh_specs(action)]
        lines.append(f"    {command}) _arguments {' '.join(specs)} ;;")
    lines += ["  esac", "}", 'if [ "$funcstack[1]" = _shardwright ]; then _shardwright "$@"']
    lines += ["else compdef _shardwright shardwright; fi"]
    return "\n".join(lines)


def _zsh_specs(action: argparse.Action) -> list[str]:
    """Returns the specifications of an argument for ``_arguments``, one per spelling."""
    words = " ".join(_words(action))
    completer = f"({words})" if words else ""
    if _takes_file(action):
        completer = f"{{compadd {words}; _files}}" if words else "_files"
    name = action.dest.replace("_", "-")
    help_text = _zsh_escaped(str(action.help or ""))
    if not action.option_strings:
        return [f":{name}:{completer}"]
    values = 0 if action.nargs == 0 else action.nargs if isinstance(action.nargs, int) else 1
    value = f":{name}:{completer or ' '}" * values
    return [f"*{option}[{help_text}]{value}" for option in action.option_strings]


def _zsh_escaped(text: str) -> str:
    """Escapes the characters that end a description."""
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text.replace("%(default)s", "")
