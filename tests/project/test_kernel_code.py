"""scripts/kernel_code.py: the hash of a kernel changes with its machine code, and with nothing else."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release  # a test of tools

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel_code.py"

SOURCE = """
__device__ int table[2] = {1, 2};
namespace outer { namespace {
template <class T>
__global__ void scale(T* x) { x[threadIdx.x] *= T(3); }
} }
namespace outer {
__global__ void shift(float* x) {
  __shared__ float staged[32];
  staged[threadIdx.x] = x[threadIdx.x] + 5.f;
  __syncthreads();
  x[threadIdx.x] = staged[31 - threadIdx.x];
}
void launch(float* x, double* y) {
  scale<<<1, 32>>>(x);
  scale<<<1, 32>>>(y);
}
}
"""
SCALE, SCALE_DOUBLE, SHIFT = "scale<float>(float*)", "scale<double>(double*)", "shift(float*)"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


# ---- From source to hashes


def hashes(folder: Path, text: str, *flags: str) -> dict[tuple[str, str], str]:
    """The hash of each kernel of a source, by architecture and name without namespaces."""
    build = folder / "build"
    build.mkdir(parents=True)
    source = folder / "kernels.cu"
    source.write_text(text)
    architectures = ["-gencode", "arch=compute_80,code=[sm_80,sm_90,compute_80]"]
    command = shlex.join(["nvcc", *architectures, *flags, "-c", str(source), "-o", "kernels.cu.o"])
    entry = {"directory": str(build), "command": command, "file": str(source)}
    host = {"directory": str(build), "command": "c++ -c host.cpp -o host.o", "file": "host.cpp"}
    (build / "compile_commands.json").write_text(json.dumps([entry, host]))
    process = run("hash", build, "-o", folder / "list.json")
    assert process.returncode == 0, process.stderr
    kernels = json.loads((folder / "list.json").read_text())
    return {(k["architecture"], k["name"].split("::")[-1].removeprefix("void ")): k["code"] for k in kernels}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on this machine")
    return hashes(tmp_path_factory.mktemp("original"), SOURCE)


def test_every_kernel_has_a_hash_for_each_architecture(original):
    names = {SCALE, SCALE_DOUBLE, SHIFT}
    assert set(original) == {(tier, name) for tier in ("sm_80", "sm_90") for name in names}
    assert len(set(original.values())) == len(original)


def test_folders_and_compressed_objects_change_no_hash(original, tmp_path):
    assert hashes(tmp_path / "another folder", SOURCE, "-Xfatbin=-compress-all") == original


def test_renamed_kernels_keep_their_hashes(original, tmp_path):
    renamed = SOURCE.replace("outer", "a_longer_namespace").replace("shift", "z_kernel")
    found = hashes(tmp_path, renamed)
    expected = {(tier, name.replace("shift", "z_kernel")): code for (tier, name), code in original.items()}
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("+ 5.f", "+ 6.f", {SHIFT}),  # an operand of an instruction
        ("T(3)", "T(1.1)", {SCALE, SCALE_DOUBLE}),
        ("float staged[32]", "float staged[64]", {SHIFT}),  # no instruction differs
        ("{1, 2}", "{1, 3}", {SCALE, SCALE_DOUBLE, SHIFT}),  # data of the module
    ],
)
def test_changed_kernels_change_their_hashes(old, new, changed, original, tmp_path):
    assert SOURCE.count(old) == 1
    found = hashes(tmp_path, SOURCE.replace(old, new))
    assert {name for (tier, name), code in found.items() if original[tier, name] != code} == changed


# ---- From two lists to what became of each kernel


def kernel(name: str, code: str, architecture: str = "sm_90", source: str = "a.cu") -> dict[str, str]:
    return {"architecture": architecture, "name": name, "code": code, "source": source}


def compared(
    folder: Path, before: list[dict[str, str]], after: list[dict[str, str]], *options: str
) -> tuple[int, list[str]]:
    for name, kernels in (("before", before), ("after", after)):
        (folder / f"{name}.json").write_text(json.dumps(kernels))
    process = run("compare", folder / "before.json", folder / "after.json", *options)
    assert not process.stderr
    return process.returncode, process.stdout.splitlines()


def test_kernels_that_moved_or_were_renamed_pass(tmp_path):
    before = [kernel("a::f()", "1"), kernel("a::g()", "2")]
    after = [kernel("a::f()", "1", source="b.cu"), kernel("a::h()", "2")]
    assert compared(tmp_path, before, after) == (
        0,
        [
            "renamed  sm_90 a.cu: a::g()",
            "      to a.cu: a::h()",
            "1 same, 1 renamed, 0 changed, 0 gone, 0 new",
        ],
    )


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ([kernel("f()", "2")], "changed  sm_90 a.cu: f()"),
        ([], "gone     sm_90 a.cu: f()"),
        ([kernel("f()", "1"), kernel("g()", "1")], "new      sm_90 a.cu: g()"),
        ([kernel("f()", "1", architecture="sm_80")], "gone     sm_90 a.cu: f()"),
    ],
)
def test_kernels_that_changed_came_or_went_fail(after, line, tmp_path):
    status, output = compared(tmp_path, [kernel("f()", "1")], after)
    assert status == 1 and output[0] == line


def test_equal_names_are_paired_by_code_first(tmp_path):
    """Two files may each have a kernel of one name in an anonymous namespace."""
    name = "(anonymous namespace)::f()"
    before = [kernel(name, "1"), kernel(name, "2", source="b.cu")]
    after = [kernel(name, "2"), kernel(name, "1", source="b.cu")]
    assert compared(tmp_path, before, after) == (0, ["2 same, 0 renamed, 0 changed, 0 gone, 0 new"])


def test_namespaces_can_be_ignored(tmp_path):
    before = [kernel("void a::(anonymous namespace)::f<a::Sum<float>, 2>(a::b::Rows)", "1")]
    after = [kernel("void c::f<d::Sum<float>, 2>(Rows)", "2")]
    assert compared(tmp_path, before, after)[1][-1] == "0 same, 0 renamed, 0 changed, 1 gone, 1 new"
    status, output = compared(tmp_path, before, after, "--ignore-namespaces")
    assert status == 1 and output[-1] == "0 same, 0 renamed, 1 changed, 0 gone, 0 new"


def test_errors_are_told(tmp_path):
    (tmp_path / "compile_commands.json").write_text("[]")
    process = run("hash", tmp_path, "--only", "attention", "-o", tmp_path / "list.json")
    assert process.returncode == 1 and "no CUDA source with 'attention' in its path" in process.stderr
