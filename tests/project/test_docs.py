"""The documents: links and paths lead somewhere, code is that of the sources, all public names are there."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Suffixes of the modules whose exports are public.
PUBLIC = (
    "",
    ".nn",
    ".monoids",
    ".stat",
    ".reference",
    ".plan",
    ".io",
    ".hardware",
    ".theory.costs",
    ".distributed",
)
PUBLIC += (".integrations.verl", ".integrations.megatron", ".integrations.torchtitan")
# These import a library. They are looked at where it is installed.
INTEGRATIONS = {"transformers": "transformers", "trl": "trl", "gkd": "trl"}

_REFERENCE = re.compile(r"^::: (\S+)$", re.M)
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    targets = [t for t in _LINK.findall(page.read_text("utf-8")) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_topics_are_listed() -> None:
    """Each page of docs/design is in its index and on the site's menu."""
    folder = ROOT / "docs/design"
    index, menu = (folder / "README.md").read_text("utf-8"), (ROOT / "mkdocs.yml").read_text("utf-8")
    topics = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    assert topics
    assert [name for name in topics if f"]({name})" not in index] == []
    assert [name for name in topics if f"- design/{name}\n" not in menu] == []


def test_results_that_pages_name_are_there() -> None:
    """A figure's committed result, as `bench/results/compare/NAME.json`."""
    named = re.compile(r"`(bench/results/[\w/.]+\.json)`")
    found = {(page.name, path) for page in PAGES for path in named.findall(page.read_text("utf-8"))}
    assert found
    assert [pair for pair in sorted(found) if not (ROOT / pair[1]).exists()] == []


def test_sources_that_pages_name_are_there() -> None:
    """Paths in code type from the repository's root; NAME and smNN stand for any."""
    named = re.compile(r"`((?:csrc|monoidreduce|tests|scripts|bench)/[\w/.]+)`")
    found = {(page.name, path) for page in PAGES for path in named.findall(page.read_text("utf-8"))}
    assert found
    any_name = re.compile(r"NAME|NN")
    missing = [p for p in sorted(found) if not any_name.search(p[1]) and not (ROOT / p[1]).exists()]
    assert missing == []


def _without_spaces(code: str) -> str:
    return re.sub(r"\s+", "", code)


