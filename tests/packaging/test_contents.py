"""The wheel and the source distribution hold exactly these files: those of the source tree, by kind."""

import re
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import monoidreduce as mr

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "__pycache__", "_C.pyi"


def tree(folder: str, *kinds: str) -> set[str]:
    """The files of a folder that match one of these patterns, by their paths within it."""
    found = {path.relative_to(ROOT / folder) for kind in kinds for path in (ROOT / folder).rglob(kind)}
    return {str(path) for path in found if not {*path.parts} & {*GENERATED}}


PYTHON = tree("monoidreduce", "*.py", "py.typed", "constants.json")
HEADERS = tree("csrc/include/monoidreduce", "*.h", "*.cuh", "rtc/*")
SOURCES = {
    name for name in tree("csrc", "*.cpp", "*.cu", "*.h", "*.cuh", "*.py") if not name.startswith("include/")
}
CMAKE = tree("cmake", "*.cmake", "*.sh")
CMAKE_PACKAGE = {"monoidreduceConfig.cmake", "monoidreduceConfigVersion.cmake"}
BUILD = {
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.py",
}
INFO = f"monoidreduce-{mr.__version__}.dist-info/"


def files(folder: str, names: set[str]) -> set[str]:
    return {folder + name for name in names}


def test_wheel(dist):
    (wheel,) = dist.glob("monoidreduce-*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) == (
        files("monoidreduce/", PYTHON)
        | files("monoidreduce/", {f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_C.pyi"})
        | files("monoidreduce/include/monoidreduce/", HEADERS)
        | files("monoidreduce/share/cmake/monoidreduce/", CMAKE_PACKAGE)
        | files(
            INFO, {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
        )
    )


def test_source_distribution(dist):
    (sdist,) = dist.glob("monoidreduce-*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    metadata = {name for name in found if re.match(r"PKG-INFO$|setup\.cfg$|monoidreduce\.egg-info/", name)}
    assert found - metadata == (
        BUILD
        | files("cmake/", CMAKE)
        | files("monoidreduce/", PYTHON)
        | files("csrc/", SOURCES)
        | files("csrc/include/monoidreduce/", HEADERS)
    )


def test_metadata(dist):
    (wheel,) = dist.glob("monoidreduce-*.whl")
    metadata = zipfile.ZipFile(wheel).read(INFO + "METADATA").decode()
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == ["torch>=2.6"]
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)
