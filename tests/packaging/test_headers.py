"""Each public header compiles alone, as C++20, with only the header folder on the include path."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import monoidreduce as mr

INCLUDE = Path(mr.get_include())
# rtc/ has stand-ins for NVRTC, on whose include path alone it is (test_nvrtc_kernels.py).
HEADERS = sorted(str(p.relative_to(INCLUDE)) for p in INCLUDE.rglob("*.h") if p.parent.name != "rtc")
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]


def test_public_headers_are_there():
    assert "monoidreduce/monoid.h" in HEADERS


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(header, tmp_path):
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{header}"\n')
    environment = {k: v for k, v in os.environ.items() if k not in {"CPATH", "CPLUS_INCLUDE_PATH"}}
    subprocess.run([COMPILER, *FLAGS, "-I", INCLUDE, unit], check=True, env=environment)


def test_headers_compile_from_a_path_with_a_space(tmp_path):
    shutil.copytree(INCLUDE, tmp_path / "a folder")
    unit = tmp_path / "unit.cpp"
    unit.write_text("#include <monoidreduce/monoid.h>\n")
    subprocess.run([COMPILER, *FLAGS, "-I", tmp_path / "a folder", unit], check=True)
