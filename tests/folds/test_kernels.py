"""The kernels of programs, as far as a compiler shows: they compile, spill little, and are kept on disk."""

from __future__ import annotations

import importlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folds import FOLDS, program_of
from sampled import sampled

import monoidreduce as mr
from monoidreduce import get_include
from monoidreduce.folds import decoding, distillation
from monoidreduce.folds.cuda import compiler, kernels
from monoidreduce.folds.cuda.compiler import CompilationError, Compiler
from monoidreduce.folds.program.arguments import ARGUMENTS, arguments
from monoidreduce.folds.program.derivative import gradient
from monoidreduce.folds.program.program import with_sizes
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.statistics_call import Call

SPILLS = re.compile(r"(\d+) bytes spill stores")


@pytest.fixture
def nvrtc() -> Compiler:
    found = compiler.find()
    if found is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def dtype_of(tier: str) -> torch.dtype:
    return torch.float32 if tier == "planes" else torch.bfloat16


@pytest.mark.parametrize("which", ("fold", "gradient", "gradient of first"))
@pytest.mark.parametrize(
    ("name", "tier"),
    sampled(
        (
            *(("token_stats", tier) for tier in ("sm90", "sm80", "simt", "planes")),
            *(("reference_kl", tier) for tier in ("sm90", "planes")),
        ),
        (("token_stats", "sm90"),),
    ),
)
def test_compiles_and_hardly_spills(nvrtc: Compiler, name: str, tier: str, which: str) -> None:
    image = kernels.compiled(which, *program_of(name), dtype_of(tier), tier, (9, 0))
    assert image.code.startswith(b"\x7fELF")
    assert all(name.encode() in image.code for name in image.names)
    spills = [int(bytes) for bytes in SPILLS.findall(image.log)]
    assert len(spills) == len(image.names) == (2 if which == "fold" and tier != "simt" else 1)
    assert max(spills) <= 64, image.log


# Functions of examples/, with their data of rows; other names are data of columns.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "policy_gradient.token_stats": (),
    "token_losses.pieces": (),
    "divergences.pieces": (),
    "contrastive.pairs": ("bias",),
    "contrastive.choices": (),
    "noisy_or.causes": (),
    "kernel_sums.gaussian": ("half",),
    "kernel_sums.soft_minimum": (),
    "kernel_density.mixture": (),
    "nearest_neighbours.nearest": (),
}


