"""The documents: links lead somewhere, indexes are complete, and the reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Suffixes of the modules whose exports are public.
PUBLIC = ("", ".nn", ".monoids", ".stat", ".reference", ".plan", ".io", ".hardware", ".costs", ".distributed")
PUBLIC += (".integrations.verl", ".integrations.megatron", ".integrations.torchtitan")
# These import a library. They are looked at where it is installed.
INTEGRATIONS = {"transformers": "transformers", "trl": "trl", "gkd": "trl"}

_REFERENCE = re.compile(r"^::: (\S+)$", re.M)
_TITLE = re.compile(r"# (\d+)\. (.+)\n\n\*\*Status\*\*: ((?:.+\n)+)")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    targets = [t for t in _LINK.findall(page.read_text("utf-8")) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_decisions_are_numbered_consecutively() -> None:
    assert [int(path.name[:2]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_decisions_refer_to_each_other_by_number() -> None:
    """A link "[decision 28](28-...)" has one number."""
    references = re.compile(r"\[[Dd]ecision\s+(\d+)\]\((?:docs/|decisions/)*([^)]*)\)")
    for page in PAGES:
        for number, target in references.findall(page.read_text("utf-8")):
            assert target.startswith(f"{int(number):02}-"), f"{page.name}: decision {number} is {target}"


def test_index_lists_every_decision() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    rows = []
    for path in DECISIONS:
        found = _TITLE.match(path.read_text("utf-8"))
        assert found is not None, f"{path.name} does not begin with its title and status"
        number, title, status = found.groups()
        assert int(number) == int(path.name[:2]), path.name
        rows.append(f"| {int(number)} | [{title}]({path.name}) | {' '.join(status.split())} |")
    assert index.rstrip().endswith("\n".join(rows))
    assert index.count("\n| ") == len(rows) + 1  # the head


def _resolved(path: str) -> object:
    """What a dotted path of the reference names, None for that of an integration that can not be imported."""
    module, _, name = path.rpartition(".")
    _, _, integration = module.partition(".integrations.")
    if integration in INTEGRATIONS and find_spec(INTEGRATIONS[integration]) is None:
        return None
    return getattr(importlib.import_module(module), name)


def test_reference_has_every_public_name() -> None:
    """The reference documents each object that a public module exports, and each has a docstring."""
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    documented = [_resolved(path) for page in pages for path in _REFERENCE.findall(page.read_text("utf-8"))]
    assert documented
    missing = []
    installed = [f".integrations.{name}" for name, library in INTEGRATIONS.items() if find_spec(library)]
    for suffix in (*PUBLIC, *installed):
        module = importlib.import_module(f"monoidreduce{suffix}")
        for name in module.__all__:
            exported = getattr(module, name)
            if name == "__version__" or inspect.ismodule(exported):
                continue
            if not any(exported is found for found in documented):
                missing.append(f"{module.__name__}.{name} is on no page of docs/reference")
            if callable(exported) and not inspect.getdoc(exported):
                missing.append(f"{module.__name__}.{name} has no docstring")
    assert missing == []


def _definition(function: str) -> re.Pattern[str]:
    """Where a function, a kernel or a struct of functions is defined, in Python or C++."""
    python, struct = rf"\s*def {function}\(", rf"\s*struct {function}\b"
    typed = rf"(?!\s*(?:return|//|#)).*[\w>&*)] {function}\("  # the type that it returns, then its name
    kernel = rf"\s+{function}\(const __grid_constant__"
    return re.compile(rf"^(?:{python}|{struct}|{typed}|{kernel})", re.M)


def test_walks_name_functions_that_exist() -> None:
    """Each hop of the walks of docs/architecture.md is a function that is defined in that file."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    hops = re.findall(r"^(\d+)\. `(\w+)` in `([^`]+)`", page, re.M)
    second = [number for number, *_ in hops].index("1", 1)
    for walk, most_files in ((hops[:second], 9), (hops[second:], 11)):
        assert 9 < len(walk) <= 12 and len({path for *_, path in walk}) <= most_files
    missing = [
        f"{function} in {path}"
        for _, function, path in hops
        if not _definition(function).search((ROOT / path).read_text("utf-8"))
    ]
    assert missing == []


def test_architecture_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text("utf-8").splitlines()) <= 200
