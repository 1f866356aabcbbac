"""What README.md and the pages of docs/ say holds: the examples run, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monoidreduce import functional

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """The targets of the page's links and images that are files of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return [target for target in targets if "://" not in target]


@pytest.mark.oldest
def test_the_readmes_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(README)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert "linear_cross_entropy" in capsys.readouterr().out  # what mr.explain says


def test_the_readme_has_an_example_of_every_operator() -> None:
    examples = "\n".join(python_blocks(README))
    assert all(f"mr.{operator}(" in examples for operator in functional.__all__)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing
