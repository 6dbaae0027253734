"""docs/architecture.md shows the packages and the path of a task as they are in the code.

`python -m tests.unit.test_architecture` redraws docs/images/architecture.svg from the import graph.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.sax.saxutils import escape

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = ROOT / "docs/images/architecture.svg"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 168, 46, 22, 44, 12
#: No package of interest imports these packages of data files and entry points.
LEFT_OUT = {"__main__", "py"}

Edges = dict[str, set[str]]


def package_imports() -> Edges:
    """Return for each package of delaytasks the packages that its modules import."""
    graph = grimp.build_graph("delaytasks")
    edges: Edges = {}
    for module in graph.modules:
        importer = _package_of(module)
        imported = map(_package_of, graph.find_modules_directly_imported_by(module))
        edges.setdefault(importer, set()).update(set(imported) - {importer, "delaytasks"})
    for name in LEFT_OUT | {"delaytasks"}:
        edges.pop(name, None)
    return edges


def _package_of(module: str) -> str:
    return [*module.split("."), module][1]


def depths(edges: Edges) -> dict[str, int]:
    """Return the length of the longest chain of imports below each package."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((depth(below) for below in edges[name]), default=-1)
        return found[name]

    for name in edges:
        depth(name)
    return found


def necessary(edges: Edges) -> Edges:
    """Return the edges that are not implied by a longer chain of edges."""

    def reachable(name: str) -> set[str]:
        return {name}.union(*(reachable(below) for below in edges[name]))

    return {
        name: {one for one in below if not any(one in reachable(o) for o in below - {one})}
        for name, below in edges.items()
    }


def purpose(name: str) -> str:
    path = ROOT / "delaytasks" / name
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def picture() -> str:
    """Draw the packages as boxes. Each package imports only packages below its box."""
    edges = package_imports()
    rows: dict[int, list[str]] = {}
    for name, depth in sorted(depths(edges).items()):
        rows.setdefault(depth, []).append(name)
    columns = max(map(len, rows.values()))
    width = 2 * MARGIN + columns * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    corners = {
        name: (
            (width - len(names) * (BOX_WIDTH + GAP_X) + GAP_X) // 2 + at * (BOX_WIDTH + GAP_X),
            MARGIN + (max(rows) - depth) * (BOX_HEIGHT + GAP_Y),
        )
        for depth, names in rows.items()
        for at, name in enumerate(names)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="15">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name, below in sorted(necessary(edges).items()):
        x, y = corners[name]
        for other in sorted(below):
            to_x, to_y = corners[other]
            parts.append(
                f'<path d="M{x + BOX_WIDTH // 2} {y + BOX_HEIGHT} '
                f"C{x + BOX_WIDTH // 2} {y + BOX_HEIGHT + GAP_Y} "
                f'{to_x + BOX_WIDTH // 2} {to_y - GAP_Y} {to_x + BOX_WIDTH // 2} {to_y}" '
                'fill="none" stroke="#8a94a6" stroke-width="1.3"/>'
            )
    for name, (x, y) in sorted(corners.items()):
        parts.append(
            f'<g><title>{escape(purpose(name))}</title><rect x="{x}" y="{y}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="#eef3fb" stroke="#3d5a99"/><text '
            f'x="{x + BOX_WIDTH // 2}" y="{y + 28}" text-anchor="middle">{escape(name)}</text></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def test_the_picture_of_the_packages_is_that_of_the_imports() -> None:
    assert PICTURE.read_text() == picture(), "run: python -m tests.unit.test_architecture"


def test_each_package_is_described() -> None:
    described = set(re.findall(r"^\| `(\w+)/?` ", PAGE, re.MULTILINE))
    assert described == set(package_imports())


def test_modules_have_no_import_cycles() -> None:
    graph = grimp.build_graph("delaytasks", "chaos", "benchmarks")
    below: Edges = {m: graph.find_modules_directly_imported_by(m) - {m} for m in graph.modules}
    while leaves := {module for module, imported in below.items() if not imported}:
        below = {
            module: imported - leaves for module, imported in below.items() if module not in leaves
        }
    assert below == {}, "each of these imports another one of them"


PATH = PAGE.partition("## The path of a task")[2].partition("## ")[0]
STEP = re.compile(r"`([\w/]+\.py)` `([\w.]+)\(\)`")


def test_the_path_of_a_task_has_at_most_29_files() -> None:
    assert 10 < len(set(re.findall(r"`([\w/]+\.py)`", PATH))) <= 29


@pytest.mark.parametrize(("path", "function"), STEP.findall(PAGE))
def test_each_function_that_the_page_names_exists(path: str, function: str) -> None:
    tree = ast.parse((ROOT / "delaytasks" / path).read_text())
    found = {
        (f"{outer.name}." if isinstance(outer, ast.ClassDef) else "") + inner.name
        for outer in [tree, *tree.body]
        if isinstance(outer, (ast.Module, ast.ClassDef))
        for inner in outer.body
        if isinstance(inner, ast.FunctionDef)
    }
    assert function in found


def test_each_other_file_that_the_page_names_exists() -> None:
    for path in re.findall(r"`(\w+\.py)`", PAGE):  # tests/unit/test_docs.py checks the others
        assert (ROOT / "delaytasks" / path).is_file(), path


#: For each list of files: a pattern of the modules that the change concerns, and the modules that
#: match but need no change, because they only use an existing column or outcome.
LISTS = {
    "A column of the task table": (
        r"\bconcurrency_key\b",
        {
            *("limits/admission.py", "limits/backlogs.py", "limits/fair_order.py"),
            *("limits/queries.py", "limits/waitlist.py"),
            *("storage/claim_queries.py", "storage/facts.py", "storage/waitlist_names.py"),
            "core/why_waiting.py",
        },
    ),
    "An outcome that a processor returns": (
        r"\bSnooze\b|\"snooze\"|\bsnoozed\b|_SHOWN_OUTCOMES|OUTCOME_OF_STATE",
        {"core/task.py", "operations/celery_tasks.py"},
    ),
    "A timer": (
        r"\buses_broker\b|\b(direct|redis)_timer\b|\b_Timers\b|(?<!type=)\"direct\"",
        set(),
    ),
    "A database": (r"\bfor_database\b|\"(postgresql|mysql|mariadb|sqlite)\"", set()),
}


@pytest.mark.parametrize("change", LISTS)
def test_each_module_that_a_change_concerns_is_in_its_list(change: str) -> None:
    pattern, others = LISTS[change]
    section = PAGE.partition(f"### {change}\n")[2].partition("\n### ")[0]
    listed = set(re.findall(r"`(?:delaytasks/)?([\w/]+\.(?:py|html))`", section))
    package = ROOT / "delaytasks"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.*")
        if path.suffix in (".py", ".html")
        and "migrations" not in path.parts
        and re.search(pattern, path.read_text(), re.MULTILINE)
    }
    assert found, "the pattern matches no module"
    assert found - listed == others, "missing in the list, or not an exception any more"
    pages = [path for path in listed if path.endswith(".html")]
    assert all((package / path).is_file() for path in pages)  # test_docs.py checks the others


if __name__ == "__main__":
    PICTURE.write_text(picture())
