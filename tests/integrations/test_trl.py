"""Log-probabilities and divergences in TRL's fused head and trainers, beside TRL's own."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", minversion="1.16")

import transformers  # noqa: E402
import trl.experimental  # noqa: E402, F811
import trl.trainer.utils as trl_utils  # noqa: E402
import trl_steps  # noqa: E402
from kept_classes import words_of  # noqa: E402
from sampled import sampled  # noqa: E402
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl.experimental.async_distillation.async_distillation_trainer import (  # noqa: E402
    _chunked_jsd_loss as THEIR_CANDIDATES,
)
from trl.kernels import ChunkedLogProbFunction as THEIRS  # noqa: E402
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as THEIR_DIVERGENCE  # noqa: E402
from trl_steps import SIZES, TRAINERS, check_same, counted_calls, history, teacher, trainer  # noqa: E402

import monoidreduce.integrations._divergence as of_divergence  # noqa: E402
import monoidreduce.integrations.trl as integration  # noqa: E402
from monoidreduce.integrations.gkd import GKDTrainer  # noqa: E402
from monoidreduce.integrations.trl import (  # noqa: E402
    OPTIONAL,
    REACHED,
    apply,
    divergence,
    divergence_of_candidates,
    log_probs,
    undo,
)

OLDER = {"1.9.0": ["sft"], "1.12.0": ["sft", "distillation_0.3"], "1.15.0": ["dpo", "distillation_0.3"]}
BY_OURS = {"gkd": GKDTrainer}


@pytest.fixture(autouse=True)
def theirs_at_the_end() -> Iterator[None]:
    """A test begins and ends with TRL's own functions."""
    undo()
    yield
    undo()


