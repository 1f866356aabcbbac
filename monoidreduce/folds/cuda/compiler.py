"""NVRTC, CUDA's run-time compiler: finding the library, and compiling sources.

The library comes with torch for CUDA, with the package nvidia-cuda-nvrtc, or with the CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from monoidreduce.folds.cuda import cache
from monoidreduce.folds.cuda.cache import Image

__all__ = ["CompilationError", "Compiler", "find"]

_OLDEST = (12, 4)


class CompilationError(RuntimeError):
    """The compiler rejected a source that this library generated, which is a bug of the library."""


class Compiler:
    """An NVRTC library. Thread-safe, because NVRTC is.

    Facts about the library are cached on disk, so that it is loaded only to compile. Loading took 6 of the
    20 ms of host time (AMD EPYC) of a process's first call with all its kernels in the cache.

    Attributes:
        path: path of the library.
        version: for example (13, 0).
        architectures: compute capabilities that it can generate machine code for; 90 means 9.0.
    """

    def __init__(self, library: Path) -> None:
        """Raises OSError or RuntimeError if the library cannot be loaded."""
        self.path = library
        file = library.stat()
        key = cache.key("nvrtc", str(library), str(file.st_size), str(file.st_mtime_ns))
        facts = cache.load_fact(key)
        if facts is None:
            facts = {"version": self._version(), "architectures": self._architectures()}
            cache.store_fact(key, facts)
        major, minor = facts["version"]
        self.version: tuple[int, int] = (major, minor)
        self.architectures: list[int] = facts["architectures"]

    @cached_property
    def _library(self) -> ctypes.CDLL:
        try:
            # NVRTC looks up its second library by bare name, which finds one that is already loaded.
            for builtins in self.path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(self.path))
        except OSError as error:
            raise OSError(f"NVRTC: expected a library that can be loaded, got {self.path}: {error}") from None

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile(
        self, source: str, architecture: str, options: Sequence[str], kernels: Sequence[str]
    ) -> Image:
        """Compile a source; returns the code of the named kernels.

        Args:
            source: C++ text.
            architecture: `sm_...` for machine code; `compute_...` for PTX, which drivers of newer GPUs
                compile.
            options: options of the compiler.
            kernels: C++ names of template instances, for example `simt::fold_program<P>`.

        Raises:
            CompilationError: the source does not compile.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), None, 0, None, None)
        try:
            for kernel in kernels:
                self._call("nvrtcAddNameExpression", program, kernel.encode())
            failed = self._compile(program, [f"--gpu-architecture={architecture}", *options])
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failed:
                raise CompilationError(log)
            names = tuple(self._lowered(program, kernel) for kernel in kernels)
            what = "CUBIN" if architecture.startswith("sm_") else "PTX"
            return Image(self._bytes(what, program), names, log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _compile(self, program: ctypes.c_void_p, options: Sequence[str]) -> bool:
        """True if the compiler refuses the program.

        The compiler runs on a thread of its own: NVRTC 12 leaves the C locale on the thread that calls it,
        where `open(path)` reads ASCII.
        """
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        compile_program = self._library.nvrtcCompileProgram
        with ThreadPoolExecutor(1) as thread:
            return bool(thread.submit(compile_program, program, len(options), given).result() != 0)

    def _lowered(self, program: ctypes.c_void_p, kernel: str) -> str:
        name = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name))
        assert name.value is not None
        return name.value.decode()

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, found)
        return found.raw

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise RuntimeError(f"{function} of {self.path} returned {result}")


def _folders() -> Iterator[Path]:
    """Folders that may contain the library: torch's, those of pip packages, those of CUDA toolkits."""
    yield Path(torch.__file__).parent / "lib"
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or []:
        # The folder for torch's own CUDA version comes first: cu13, or cuda_nvrtc for CUDA 12.
        major = (torch.version.cuda or "").partition(".")[0]
        own = f"cu{major}" if major != "12" else "cuda_nvrtc"
        yield from sorted(Path(folder).glob("*/lib"), key=lambda path: (path.parent.name != own, path))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "lib64"
    yield Path("/usr/local/cuda/lib64")


@lru_cache(1)
def find() -> Compiler | None:
    """The first NVRTC of version 12.4 or later that can be loaded; None if there is none."""
    for folder in _folders():
        for library in sorted(folder.glob("libnvrtc*.so.1[2-9]*")):
            if "builtins" in library.name or "alt" in library.name:
                continue
            try:
                compiler = Compiler(library)
            except (OSError, RuntimeError):
                continue
            if compiler.version >= _OLDEST:
                return compiler
    return None
