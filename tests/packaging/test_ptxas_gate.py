"""A kernel that spills registers, or whose products wait for each other, fails the build."""

import os
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.release  # a test of tools

# The build of the kernels as it is, of one kernel.
PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(gated LANGUAGES CXX)
add_library(monoidreduce_flags INTERFACE)
set(MONOIDREDUCE_CUDA_SOURCES kernel.cu)
set(MONOIDREDUCE_CUDA_ARCH_SOURCES kernel.cu)
include(cmake/CudaKernels.cmake)
"""
# 64 sums, each of another, in 32 registers.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) too_many_sums(float* x) {
  float sums[64];
  for (int i = 0; i < 64; ++i) sums[i] = x[i];
  for (int n = 0; n < 100; ++n)
    for (int i = 0; i < 64; ++i) sums[i] = sums[i] * sums[(i + 7) % 64] + x[n];
  for (int i = 0; i < 64; ++i) x[i] = sums[i];
}
"""
STATISTICS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5tightv' for 'sm_90a'
ptxas info    : Function properties for _Z5tightv
    40 bytes stack frame, {stored} bytes spill stores, {loaded} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers"""
SERIAL = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.fixture
def compile_printing(source, tmp_path):
    """Run the gate on a compiler that prints this; return the status, the output, and is there an object."""
    compiled = tmp_path / "kernel.o"

    def run(text: str, *, status: int = 0, memory: int = 1 << 20) -> tuple[int, str, bool]:
        compiler = tmp_path / "compiler.sh"
        compiler.write_text(f"cat >&2 <<'END'\n{text}\nEND\ntouch '{compiled}'\nexit {status}\n")
        gate = ["sh", source / "cmake/ptxas_gate.sh", "32", str(memory), "sh", compiler]
        process = subprocess.run(
            [*gate, "-c", "kernel.cu", "-o", compiled],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return process.returncode, process.stdout.strip(), compiled.exists()

    return run


def test_what_compiles_well_is_quiet(compile_printing):
    assert compile_printing(STATISTICS.format(stored=32, loaded=32)) == (0, "", True)


@pytest.mark.parametrize("spills", [{"stored": 36, "loaded": 0}, {"stored": 0, "loaded": 36}], ids=str)
def test_spills_are_errors_that_name_kernel_file_and_figure(spills, compile_printing):
    status, output, built = compile_printing(STATISTICS.format(**spills))
    assert status != 0 and not built
    figures = "more than 32 bytes spilled: {stored} stored, {loaded} loaded".format(**spills)
    assert output.splitlines()[0] == f"kernel.cu: error: {figures}, for sm_90a, by tight()"


def test_serialized_products_are_errors(compile_printing):
    status, output, built = compile_printing(SERIAL)
    assert status != 0 and not built
    assert output.splitlines()[0] == f"kernel.cu: error: {SERIAL}"


@pytest.mark.skipif(not os.access("/usr/bin/time", os.X_OK), reason="no GNU time on this machine")
def test_a_compiler_of_much_memory_is_an_error(compile_printing, tmp_path):
    times = "\n".join(f"ptxas info    : Compile time = {time} ms" for time in ("211.385", "1549.2", "980.0"))
    assert compile_printing(times) == (0, "", True)
    cost = (tmp_path / "kernel.o.cost").read_text()
    assert re.fullmatch(r"\d\.\d s \d+ MiB, a kernel 1\.5 s, kernel\.cu\n", cost)
    status, output, built = compile_printing("", memory=100)
    assert status != 0 and not built
    assert re.match(r"kernel\.cu: error: its compiler took \d+ MiB of memory, more than 0\n", output)


def test_other_messages_and_failures_are_the_compilers(compile_printing):
    assert compile_printing("kernel.cu(1): warning: unused", status=3) == (
        3,
        "kernel.cu(1): warning: unused",
        True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on this machine")
def test_a_build_with_a_spilling_kernel_fails(source, tmp_path):
    tree, build = tmp_path / "a folder", tmp_path / "build"
    shutil.copytree(source / "cmake", tree / "cmake")
    (tree / "CMakeLists.txt").write_text(PROJECT)
    (tree / "kernel.cu").write_text(SPILLING)
    launcher = [f"-DCMAKE_CUDA_COMPILER_LAUNCHER={found}"] if (found := shutil.which("ccache")) else []
    options = ["-DMONOIDREDUCE_CUDA=ON", "-DMONOIDREDUCE_CUDA_ARCHS=80-real", "-DMONOIDREDUCE_PTXAS_GATE=ON"]
    configure = ["cmake", "-S", tree, "-B", build, *options]
    environment = {**os.environ, "CCACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([*configure, *launcher], check=True, env=environment)
    for _ in range(2):  # the second time, a compiler cache answers
        command = ["cmake", "--build", build, "--target", "cuda_kernels"]
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert process.returncode != 0
        output = process.stdout + process.stderr
        assert "kernel.cu: error: more than 32 bytes spilled: " in output
        assert "for sm_80, by too_many_sums(float*)" in output