def operands(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    """x, weight, bias; logits have about unit variance."""
    shapes = [(40, 24), (301, 24), (301,)]
    factors = (1, 24**-0.5, 1)
    made = [(torch.randn(s) * f).to(dtype).requires_grad_() for s, f in zip(shapes, factors, strict=True)]
    return [*made[:2], made[2] if bias else None]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("softcap", (None, 3.0))
def test_the_function(softcap: float | None, bias: bool, dtype: torch.dtype) -> None:
    """All results and gradients; TRL's rounds each logit to the dtype, and sums in float32."""
    leaves, targets = operands(dtype, bias), torch.randint(301, (40,))
    options = (targets, 0.7, 64, softcap, 1.3, OPTIONAL)
    ours, theirs = log_probs(*leaves, *options), THEIRS.apply(*leaves, *options)  # type: ignore[arg-type]
    tolerance = 0.05 if dtype == torch.bfloat16 else 2e-5
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    for name, found, expected in zip(("log_probs", *OPTIONAL), ours, theirs, strict=True):
        if name == "is_top1" and dtype == torch.bfloat16:
            continue  # of logits that are rounded there, and not here
        torch.testing.assert_close(found, expected, **near, msg=lambda m, name=name: f"{name}: {m}")
    upstream = [torch.randn(40), torch.randn(40)]
    wanted = [t for t in leaves if t is not None]
    gradients = (
        torch.autograd.grad(y[:2], wanted, [g.to(t.dtype) for g, t in zip(upstream, y[:2], strict=True)])  # type: ignore[arg-type, union-attr]
        for y in (ours, theirs)
    )
    for found, expected in zip(*gradients, strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


def test_kept_classes() -> None:
    """Leaving a class out gives what a bias of -inf gives, except for the mean of the logits."""
    x, weight, bias = operands(torch.float64, True)
    targets, keeps = torch.randint(301, (40,)), torch.rand(301) < 0.5
    keeps[targets] = True
    excluded = bias.masked_fill(~keeps, -torch.inf)  # type: ignore[union-attr]
    kept = words_of(keeps.expand(40, 301))
    options = (targets, 0.7, 64, None, 1.3, OPTIONAL)
    found = log_probs(x, weight, bias, *options, kept=kept)  # type: ignore[arg-type]
    expected = log_probs(x, weight, excluded, *options)  # type: ignore[arg-type]
    of_all = log_probs(x, weight, bias, *options)  # type: ignore[arg-type]
    for name, ours, theirs in zip(("log_probs", *OPTIONAL), found, expected, strict=True):
        torch.testing.assert_close(ours, of_all[3] if name == "mean_logits" else theirs, msg=name)
    gradients = (torch.autograd.grad(y[0].sum() + y[1].sum(), (x, weight)) for y in (found, expected))  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(*gradients)


def test_only_what_is_asked_for() -> None:
    found = log_probs(
        *operands(torch.float32, True), torch.randint(301, (40,)), 1.0, 64, None, 1.0, ("log_probs",)
    )  # type: ignore[arg-type]
    assert found[0].shape == (40,) and found[1:] == (None,) * 4


@pytest.mark.parametrize("other", (None, lambda hidden, weight, labels: None), ids=("none", "other"))
@pytest.mark.parametrize("place", [place[:2] for place in integration._places()], ids=lambda place: place[1])
def test_a_version_without_the_function(
    place: tuple[str, str], other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is replaced then."""
    module, name = place
    if other is None:
        monkeypatch.delattr(importlib.import_module(module), name)
    else:
        monkeypatch.setattr(importlib.import_module(module), name, other)
    with pytest.raises(
        ImportError, match=rf"trl: expected {module}.{name} as versions 1.9 to 1.16 have it, and"
    ):
        apply()
    left = [getattr(importlib.import_module(m), n, None) for m, n, _ in integration._places()]
    assert not any(isinstance(function, integration._InPlace) for function in left)


def pair(dtype: torch.dtype, teacher_dtype: torch.dtype, biases: tuple[bool, bool]) -> list[Tensor | None]:
    """Hidden states, weight and bias of a student [40, 24] and a teacher [40, 16]."""
    made: list[Tensor | None] = []
    for width, of, bias in ((24, dtype, biases[0]), (16, teacher_dtype, biases[1])):
        shapes = (40, width), (301, width), (301,)
        factors = (1, width**-0.5, 1)
        of_model: list[Tensor | None] = [
            (torch.randn(s) * f).to(of) for s, f in zip(shapes, factors, strict=True)
        ]
        made += of_model if bias else [*of_model[:2], None]
    return [t if t is None or i > 2 else t.requires_grad_() for i, t in enumerate(made)]


@pytest.mark.parametrize("beta", (0.0, 0.2, 0.5, 1.0))
@pytest.mark.parametrize("biases", ((False, False), (True, False), (True, True)), ids=("none", "one", "both"))
@pytest.mark.parametrize("scales", ((1.0, 1.0), (0.5, 1.3)), ids=("unscaled", "scaled"))
@pytest.mark.parametrize(
    "dtypes",
    ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)),
    ids=("float32", "bfloat16", "mixed"),
)
def test_the_divergence(
    dtypes: tuple[torch.dtype, torch.dtype],
    scales: tuple[float, float],
    biases: tuple[bool, bool],
    beta: float,
) -> None:
    """Values and gradients for each token, and the entropy of the student, which has none."""
    leaves, (of_student, of_teacher) = pair(*dtypes, biases), scales
    options = (beta, 0.7, of_student, None, of_teacher, None)
    ours, theirs = divergence(*leaves, *options), THEIR_DIVERGENCE.apply(*leaves, *options)  # type: ignore[arg-type]
    # In bfloat16 hidden states times of_teacher / of_student are rounded here, gradients of logits there.
    exact, narrow = 2e-5, 2e-2
    in_bfloat16 = dtypes[0] == torch.bfloat16
    tolerance = narrow if in_bfloat16 and of_student != of_teacher else exact
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=exact, atol=exact)
    assert not ours[1].requires_grad
    wanted, upstream = [t for t in leaves[:3] if t is not None], torch.randn(40)
    gradients = (torch.autograd.grad(y[0], wanted, upstream) for y in (ours, theirs))
    for found, expected in zip(*gradients, strict=True):
        assert found.dtype == expected.dtype
        largest = float(expected.abs().max())
        tolerance = narrow if in_bfloat16 else exact
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("beta", (0.0, 0.2))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_the_divergence_under_autocast(bias: bool, beta: float) -> None:
    """Float32 weights and hidden states, as in mixed precision, take part in bfloat16."""
    leaves = pair(torch.float32, torch.float32, (bias, bias))
    wanted = [t for t in leaves[:3] if t is not None]
    results = []
    for function in (divergence, THEIR_DIVERGENCE.apply):
        with torch.autocast("cpu", torch.bfloat16):
            found, entropy = function(*leaves, beta, 0.7)  # type: ignore[operator]
        results.append([found, entropy, *torch.autograd.grad(found.sum(), wanted)])
    (found, entropy, *gradients), (expected, their_entropy, *their_gradients) = results
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    of_entropy = 2e-2 if bias else 2e-5  # whose bias is rounded here
    torch.testing.assert_close(entropy, their_entropy, rtol=of_entropy, atol=of_entropy)
    for gradient, theirs in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("beta", (0.0, 0.2, 1.0))
@pytest.mark.parametrize("rest", (False, True), ids=("candidates", "rest"))
@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_divergence_of_candidates(
    dtype: torch.dtype, bias: bool, softcap: float | None, rest: bool, beta: float
) -> None:
    """All sums, and gradients. Some tokens have fewer candidates."""
    leaves = operands(dtype, bias)
    log_p = (2 * torch.randn(40, 301)).log_softmax(1)
    known = torch.rand(40, 6) < 0.8
    known[:, 0] = True
    candidates = torch.where(known, log_p.topk(6).indices, -1)
    of_teacher = log_p.gather(1, candidates.clamp(min=0))
    options = (1.3, softcap, candidates, of_teacher, known, beta, 0.7, rest, torch.arange(40) % 2, 3, 16)
    ours, theirs = (
        integration._divergence_of_candidates(*leaves, *options),
        THEIR_CANDIDATES(*leaves, *options),
    )  # type: ignore[arg-type]
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, check_dtype=False)
    wanted = [t for t in leaves if t is not None]
    gradients = (torch.autograd.grad(y[0], wanted) for y in (ours, theirs))
    for found, expected in zip(*gradients, strict=True):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("rest", (False, True), ids=("candidates", "rest"))
def test_a_candidate_of_probability_0(rest: bool) -> None:
    """The teacher's: it is part of the student's distribution alone."""
    x, weight, _ = operands(torch.float32, False)
    assert x is not None and weight is not None
    of_teacher = torch.tensor([[0.4, 0.0, 0.3], [0.0, 0.5, 0.2]]).log()
    given = (torch.tensor([[3, 7, 9], [1, 2, 0]]), of_teacher, torch.ones(2, 3, dtype=torch.bool))
    for beta in (0.0, 0.4):
        head = (x[:2], weight, None, 1.0, None)
        ours = divergence_of_candidates(*head, 0.7, *given, beta, rest)
        loss, *_ = THEIR_CANDIDATES(*head, *given, beta, 0.7, rest, None, 1, 2)
        torch.testing.assert_close(ours[0].sum(), loss)
        assert all(t.isfinite().all() for t in (*ours, *torch.autograd.grad(ours[0].sum(), (x, weight))))


def test_a_trainer_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of a package: the others are reached all the same. A module that TRL lacks is an error."""
    real = importlib.import_module

    def missing(package: str) -> Any:
        def imported(name: str) -> Any:
            if "async_distillation" in name:
                raise ModuleNotFoundError(f"No module named '{package}'", name=package)
            return real(name)

        return imported

    monkeypatch.setattr(integration, "import_module", missing("aiohttp"))
    apply()
    assert isinstance(trl_utils._ChunkedLogProbFunction, integration._InPlace)
    undo()
    monkeypatch.setattr(integration, "import_module", missing("trl.experimental.async_distillation"))
    with pytest.raises(ImportError, match="no such module"):
        apply()


def test_the_divergence_without_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = pair(torch.float32, torch.float32, (False, False))
    expected, _ = divergence(*leaves, 0.5)  # type: ignore[arg-type]
    monkeypatch.setattr(of_divergence, "linear_log_probs", None)
    found, entropy = divergence(*leaves, 0.5, entropy=False)  # type: ignore[arg-type]
    assert entropy is None and torch.equal(found, expected)
    with pytest.raises(TypeError, match="entropy: expected True or False"):
        divergence(*leaves, 0.5, entropy=None)  # type: ignore[arg-type]


def test_the_divergence_refuses() -> None:
    leaves = pair(torch.float32, torch.float32, (False, False))
    for name in ("student", "teacher"):
        for argument, given in ((f"{name}_final_logit_softcapping", 30.0), (f"{name}_logit_scale", 0.0)):
            with pytest.raises(ValueError, match=f"{argument}: expected"):
                divergence(*leaves, 0.5, **{argument: given})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"{name}_logit_scale: expected"):
            divergence(*leaves, 0.5, **{f"{name}_logit_scale": None})  # type: ignore[arg-type]


MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, final_logit_softcapping=5.0, attn_implementation="eager")
    ),
}


