"""HTML of the parts that the page of a report consists of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from delaytasks.core.text import one_line


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: set[int],
    texts: Iterable[int] = (),
) -> str:
    """Return a table. The cells are HTML already."""
    styles = {**dict.fromkeys(texts, "text"), **dict.fromkeys(numbers, "number")}

    def row(cells: Sequence[str], name: str) -> str:
        shown = (
            f'<{name} class="{styles[n]}">{cell}</{name}>'
            if n in styles
            else f"<{name}>{cell}</{name}>"
            for n, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(heads, 'th')}</thead><tbody>{body}</tbody></table>"


def section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def text_of(value: str, longest: int = 200) -> str:
    """Return untrusted text as HTML, without control characters."""
    return escape(one_line(value, longest))
