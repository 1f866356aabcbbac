"""Importing the package is cheap and has no effect on the machine or on CUDA."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monoidreduce

WATCHED_IMPORT = """
import os, sys
import torch
effects = []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def hook(event, args):
    if event.startswith(("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "socket.")):
        effects.append((event, args))
    elif event == "open" and args[2] is not None and args[2] & WRITING:
        effects.append((event, args))
sys.addaudithook(hook)
import monoidreduce
print(effects)
"""

FORKED_USE = """
import os, torch, monoidreduce
if os.fork() == 0:
    torch.zeros(1, device="cuda")
    os._exit(0)
print(os.wait()[1])
"""


def run_python(code: str, **environment: str) -> str:
    """Run code in a new interpreter, away from the source tree, and return what it printed."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.oldest
def test_import_starts_nothing_and_writes_nothing():
    assert run_python(WATCHED_IMPORT) == "[]"


def test_import_loads_no_library_beside_torch():
    code = """
import sys, torch
loaded = set(sys.modules)
import monoidreduce
names = {name.partition(".")[0] for name in set(sys.modules) - loaded}
print(names - {"monoidreduce"} - sys.stdlib_module_names)
"""
    assert run_python(code) == "set()"


def test_import_leaves_ctrl_c_to_the_program():
    code = "import signal, monoidreduce; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run_python(code) == "True"


@pytest.mark.parametrize(
    ("torch_module", "found"),
    [
        ("__version__ = '2.5.1'", "2.5.1"),
        ("__version__ = '1.13.0+cpu'", "1.13.0+cpu"),
        ("__version__ = 'unknown'", "unknown"),
        ("", "a module without a version"),
    ],
)
def test_a_torch_that_is_too_old_is_named_before_anything_else_fails(
    torch_module: str, found: str, tmp_path: Path
):
    (tmp_path / "torch.py").write_text(torch_module)
    path = os.pathsep.join([str(tmp_path), str(Path(monoidreduce.__file__).parent.parent)])
    code = """
try:
    import monoidreduce
except ImportError as error:
    print(error)
"""
    assert run_python(code, PYTHONPATH=path) == f"monoidreduce needs torch >= 2.6, found {found}"


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.10.0a0+git1234", "3.0.0.dev20300101"])
def test_a_torch_that_is_new_enough_is_taken(version: str, tmp_path: Path):
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    file = Path(monoidreduce.__file__).with_name("_requirements.py")
    code = f"import runpy; print(runpy.run_path({str(file)!r})['LEAST_TORCH'])"
    assert run_python(code, PYTHONPATH=str(tmp_path)) == "(2, 6)"


def test_import_opens_no_cuda_context():
    assert run_python("import torch, monoidreduce; print(torch.cuda.is_initialized())") == "False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_child_can_use_cuda_after_the_parent_imported_the_package():
    assert run_python(FORKED_USE) == "0"


def test_import_with_gpus_hidden():
    assert run_python("import monoidreduce; print(monoidreduce.__version__)", CUDA_VISIBLE_DEVICES="")


def test_import_without_home():
    code = "import os; del os.environ['HOME']; import monoidreduce; print('imported')"
    assert run_python(code, HOME="") == "imported"


@pytest.mark.parametrize("clone", [True, False], ids=["clone", "elsewhere"])
def test_sources_that_are_not_built_say_so(clone: bool, tmp_path: Path):
    folder = tmp_path / "monoidreduce"
    package = Path(monoidreduce.__file__).parent
    shutil.copytree(
        package, folder, ignore=shutil.ignore_patterns("_C*.so", "__pycache__", "include", "share")
    )
    (folder / "_C.cpython-399-x86_64-linux-gnu.so").touch()
    if clone:
        (tmp_path / "CMakeLists.txt").touch()
    code = """
try:
    import monoidreduce
except ImportError as error:
    print(error)
"""
    said = run_python(code, PYTHONPATH=str(tmp_path))
    version = ".".join(map(str, sys.version_info[:2]))
    assert said.startswith(
        f"monoidreduce is not built: {folder} has no compiled module _C for Python {version}"
    )
    assert ", only _C.cpython-399-x86_64-linux-gnu.so" in said and "circular" not in said
    assert (f"`pip install -e {tmp_path}`" in said and "in another folder" in said) is clone
    assert ("Install it again with this Python" in said) is not clone
