"""The demo of a fold: its losses are one function, and the command from end to end at a tiny scale."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import monoidreduce as mr
from monoidreduce import demo
from monoidreduce.demo import fold, policy
from monoidreduce.demo.fold import FoldScale
from monoidreduce.demo.memory import UNMEASURED, can_measure
from monoidreduce.demo.sweep import Sweep
from monoidreduce.folds.cuda.cuda_source import fold_source, gradient_source

pytestmark = pytest.mark.release  # a test of tools

CPU = torch.device("cpu")
MIB = 1 << 20
TINY = FoldScale(8, 16, [16, 48], torch.float32, checked=3, seconds=1e-3)


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """At these sizes threads only wait for each other, for long where tests run side by side."""
    torch.set_num_threads(1)


def unspaced(code: str) -> str:
    """The code without its layout."""
    return "".join(code.split())


# What is compared


def test_the_losses_are_those_of_a_policy_gradient() -> None:
    hidden, head, token = policy.tensors(7, 33, 5, CPU, torch.float64)
    of_tokens = torch.distributions.Categorical(logits=hidden @ head.T)
    surprise = -of_tokens.log_prob(token)
    expected = surprise - policy.ENTROPY * of_tokens.entropy()
    for name, loss in policy.BACKENDS.items():
        exact = surprise if name == "linear_cross_entropy" else expected
        gradients = torch.autograd.grad(exact.sum(), (hidden, head), retain_graph=True)
        found = loss(hidden, head, token)
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
        ours = torch.autograd.grad(found.sum(), (hidden, head))
        torch.testing.assert_close(ours, gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", policy.BACKENDS)
def test_a_problem_is_the_mean_loss(name: str) -> None:
    problem = policy.policy_problem(name, 16, tokens=8, dim=4, device="cpu", dtype="bfloat16")
    loss = problem.forward()
    assert loss.shape == problem.grad_output.shape and loss.dtype == problem.grad_output.dtype
    gradients = torch.autograd.grad(loss, problem.inputs, problem.grad_output)
    assert [g.shape for g in gradients] == [(8, 4), (16, 4)]


# What is shown


def test_the_code_shown_is_what_the_library_compiles() -> None:
    function = fold.traced_function()
    assert function.counts == (0, 1, 0, 0)  # the label
    for write in (fold_source, gradient_source):
        whole = write(function.text, *function.counts).text
        shown = fold.element_code(whole)
        assert unspaced(whole).endswith(unspaced(shown) + "};")
        assert max(map(len, shown.splitlines())) <= 110


def test_a_broken_law_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    function = fold.traced_function()
    assert "all 9 laws of mr.check_monoid hold" in fold.check_laws(function)
    combine = fold.StatisticsMonoid.combine
    monkeypatch.setattr(fold.StatisticsMonoid, "combine", lambda self, a, b: combine(self, a, a))
    with pytest.raises(mr.MonoidLawError):
        fold.check_laws(function)


def test_errors_are_of_each_in_its_dtype() -> None:
    torch.manual_seed(0)
    said = fold.show_errors(*policy.tensors(9, 40, 16, CPU, torch.bfloat16), checked=5)
    head, *rows = said.splitlines()
    assert re.split(r" {2,}", head) == ["largest error beside float64, 5 tokens", "torch", "token_stats"]
    assert [row[:20].strip() for row in rows] == ["loss", "gradient of hidden", "gradient of head"]
    errors = torch.tensor([[float(x) for x in row.split()[-2:]] for row in rows])
    assert (errors > 0).all() and (errors < 0.03).all()
    assert errors[0, 1] < errors[0, 0]  # torch rounds the logits


def test_the_cache_is_a_new_one_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "MONOIDREDUCE_CACHE_DIR"
    for before in (str(tmp_path), None):
        monkeypatch.setenv(variable, before) if before else monkeypatch.delenv(variable)
        with fold.own_cache():
            folder = Path(os.environ[variable])
            assert folder.is_dir() and folder != tmp_path and not list(folder.iterdir())
        assert not folder.exists() and os.environ.get(variable) == before


FORWARD = dict.fromkeys(policy.BACKENDS, 0.25e-3)
STEPS = {name: [0.001, 0.002] for name in policy.BACKENDS}
MEMORY = Sweep("loss", "vocabulary", TINY.vocabularies, {name: [0, 3 * MIB] for name in policy.BACKENDS})


def test_table_is_of_the_largest_vocabulary() -> None:
    lines = [line.split() for line in fold.table(FORWARD, STEPS, MEMORY).splitlines()]
    assert lines[0] == ["forward", "step", "memory"]
    for name, line in zip(policy.BACKENDS, lines[1:], strict=False):
        assert line == [name, "0.25", "ms", "2.00", "ms", "3.0", "MiB"]
    without = fold.table(FORWARD, STEPS, None)
    assert without.endswith(UNMEASURED) and "MiB" not in without


@pytest.mark.parametrize("memory", [MEMORY, None])
def test_plot_is_written(tmp_path: Path, memory: Sweep | None) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    fold.save_plot(file, TINY, STEPS, memory)
    assert ("peak memory of the loss" in file.read_text("utf-8")) == (memory is not None)


# The command


@pytest.mark.parametrize("measured", [False, True])
def test_command_shows_checks_and_times(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = TINY
    if measured:
        if not can_measure(CPU):
            pytest.skip("needs Linux's /proc/self/clear_refs")
        scale = replace(TINY, vocabularies=[4096])
    monkeypatch.setattr(fold, "can_measure", lambda device: measured)
    monkeypatch.setitem(fold.SCALES, "cpu", scale)
    plot = tmp_path / "plot.png"
    assert demo.main(["fold", "--device", "cpu", "--seed", "3", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert inspect.getsource(policy.token_stats) in said
    for part in (
        r"Traced in \d+\.\d ms to 6 operations",
        r"const R x0 = e\.score;",
        r"const R x9 = share\(x0, x8, x7\);",
        r"all 9 laws of mr\.check_monoid hold",
        rf"Forward pass: statistics_forward/cpu/{mr._C.cpu_isa_of(torch.empty(0))}/float32\.",
        r"No compiler runs: the CPU engine interprets the program, whose code took \d+\.\d ms\.",
        rf"8 tokens, {scale.vocabularies[-1]} classes, width 16, float32, on 1 CPU threads",
        r"largest error beside float64, 3 tokens",
    ):
        assert re.search(part, said), part
    timed = re.findall(rf"^({'|'.join(policy.BACKENDS)}) +[\d.]+ ms +[\d.]+ ms( +[\d.]+ MiB)?$", said, re.M)
    assert [name for name, _ in timed] == list(policy.BACKENDS)
    assert all(bool(memory) == measured for _, memory in timed)
    assert (UNMEASURED in said) != measured
    assert plot.exists() == ("no plot" not in said)
