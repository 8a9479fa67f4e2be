"""Extension of griffe, which reads the docstrings of the API pages (mkdocs.yml).

- Resolves the compiled modules to their stubs. `shardwright._native` imports them at run time, which static analysis
  does not follow.
- Makes names in single backticks, such as `plan`, links to their entries. A name means an entry of the same module,
  else of the same subpackage, else of the package; names of parameters are left alone. Double backticks are literals.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).resolve().parent.parent / "docs" / "api"
PACKAGE = "shardwright"
NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?![`\]])")


class Names(griffe.Extension):
    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.canonical_path == f"{PACKAGE}._native":
            for stub in ("_planner", "_runtime"):
                mod.members[stub] = griffe.Alias(stub, f"{PACKAGE}.{stub}", parent=mod)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.name != PACKAGE:
            return
        loader.resolve_aliases(external=False)
        text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
        found = {}
        for entry in re.findall(rf"^::: {PACKAGE}\.(\S+)", text, re.MULTILINE):
            with contextlib.suppress(KeyError):  # mkdocstrings reports names that do not exist
                found[f"{PACKAGE}.{entry}"] = pkg[entry]
        paths = {entry.canonical_path: path for path, entry in found.items()}
        for entry in found.values():
            self.link(entry, paths)

    def link(self, entry: Any, paths: dict[str, str]) -> None:
        """Makes links in the docstrings of an entry and of its members.

        Args:
            entry: an object or an alias.
            paths: canonical path of every entry: its path on the pages.
        """
        found = entry.final_target if entry.is_alias else entry
        if found.docstring:
            own = {found.name, *(p.name for p in getattr(found, "parameters", ()))}

            def linked(match: re.Match[str]) -> str:
                name = re.sub(rf"^(?:sw|{PACKAGE})\.", "", match[1])
                public = ".".join(found.module.canonical_path.split(".")[:2])
                near = paths.get(f"{found.module.canonical_path}.{name}")
                candidates = (near, f"{public}.{name}", f"{PACKAGE}.{name}")
                path = next((path for path in candidates if path in paths.values()), None)
                return match[0] if path is None or name in own else f"[{match[0]}][{path}]"

            found.docstring.value = NAME.sub(linked, found.docstring.value)
        if found.is_class:
            for name, member in found.members.items():
                if not name.startswith("_") and not member.is_alias:
                    self.link(member, paths)
