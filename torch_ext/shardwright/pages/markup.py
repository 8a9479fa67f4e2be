"""Style and elements of HTML pages. Pages load no other files, run no code, and adapt to dark mode and width."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

NUM_COLORS = 6
_NO_BREAK = "\u00a0"  # no-break space

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f5f6f8; --ink: #1b1f24; --soft: #57606a; --line: #d5d9de;
  --c0: #2f6fc4; --c1: #c4560a; --c2: #1d7f5f; --c3: #7a4bb5; --c4: #a3386b; --c5: #6b6b1f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1e2328; --ink: #e8eaed; --soft: #a3abb5;
  --line: #3a4149; --c0: #78aef2; --c1: #f0995c; --c2: #5cc9a3; --c3: #b899ea; --c4: #ea8db8; --c5: #c6c66a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.45 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.6rem; }
p { margin: 0.4rem 0; } .soft { color: var(--soft); font-size: 0.9rem; }
code, .mono { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.7rem; margin: 1.2rem 0 0; }
.tiles div { background: var(--card); border-radius: 0.5rem; padding: 0.7rem 0.9rem; }
.tiles dt, .tiles .soft { color: var(--soft); font-size: 0.85rem; }
.tiles dd { margin: 0; } .tiles .value { font-size: 1.35rem; font-weight: 600; }
.bar { display: flex; gap: 2px; height: 2.2rem; }
.bar div { min-width: 3px; overflow: hidden; color: var(--page); text-align: center; font-weight: 600;
  line-height: 2.2rem; border-radius: 3px; }
.steps { list-style: none; margin: 0.8rem 0 0; padding: 0; }
.steps li { display: grid; grid-template-columns: 1.6rem 1fr auto; gap: 0.1rem 0.6rem; padding: 0.35rem 0; }
.steps .mono { grid-column: 2 / 4; font-size: 0.85rem; color: var(--soft); }
.key { width: 1.6rem; height: 1.6rem; line-height: 1.6rem; border-radius: 3px; color: var(--page); text-align: center;
  font-size: 0.85rem; font-weight: 600; }
.lanes { display: grid; grid-template-columns: minmax(4.5rem, max-content) 1fr; gap: 0.35rem 0.7rem; }
.lanes .lane { position: relative; height: 1.5rem; background: var(--card); border-radius: 3px; }
.lanes .span { position: absolute; top: 0; bottom: 0; border: 1px solid; border-radius: 3px; overflow: hidden; }
.lanes .fill { position: absolute; left: 0; top: 0; bottom: 0; background: currentColor; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: 0.85rem; }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: 0.85rem; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { color: var(--ink); font-size: 1rem; font-weight: 400; }
.picture { background: #ffffff; border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.5rem; }
.picture svg { display: block; margin: 0 auto; max-width: max(100%, 48rem); height: auto; }
pre { background: var(--card); border-radius: 0.5rem; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
ul.remarks { padding-left: 1.2rem; } ul.remarks li { margin: 0.25rem 0; }
@media (max-width: 48rem) {
  .cards thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  .cards tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--line); }
  .cards th, .cards td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0.12rem 0;
    white-space: normal; }
  .cards tbody th { font-weight: 600; }
  .cards td::before { content: attr(data-label); color: var(--soft); font-size: 0.85rem; text-align: left; }
}
@media print { .bar div, .key, .lanes .fill { print-color-adjust: exact; } }
"""


def escape(text: object) -> str:
    """Escapes text for use between tags and in attributes. Characters that UTF-8 cannot encode become ``?``."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def document(title: str, body: Iterable[str]) -> str:
    """Returns a page with this title. `body` is HTML."""
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        )
    )


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. Rows become cards on narrow screens. `caption` is for screen readers; cells are HTML."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f'<td data-label="{escape(name)}">{cell}</td>' for name, cell in zip(heads[1:], rest, strict=True))
        + "</tr>"
        for first, *rest in rows
    )
    label = escape(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table class="cards" aria-label="{label}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def color(index: int) -> str:
    """Returns the color of a step, as a CSS value."""
    return f"var(--c{index % NUM_COLORS})"


def bytes_text(count: int) -> str:
    """Returns an amount such as "12.5 MiB". The exact number is shown on hover."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    text = f"{count:,}{_NO_BREAK}B" if unit == "B" else f"{value:.4g}{_NO_BREAK}{unit}"
    return f'<span title="{count:,} bytes">{text}</span>'


def time_text(microseconds: float) -> str:
    """Returns a time such as "12.3 µs"."""
    if 0 < microseconds < 0.1:
        return f"{1000 * microseconds:.3g}{_NO_BREAK}ns"
    value, unit = microseconds, "µs"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g}{_NO_BREAK}{unit}" if value < 100 else f"{value:,.0f}{_NO_BREAK}{unit}"