@pytest.mark.parametrize("cast", (False, True), ids=("as_is", "float32_head"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_head(name: str, dtype: torch.dtype, cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and gradients of a model are TRL's, also where the prompt has no labels."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    ids = torch.randint(301, (2, 20))
    labels = ids.masked_fill(torch.arange(20) < 5, -100)
    results = []
    for ours in (False, True):
        undo()
        if ours:
            apply()
        copied = copy.deepcopy(model)
        outputs = ("log_probs", *OPTIONAL)
        trl_utils.add_fused_lm_head(copied, temperature=0.8, cast_lm_head_to_fp32=cast, outputs=outputs)
        out = copied(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss + out.entropy.mean()).backward()
        results.append((out, {n: p.grad for n, p in copied.named_parameters()}))
    (theirs, expected), (ours_out, found) = results
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    for field in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
        torch.testing.assert_close(getattr(ours_out, field), getattr(theirs, field), **near)
    assert not ours_out.log_probs[:, :4].any() and torch.equal(ours_out.label_mask, theirs.label_mask)
    for parameter, gradient in expected.items():
        largest = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=tolerance * largest)


def installed() -> dict[str, list[type]]:
    """The trainers of the installed TRL by their names, found in all modules that can be imported here."""
    found: dict[str, list[type]] = {}
    for package in (trl.trainer, trl.experimental):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                names = vars(importlib.import_module(module.name))
            except ImportError:
                continue
            for name, value in names.items():
                if (
                    isinstance(value, type)
                    and issubclass(value, transformers.Trainer)
                    and value.__module__ == module.name
                    and not name.startswith("_")
                ):
                    found.setdefault(name, []).append(value)
    return found


def test_every_trainer_is_reached_or_named(caplog: pytest.LogCaptureFixture) -> None:
    """In one line of the log, of the first call; what is not reached has a loss that is not of who is."""
    found = installed()
    with caplog.at_level(logging.WARNING, "monoidreduce"):
        apply()
        apply()
    (line,) = [record.getMessage() for record in caplog.records]
    of, _, not_of = line.partition("It replaces nothing in ")
    reached = [name for name in found if f" {name}," in of or f" {name}." in of]
    others = [name for name in found if f"{name}," in not_of.split(" ") or f"{name}." in not_of.split(" ")]
    assert len(found) >= 20 and len(reached) >= 7
    assert sorted(reached + others) == sorted(found)
    assert set(reached) == {name for name in REACHED if name in found}
    losses = {inspect.getmodule(c.compute_loss) for name in reached for c in found[name]}  # type: ignore[attr-defined]
    assert [n for n in others for c in found[n] if inspect.getmodule(c.compute_loss) in losses] == []  # type: ignore[attr-defined]


def test_undo() -> None:
    ours, places = [], integration._places()
    for function in (undo, apply, undo, undo):
        function()
        ours.append([getattr(importlib.import_module(m), n) for m, n, _ in places])
    assert all(isinstance(function, integration._InPlace) for function in ours[1])
    assert ours[0] == ours[2] == ours[3] and ours[0][0] is THEIRS


@pytest.mark.release
def test_an_old_version_is_refused(tmp_path: Path) -> None:
    """By its name and number, before the trainers are imported."""
    (tmp_path / "trl.py").write_text("__version__ = '0.24.0'")
    code = "import monoidreduce.integrations.trl"
    path = os.pathsep.join([str(tmp_path), str(Path(integration.__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 1
    assert "ImportError: trl: expected version 1.9 or later, got 0.24.0" in found.stderr.splitlines()[-1]
    assert "transformers.apply(model, loss=False)" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", sampled(TRAINERS, ("sft", "gkd_0.3", "grpo", "asyncdistillation_0.3")))
def test_trainers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they log of three steps, and the gradients of the first, are as with TRL's own."""
    of = name.partition("_")[0]
    calls = counted_calls(monkeypatch)
    expected = history(name, tmp_path / "theirs")
    apply()
    found = history(name, tmp_path / "ours")
    check_same(found, expected)
    reached = trl_steps.class_of(name).__name__ in REACHED
    assert len(calls) >= 3 if reached else not calls
    if of in BY_OURS:
        check_same(history(name, tmp_path / "ours", BY_OURS[of]), expected)
        assert len(calls) >= 3


def test_the_check_installs_the_older_versions() -> None:
    """Without them the next test would be skipped."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    assert f"\nOLDER_TRL := {' '.join(OLDER)}\n" in makefile


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_older_versions(version: str) -> None:
    """The same in a process with another TRL, which `make test` installs for it."""
    folder = Path(sys.prefix) / f"trl-{version}"
    if not folder.is_dir():
        pytest.skip(f"no TRL {version}: make .venv/trl-{version}.done")
    reached = {"1.9.0": ["sft"], "1.12.0": ["sft", "distillation_0.3"]}.get(
        version, ["dpo", "distillation_0.3"]
    )
    folders = [folder, Path(integration.__file__).parents[2], os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, trl_steps.__file__, *reached, "orpo"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, folders)))},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    said = json.loads(process.stdout.splitlines()[-1])
    assert said["version"] == version and said["calls"].pop("orpo") == 0 and "ORPOTrainer" in said["others"]
    assert all(count >= 3 for count in said["calls"].values()) and len(said["calls"]) == len(reached)
    names = [f"{trl_steps.NAMES.get(name.partition('_')[0], name.upper())}Trainer" for name in reached]
    assert set(names) <= set(said["reached"]) and len(said["others"]) >= 13


def test_gkd_makes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where outputs are asked for, and then the loss is the same."""
    made = trainer("gkd_0.3", tmp_path, GKDTrainer, lmbda=0.0)
    calls: list[int] = []
    for model in (made.model, made.teacher_model):
        model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    made.train()
    assert made.state.global_step == 3 and not calls
    batch = made.data_collator(list(made.train_dataset)[:4])
    made.model.eval()
    with torch.no_grad():
        loss = made.compute_loss(made.model, batch)
        theirs, outputs = made.compute_loss(made.model, batch, return_outputs=True)
    assert len(calls) == 2 and outputs.logits.shape[-1] == 301
    torch.testing.assert_close(loss, theirs)


@pytest.mark.parametrize("name", ("gkd_0.3", "distillation_0.3"))
def test_who_logs_no_entropy_computes_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply()
    calls: list[int] = []
    entropy_of = of_divergence.linear_log_probs
    monkeypatch.setattr(
        of_divergence,
        "linear_log_probs",
        lambda *args, **options: calls.append(1) or entropy_of(*args, **options),
    )
    steps, _ = history(name, tmp_path, BY_OURS.get(name.partition("_")[0]))
    assert len(steps) == 3 and len(calls) == (0 if name.startswith("gkd") else 3)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(("entropy" in step) == (len(calls) > 0) for step in steps)


def test_gkd_refuses_a_softcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("gkd_0.3", tmp_path, GKDTrainer, lmbda=0.0)
    made.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="student_final_logit_softcapping: expected None"):
        made.train()


def test_gkd_refuses_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the teacher's head and of prompts, which a loss of hidden states would leave out."""
    peft = pytest.importorskip("peft")
    head = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted: list[tuple[Any, str, dict[str, Any]]] = [
        (
            TypeError,
            r"teacher_model: its head: .*Linear",
            {"teacher_model": peft.get_peft_model(teacher(), head)},
        ),
        (ValueError, "model: expected no prompts that PEFT learns", {"peft_config": prompts}),
    ]
    for error, message, options in adapted:
        with pytest.raises(error, match=message):
            trainer("gkd_0.3", tmp_path, lambda options=options, **given: GKDTrainer(**given | options))
