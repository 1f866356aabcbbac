"""The documents: links lead somewhere, indexes are complete, and the reference has every public name."""

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
    "kernel": (
        (
            "getattr(ops, name).default",
            "monoidreduce/_ops/registry.py",
            "_library.impl(kernel_name, kernel,",
        ),
        ("backward_op", "monoidreduce/_ops/registry.py", "_library.impl(kernel_name, kernel,"),
    ),
    "attention_forward": (("backend", "monoidreduce/_ops/attention.py", "    forward=attention_forward,"),),
    "define": (
        ("_C.attention_forward", "csrc/include/monoidreduce/ops/attention.h", 'pass("attention_forward",'),
        (
            "_C.cross_entropy_local_gradient",
            "csrc/include/monoidreduce/ops/cross_entropy.h",
            'part<CrossEntropyBackward>("cross_entropy_local_gradient",',
        ),
        ("_C.rows_product", "csrc/include/monoidreduce/ops/rows.h", 'helper("rows_product",'),
    ),
    "cross_entropy_backward": (
        ("backend", "monoidreduce/_ops/losses.py", "    backward=cross_entropy_backward,"),
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
    ends = [hop.function for hop in second].index(
        "add_products"
    )  # a second branch, of multiply_local_gradients
    fork = next(hop for hop in second if hop.function == "multiply_local_gradients")
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


def _files_with(pattern: str) -> set[str]:
    """The production files that have it, except the files of folds over ranks."""
    found = re.compile(rf"\b(?:{pattern})\b")
    sources = [p for f in ("monoidreduce", "csrc") for p in (ROOT / f).rglob("*") if p.suffix in SUFFIXES]
    paths = (str(p.relative_to(ROOT)) for p in sources if found.search(p.read_text("utf-8")))
    return {path for path in paths if "distributed/" not in path and not path.endswith("ops/ranks.h")}


SUFFIXES = (".py", ".h", ".cuh", ".cu", ".cpp")


def test_files_of_an_option_are_those_of_the_page() -> None:
    """Of docs/extending.md: a tensor's are those that its section names, a number's five and the hints."""
    page = (ROOT / "docs/extending.md").read_text("utf-8")
    (section,) = re.findall(r"^## An option of an operator\n(.*?)^## ", page, re.M | re.S)
    named = re.findall(r"`((?:csrc|monoidreduce)/[\w/.]+)`", section)
    of_tensor = {n for n in named if n != "monoidreduce/nn.py" and "distributed/" not in n}
    assert _files_with("class_weight|weighs_all|WeightedCrossEntropy") == of_tensor
    of_number = (
        "ops/cross_entropy.h",
        "monoids/cross_entropy.h",
        "losses.py",
        "functional.py",
        "reference.py",
    )
    hints = "monoidreduce/_keywords.py"
    assert len(of_tensor - {hints}) == 5
    assert all(f"`{name}`" in section for name in of_number[:2])
    assert _files_with("z_loss") - {hints} == {n for n in of_tensor if n.endswith(of_number)}
