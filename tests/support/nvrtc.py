"""NVRTC, the compiler of programs that are made while they run, for tests of what it compiles."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import monoidreduce as mr

INCLUDE = Path(mr.get_include())
# NVRTC has no standard headers, and the wheel none of CUDA's.
STAND_INS = INCLUDE / "monoidreduce" / "rtc"


class CompilationError(Exception):
    """The compiler's messages."""


class Nvrtc:
    """One version of NVRTC: its two libraries in a folder."""

    def __init__(self, library: Path) -> None:
        # NVRTC asks for its second library by name alone: one that is loaded is found.
        (builtins,) = library.parent.glob("libnvrtc-builtins.so.*")
        ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(library))

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, source: str, options: Sequence[str], instances: Sequence[str] = ()) -> str:
        """The PTX of a source, with the kernels that `instances` name.

        For `--gpu-architecture=sm_...` it is compiled to machine code too. Raises CompilationError.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), None, 0, None, None)
        try:
            for instance in instances:
                self._call("nvrtcAddNameExpression", program, instance.encode())
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), arguments) != 0:
                raise CompilationError(self._text("ProgramLog", program))
            return self._text("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise RuntimeError(f"{function} returned {result}")


def _libraries(folder: Path) -> Iterator[Path]:
    return folder.glob("*/lib/libnvrtc.so.*")


def newest() -> Nvrtc:
    """The NVRTC of the wheel nvidia-cuda-nvrtc, which a torch for CUDA brings too, or skips the test."""
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels and wheels.submodule_search_locations) or []
    found = [library for folder in folders for library in _libraries(Path(folder))]
    if not found:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    return Nvrtc(max(found))


def oldest() -> Nvrtc:
    """The NVRTC of the oldest torch that is supported, where `make test` puts it, or skips the test."""
    found = [*_libraries(Path(sys.prefix) / "nvrtc-oldest" / "nvidia")]
    if not found:
        pytest.skip("no old NVRTC: make .venv/nvrtc.done")
    return Nvrtc(*found)
