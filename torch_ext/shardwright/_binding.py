"""How the drop-in takes PyTorch's functions and gives them back: which modules hold them, and who wants what.

`Holders` finds a function in every loaded module. `Switch` says what is on: for the process as a whole, and within the
blocks of its threads.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import Any, Generic, TypeVar

Mode = TypeVar("Mode")


class Holders:
    """The places, of all loaded modules, that hold one of two functions: the original or what stands in for it.

    Looking through the names of all modules takes tens of milliseconds, so it is done once for each. A module is looked
    through again when it has more names or fewer than then, as one has that was still being imported. One that already
    had a name and puts the function there later is found if it is the function's own name.
    """

    def __init__(self) -> None:
        self._pair: tuple[object, object] | None = None
        self._sizes: dict[int, int] = {}  # by id of a module's namespace: how many names were looked through
        self._places: list[tuple[dict[str, Any], str]] = []

    def replace(self, original: Any, ours: Any, *, by_ours: bool, but_in: dict[str, Any]) -> None:
        """Puts `ours` where `original` is, or the other way round, under whatever name but in one namespace."""
        old, new = (original, ours) if by_ours else (ours, original)
        self._look_for(original, ours, but_in)
        for names, name in self._places:
            if names.get(name) is old:
                names[name] = new

    def _look_for(self, original: Any, ours: Any, but_in: dict[str, Any]) -> None:
        if self._pair is None or self._pair[0] is not original or self._pair[1] is not ours:
            self._pair = (original, ours)
            self._sizes.clear()
            self._places.clear()
        known = {(id(names), name) for names, name in self._places}
        sizes, own_name = self._sizes, original.__name__
        for module in list(sys.modules.values()):
            try:
                names = module.__dict__
                size, own = len(names), names.get(own_name)
            except (AttributeError, TypeError):
                continue  # something else that somebody put among the modules
            if sizes.get(id(names)) == size and own is not original and own is not ours:
                continue
            if not isinstance(names, dict) or names is but_in:
                continue
            sizes[id(names)] = size
            found = [name for name, value in list(names.items()) if value is original or value is ours]
            self._places += [(names, name) for name in found if (id(names), name) not in known]


@dataclasses.dataclass(eq=False)
class _Block(Generic[Mode]):
    thread: int
    mode: Mode


class Switch(Generic[Mode]):
    """What is on, for all threads alike: a mode for the process, and over it those of the blocks that have not ended.

    Blocks may overlap in any way, as those of several threads do: the one that began last decides, and when one ends,
    in whatever order, what is left decides. Not to be used by two threads at once: whoever asks holds a lock.
    """

    def __init__(self, off: Mode) -> None:
        self._base = off
        self._blocks: list[_Block[Mode]] = []

    @property
    def mode(self) -> Mode:
        return self._blocks[-1].mode if self._blocks else self._base

    @property
    def modes(self) -> list[Mode]:
        """Of the process and all blocks."""
        return [self._base, *(block.mode for block in self._blocks)]

    @property
    def mine(self) -> Mode:
        """What this thread switches: the mode of its innermost block, else that of the process."""
        block = self._my_block()
        return self._base if block is None else block.mode

    @mine.setter
    def mine(self, mode: Mode) -> None:
        block = self._my_block()
        if block is None:
            self._base = mode
        else:
            block.mode = mode

    def begin(self, mode: Mode) -> _Block[Mode]:
        block = _Block(threading.get_ident(), mode)
        self._blocks.append(block)
        return block

    def end(self, block: _Block[Mode]) -> None:
        self._blocks.remove(block)

    def _my_block(self) -> _Block[Mode] | None:
        thread = threading.get_ident()
        return next((block for block in reversed(self._blocks) if block.thread == thread), None)
