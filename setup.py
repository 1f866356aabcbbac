"""A build_ext that runs CMake, the one build description. Metadata is in pyproject.toml.

Environment: MONOIDREDUCE_CUDA and MONOIDREDUCE_CUDA_ARCHS (see cmake/CudaToolchain.cmake), CMAKE_ARGS (more
arguments for CMake), MAX_JOBS (parallel compilers).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LEAST_SETUPTOOLS, LEAST_CMAKE = (77,), (3, 24)  # the same as in pyproject.toml
SOURCE = Path(__file__).resolve().parent
# Variables of the environment that CMake reads once and then remembers.
BUILD_VARIABLES = (
    *("MONOIDREDUCE_CUDA", "MONOIDREDUCE_CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDAARCHS"),
    *("CXX", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "PATH"),
)
BYTES_PER_JOB = 2 << 30  # the largest translation unit, with room for nvcc's several passes


def parallel_jobs() -> int:
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_JOB))


def lacks(needed: str, found: object, remedy: str) -> NoReturn:
    raise SystemExit(f"monoidreduce needs {needed} to build, found {found}: {remedy}")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def find_tool(name: str) -> str | None:
    # Tools of the virtual environment count even if it was not activated.
    return shutil.which(name, path=sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""))


def build_tools() -> tuple[str, str | None]:
    """CMake and ninja, or None where make is there; ends the build if it cannot begin."""
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    shown = cmake and subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    version = f"{shown.splitlines()[0]} ({cmake})" if shown else "none"
    if cmake is None or numbers(version) < LEAST_CMAKE:
        lacks("CMake 3.24 or later", version, "pip install 'cmake>=3.24'")
    if ninja is None and find_tool("make") is None:
        lacks("ninja or make", "neither", "pip install ninja")
    if "CXX" not in os.environ and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        remedy = "install one (Debian: apt install g++), or name one by CXX=/path/to/g++"
        lacks("a C++20 compiler", "none", remedy)
    return cmake, ninja


def forget_other_options(build: Path, configure: str) -> None:
    """Keeps the objects of an earlier build in the folder, and forgets what it was configured with."""
    options = {name: value for name, value in os.environ.items() if name in BUILD_VARIABLES}
    asked = "\n".join([configure, *(f"{name}={value}" for name, value in sorted(options.items()))])
    build.mkdir(parents=True, exist_ok=True)
    earlier = build / "configured_with.txt"
    if not earlier.exists() or earlier.read_text() != asked:
        for file in (build / "CMakeCache.txt", *build.glob("CMakeFiles/*/CMake*.cmake")):
            file.unlink(missing_ok=True)
        earlier.write_text(asked)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cmake, ninja = build_tools()
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        configure = [cmake, "-S", str(SOURCE), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        forget_other_options(build, shlex.join(configure))
        install = [cmake, "--install", str(build), "--prefix", str(package)]
        if self.inplace:  # headers and CMake files are used from the source tree
            install += ["--component", "module"]
        steps = configure, [cmake, "--build", str(build), "--parallel", str(parallel_jobs())], install
        for step in steps:
            if status := subprocess.run(step).returncode:
                raise SystemExit(f"{shlex.join(step)} ended with status {status}, for the reason above")


# An older setuptools rejects the license field of pyproject.toml.
if numbers(setuptools.__version__) < LEAST_SETUPTOOLS:
    lacks("setuptools 77 or later", setuptools.__version__, "pip install 'setuptools>=77'")
setup(ext_modules=[Extension("monoidreduce._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
