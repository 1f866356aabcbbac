"""What the build decides about CUDA: from the toolkit it finds and MONOIDREDUCE_CUDA, never from the presence of a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

USUAL_PREFIX = Path("/usr/local/cuda/bin")


def nvcc_folders() -> list[Path]:
    path = [Path(p) for p in os.environ["PATH"].split(os.pathsep)]
    return [p for p in dict.fromkeys([*path, USUAL_PREFIX]) if (p / "nvcc").exists()]


@pytest.fixture
def configure(source, tmp_path):
    """Configure the build with the given environment and CMake arguments; return the exit status and what CMake said."""

    def run(*arguments: str, path: str | None = None, **environment: str) -> tuple[int, str]:
        ambient = {
            k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "MONOIDREDUCE_", "CMAKE_"))
        }
        ambient["PATH"] = path or ambient["PATH"]
        cmake = subprocess.run(
            [
                shutil.which("cmake"),
                "-S",
                source,
                "-B",
                tmp_path / "build",
                f"-DPython_EXECUTABLE={sys.executable}",
                *arguments,
            ],
            env={**ambient, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cmake.returncode, " ".join(cmake.stdout.split())  # CMake wraps long messages

    return run


def without_nvcc() -> tuple[str, str]:
    """A CMake argument that hides every nvcc of this machine, and a PATH that has none."""
    hidden = nvcc_folders()
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) not in hidden)
    return f"-DCMAKE_IGNORE_PATH={';'.join(map(str, hidden))}", path


def with_tools(path: str, folder: Path) -> str:
    """PATH with the build tools in front that a folder of it may have taken along."""
    folder.mkdir()
    for tool in ("cmake", "ninja", "c++", "cc", "make"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return f"{folder}{os.pathsep}{path}"


def test_without_nvcc_the_build_is_cpu_only_and_says_so(configure, tmp_path):
    hide, path = without_nvcc()
    status, output = configure(hide, path=with_tools(path, tmp_path / "tools"))
    assert status == 0
    assert "CPU-only build, CUDA tensors will not be supported: no nvcc on PATH" in output


def test_cuda_on_without_nvcc_is_one_clear_error(configure, tmp_path):
    hide, path = without_nvcc()
    status, output = configure(hide, path=with_tools(path, tmp_path / "tools"), MONOIDREDUCE_CUDA="ON")
    assert status != 0
    assert output.count("CMake Error") == 1
    assert "MONOIDREDUCE_CUDA=ON, but no nvcc on PATH" in output


@pytest.fixture
def broken_nvcc(tmp_path) -> Path:
    nvcc = tmp_path / "broken" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    return nvcc


def test_broken_nvcc_makes_a_cpu_only_build(configure, broken_nvcc):
    status, output = configure(path=f"{broken_nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    assert status == 0
    assert f"CPU-only build, CUDA tensors will not be supported: {broken_nvcc} cannot compile" in output


def test_cuda_on_with_broken_nvcc_is_one_clear_error(configure, broken_nvcc):
    status, output = configure(
        path=f"{broken_nvcc.parent}{os.pathsep}{os.environ['PATH']}", MONOIDREDUCE_CUDA="ON"
    )
    assert status != 0
    assert output.count("CMake Error") == 1
    assert f"MONOIDREDUCE_CUDA=ON, but {broken_nvcc} cannot compile" in output


def test_cuda_off_is_obeyed(configure):
    status, output = configure(MONOIDREDUCE_CUDA="off")
    assert status == 0
    assert "CPU-only build, CUDA tensors will not be supported: MONOIDREDUCE_CUDA=OFF" in output


def test_unknown_choice_is_an_error(configure):
    status, output = configure(MONOIDREDUCE_CUDA="maybe")
    assert status != 0
    assert "MONOIDREDUCE_CUDA=MAYBE: expected AUTO, ON or OFF" in output


@pytest.mark.skipif(not nvcc_folders(), reason="no nvcc on this machine")
def test_architectures_are_obeyed(configure):
    status, output = configure(MONOIDREDUCE_CUDA="ON", MONOIDREDUCE_CUDA_ARCHS="86-real,90-virtual")
    assert status == 0
    assert "for 86-real,90-virtual" in output


@pytest.mark.skipif(USUAL_PREFIX not in nvcc_folders(), reason="no nvcc under the toolkit's usual prefix")
def test_nvcc_under_the_usual_prefix_is_found_off_the_path(configure, tmp_path):
    _, path = without_nvcc()
    status, output = configure(path=with_tools(path, tmp_path / "tools"), MONOIDREDUCE_CUDA="ON")
    assert status == 0
    assert "for 80-real,90-real,90-virtual" in output
