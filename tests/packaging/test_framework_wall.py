"""Torch stays out of everything that is compiled, pybind11 out of everything but the binding, CUDA's libraries out of the link."""

import re
import subprocess

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
TORCH = ("torch/", "ATen/", "c10/", "caffe2/")
SYSTEM_LIBRARIES = re.compile(r"^(lib(stdc\+\+|gcc_s|m|c|pthread|dl|rt)|ld-linux[-\w]*)\.so\.\d+$")


def includes_by_file(source):
    files = [p for p in (source / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert files
    return {p.relative_to(source / "csrc"): INCLUDE.findall(p.read_text()) for p in files}


def test_nothing_compiled_includes_torch(source):
    offenders = {
        str(f) for f, names in includes_by_file(source).items() if any(n.startswith(TORCH) for n in names)
    }
    assert not offenders


def test_only_the_binding_includes_pybind11(source):
    users = {
        f.parts[0]
        for f, names in includes_by_file(source).items()
        if any(n.startswith("pybind11/") for n in names)
    }
    assert users == {"bindings"}


def test_extension_links_system_libraries_only(extension):
    dynamic = subprocess.run(["readelf", "-d", extension], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert not [name for name in needed if not SYSTEM_LIBRARIES.match(name)]


def test_extension_exports_its_init_function_only(extension):
    symbols = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=posix", extension],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    strong = {line.split()[0] for line in symbols.splitlines() if line.split()[1] in "TDB"}
    assert strong == {"PyInit__C"}
