"""What a build lacks is named with what to install, before anything is compiled."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.release  # a test of tools

setuptools = pytest.importorskip("setuptools")


def hide(module: str, folder: Path) -> str:
    """A PYTHONPATH on which the module is not there."""
    (folder / f"{module}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\")")
    return str(folder)


# In setup.py


@pytest.fixture
def setup(source: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs setup.py, which builds nothing, and returns its names."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    return lambda: runpy.run_path(str(source / "setup.py"))


@pytest.mark.parametrize(
    ("lacking", "message"),
    (
        (("cmake",), "needs CMake 3.24 or later to build, found none: pip install 'cmake>=3.24'"),
        (("ninja", "make"), "needs ninja or make to build, found neither: pip install ninja"),
        (("c++", "g++", "clang++"), r"needs a C\+\+20 compiler to build, found none: .*apt install g"),
    ),
    ids=("cmake", "ninja", "compiler"),
)
def test_a_tool_that_is_not_there(
    setup: Callable[[], dict[str, Any]],
    lacking: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **k: None if name in lacking else real(name, **k))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=message):
        setup()["build_tools"]()


def test_an_old_cmake(
    setup: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmake").write_text("#!/bin/sh\necho cmake version 3.18.4\n")
    (tmp_path / "cmake").chmod(0o755)
    real = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **k: str(tmp_path / name) if name == "cmake" else real(name, **k)
    )
    with pytest.raises(SystemExit, match=r"CMake 3.24 .*found cmake version 3.18.4 \(.*: pip install 'cmake"):
        setup()["build_tools"]()


def test_old_setuptools(setup: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "__version__", "65.5.1")
    with pytest.raises(SystemExit, match=r"needs setuptools 77 .*found 65.5.1: pip install 'setuptools>=77'"):
        setup()


# In CMake


@pytest.fixture
def configure(source: Path, tmp_path: Path) -> Callable[..., str]:
    """What CMake says of a build for CPUs that it does not configure."""

    def run(*arguments: str, **environment: str) -> str:
        foreign = ("MONOIDREDUCE_", "CMAKE_", "CXX")
        ambient = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        command = ["cmake", "-S", source, "-B", tmp_path / "build", "-DMONOIDREDUCE_CUDA=OFF"]
        found = subprocess.run(
            [*command, f"-DPython_EXECUTABLE={sys.executable}", *arguments],
            env={**ambient, **environment},
            capture_output=True,
            text=True,
        )
        assert found.returncode != 0, found.stdout
        assert found.stderr.count("CMake Error") == 1
        return " ".join(found.stderr.split())  # CMake wraps long messages

    return run


def test_no_pybind11(configure: Callable[..., str], tmp_path: Path) -> None:
    said = configure(PYTHONPATH=hide("pybind11", tmp_path))
    assert "needs pybind11 2.13 or later to build, found none" in said
    assert f"{sys.executable} -m pip install 'pybind11>=2.13'" in said


def test_an_old_pybind11(configure: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "pybind11.py").write_text("__version__ = '2.9.2'\ndef get_cmake_dir(): return '/nowhere'\n")
    said = configure(PYTHONPATH=str(tmp_path))
    assert "needs pybind11 2.13 or later to build, found 2.9.2" in said


def test_no_python_headers(configure: Callable[..., str], tmp_path: Path) -> None:
    said = configure(f"-DPython_INCLUDE_DIR={tmp_path / 'nowhere'}")
    assert "No Python headers" in said and "apt install python3-dev" in said


def test_an_old_compiler(configure: Callable[..., str], tmp_path: Path) -> None:
    """One of C++17, whatever it is asked for."""
    compiler = tmp_path / "old-g++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -std=c++17\n')
    compiler.chmod(0o755)
    said = configure(CXX=str(compiler))
    assert "needs a C++20 compiler, such as g++ 11 or later" in said and "old-g++" in said
    assert "apt install g++" in said


@pytest.mark.slow
def test_pip_without_isolation_ends_with_what_to_install(source: Path, tmp_path: Path) -> None:
    """In a copy, since pip builds within the folder of the sources."""
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "tests", "docs", "bench", "_C*.so", "__pycache__")
    shutil.copytree(source, tree, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-index", "--no-deps"]
    environment = {**os.environ, "MONOIDREDUCE_CUDA": "OFF", "PYTHONPATH": hide("pybind11", tmp_path)}
    found = subprocess.run([*command, "-w", tmp_path, tree], env=environment, capture_output=True, text=True)
    assert found.returncode != 0
    said = " ".join((found.stdout + found.stderr).split())
    assert "-m pip install 'pybind11>=2.13'" in said and "for the reason above" in said
