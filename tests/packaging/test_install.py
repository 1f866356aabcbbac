"""The ways to install from a source tree: a hollow one, whose empty sources compile in seconds."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.release]

MODULE = '#include <pybind11/pybind11.h>\nPYBIND11_MODULE(_C, m) { m.attr("hollow") = true; }\n'
TREE = (
    "cmake",
    "csrc",
    "monoidreduce",
    "CMakeLists.txt",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
)


@pytest.fixture
def hollow_tree(source, tmp_path) -> Path:
    tree = tmp_path / "a folder"
    tree.mkdir()
    for name in (*TREE, "setup.py"):
        if (source / name).is_dir():
            shutil.copytree(
                source / name, tree / name, ignore=shutil.ignore_patterns("_C*.so", "__pycache__")
            )
        else:
            shutil.copy(source / name, tree)
    for unit in [*(tree / "csrc").rglob("*.cpp"), *(tree / "csrc").rglob("*.cu")]:
        unit.write_text(MODULE if unit.name == "python.cpp" else "")
    (tree / "csrc" / "bindings" / "stub.py").write_text("import sys\nopen(sys.argv[2], 'w').close()\n")
    return tree


def install(python: Path, *arguments) -> None:
    command = [python, "-m", "pip", "install", "--no-deps", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "MONOIDREDUCE_CUDA": "OFF"})


def test_editable_install_uses_the_source_tree(hollow_tree, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install(python, "--editable", hollow_tree)
    code = """if True:
        import importlib.util, pathlib, runpy
        package = pathlib.Path(importlib.util.find_spec("monoidreduce").origin).parent
        paths = runpy.run_path(str(package / "_paths.py"))
        print(package, paths["get_include"](), paths["get_cmake_dir"](), sep="\\n")
    """
    printed = subprocess.run([python, "-c", code], cwd="/", check=True, capture_output=True, text=True).stdout
    expected = [hollow_tree / "monoidreduce", hollow_tree / "csrc/include", hollow_tree / "cmake/package"]
    assert printed.splitlines() == [str(path) for path in expected]
    assert len(list((hollow_tree / "monoidreduce").glob("_C*.so"))) == 1


def test_install_without_isolation_and_without_an_index(hollow_tree, tmp_path):
    site = tmp_path / "site"
    install(sys.executable, "--no-build-isolation", "--no-index", "--target", site, hollow_tree)
    package = site / "monoidreduce"
    assert len(list(package.glob("_C*.so"))) == 1
    assert (package / "include/monoidreduce/monoid.h").exists()
    assert (package / "share/cmake/monoidreduce/monoidreduceConfig.cmake").exists()
