"""Lists every kernel with a hash of its machine code, and compares two such lists.

A refactoring that only moves or renames code must leave the machine code as it is. To see that it does:

    cmake -S . -B build/kernels -G Ninja -DMONOIDREDUCE_CUDA=ON     (configures; no build is needed)
    python scripts/kernel_code.py hash build/kernels -o before.json
    ... the refactoring; if it adds, moves or removes a .cu file, configure again ...
    python scripts/kernel_code.py hash build/kernels -o after.json
    python scripts/kernel_code.py compare before.json after.json

`hash` compiles the device code of the CUDA sources in compile_commands.json, with the flags of the build.
`--only sm90/attention` takes only sources whose path contains this. The hash covers a kernel's instructions,
its constants, the size of its static shared memory, and the global data of its module. Names, paths and build
ids are not in it.

`compare` pairs kernels of equal name, then of equal code. It exits with 1 unless every kernel keeps its code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOBITS = 8  # the ELF section type of memory that has a size but no content


@dataclass(frozen=True, order=True)
class Kernel:
    architecture: str
    name: str  # demangled
    code: str  # the hash
    source: str


# ---- Cubins


def read_sections(elf: bytes) -> list[tuple[str, int, int, bytes]]:
    """Name, type, size and content of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    sections = []
    for name, kind, _, _, offset, size in headers:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        sections.append((text, kind, size, b"" if kind == NOBITS else elf[offset : offset + size]))
    return sections


def architecture(elf: bytes) -> str:
    (flags,) = struct.unpack_from("<I", elf, 48)
    return f"sm_{flags >> 8 & 0xFF if elf[8] >= 8 else flags & 0xFF}"  # from CUDA 13 on, ABI version 8


def kernel_hashes(elf: bytes) -> dict[str, str]:
    """The hash of each kernel, by mangled name.

    The names of a kernel's sections end with its own, as in .text.NAME. Global data is in sections of the
    module: which kernels read it is not recorded, so it counts for all of them.
    """
    sections = read_sections(elf)
    module_data = re.compile(r"(\.rela)?\.nv\.(constant\d+|global|global\.init)")
    hashes = {}
    for kernel in (name[len(".text.") :] for name, *_ in sections if name.startswith(".text.")):
        parts = []
        for name, kind, size, content in sections:
            role = name.removesuffix("." + kernel)
            # .nv.info only describes the code, and holds indices of symbols, which depend on names.
            own = role not in (name, ".nv.info")
            if own or module_data.fullmatch(name):
                parts.append(f"{role} {kind} {size} ".encode() + content)
        hashes[kernel] = hashlib.sha256(b"".join(sorted(parts))).hexdigest()[:16]
    return hashes


def demangle(names: Iterable[str]) -> list[str]:
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


# ---- Compilation


def compile_cubins(command: dict[str, str], folder: Path) -> list[Path]:
    """Runs a compile command as far as device code goes, and keeps the cubin of every architecture."""
    arguments = shlex.split(command["command"])
    arguments[arguments.index("-o") + 1] = str(folder / "kernels.fatbin")
    arguments[arguments.index("-c")] = "-fatbin"
    process = subprocess.run(
        [*arguments, "--keep", "--keep-dir", str(folder)],
        cwd=command["directory"],
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"{shlex.join(arguments)}\n{process.stdout}{process.stderr}")
    return sorted(folder.glob("*.cubin"))


def hash_source(command: dict[str, str]) -> list[Kernel]:
    source = os.path.relpath(command["file"])
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for cubin in compile_cubins(command, Path(folder)):
            elf = cubin.read_bytes()
            hashes = kernel_hashes(elf)
            kernels += [
                Kernel(architecture(elf), name, code, source)
                for name, code in zip(demangle(hashes), hashes.values(), strict=True)
            ]
    print(f"{len(kernels):5} kernels in {source}", file=sys.stderr)
    return kernels


def hash_build(build: Path, only: str, jobs: int) -> list[Kernel]:
    commands = json.loads((build / "compile_commands.json").read_text())
    chosen = [c for c in commands if c["file"].endswith(".cu") and only in c["file"]]
    if not chosen:
        raise SystemExit(f"{build}/compile_commands.json has no CUDA source with {only!r} in its path")
    with ThreadPoolExecutor(jobs) as pool:
        return sorted(kernel for kernels in pool.map(hash_source, chosen) for kernel in kernels)


# ---- Comparison


def without_namespaces(name: str) -> str:
    return re.sub(r"(\(anonymous namespace\)|\b[A-Za-z_]\w*)::", "", name)


def pair(
    before: list[Kernel], after: list[Kernel], key: Callable[[Kernel], Any]
) -> tuple[list[tuple[Kernel, Kernel]], list[Kernel], list[Kernel]]:
    """Pairs of kernels with equal keys, and the kernels of either list that have no partner."""
    partners = defaultdict(list)
    for kernel in after:
        partners[key(kernel)].append(kernel)
    pairs, alone = [], []
    for kernel in before:
        if found := partners[key(kernel)]:
            pairs.append((kernel, found.pop(0)))
        else:
            alone.append(kernel)
    return pairs, alone, sorted(kernel for rest in partners.values() for kernel in rest)


def compare(before: list[Kernel], after: list[Kernel], ignore_namespaces: bool) -> bool:
    """Prints what became of each kernel; returns whether all keep their code."""

    def name(kernel: Kernel) -> str:
        return without_namespaces(kernel.name) if ignore_namespaces else kernel.name

    same, gone, new = pair(before, after, lambda k: (k.architecture, name(k), k.code))
    changed, gone, new = pair(gone, new, lambda k: (k.architecture, name(k)))
    renamed, gone, new = pair(gone, new, lambda k: (k.architecture, k.code))
    for old, now in renamed:
        print(f"renamed  {old.architecture} {old.source}: {old.name}\n      to {now.source}: {now.name}")
    for status, kernels in (("changed", [now for _, now in changed]), ("gone   ", gone), ("new    ", new)):
        for kernel in kernels:
            print(f"{status}  {kernel.architecture} {kernel.source}: {kernel.name}")
    print(
        f"{len(same)} same, {len(renamed)} renamed, {len(changed)} changed, {len(gone)} gone, {len(new)} new"
    )
    return not (changed or gone or new)


# ---- Command line


def read_list(file: Path) -> list[Kernel]:
    return sorted(Kernel(**kernel) for kernel in json.loads(file.read_text()))


def write_list(kernels: list[Kernel], file: Path) -> None:
    lines = ",\n".join(json.dumps(asdict(kernel)) for kernel in kernels)
    file.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    hashing = actions.add_parser("hash", help="compile the kernels and list their hashes")
    hashing.add_argument("build", type=Path, help="a folder that CMake configured")
    hashing.add_argument("--only", default="", metavar="TEXT", help="only sources with this in their path")
    hashing.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    hashing.add_argument("-o", "--output", type=Path, required=True, help="the list, as JSON")
    comparing = actions.add_parser("compare", help="compare two lists")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--ignore-namespaces", action="store_true", help="match names without them")
    options = parser.parse_args()
    if options.action == "hash":
        write_list(hash_build(options.build, options.only, options.jobs), options.output)
    elif not compare(read_list(options.before), read_list(options.after), options.ignore_namespaces):
        sys.exit(1)


if __name__ == "__main__":
    main()