def test_snippets_of_the_extending_page_are_in_the_sources() -> None:
    """Spaces apart. `// ...` leaves lines out. MyMonoid and SoftCount are what a reader adds."""
    page = (ROOT / "docs/extending.md").read_text("utf-8")
    blocks = re.findall(r"^```cpp\n(.*?)^```", page, re.M | re.S)
    blocks = [b for b in blocks if "MyMonoid" not in b and "SoftCount" not in b]
    parts = [part for block in blocks for part in re.split(r"^ *// \.\.\.\n", block, flags=re.M)]
    headers = (p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu"))
    sources = [_without_spaces(path.read_text("utf-8")) for path in headers]
    assert parts
    assert [part for part in parts if not any(_without_spaces(part) in source for source in sources)] == []


def test_diffs_of_the_extending_page_fit_the_sources() -> None:
    """The lines that a diff removes or keeps are in the file that is named before it."""
    page = (ROOT / "docs/extending.md").read_text("utf-8")
    missing, file = [], ""
    for before, diff in re.findall(r"(.*?)^```diff\n(.*?)^```", page, re.M | re.S):
        file = re.findall(r"^\*\*[^`]*`([\w/.]+)`", before, re.M)[-1]
        source = _without_spaces((ROOT / file).read_text("utf-8"))
        old = [line[1:] for line in diff.splitlines() if line[:1] in (" ", "-")]
        missing += [(file, line) for line in old if _without_spaces(line) not in source]
    assert file
    assert missing == []


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


def _bodies(function: str, path: str) -> list[str]:
    """The text of each definition of a function in a file."""
    source, found = (ROOT / path).read_text("utf-8"), []
    for match in _definition(function).finditer(source):
        head, *lines = source[match.start() :].lstrip("\n").splitlines()
        kernel = "__grid_constant__" in head  # whose parameters stand on a line of their own
        indent = 0 if kernel else len(head) - len(head.lstrip())
        end = re.compile(rf"\s{{0,{indent}}}" + (r"[^\s)]" if path.endswith(".py") else "}"))
        last = next((i for i, line in enumerate(lines) if end.match(line)), len(lines))
        found.append("\n".join((head, *lines[:last])))
    return found


# A function that is called by another name -> that name, and where a line binds it.
BOUND = {
    "recorded": (("directly", "monoidreduce/_ops/registry.py", "return kernel, partial(recorded, True)"),),
    "kernel": (("backward_op", "monoidreduce/_ops/registry.py", "_library.impl(of, autograd,"),),
    "attention_forward": (("backend", "monoidreduce/_ops/attention.py", "    forward=attention_forward,"),),
    "define": (
        ("_C.attention_forward", "csrc/include/monoidreduce/ops/attention.h", 'pass("attention_forward",'),
        (
            "_C.cross_entropy_local_gradient",
            "csrc/include/monoidreduce/ops/cross_entropy.h",
            '"cross_entropy_local_gradient", kSm80 | kSm90 | kPlanes,',
        ),
        ("_C.rows_product", "csrc/include/monoidreduce/ops/rows.h", 'helper("rows_product",'),
    ),
    "cross_entropy_backward": (
        ("backend", "monoidreduce/_ops/cross_entropy.py", "    backward=cross_entropy_backward,"),
    ),
    "run": (
        ("cuda::sm90::run", "csrc/cuda/sm90/attention_forward.cu", "void run(const AttentionForward& x,"),
        (
            "cuda::sm90::run",
            "csrc/cuda/sm90/loss_gradients.cu",
            "void run(const CrossEntropyLocalGradient& x,",
        ),
        ("cuda::sm90::run", "csrc/cuda/sm90/loss_gradients.cu", "void run(const RowsProduct& x,"),
    ),
}


class Hop(NamedTuple):
    function: str
    path: str
    calls: str  # as its text has it


def _walks() -> list[list[Hop]]:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    walks: list[list[Hop]] = []
    for number, names, path, text in re.findall(r"^(\d+)\. ((?:`\w+`,? )+)in `([^`]+)`: (.*)", page, re.M):
        functions, called = re.findall(r"\w+", names), ["", *re.findall("`([^`]+)`", text)]
        if number == "1":
            walks.append([])
        calls = [*functions[1:], called[-1]]
        walks[-1] += [Hop(function, path, to) for function, to in zip(functions, calls, strict=True)]
    return walks


def _missing(hop: Hop, to: Hop) -> list[str]:
    """What keeps a hop from being one: the text names the other function, or what is bound to it, and so
    does the function itself."""
    bound = [n for n, path, line in BOUND.get(to.function, ()) if line in (ROOT / path).read_text("utf-8")]
    names = [to.function, *bound]
    if hop.calls not in names:
        return [f"{hop.function} in {hop.path} calls {hop.calls}, which is not {to.function}"]
    searched = names if hop.calls == to.function else [hop.calls]
    call = re.compile("|".join(rf"(?<!\w){re.escape(name)}\b" for name in searched))
    found = any(map(call.search, _bodies(hop.function, hop.path)))
    return [] if found else [f"{hop.function} in {hop.path} does not call {' or '.join(searched)}"]


def test_walks_are_those_of_the_calls() -> None:
    """Of docs/architecture.md: every hop is a call, in a function that is defined in that file."""
    first, second = _walks()
    ends = [hop.function for hop in second].index("add_products")  # a second branch, of multiply_dlogits
    fork = next(hop for hop in second if hop.function == "multiply_dlogits")
    chains = (first, second[:ends], [fork._replace(calls="add_products"), *second[ends:]])
    missing = [problem for chain in chains for pair in pairwise(chain) for problem in _missing(*pair)]
    undefined = [f"{h.function} in {h.path}" for h in (*first, *second) if not _bodies(h.function, h.path)]
    assert missing + undefined == []
    bound = [(path, line) for names in BOUND.values() for _, path, line in names]
    assert [line for path, line in bound if line not in (ROOT / path).read_text("utf-8")] == []
    assert "wgmma.mma_async" in (ROOT / first[-1].path).read_text("utf-8")


def test_a_hop_that_is_no_call_is_found() -> None:
    (first, *_), (second, *_) = _walks()
    assert _missing(first, second)
    assert _missing(first._replace(calls="kernel"), second)
