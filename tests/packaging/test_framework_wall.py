"""No torch in what is compiled, no pybind11 outside the binding, no CUDA library to load."""

import re
import subprocess

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SYSTEM_LIBRARIES = re.compile(r"^(lib(stdc\+\+|gcc_s|m|c|pthread|dl|rt)|ld-linux[-\w]*)\.so\.\d+$")


def users_of(source, *prefixes):
    """The files of csrc/ that include a header whose name begins with one of these prefixes."""
    files = [p for p in (source / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert files
    return {
        str(p.relative_to(source / "csrc"))
        for p in files
        if any(name.startswith(prefixes) for name in INCLUDE.findall(p.read_text()))
    }


def test_nothing_compiled_includes_torch(source):
    assert users_of(source, "torch/", "ATen/", "c10/", "caffe2/") == set()


def test_only_the_binding_includes_pybind11(source):
    assert {file.split("/")[0] for file in users_of(source, "pybind11/")} == {"bindings"}


def test_extension_links_system_libraries_only(extension):
    dynamic = subprocess.run(["readelf", "-d", extension], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert not [name for name in needed if not SYSTEM_LIBRARIES.match(name)]


def test_extension_exports_its_init_function_only(extension):
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", extension]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    strong = {line.split()[0] for line in symbols.splitlines() if line.split()[1] in "TDB"}
    assert strong == {"PyInit__C"}
