"""A page that uses a term which only the glossary explains leads its readers to the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doc_pages import ROOT

GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The terms that readers cannot know from Celery, from databases or from a page of its own.
TERMS = (
    "abandoned row",
    "chunk",
    "grace period",
    "horizon",
    "lease",
    "near row",
    "pool process",
    "settlement",
    "sweep",
    "sweep partition",
    "time budget",
    "timing wheel",
    "waitlist",
)
_TERM = re.compile(rf"\b(?:{'|'.join(TERMS)})(?:e?s)?\b", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|<!--.*?-->|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("term", TERMS)
def test_the_glossary_has_the_term(term: str) -> None:
    assert f"\n### {term}\n" in GLOSSARY


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_a_page_with_a_term_of_the_glossary_has_a_link_to_it(page: Path) -> None:
    text = page.read_text()
    used = _TERM.search(_CODE.sub("", text))
    assert used is None or page.name == "glossary.md" or "glossary.md" in text, used[0]
