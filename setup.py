"""A build_ext that runs CMake, the one build description. Metadata is in pyproject.toml.

Environment: MONOIDREDUCE_CUDA and MONOIDREDUCE_CUDA_ARCHS (see cmake/CudaToolchain.cmake), CMAKE_ARGS (more
arguments for CMake), MAX_JOBS (parallel compilers).
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
BYTES_PER_JOB = 2 << 30  # the largest translation unit, with room for nvcc's several passes


def parallel_jobs() -> int:
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_JOB))


def find_tool(name: str) -> str | None:
    # An environment's tools count even if it was never activated.
    return shutil.which(name, path=sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""))


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        if cmake is None:
            raise SystemExit("monoidreduce needs CMake 3.24 or later to build: pip install cmake")
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        # Fresh: an earlier build's options and the place of its build environment must not be remembered.
        configure = [cmake, "--fresh", "-S", str(SOURCE), "-B", str(build)]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        install = [cmake, "--install", str(build), "--prefix", str(package)]
        if self.inplace:  # headers and CMake files are used where they lie in the source tree
            install += ["--component", "module"]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--parallel", str(parallel_jobs())], check=True)
        subprocess.run(install, check=True)


setup(ext_modules=[Extension("monoidreduce._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
