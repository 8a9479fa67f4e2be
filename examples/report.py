"""Plain terminal output from rank 0, at most 100 columns."""

import os
import sys
import textwrap

import torch.distributed as dist

WIDTH = 100


def is_speaker() -> bool:
    """Returns True if this process prints: rank 0, also before and after it has a group, or a process without ranks."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def say(line: str = "") -> None:
    """Prints one line, once for all ranks."""
    if is_speaker():
        print(line, flush=True)


def say_losses(losses: dict[str, list[float]]) -> None:
    """Prints a line with the losses of each way to train."""
    for name, values in losses.items():
        say(f"  {name:12} " + "  ".join(f"{loss:.6f}" for loss in values))


def say_text(text: str, indent: int = 2) -> None:
    """Prints prose, wrapped."""
    say(textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent))


def heading(number: int, text: str) -> None:
    """Starts a part of the demo."""
    say(f"\n{number}. {text}\n{'-' * WIDTH}")


def in_mebibytes(num_bytes: float) -> str:
    """Returns the number without a unit, with enough digits for small tensors."""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.2f}" if mebibytes < 10 else f"{mebibytes:.1f}"


class ProgressBar:
    """A progress line. It is redrawn on a terminal, and only appended to in a log."""

    MARKS = 40

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done = label, total, 0
        self.redraw = sys.stdout.isatty()
        self.speaks = is_speaker()
        if self.speaks and not self.redraw:
            print(f"  {label} [", end="", flush=True)

    def advance(self, note: str = "") -> None:
        """Counts one more of `total` as done."""
        marks_before = self.done * self.MARKS // self.total
        self.done += 1
        marks = self.done * self.MARKS // self.total
        if not self.speaks:
            return
        if self.redraw:
            bar = "#" * marks + "." * (self.MARKS - marks)
            print(f"\r  {self.label} [{bar}] {self.done}/{self.total}  {note:30}", end="", flush=True)
        else:
            print("#" * (marks - marks_before), end="", flush=True)

    def close(self) -> None:
        """Ends the line."""
        if self.speaks:
            print("" if self.redraw else f"] {self.total}/{self.total}", flush=True)
