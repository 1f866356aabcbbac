"""The demo with a model of transformers: its models, the memory of a step, the command at a tiny scale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import demo
from monoidreduce.demo.memory import can_measure
from monoidreduce.demo.model import ModelSize

pytestmark = pytest.mark.release  # a test of tools

CPU = torch.device("cpu")
TINY = ModelSize(layers=2, dim=16, heads=2, hidden=24, length=12)


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """At these sizes threads only wait for each other, for long where tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture
def ours() -> Any:
    """The module, where transformers is installed."""
    pytest.importorskip("transformers", minversion="5.4")
    from monoidreduce.demo import transformers

    return transformers


def test_the_models_are_one_function_of_one_seed(ours: Any) -> None:
    scale = ours.ModelScale(TINY, 2, 3, 1e-3, None, vocabularies=[16])
    tokens, target = torch.randint(256, (2, 3, TINY.length))
    results: dict[str, list[Tensor]] = {}
    for name, model in scale.models(seed=0).items():
        loss = model(tokens, target)
        results[name] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    assert list(results) == ["transformers", "monoidreduce"]
    torch.testing.assert_close(results["monoidreduce"], results["transformers"], rtol=1e-4, atol=1e-6)


def test_the_loss_is_of_the_next_tokens_that_are_given(ours: Any) -> None:
    tokens, target = torch.randint(256, (2, 3, TINY.length))
    for model in ours.ModelScale(TINY, 2, 3, 1e-3, None, vocabularies=[16]).models(seed=0).values():
        logits = model.model.eval()(input_ids=tokens).logits.double()
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        torch.testing.assert_close(model.train()(tokens, target).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.skipif(not can_measure(CPU), reason="needs Linux's /proc/self/clear_refs")
def test_a_step_without_logits_needs_less(ours: Any) -> None:
    scale = ours.ModelScale(TINY, 64, 3, 1e-3, None, vocabularies=[16384])
    (sweep,) = scale.sweeps(CPU)
    logits = 64 * TINY.length * 16384 * 4
    assert sweep.growth["transformers"][0] > 2 * logits > 6 * sweep.growth["monoidreduce"][0]


def test_command_trains_measures_and_reports(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "can_measure", lambda device: False)  # which takes two processes
    monkeypatch.setitem(ours.SCALES, "cpu", ours.ModelScale(TINY, 2, 3, 1e-3, None, vocabularies=[16]))
    plot = tmp_path / "plot.png"
    argv = ["--device", "cpu", "--path", __file__, "--steps", "2", "--plot", str(plot)]
    assert demo.main(["transformers", *argv]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM of transformers" in said and "2 steps of 2 sequences" in said
    assert "largest difference of the two loss curves" in said
    calls = {line.split()[0]: line.split()[1] for line in said.splitlines() if "_forward/" in line}
    isa = mr._C.cpu_isa_of(torch.empty(0))
    assert calls == {
        f"attention_forward/cpu/{isa}/float32": str(2 * TINY.layers),
        f"cross_entropy_forward/cpu/{isa}/float32": "2",
    }
    assert "memory is not measured" in said
    assert plot.exists() == ("no plot" not in said)


def test_without_transformers_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "monoidreduce.demo.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)  # what an import then finds missing
    with pytest.raises(SystemExit) as stop:
        demo.main(["transformers", "--device", "cpu", "--plot", str(tmp_path / "plot.png")])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    assert "argument model: " in err and "pip install 'monoidreduce[transformers]'" in err
    assert not list(tmp_path.iterdir())
