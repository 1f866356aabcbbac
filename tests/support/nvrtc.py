"""NVRTC, CUDA's runtime compiler, for tests of sources that it compiles."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import monoidreduce as mr
from monoidreduce.folds.cuda.compiler import CompilationError, Compiler

INCLUDE = Path(mr.get_include())
# NVRTC has no C++ standard headers, and its wheel has none of CUDA's. These replace both.
STAND_INS = INCLUDE / "monoidreduce" / "rtc"


class Nvrtc(Compiler):
    """An NVRTC library for sources other than the library's own."""

    def compile_ptx(self, source: str, options: Sequence[str], instances: Sequence[str] = ()) -> str:
        """The PTX of a source, with the kernels that `instances` name.

        With `--gpu-architecture=sm_...` NVRTC also compiles it to machine code. Raises CompilationError.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), None, 0, None, None)
        try:
            for instance in instances:
                self._call("nvrtcAddNameExpression", program, instance.encode())
            if self._compile(program, options):
                raise CompilationError(self._text("ProgramLog", program))
            return self._text("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        return self._bytes(what, program).rstrip(b"\0").decode()


def _libraries(folder: Path) -> Iterator[Path]:
    return folder.glob("*/lib/libnvrtc.so.*")


def newest() -> Nvrtc:
    """The newest NVRTC of wheels (nvidia-cuda-nvrtc, which torch for CUDA also installs). Skips if none."""
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels and wheels.submodule_search_locations) or []
    found = [library for folder in folders for library in _libraries(Path(folder))]
    if not found:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    return Nvrtc(max(found))


def oldest() -> Nvrtc:
    """The NVRTC of the oldest supported torch, where `make test` installs it. Skips if there is none."""
    found = [*_libraries(Path(sys.prefix) / "nvrtc-oldest" / "nvidia")]
    if not found:
        pytest.skip("no old NVRTC: make .venv/nvrtc.done")
    return Nvrtc(*found)
