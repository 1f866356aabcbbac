"""Where the C++ side of the package lies, for extensions that are built against it."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def get_include() -> str:
    """Return the folder to put on a compiler's include path for ``#include <monoidreduce/monoid.h>``.

    It is part of the installed package; in an editable install it is the source tree's own.
    """
    return _first_folder(_PACKAGE / "include", _PACKAGE.parent / "csrc" / "include")


def get_cmake_dir() -> str:
    """Return the folder of ``monoidreduceConfig.cmake``, to pass to CMake as ``-Dmonoidreduce_DIR=...``.

    ``find_package(monoidreduce)`` then defines the target ``monoidreduce::headers``.
    """
    return _first_folder(_PACKAGE / "share" / "cmake" / "monoidreduce", _PACKAGE.parent / "cmake" / "package")


def _first_folder(*candidates: Path) -> str:
    for folder in candidates:
        if folder.is_dir():
            return str(folder)
    raise ImportError(f"monoidreduce is installed without its development files: no {candidates[0]}")
