"""The commands in the documentation run, and the other commands have known options.

`tests/doc_commands.py` describes how.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_commands import check_command, command_lines, runs_here
from tests.doc_pages import NAMES, ROOT, SHELLS, blocks, environment

WITH_COMMANDS = [
    name for name in NAMES if any(runs_here(ROOT / name, block) for block in blocks(ROOT / name))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.doc_commands", str(ROOT / name)],
        cwd=tmp_path,
        env={**environment(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_command_shown_exists_with_its_options(name: str) -> None:
    for block in blocks(ROOT / name):
        if block.language in SHELLS and not block.before.startswith("<!-- not run: "):
            for line in command_lines(block):
                words = shlex.split(line, comments=True)
                if "delays" in words or words[:1] in (["celery"], ["delaytasks"]):
                    check_command(words, f"{name}: {line}")
