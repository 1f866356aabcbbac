"""Monoids that users write in C++, as far as a compiler shows: kernels, errors, laws and verdicts."""

from __future__ import annotations

import pickle
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_monoids import BAD, FIRST, GOOD, NONE_FIRES, options_of_bad, tried_on_the_host

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce.folds import cpp_monoid_op
from monoidreduce.folds.cpp import cpp_kernels, cpp_laws
from monoidreduce.folds.cpp.cpp_source import CppSource, parse
from monoidreduce.folds.cuda import compiler

A, B = torch.randn(3, 4), torch.randn(5, 4)
CPU = torch.device("cpu")


@pytest.fixture
def nvrtc() -> None:
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_of(source: str, **options: Any) -> CppSource:
    monoid = mr.cpp_monoid(source, **options)._source
    assert parse(monoid.text) == monoid
    return monoid


def good(name: str) -> CppSource:
    return source_of(GOOD[name].source, **GOOD[name].options)


def bad(name: str) -> CppSource:
    return source_of(BAD[name][1], **options_of_bad(name))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("which", (cpp_kernels.FOLD, cpp_kernels.GRADIENT, cpp_kernels.LAWS))
def test_compiles_without_spills(nvrtc: None, name: str, which: str) -> None:
    """The kernel of the laws may: it runs once, on 256 rows."""
    for dtype in (torch.bfloat16, torch.float64):
        image = cpp_kernels.compiled(which, good(name).text, dtype, (9, 0))
        assert image.code.startswith(b"\x7fELF") and image.names[0].encode() in image.code
        (spills,) = re.findall(r"(\d+) bytes spill stores", image.log)
        assert int(spills) <= (64 if which == cpp_kernels.LAWS else 0), image.log