def program_of_example(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The text of the program, and the numbers of its data."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    module, _, function = name.partition(".")
    traced_function = getattr(importlib.import_module(module), function)._function
    data = [argument for argument in arguments(traced_function) if argument not in ARGUMENTS]
    rows, columns = (
        {argument: "real" for argument in data if (argument in EXAMPLES[name]) == of_rows}
        for of_rows in (True, False)
    )
    traced = trace(traced_function, rows, columns)
    return traced.text, tuple(
        len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index")
    )


@pytest.mark.parametrize(
    ("name", "tier"),
    sampled(
        (
            *((name, "sm90") for name in EXAMPLES),
            *(("divergences.pieces", tier) for tier in ("sm80", "planes")),
        ),
        (("policy_gradient.token_stats", "sm90"),),
    ),
)
def test_examples_hardly_spill(
    nvrtc: Compiler, name: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, counts = program_of_example(name, monkeypatch)
    capability = (8, 0) if tier == "sm80" else (9, 0)
    for which in ("fold", "gradient"):
        image = kernels.compiled(which, program, counts, dtype_of(tier), tier, capability)
        assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log


@mr.statistics
def largest_of_both(score: Any, other: Any) -> Any:
    return dict(best=mr.stat.largest(score - 0.5 * other, 5))


def test_the_largest_of_two_scores_in_planes_hardly_spill(nvrtc: Compiler) -> None:
    text = trace(largest_of_both._function, {}, {}).text
    image = kernels.compiled("fold", text, (0, 0, 0, 0), torch.float32, "planes", (9, 0))
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize(
    "name",
    sampled(
        ("kernel_sums.gaussian", "kernel_sums.soft_minimum", "nearest_neighbours.nearest", "noisy_or.causes"),
        ("kernel_sums.gaussian",),
    ),
)
def test_gradients_of_rows_in_planes_do_not_spill(
    nvrtc: Compiler, name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, counts = program_of_example(name, monkeypatch)
    of = gradient(program, *counts[:2])
    for of_columns, by_data in ((False, of.rows), (True, of.columns)):
        by = tuple(number for number, by in enumerate(by_data) if by is not None)
        given = program, counts, of_columns, True, by, torch.float32, (width, 0, 4), (9, 0), "planes"
        image = kernels.compiled_row_gradient(*given)
        assert [int(bytes) for bytes in SPILLS.findall(image.log)] == [0], image.log


@pytest.mark.release
@pytest.mark.parametrize("tier", ("sm90", "planes"))
@pytest.mark.parametrize("loss", distillation.LOSSES)
def test_losses_of_distillation_hardly_spill(nvrtc: Compiler, loss: str, tier: str) -> None:
    """Without biases and hard labels."""
    function = distillation._FOLDS[loss, (False, False)]._function
    rows = {argument: "real" for argument in arguments(function) if argument not in ARGUMENTS}
    traced = trace(function, rows, {})
    counts: Any = [len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index")]
    for which in ("fold", "gradient", "gradient of first"):
        image = kernels.compiled(which, traced.text, counts, dtype_of(tier), tier, (9, 0))
        assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log


@pytest.mark.parametrize(
    ("name", "tier"),
    sampled(
        (("topk", "sm90"), ("sample", "sm90"), ("topk", "sm80"), ("sample", "sm80")), (("sample", "sm90"),)
    ),
)
def test_heads_hardly_spill(nvrtc: Compiler, name: str, tier: str) -> None:
    """And they have the code of a few elements: unrolled over a tile it was over 200 KB. The sample has all
    options."""
    fold = decoding._TOPK[64, (False, False)] if name == "topk" else decoding._SAMPLE[True, (True,) * 4]
    a, b = torch.ones(8, 64, dtype=torch.bfloat16), torch.ones(9, 64, dtype=torch.bfloat16)
    row, column, words = {"inverse": torch.ones(8)}, {}, None
    if name == "sample":
        row |= {"cap": torch.ones(8), "noise": torch.ones(8), "seed": torch.ones(8, dtype=torch.int64)}
        column = {"bias": torch.ones(9), "shift": torch.ones(9, dtype=torch.int64)}
        words = torch.ones(8, 1, dtype=torch.int64)
    call = Call(fold, a, b, None, None, None, -100, row, column, 1.0, words=words)
    traced, tensors = fold._traced(call)
    text, _, _, sizes = call.tables_of(traced, tensors)
    capability = (9, 0) if tier == "sm90" else (8, 0)
    given = "fold", with_sizes(text, tuple(sizes)), traced.counts, torch.bfloat16, tier, capability
    for row_block in (256, 128) if tier == "sm90" else (256,):
        image = kernels.compiled(*given, row_block=row_block)
        assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 32, image.log
        assert len(image.code) < 200_000


def test_no_example_is_forgotten() -> None:
    examples = Path(__file__).parents[2] / "examples"
    decorated = re.compile(r"^@mr\.statistics\ndef (\w+)", re.M)
    found = {
        f"{file.stem}.{name}"
        for file in examples.glob("*.py")
        for name in decorated.findall(file.read_text())
    }
    assert found == set(EXAMPLES)


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "dtype", "owned"),
    (
        *(("token_stats", torch.float32, owned) for owned in ((4, 0, 1), (16, 0, 1), (64, 0, 4))),
        ("token_stats", torch.float64, (8, 0, 4)),
        ("token_stats", torch.float64, (32, 0, 4)),
        ("reference_kl", torch.float32, (8, 8, 1)),
        ("reference_kl", torch.float32, (32, 32, 4)),
        ("reference_kl", torch.float64, (8, 8, 4)),
    ),
)
def test_threads_have_registers_for_rows(
    nvrtc: Compiler, name: str, dtype: torch.dtype, owned: tuple[int, int, int]
) -> None:
    program, counts = program_of(name)
    images = [kernels.compiled("fold", program, counts, dtype, "simt", (9, 0), owned)]
    images += [
        kernels.compiled_row_gradient(program, counts, of_columns, True, (), dtype, owned, (9, 0), "simt")
        for of_columns in (False, True)
    ]
    assert [len(image.names) for image in images] == [2, 1, 1]
    for image in images:
        spills = [int(bytes) for bytes in SPILLS.findall(image.log)]
        assert len(spills) == len(image.names)
        assert max(spills) <= 64, image.log


@pytest.mark.parametrize(
    ("dtype", "capability"),
    ((torch.float64, (8, 6)), (torch.float32, (12, 0)), (torch.float16, (99, 0))),
    ids=str,
)
def test_kernels_of_any_gpu(nvrtc: Compiler, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    image = kernels.compiled("fold", *program_of("siglip"), dtype, "simt", capability)
    is_ptx = b".entry" in image.code
    assert is_ptx == (capability == (99, 0))  # a GPU that the compiler does not know


def test_kept_on_disk(nvrtc: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = ("fold", *program_of("noisy_or"), torch.float32, "simt", (8, 0))
    image = kernels.compiled(*arguments)
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("it is in the cache"))
    assert kernels.compiled(*arguments) == image
    (file,) = (path for path in folder.glob("*/*") if image.code in path.read_bytes())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # A file that is not whole is as none.
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(pytest.fail.Exception, match="in the cache"):
        kernels.compiled(*arguments)


def test_kept_kernels_load_no_compiler(
    nvrtc: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache knows of a library is of this file alone."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(folder / "empty"))  # the other one knows `nvrtc`
    first = Compiler(nvrtc.path)
    again = Compiler(nvrtc.path)
    assert "_library" in vars(first) and "_library" not in vars(again)
    assert (again.version, again.architectures) == (nvrtc.version, nvrtc.architectures)
    assert again.compile("__global__ void kernel() {}", "compute_80", [], ["kernel"]).names == ("_Z6kernelv",)
    other = folder / nvrtc.path.name
    other.write_bytes(b"no library")
    with pytest.raises(OSError):
        Compiler(other)


def test_compiler_says_what_it_refuses(nvrtc: Compiler) -> None:
    with pytest.raises(CompilationError, match=r"(?s)error: .*nonsense"):
        nvrtc.compile("nonsense", "sm_80", ["--std=c++20"], [])


def test_a_line_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hurried:
        def __init__(self, seconds: float, write: Any, arguments: list[str]) -> None:
            assert seconds == 1.0
            self.start, self.cancel = lambda: write(*arguments), lambda: None

    monkeypatch.setattr(kernels.threading, "Timer", Hurried)
    with kernels._progress(), kernels._progress():  # at once: one line
        pass
    monkeypatch.setenv("MONOIDREDUCE_PROGRESS", "0")
    with kernels._progress():
        pass
    assert capsys.readouterr().err == "monoidreduce: compiling the kernels of a function, once\n"


ALONE = """
import torch, monoidreduce as mr
from monoidreduce.folds.cuda import cache, compiler, kernels
from monoidreduce.folds.program.tracing import trace

@mr.statistics
def fold(score, column):
    return dict(lse=mr.stat.softmax(score).logsumexp, best=mr.stat.largest(score))

a, b = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
fold(a, b).lse.sum().backward()
if compiler.find() is not None:
    text = trace(fold.__wrapped__, {}, {}).text
    assert kernels.compiled("fold", text, (0, 0, 0, 0), torch.float32, "simt", (9, 0)).code
print("done")
"""


def test_without_commands_or_a_home() -> None:
    """No PATH, and a home where nothing can be written: nothing is kept, and all else works."""
    environment = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH",)}
    environment |= {"PATH": "", "HOME": "/proc/nothing"}
    assert subprocess.check_output([sys.executable, "-c", ALONE], text=True, env=environment) == "done\n"


def test_nothing_is_compiled_by_an_import() -> None:
    script = "import monoidreduce, sys; print('monoidreduce.folds.cuda.compiler' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


@pytest.mark.parametrize("name", FOLDS)
def test_the_host_knows_the_size_of_a_state(nvrtc: Compiler, name: str) -> None:
    """The scratch memory is sized by it: with a wrong size a unit does not compile."""
    text, counts = program_of(name)
    unit = kernels.unit("fold", text, kernels.fold_source(text, *counts), "simt", torch.float32)
    words = re.search(r"sizeof\(StatisticsState<P>\) == (\d+)", unit)
    assert words is not None
    wrong = unit.replace(words[0], words[0][: -len(words[1])] + str(int(words[1]) + 1))
    folders = (Path(get_include()) / "monoidreduce" / "rtc", get_include())
    options = ["--std=c++20", "-default-device", *(f"-I{folder}" for folder in folders)]
    nvrtc.compile(unit, "compute_80", options, [])
    with pytest.raises(CompilationError, match="static assertion failed"):
        nvrtc.compile(wrong, "compute_80", options, [])
