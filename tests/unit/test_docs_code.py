"""Each code block of the documentation runs, or says why it does not.

| before a block | meaning |
|---|---|
| `<!-- runs -->` | Python that `tests/doc_runner.py` executes, or a diff, as it is afterwards |
| `<!-- setup` … `-->` | code that a reader already has, or a check; executed with the blocks |
| `<!-- runs in tests/… -->` | the named test takes the block from the page |
| `<!-- not run: … -->` | the reason |

`<!-- files: tests/… -->` names the test that writes all blocks of a page whose first line names a
file, and runs the commands of the page. `test_docs.py` runs the commands of other pages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_pages import NAMES, PAGES, ROOT, SHELLS, blocks, environment
from tests.doc_pages import files_test as files_test_of


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_each_block_runs_or_states_why_it_does_not(page: Path) -> None:
    silent = [
        f"{page.name}:{block.line}"
        for block in blocks(page)
        if not block.runs
        and block.language not in SHELLS
        and block.test is None
        and not block.before.startswith("<!-- not run: ")
        and not (block.file and files_test_of(page))
    ]
    assert silent == []
    named = {block.test for block in blocks(page)} | {files_test_of(page)}
    for test in named - {None}:
        assert page.name in (ROOT / str(test)).read_text(), f"{test} does not read the page"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, page in zip(NAMES, PAGES, strict=True) if any(b.runs for b in blocks(page))]
)
def test_the_blocks_of_a_page_that_are_marked_to_run_succeed(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.doc_runner", str(ROOT / name)]
    env = environment(tmp_path)
    done = subprocess.run(words, cwd=tmp_path, env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
