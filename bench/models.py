"""A training step of a model of transformers: unmodified, after `apply`, and with all of Liger's patches.

Further contenders are `apply` without compiled layers, and the unmodified model and Liger's with layers
compiled in the same way.

The contenders are copies of one model with random weights. They share the weights, in one process, and take
turns. Each turn begins with an empty memory cache and an untimed step. Liger also replaces functions in
transformers' module; these are in effect only in its turns.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Stopwatch, dtype_name, in_turn, run_once, summary
from monoidreduce.demo.memory import Problem, peak, start_peak

OURS, THEIRS, LIGER = "monoidreduce", "transformers", "Liger"
UNCOMPILED, THEIRS_COMPILED = "monoidreduce, layers as they are", "transformers, compiled layers"
LIGER_COMPILED = "Liger, compiled layers"
BY_POSITIONS = "monoidreduce, position_ids"
FLASH = "transformers, flash-attn"
DTYPE = torch.bfloat16
# Largest relative difference of results. Through 16 layers of width 256, on a CPU, our gradients differ from
# transformers' by 0.011. With wrong boundaries of packed sequences they differ by 1.06.
AGREEMENT = 0.1
PHASES = ("forward", "backward", "total")
LIGERS_PARTS = ("forward", "norm", "mlp", "rope")  # parts that Liger's patches replace


@dataclass(frozen=True)
class Step:
    """The tokens of a step, whether layers are recomputed, and targets of others' median times over ours."""

    batch: int
    length: int
    checkpointing: bool = False
    sequences: int | None = None  # number of sequences packed in each row of the batch, of random lengths
    targets: dict[str, float] = field(default_factory=dict)

    def parameters(self) -> dict[str, Any]:
        """The sizes and options that tell the steps of a model apart."""
        packed = {} if self.sequences is None else {"sequences": self.sequences}
        checkpointing = {"checkpointing": True} if self.checkpointing else {}
        return {"batch": self.batch, "length": self.length} | packed | checkpointing

    def names(self) -> list[str]:
        """The contenders' names.

        For packed sequences ours are measured with cumulative lengths and with position ids only, and
        flash-attn with cumulative lengths.
        """
        everyone = [OURS, UNCOMPILED, THEIRS, THEIRS_COMPILED, LIGER, LIGER_COMPILED]
        return everyone + ([] if self.sequences is None else [BY_POSITIONS, FLASH])


class Scale(NamedTuple):
    """A model (the family in transformers, arguments of its config), its steps, and the rounds of each."""

    name: str
    family: str
    config: dict[str, int]
    steps: list[Step]
    rounds: int


