"""Every example runs in seconds, and prints how little it differs from what it is compared with."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

# The script and how many differences, of the output and the gradients, it prints.
SCRIPTS = {
    "paper_attention.py": 4,
    "paper_listing1.py": 4,
    "paper_cross_entropy.py": 3,
    "paper_distillation.py": 5,
    "paper_mlp.py": 4,
    "bilinear_attention.py": 5,
    "custom_monoid.py": 3,
    "divergences.py": 5,
    "policy_gradient.py": 5,
    "topk_teacher.py": 4,
    "grpo.py": 5,
    "token_losses.py": 3,
    "contrastive.py": 5,
    "noisy_or.py": 4,
    "kernel_sums.py": 4,
    "kernel_density.py": 3,
    "nearest_neighbours.py": 3,
    "score_mods.py": 25,
    "attention_weights.py": 12,
    "hessian_vector_product.py": 2,
    "gradient_penalty.py": 4,
    "consistency_model.py": 8,
}


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples import their neighbour, and set the default dtype."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    torch.set_default_dtype(torch.float32)


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "compare.py"}


def test_the_site_shows_each_example() -> None:
    """A formatter that takes the lines for Python would keep the site from putting the files in."""
    page = (EXAMPLES.parent / "docs/examples.md").read_text("utf-8")
    shown = re.findall(r'^--8<-- "examples/([a-z0-9_]+\.py)"$', page, re.M)
    assert sorted(shown) == sorted([*SCRIPTS, "compare.py"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    printed = capsys.readouterr().out
    differences = [float(number) for number in re.findall(r"largest relative difference (\S+)", printed)]
    assert len(differences) == SCRIPTS[script]
    assert all(difference < 1e-12 for difference in differences), printed


def test_custom_monoid_shows_a_report_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_monoid.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "Moments() obeys the laws of a commutative monoid with a local gradient (torch.float64)" in printed
    assert "Forgetful() breaks the law of local gradient: " in printed


def test_a_difference_fails_the_example() -> None:
    compare = runpy.run_path(str(EXAMPLES / "compare.py"))["compare"]
    x = torch.randn(5, dtype=torch.float64)
    with pytest.raises(AssertionError, match="output differs by"):
        compare(torch.sin, torch.cos, {"input": x})