def test_code_that_moves_is_not_compiled_again(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monoid = good("none fires")
    image = cpp_kernels.compiled(cpp_kernels.FOLD, monoid.text, torch.float32, (9, 0))
    monkeypatch.setattr(compiler.Compiler, "compile", lambda *_: pytest.fail("it is in the cache"))
    moved = monoid._replace(file="elsewhere.py", line=1234)
    assert cpp_kernels.compiled(cpp_kernels.FOLD, moved.text, torch.float32, (9, 0)) == image


def refused(monoid: CppSource) -> mr.CppMonoidError:
    with pytest.raises(mr.CppMonoidError) as caught:
        cpp_kernels.compiled(cpp_kernels.FOLD, monoid.text, torch.float32, (9, 0))
    return caught.value


def test_errors_are_at_lines_of_the_file_of_the_call(nvrtc: None) -> None:
    monoid = source_of("""
template <class R>
struct Misspelt {
  using Real = R;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State { R sum; };
  MR_HD State identity() const { return {R(-0.f)}; }
  MR_HD State lift(mr::Element<R> e) const { return {e.scores}; }
  MR_HD State combine(State a, State b) const { return {a.sum + b.sum}; }
  MR_HD R project(State s) const { return s.sum; }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, R p, R g) const { return {g, R(0)}; }
};
""")
    error = refused(monoid)
    lines = Path(__file__).read_text().splitlines()
    wrong = next(number for number, text in enumerate(lines, 1) if "{e.scores}" in text)
    assert (error.file, error.line) == (__file__, wrong)
    assert str(error) == (
        "the monoid Misspelt does not compile\n"
        f'{__file__}:{wrong}: class "monoidreduce::Element<float>" has no member "scores"\n'
        f"    {lines[wrong - 1].strip()}"
    )
    assert "unit of monoidreduce" not in str(error) and "monoid of the user" in error.log
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.line == error.line


def test_errors_of_a_file_and_of_a_text_from_elsewhere(nvrtc: None) -> None:
    wrong = NONE_FIRES.replace("a.log_none", "a.log")
    line = wrong[: wrong.index("a.log ")].count("\n") + 1
    assert f"fold.h:{line}: " in str(refused(source_of(wrong, filename="fold.h")))
    error = refused(source_of(wrong))
    assert re.fullmatch(rf"<cpp_monoid of {re.escape(__file__)}:\d+>", error.file) and error.line == line


@pytest.mark.parametrize(
    ("source", "options", "said"),
    (
        (NONE_FIRES.replace("combine(", "join("), {}, "it has neither combine nor the members of a Framed"),
        (NONE_FIRES.replace("project(", "output("), {}, "it has not the members of every monoid"),
        (NONE_FIRES.replace("struct State", "R t = 1;\n  struct State"), {}, "it has members: write its"),
        (NONE_FIRES, {"scores": 2}, "kScores is not 2, the argument scores of cpp_monoid"),
        (NONE_FIRES, {"results": {"p": "real", "at": "index"}}, "Output is one real"),
        (GOOD["largest"].source, {"results": {"p": "real", "at": "real"}}, "result at is no R in Output"),
        (GOOD["pair"].source, {"results": {"p": "real", "q": "kept"}, "scores": 2}, "Upstream is not one"),
        (NONE_FIRES, {"name": "Other"}, 'has no member "Other"'),
    ),
)  # fmt: skip
def test_errors_of_what_the_struct_lacks(
    nvrtc: None, source: str, options: dict[str, Any], said: str
) -> None:
    error = refused(source_of(source, filename="fold.h", **options))
    assert said in str(error), error.log
    assert error.line == (1 if "name" in options else 1 + source[: source.index("struct ")].count("\n"))


@pytest.mark.parametrize("name", GOOD)
def test_laws_hold(name: str, tmp_path: Path) -> None:
    monoid = good(name)
    samples = cpp_laws.draw(monoid)
    numbers = tried_on_the_host(monoid, samples, tmp_path)
    assert numbers.isfinite().all()
    assert cpp_laws.judge(monoid, samples, numbers) is None


def test_laws_of_the_monoid_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/statistics.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (block,) = (text for text in blocks if "mr.cpp_monoid" in text)
    defined: dict[str, Any] = {"mr": mr}
    exec(block.partition("if torch.cuda")[0], defined)
    monoid = defined["top_two"]._source
    samples = cpp_laws.draw(monoid)
    assert cpp_laws.judge(monoid, samples, tried_on_the_host(monoid, samples, tmp_path)) is None
    if compiler.find() is not None:
        cpp_kernels.compiled(cpp_kernels.FOLD, monoid.text, torch.float32, (9, 0))


@pytest.mark.parametrize("name", BAD)
def test_broken_laws_are_named(name: str, tmp_path: Path) -> None:
    monoid, law = bad(name), BAD[name][0]
    samples = cpp_laws.draw(monoid)
    verdict = cpp_laws.judge(monoid, samples, tried_on_the_host(monoid, samples, tmp_path))
    assert verdict is not None and verdict["law"] == law
    assert verdict["message"].startswith(f"{monoid.name} breaks the law of {law}: ")
    assert verdict["counterexample"]["found"] != verdict["counterexample"]["expected"]


def test_a_verdict_is_kept(nvrtc: None, tmp_path: Path) -> None:
    tries = []

    def tried(text: str, device: torch.device) -> Any:
        tries.append(text)
        monoid = parse(text)
        samples = cpp_laws.draw(monoid)
        return cpp_laws.judge(monoid, samples, tried_on_the_host(monoid, samples, tmp_path))

    for count, (monoid, law) in enumerate(((good("none fires"), None), (bad("first"), "commutativity")), 1):
        for _ in range(2):
            cpp_laws.check.cache_clear()  # as in another process
            if law is None:
                cpp_laws.check(monoid.text, CPU, tried)
            else:
                moved = monoid._replace(file="moved.py", line=10)
                said = rf"^moved\.py:{9 + monoid.struct_line}: First breaks the law of commutativity: "
                with pytest.raises(mr.MonoidLawError, match=said) as caught:
                    cpp_laws.check(moved.text, CPU, tried)
                assert caught.value.law == law and "found" in caught.value.counterexample
        assert len(tries) == count
    other = monoid._replace(source=FIRST.replace("COMBINED", "b"))
    with pytest.raises(mr.MonoidLawError):
        cpp_laws.check(other.text, CPU, tried)
    assert other.text in tries


def test_without_a_gpu() -> None:
    monoid = mr.cpp_monoid(NONE_FIRES)
    for call in (monoid, monoid.explain, lambda *ab: mr.explain(monoid, *ab)):
        with pytest.raises(RuntimeError, match="expected tensors on a CUDA device, got one on cpu"):
            call(A, B)


def test_explained_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its plans. Nothing is compiled, and no law is tried."""
    monkeypatch.setattr(compiler.Compiler, "compile", lambda *_: pytest.fail("compiled"))
    monoid = mr.cpp_monoid(NONE_FIRES)
    found = mr.explain(monoid, A, B, workspace=1000, hardware="h100")
    assert found.forward == "statistics_fold/cuda/simt/float32"
    assert found.backward == "statistics_local_gradient/cuda/simt/float32" and found.deterministic
    assert found.architecture == "sm_90" and found.workspace == 1000
    assert any("a user's monoid in C++ has no kernels with them" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"source": 3}, TypeError, "source: expected C\\+\\+ as text, got 3"),
        ({"source": "struct A {};"}, ValueError, "source: expected template <class R> struct"),
        ({"scores": 3}, ValueError, "scores: expected 1 or 2, got 3"),
        ({"name": "a b"}, ValueError, "name: expected the name of a struct"),
        ({"results": ["a"]}, TypeError, "results: expected a dict"),
        ({"results": {"a": "float"}}, ValueError, r"results\['a'\]: expected one of real, index, kept"),
        ({"results": {"a": "index"}}, ValueError, 'results: expected a result that is "real"'),
        ({"results": {"_a": "real"}}, ValueError, "results: expected names"),
        ({"results": {"class": "real"}}, ValueError, "results: expected names"),
    ),
)
def test_definitions_are_checked(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        mr.cpp_monoid(**{"source": NONE_FIRES, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        ({"a": None}, TypeError, "a: expected a tensor"),
        ({"b": torch.randn(5, 3)}, ValueError, "b: expected"),
        ({"other_a": A, "other_b": B}, ValueError, "other_a, other_b: expected 0 tensors, since scores is 1"),
        ({"label": torch.zeros(2, dtype=torch.int64)}, ValueError, r"label: expected shape \[3\]"),
        ({"label": torch.zeros(3)}, TypeError, "label: expected an integer dtype"),
        ({"scale": float("inf")}, ValueError, "scale: expected a finite number"),
        ({"workspace": -1}, ValueError, "workspace: expected None or an int >= 0"),
    ),
)
def test_calls_are_checked(call: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        mr.cpp_monoid(NONE_FIRES)(**{"a": A, "b": B, **call})


def test_shapes_of_results() -> None:
    """Of the op on tensors without memory, as torch.compile sees it."""
    monoid = mr.cpp_monoid(GOOD["log mean exp"].source, **GOOD["log mean exp"].options)
    with torch._subclasses.FakeTensorMode():
        found = monoid(torch.empty(2, 3, 4, dtype=torch.bfloat16), torch.empty(5, 4, dtype=torch.bfloat16))
    assert found._fields == ("value",) and type(found).__name__ == "LogMeanExp"
    assert found.value.shape == (2, 3) and found.value.dtype == torch.float32


def test_the_last_struct_is_the_monoid() -> None:
    assert source_of(f"{NONE_FIRES}\n{FIRST}").name == "First"
    monoid = mr.cpp_monoid(f"{NONE_FIRES}\n{FIRST}", name="NoneFires")
    assert repr(monoid) == "<cpp_monoid NoneFires>"
    assert repr(pickle.loads(pickle.dumps(monoid))) == repr(monoid)
    indented = textwrap.indent(NONE_FIRES, "    ")
    assert source_of(indented).name == "NoneFires"


class PairByTorch:
    """What the kernels of the monoid Pair do with their arguments, by torch (device/simt/monoid_simt.cuh)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        for module in (cpp_monoid_op, cpp_kernels):
            monkeypatch.setattr(module, "_C", self)
        monkeypatch.setattr(cpp_monoid_op, "check_device", lambda a: None)
        monkeypatch.setattr(cpp_monoid_op, "check", lambda *_: None)
        monkeypatch.setattr(cpp_monoid_op, "loaded", lambda *_: 7)
        hopper = _C.DeviceFacts(9, 0, multiprocessors=132, cache_bytes=50 << 20, shared_bytes=232448)
        self.plan_statistics_fold = partial(_C.plan_statistics_fold, gpu=hopper)
        self.plan_statistics_local_gradient = partial(_C.plan_statistics_local_gradient, gpu=hopper)

    def statistics_fold(self, *given: Any) -> None:
        *operands, row, column, label, column_index, table, table_index, values, low, indices = given[:13]
        scratch, *planes, kernels, _, _, scale, _, _, plan = given[13:]
        assert (row, column, column_index, table, table_index, *planes) == (None,) * 9
        assert plan.tier == "simt" and len(scratch) == plan.scratch and kernels == 7
        assert low.shape == indices.shape == (0, len(operands[0])) and label.shape == (1, len(operands[0]))
        score, other = (scale * operands[i] @ operands[i + 1].T for i in (0, 2))
        values.copy_(torch.stack(GOOD["pair"].reference(score, other, label[0])))

    def statistics_local_gradient(self, *given: Any) -> None:
        a, b, other_a, other_b, known, column, integers, column_index, table, table_index = given[:10]
        out, other_out, *planes, kernels, first, scale, _, _, _, plan = given[10:]
        assert [column, column_index, table, table_index, *planes] == [None] * 8
        assert plan.tier == "simt" and kernels == 7 and known.shape == (4, len(a))
        (_, _, g, of_target), (label,) = known[:, :, None], integers[:, :, None]
        score, t = scale * a @ b.T, (scale * other_a @ other_b.T).tanh()
        hit = first + torch.arange(len(b)) == label
        out.copy_(scale * (g * t + torch.where(hit, of_target, 0.0)))
        other_out.copy_(scale * g * score * (1 - t * t))
        self.parts.append(first)


def test_passes_give_kernels_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PairByTorch(monkeypatch)
    monoid = mr.cpp_monoid(GOOD["pair"].source, **GOOD["pair"].options)
    sizes = ((2, 30, 5), (600, 5), (2, 30, 4), (600, 4))
    operands = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    label = torch.randint(-1, 601, (2, 30))
    found = monoid(*operands, label=label, scale=0.5, workspace=0)
    a, b, other_a, other_b = operands
    scores = ((0.5 * x.flatten(0, 1) @ y.T) for x, y in ((a, b), (other_a, other_b)))
    expected = [t.view(2, 30) for t in GOOD["pair"].reference(*scores, label.flatten())]
    upstream = [torch.randn(2, 30, dtype=torch.float64) for _ in expected]
    torch.testing.assert_close(list(found), expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, operands, upstream), torch.autograd.grad(expected, operands, upstream)
    )
    assert engine.parts == [0, 256, 512]
    compiled = torch.compile(
        lambda *given: tuple(monoid(*given, label=label, scale=0.5)), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(list(compiled(*operands)), expected)
    # No gradient for what does not ask for it.
    some = monoid(a.detach(), *operands[1:], label=label)
    assert len(torch.autograd.grad(some.product.sum(), [b, other_b])) == 2