def _config(
    hidden: int, layers: int, heads: int, key_heads: int, intermediate: int, vocabulary: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


QUICK = Scale(
    "a tiny Llama",
    "Llama",
    _config(64, 2, 4, 2, 128, 257),
    [Step(2, 24), Step(2, 24, checkpointing=True), Step(1, 40, sequences=3)],
    rounds=2,
)
ON_CPU = Scale(
    "a small Llama",
    "Llama",
    _config(512, 4, 8, 2, 2048, 32000),
    [Step(2, 256), Step(2, 256, checkpointing=True), Step(1, 512, sequences=8)],
    rounds=5,
)
# Targets of steps without and with recomputed layers.
WHOLE, RECOMPUTED = {THEIRS: 1.15, LIGER: 1.05}, {THEIRS: 1.08, LIGER: 1.05}
ON_CUDA = Scale(
    "Llama-3.2-1B",
    "Llama",
    _config(2048, 16, 32, 8, 8192, 128256),
    [
        Step(2, 4096, targets=WHOLE),
        Step(2, 4096, checkpointing=True, targets=RECOMPUTED),
        Step(1, 16384, targets=WHOLE),
        Step(1, 16384, checkpointing=True, targets=RECOMPUTED),
        Step(1, 16384, sequences=32),
    ],
    rounds=10,
)
QWEN3_ON_CUDA = Scale(
    "Qwen3-1.7B",
    "Qwen3",
    _config(2048, 28, 16, 8, 6144, 151936) | {"head_dim": 128},
    [Step(1, 8192), Step(1, 8192, checkpointing=True)],
    rounds=10,
)


class Contender(NamedTuple):
    """A model, and the attributes of transformers' Llama module that it replaces in its turns."""

    model: Any
    replaced: dict[str, Any]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context with its patches in effect. It has to contain backward passes, which recompute layers."""
        module = vars(sys.modules[type(self.model).__module__])
        before = {name: module[name] for name in self.replaced}
        module.update(self.replaced)
        try:
            yield
        finally:
            module.update(before)

    def parts(self) -> dict[str, str]:
        """The modules that the functions of a step come from, and the name of the attention in use."""
        inner = self.model.model
        norms = [layer.input_layernorm for layer in inner.layers]
        norms += [layer.post_attention_layernorm for layer in inner.layers]
        with self.turn():
            functions = {
                "forward": [self.model.forward],
                "loss": [self.model.loss_function],
                "norm": [norm.forward for norm in (*norms, inner.norm)],
                "mlp": [layer.mlp.forward for layer in inner.layers],
                "layers": [layer.forward for layer in inner.layers],
                "rope": [sys.modules[type(self.model).__module__].apply_rotary_pos_emb],
            }
        named = {
            part: ", ".join(sorted({inspect.unwrap(function).__module__ for function in found}))
            for part, found in functions.items()
        }
        return named | {"attention": self.model.config._attn_implementation}


def plain(model: Any) -> Contender:
    """The unmodified model."""
    return Contender(model, {})


def ours(model: Any) -> Contender:
    """The model after `apply` with its defaults."""
    from monoidreduce.integrations.transformers import apply

    return Contender(apply(model), {})


def ours_uncompiled(model: Any) -> Contender:
    """The model after `apply` without compiled layers."""
    from monoidreduce.integrations.transformers import apply

    return Contender(apply(model, compile_layers=False), {})


def theirs_compiled(model: Any) -> Contender:
    """The unmodified model with its layers compiled as `apply` does."""
    from monoidreduce.integrations._layers import compile_in_training, layers_of

    compile_in_training(layers_of(model))
    return Contender(model, {})


def liger(model: Any) -> Contender:
    """The model with Liger's defaults, that is all patches. Raises RuntimeError if one is not in effect."""
    library = importlib.import_module("liger_kernel.transformers")
    module = vars(sys.modules[type(model).__module__])
    before = dict(module)
    getattr(library, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    replaced = {name: value for name, value in module.items() if value is not before.get(name)}
    module.update(before)
    contender = Contender(model, replaced)
    parts = contender.parts()
    if others := [part for part in LIGERS_PARTS if not parts[part].startswith("liger_kernel.")]:
        raise RuntimeError(
            f"its patches are not in effect: {', '.join(f'{part} of {parts[part]}' for part in others)}"
        )
    return contender


def liger_compiled(model: Any) -> Contender:
    """The model with Liger's patches, its layers compiled as `apply` does."""
    from monoidreduce.integrations._layers import compile_in_training, layers_of

    contender = liger(model)
    compile_in_training(layers_of(model))
    return contender


def flash(model: Any) -> Contender:
    """The model with transformers' FlashAttention-4, or else 2. Raises ImportError without both."""
    try:
        model.set_attn_implementation("flash_attention_4")
    except (ImportError, ValueError):
        model.set_attn_implementation("flash_attention_2")
    return Contender(model, {})


BUILD: dict[str, Callable[[Any], Contender]] = {
    OURS: ours,
    UNCOMPILED: ours_uncompiled,
    THEIRS: plain,
    THEIRS_COMPILED: theirs_compiled,
    LIGER: liger,
    LIGER_COMPILED: liger_compiled,
    BY_POSITIONS: ours,
    FLASH: flash,
}


def base_model(scale: Scale, device: torch.device) -> Any:
    """A model in training mode, with its embeddings tied to its head and without a KV cache."""
    import transformers

    torch.manual_seed(0)
    config, model = (getattr(transformers, f"{scale.family}{part}") for part in ("Config", "ForCausalLM"))
    made = config(**scale.config, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    with torch.device(device):
        return model(made).to(DTYPE).train()


def copy_of(model: Any) -> Any:
    """A copy with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def batch_of(step: Step, vocabulary: int, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a call of a model, and arguments that give attention the lengths of packed sequences."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (step.batch, step.length), generator=generator)
    labels = ids.clone()
    if step.sequences is None:
        return {"input_ids": ids.to(device), "labels": labels.to(device)}, {}
    starts = [0, *sorted(random.Random(0).sample(range(1, step.length), step.sequences - 1))]
    bounds = torch.tensor([*starts, step.length])
    lengths = bounds.diff()
    labels[:, starts] = -100  # no token predicts the first of a sequence
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    longest, bounds = int(lengths.max()), bounds.to(device, torch.int32)
    told = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}, told


def problems_of(step: Step, contenders: dict[str, Contender], device: torch.device) -> dict[str, Problem]:
    """A step of each contender over the same tokens. The shared weights get gradients."""
    batch, told = batch_of(step, contenders[THEIRS].model.config.vocab_size, device)

    def problem(name: str) -> Problem:
        model, arguments = contenders[name].model, batch | (told if name in (OURS, UNCOMPILED, FLASH) else {})
        if step.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        leaves, grad = tuple(model.parameters()), torch.ones((), device=device)
        return Problem(lambda: model(**arguments).loss.float(), leaves, grad)

    return {name: problem(name) for name in step.names() if name in contenders}


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative difference of all tensors together, by norm."""
    pairs = zip(found, expected, strict=True)
    norms = [((a.float() - b.float()).norm(), b.float().norm()) for a, b in pairs]
    apart, whole = (torch.stack(column).norm() for column in zip(*norms, strict=True))
    return float(apart / whole)


def compare(
    problems: dict[str, Problem], contenders: dict[str, Contender], watch: Stopwatch
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Differences of each contender's loss and gradients from transformers', and reasons why contenders fail.

    Raises RuntimeError if one of ours fails.
    """

    def results(name: str) -> list[Tensor]:
        with contenders[name].turn():
            return run_once(problems[name], watch)[1]

    differences, absent = {}, {}
    loss, *gradients = results(THEIRS)
    for name in problems:
        try:
            own_loss, *own_gradients = results(name)
            apart = {"loss": distance([own_loss], [loss]), "gradients": distance(own_gradients, gradients)}
            if not all(value <= AGREEMENT for value in apart.values()):  # a NaN is wrong too
                raise ValueError(f"its results differ from transformers' by {apart}")
            differences[name] = apart
        except Exception as error:
            absent[name] = why(name, error)
    return differences, absent


def why(name: str, error: Exception) -> str:
    """The reason why a contender is absent. Raises RuntimeError if it is one of ours."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if name.startswith(OURS):
        raise RuntimeError(f"{name}: {reason}") from error
    return reason


def peak_bytes(problem: Problem) -> int:
    """Peak memory of a step beyond the weights, including its gradients."""
    device = problem.grad_output.device
    before = start_peak(device)
    torch.autograd.grad(problem.forward(), problem.inputs, problem.grad_output)
    return peak(device) - before


def measure_step(
    step: Step, contenders: dict[str, Contender], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Time a step of all contenders in turn; on a GPU, measure its memory too."""
    torch.compiler.reset()  # layers are compiled for the lengths of this step
    watch = Stopwatch(device)
    problems = problems_of(step, contenders, device)
    differences, absent = compare(problems, contenders, watch)
    times: dict[str, list[list[float]]] = {name: [] for name in differences}
    for name in in_turn(list(times), rounds):
        torch.cuda.empty_cache()
        with contenders[name].turn():
            run_once(problems[name], watch)
            times[name].append(run_once(problems[name], watch)[0])
    peaks = {}
    for name in times if device.type == "cuda" else ():
        with contenders[name].turn():
            peaks[name] = peak_bytes(problems[name])
    milliseconds = {
        name: {
            phase: summary(list(laps))
            for phase, laps in zip(PHASES, zip(*measured, strict=True), strict=True)
        }
        for name, measured in times.items()
    }
    own = milliseconds[OURS]["total"]["median"]
    return {
        "rounds": rounds,
        "milliseconds": milliseconds,
        "speedup": {name: phases["total"]["median"] / own for name, phases in milliseconds.items()},
        "peak_bytes": peaks,
        "difference": differences,
        "absent": absent,
        "targets": step.targets,
    }


def measure_models(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For each step of a model, the times and memory of all contenders, and the parts in effect in each.

    Without transformers nothing is measured, and a line is printed that says so.
    """
    if importlib.util.find_spec("transformers") is None:
        print("models are not measured: transformers is not installed", file=sys.stderr)
        return
    on_device = [ON_CUDA, QWEN3_ON_CUDA] if device.type == "cuda" else [ON_CPU]
    for scale in [QUICK] if quick else on_device:
        yield from measure_scale(scale, device)


def measure_scale(scale: Scale, device: torch.device) -> Iterator[dict[str, Any]]:
    """The rows of one model's steps."""
    base = base_model(scale, device)
    contenders, missing = {}, {}
    for name, build in BUILD.items():
        try:
            contenders[name] = build(copy_of(base))
        except Exception as error:
            missing[name] = why(name, error)
    for step in scale.steps:
        print(f"measuring {scale.name} {step.parameters()}", file=sys.stderr)
        row = measure_step(step, contenders, device, scale.rounds)
        row["absent"] |= {name: reason for name, reason in missing.items() if name in step.names()}
        parts = {name: contenders[name].parts() for name in row["milliseconds"]}
        about = {
            "op": scale.name,
            "dtype": dtype_name(DTYPE),
            "parameters": step.parameters(),
            "parts": parts,
        }
        yield about | row
