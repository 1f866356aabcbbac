"""Records what the host's half of the CUDA code launches, and compares two such records. Needs no GPU.

A refactoring of dispatch, plans or launches must launch the same kernels with the same grids, shared memory
and arguments. To see that it does:

    cmake -S . -B build/launches -G Ninja -DMONOIDREDUCE_CUDA=ON -DMONOIDREDUCE_BUILD_TESTS=ON
    python scripts/launch_trace.py record build/launches -o before.json
    ... the refactoring ...
    python scripts/launch_trace.py record build/launches -o after.json
    python scripts/launch_trace.py compare before.json after.json

`record` builds and runs tests/launches/trace.cpp, which makes the calls of tests/launches/calls.cpp on
several GPUs. tests/launches/fake_cudart.cpp plays these. A parameter is recorded in words of 8 bytes. An
address is the name of a tensor and an offset in bytes.

`compare` exits with 1 unless all calls launch the same. It matches kernels by name, or with two lists of
scripts/kernel_code.py by their machine code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kernel_code import read_list, without_namespaces

Record = dict[str, Any]
SHOWN = 20  # calls that differ


def record(build: Path) -> list[Record]:
    cmake = re.search(r"^CMAKE_COMMAND:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    assert cmake is not None
    subprocess.run([cmake[1], "--build", str(build), "--target", "launch_trace"], check=True)

    def run() -> str:
        return subprocess.run([build / "launch_trace"], capture_output=True, text=True, check=True).stdout

    text = run()
    if text != run():
        raise SystemExit("two runs of launch_trace differ: a kernel is given something that is not set")
    calls: list[Record] = json.loads(text)
    return calls


# ---- Comparison


def code_of_kernels(list_file: Path) -> dict[str, str]:
    """The hashes of each kernel's code on all architectures, by its name."""
    found: dict[str, set[tuple[str, str]]] = {}
    for kernel in read_list(list_file):
        found.setdefault(kernel.name, set()).add((kernel.architecture, kernel.code))
    return {name: str(sorted(codes)) for name, codes in found.items()}


def parameter_differences(before: list[str], after: list[str]) -> Iterator[str]:
    for number, texts in enumerate(zip_longest(before, after, fillvalue="")):
        for word, (old, new) in enumerate(zip_longest(*(t.split(" ") for t in texts), fillvalue="none")):
            if old != new:
                yield f"parameter {number}, byte {8 * word}: {old} -> {new}"


def launch_differences(
    before: Record, after: Record, names: tuple[Callable[[str], str], Callable[[str], str]]
) -> Iterator[str]:
    if names[0](before["kernel"]) != names[1](after["kernel"]):
        yield f"{before['kernel']}\n   -> {after['kernel']}"
        return
    for key in ("device", "grid", "block", "shared", "stream"):
        if before[key] != after[key]:
            yield f"{key} {before[key]} -> {after[key]}"
    yield from parameter_differences(before["parameters"], after["parameters"])


def call_differences(
    before: Record,
    after: Record,
    names: tuple[Callable[[str], str], Callable[[str], str]],
    ignored: tuple[str, ...] = (),
) -> Iterator[str]:
    for key in ("tier", "reason", "error"):
        if before[key] != after[key] and key not in ignored:
            yield f"{key}: {before[key]} -> {after[key]}"
    for number, (old, new) in enumerate(zip_longest(before["launches"], after["launches"])):
        if old is None:
            yield f"launch {number} is new: {new['kernel']}"
        elif new is None:
            yield f"launch {number} is gone: {old['kernel']}"
        else:
            for difference in launch_differences(old, new, names):
                yield f"launch {number}: {difference}"


def compare(
    before: list[Record],
    after: list[Record],
    names: tuple[Callable[[str], str], Callable[[str], str]],
    ignored: tuple[str, ...] = (),
    shown: int = SHOWN,
) -> bool:
    """Prints the calls that differ, the first ones whole; returns whether there is none."""

    def by_name(calls: list[Record]) -> dict[str, Record]:
        return {f"{call['machine']}: {call['call']}": call for call in calls}

    old, new = by_name(before), by_name(after)
    found = {name: ["the call is gone"] for name in old if name not in new}
    found |= {name: ["the call is new"] for name in new if name not in old}
    common = [name for name in old if name in new]
    for name in common:
        if differences := list(call_differences(old[name], new[name], names, ignored)):
            found[name] = differences
    for name, differences in list(found.items())[:shown]:
        print(name, *differences, sep="\n  ")
    if len(found) > shown:
        print(f"... and {len(found) - shown} calls more")
    print(f"{len(common)} calls in both, {len(found)} differ, are gone or new")
    return not found


# ---- Command line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="record the launches of a build")
    recording.add_argument(
        "build", type=Path, help="a folder that CMake configured, with nvcc and the C++ tests"
    )
    recording.add_argument("-o", "--output", type=Path, required=True, help="the record, as JSON")
    comparing = actions.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--ignore-namespaces", action="store_true", help="match kernels without them")
    comparing.add_argument(
        "--kernels", type=Path, nargs=2, metavar="LIST", help="of kernel_code.py: match kernels by their code"
    )
    comparing.add_argument("--ignore-reasons", action="store_true", help="what the library says of a tier")
    comparing.add_argument("--all", action="store_true", help="show all calls that differ")
    options = parser.parse_args()
    if options.action == "record":
        calls = record(options.build)
        lines = ",\n".join(json.dumps(call) for call in calls)
        options.output.write_text(f"[\n{lines}\n]\n")
        print(f"{len(calls)} calls, {sum(len(call['launches']) for call in calls)} launches")
        return

    def naming(list_file: Path | None) -> Callable[[str], str]:
        codes = {} if list_file is None else code_of_kernels(list_file)

        def name(kernel: str) -> str:
            return codes.get(kernel, without_namespaces(kernel) if options.ignore_namespaces else kernel)

        return name

    lists = options.kernels or (None, None)
    same = compare(
        json.loads(options.before.read_text()),
        json.loads(options.after.read_text()),
        (naming(lists[0]), naming(lists[1])),
        ("reason",) if options.ignore_reasons else (),
        sys.maxsize if options.all else SHOWN,
    )
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
