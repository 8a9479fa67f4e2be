"""Hooks of MkDocs for the documentation site (mkdocs.yml).

The pages of docs/ link to files elsewhere in the repository, so that the links also work on GitHub. This module adds a
page to the site for each of these files, and lets the links lead there:

- a Markdown file, such as CONTRIBUTING.md, becomes the page project/contributing.md;
- any other file becomes a page with its text, source/PATH.md.

The links of these pages are followed in the same way. A link whose text is the name of a page, as in
`[guide.md](docs/guide.md)`, gets the title of the page as its text. The build fails if a page would load anything from
another server.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
HOME = "index.md"

# Markdown pages from outside of docs/ that the navigation lists.
PROJECT_PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
)

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^]\[]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\ssrc=\"?(?:https?:)?//[^>]*|<link\b[^>]*\shref=\"?(?:https?:)?//[^>]*"
)
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".h": "cpp", ".cpp": "cpp"}

_sources: dict[str, str] = {}  # path of a page in the site: path of its file in the repository


def site_path(path: str) -> str:
    """Returns the path of a page in the site, from the path of its file in the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path == "README.md":
        return HOME
    if path.endswith(".md"):
        name = PurePosixPath(path)
        stem = name.stem if name.stem != "README" else name.parent.name
        return f"project/{stem.lower()}.md"
    return f"source/{path}.md"


def with_site_links(text: str, source: str) -> tuple[str, set[str]]:
    """Lets the links of a page lead to pages of the site. Returns the text and the files that need such a page.

    Args:
        text: Markdown of the page.
        source: path of its file in the repository.
    """
    found: set[str] = set()
    page = site_path(source)

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if re.match(r"[a-z]+:", target) or not (ROOT / path).is_file():
            return match.group()  # MkDocs reports links that lead nowhere
        if target.endswith(".md") and path.endswith(text):
            text = title_of(path)
        if not path.startswith(DOCS):
            found.add(path)
        return f"[{text}]({os.path.relpath(site_path(path), os.path.dirname(page) or '.')}{anchor})"

    parts, at = [], 0
    for fence in FENCED.finditer(text):
        parts += [LINK.sub(replaced, text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, LINK.sub(replaced, text[at:])]), found


def title_of(path: str) -> str:
    """Returns the first heading of a Markdown file."""
    return re.search(r"^# (.*)$", (ROOT / path).read_text(), re.MULTILINE)[1]


def page_of(path: str) -> str:
    """Returns a file of the repository as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(PurePosixPath(path).suffix, 'text')}\n{text}{fence}\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of docs/."""
    _sources.clear()
    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    _sources.update({file.src_uri: DOCS + file.src_uri for file in pages})
    waiting = set(PROJECT_PAGES)
    for source in _sources.values():
        waiting |= with_site_links((ROOT / source).read_text(), source)[1]
    while waiting:
        path = waiting.pop()
        if site_path(path) in _sources or path == "README.md":
            continue
        text = page_of(path)
        is_in_nav = InclusionLevel.INCLUDED if path in PROJECT_PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_path(path), content=text, inclusion=is_in_nav))
        _sources[site_path(path)] = path
        if path.endswith(".md"):
            waiting |= with_site_links(text, path)[1]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lets the links of a page lead to pages of the site."""
    return with_site_links(markdown, _sources[page.file.src_uri])[0]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Checks that a page loads nothing from other servers, so that the site works without a network."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} must load only files of the site, got {found.group()}")
    return output
