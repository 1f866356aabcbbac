"""What the build decides about CUDA: by its toolkit and MONOIDREDUCE_CUDA, whether or not there is a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release  # a test of tools

USUAL_PREFIX = Path("/usr/local/cuda/bin")
CPU_ONLY = "CPU-only build, CUDA tensors will not be supported:"


def nvcc_folders() -> list[Path]:
    path = [Path(p) for p in os.environ["PATH"].split(os.pathsep)]
    return [p for p in dict.fromkeys([*path, USUAL_PREFIX]) if (p / "nvcc").exists()]


def path_without_nvcc(tools: Path) -> str:
    """PATH less the folders that have nvcc, plus a folder of links to build tools that lay there too."""
    tools.mkdir()
    for name in ("cmake", "ninja", "make", "cc", "c++"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    kept = [p for p in os.environ["PATH"].split(os.pathsep) if Path(p) not in nvcc_folders()]
    return os.pathsep.join([str(tools), *kept])


@pytest.fixture
def configure(source, tmp_path):
    """Configure with these CMake arguments and environment; return the exit status and what CMake said."""

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        foreign = ("CUDA", "MONOIDREDUCE_", "CMAKE_")
        ambient = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        command = [shutil.which("cmake"), "-S", source, "-B", tmp_path / "build"]
        command += [f"-DPython_EXECUTABLE={sys.executable}", *arguments]
        cmake = subprocess.run(
            command,
            env={**ambient, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cmake.returncode, " ".join(cmake.stdout.split())  # CMake wraps long messages

    return run


@pytest.fixture
def configure_without_nvcc(configure, tmp_path):
    hide = f"-DCMAKE_IGNORE_PATH={';'.join(map(str, nvcc_folders()))}"
    path = path_without_nvcc(tmp_path / "tools")
    return lambda **environment: configure(hide, PATH=path, **environment)


@pytest.fixture
def broken_nvcc(tmp_path) -> Path:
    nvcc = tmp_path / "broken" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def configure_with_broken_nvcc(configure, broken_nvcc):
    path = f"{broken_nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    return lambda **environment: configure(PATH=path, **environment)


def test_without_nvcc_the_build_is_cpu_only_and_says_so(configure_without_nvcc):
    status, output = configure_without_nvcc()
    assert status == 0, output
    assert f"{CPU_ONLY} no nvcc on PATH" in output


def test_cuda_on_without_nvcc_is_one_clear_error(configure_without_nvcc):
    status, output = configure_without_nvcc(MONOIDREDUCE_CUDA="ON")
    assert status != 0, output
    assert output.count("CMake Error") == 1
    assert "MONOIDREDUCE_CUDA=ON, but no nvcc on PATH" in output


def test_broken_nvcc_makes_a_cpu_only_build(configure_with_broken_nvcc, broken_nvcc):
    status, output = configure_with_broken_nvcc()
    assert status == 0, output
    assert f"{CPU_ONLY} {broken_nvcc} cannot compile" in output


def test_cuda_on_with_broken_nvcc_is_one_clear_error(configure_with_broken_nvcc, broken_nvcc):
    status, output = configure_with_broken_nvcc(MONOIDREDUCE_CUDA="ON")
    assert status != 0, output
    assert output.count("CMake Error") == 1
    assert f"MONOIDREDUCE_CUDA=ON, but {broken_nvcc} cannot compile" in output


def test_cuda_off_is_obeyed(configure):
    status, output = configure(MONOIDREDUCE_CUDA="off")
    assert status == 0, output
    assert f"{CPU_ONLY} MONOIDREDUCE_CUDA=OFF" in output


def test_unknown_choice_is_an_error(configure):
    status, output = configure(MONOIDREDUCE_CUDA="maybe")
    assert status != 0, output
    assert "MONOIDREDUCE_CUDA=MAYBE: expected AUTO, ON or OFF" in output


@pytest.mark.skipif(not nvcc_folders(), reason="no nvcc on this machine")
def test_architectures_are_obeyed(configure):
    status, output = configure(MONOIDREDUCE_CUDA="ON", MONOIDREDUCE_CUDA_ARCHS="86-real,90-virtual")
    assert status == 0, output
    assert "for 86-real,90-virtual" in output


@pytest.mark.skipif(not nvcc_folders(), reason="no nvcc on this machine")
def test_kernels_for_hopper_can_be_ptx_alone(configure, tmp_path):
    options = ("-G", "Ninja", "-DMONOIDREDUCE_UNOPTIMIZED_KERNELS=ON")
    status, output = configure(
        *options, MONOIDREDUCE_CUDA="ON", MONOIDREDUCE_CUDA_ARCHS="80-virtual,90a-virtual"
    )
    assert status == 0, output
    rules = (tmp_path / "build" / "build.ninja").read_text()
    assert "arch=compute_90a,code=[compute_90a]" in rules and "sm_90a" not in rules
    assert "ptxas_gate.sh" not in rules


@pytest.mark.skipif(USUAL_PREFIX not in nvcc_folders(), reason="no nvcc under the toolkit's usual prefix")
def test_nvcc_under_the_usual_prefix_is_found_off_the_path(configure, tmp_path):
    status, output = configure(MONOIDREDUCE_CUDA="ON", PATH=path_without_nvcc(tmp_path / "tools"))
    assert status == 0, output
    assert "for 80-real,90-real,90-virtual" in output
