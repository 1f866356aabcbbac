"""Compare the speed of two builds of monoidreduce: `python bench/compare.py OLD NEW [what ...] --out FILE`.

OLD and NEW are wheels. Each runs in a separate process, on the benchmark cases of this tree. They take turns
on one GPU, so that both see the same clocks. Only this library's contenders are timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ["attention", "cross_entropy", "distillation", "log_probs", "mlp", "logsumexp"]
ROUNDS = (5, 40)  # fewest and most
SECONDS = 1.5  # for each contender of a case, both builds together


class Build:
    """A process that times cases with one build."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.name = wheel.name
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        serve = f"import sys; sys.path[:0] = [{str(folder)!r}]; sys.path += [{str(ROOT)!r}]; "
        serve += "from bench.compare import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([question, *arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name}: its process ended, asked for {question}{arguments}")
        return json.loads(answer)


def serve() -> None:
    """The process of one build: reads a question per line, and answers each."""
    import torch

    from bench.harness import Case, Stopwatch, run_once, tf32_allowed
    from bench.machine import environment
    from monoidreduce.demo.memory import Problem, peaks

    device, watch = torch.device("cuda"), Stopwatch(torch.device("cuda"))
    cases: list[Case] = []
    problems: dict[str, Problem] = {}
    answers, sys.stdout = sys.stdout, sys.stderr

    for line in sys.stdin:
        answer: Any
        match json.loads(line):
            case ["environment", command]:
                answer = environment(device, command)
            case ["cases", op]:
                cases = importlib.import_module(f"bench.{op}").cases(device, False)
                answer = [[case.op, case.parameters, case.precision] for case in cases]
            case ["contenders", index]:
                problems.clear()
                torch.cuda.empty_cache()
                named = cases[index].problems().items()
                problems |= {name: problem for name, problem in named if name.startswith("monoidreduce")}
                answer = list(problems)
            case ["peaks", index, contender]:
                with tf32_allowed(cases[index].tf32):
                    answer = peaks(problems[contender])
            case ["time", index, contender]:
                with tf32_allowed(cases[index].tf32):
                    answer = run_once(problems[contender], watch)[0]
        print(json.dumps(answer), file=answers, flush=True)


def compare(builds: list[Build], index: int, contender: str) -> dict[str, Any]:
    """Median milliseconds of forward, backward and both, and peak bytes beyond inputs and results."""
    laps: list[list[list[float]]] = [[], []]
    first = [build.ask("time", index, contender) for build in builds]  # loads kernels
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(SECONDS * 1e3 / sum(lap[2] for lap in first))))
    for round_ in range(rounds):
        for place in (0, 1) if round_ % 2 else (1, 0):
            laps[place].append(builds[place].ask("time", index, contender))
    medians = [[statistics.median(phase) for phase in zip(*found, strict=True)] for found in laps]
    return {
        "rounds": rounds,
        "old_milliseconds": medians[0],
        "new_milliseconds": medians[1],
        "new_over_old": [new / old for old, new in zip(*medians, strict=True)],
        "old_peak_bytes": builds[0].ask("peaks", index, contender),
        "new_peak_bytes": builds[1].ask("peaks", index, contender),
    }


def ask_both(builds: list[Build], *question: Any) -> Any:
    """Ask both builds; returns the newer one's answer."""
    return [build.ask(*question) for build in builds][-1]


def rows(builds: list[Build], what: list[str], skip: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each contender of each case in `what`."""
    for chosen in what:
        op, _, places = chosen.partition(":")
        cases = ask_both(builds, "cases", op)
        for index in map(int, places.split(",")) if places else range(len(cases)):
            name, parameters, precision = cases[index]
            for contender in ask_both(builds, "contenders", index):
                if contender not in skip:
                    row = {"op": name, "parameters": parameters, "dtype": precision, "contender": contender}
                    yield row | compare(builds, index, contender)


def line(row: dict[str, Any]) -> str:
    """A row as text, to print while others are measured."""
    ratios = " ".join(f"{ratio:.3f}" for ratio in row["new_over_old"])
    times = " ".join(f"{time:.3f}" for time in row["new_milliseconds"])
    peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in row["new_peak_bytes"])
    what = f"{row['op']} {row['parameters']} {row['dtype']} {row['contender']}"
    return f"{what}: new/old {ratios}; new {times} ms, {peaks} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "what", nargs="*", default=OPERATORS, help="OPERATOR, or OPERATOR:INDEX,... of its cases"
    )
    parser.add_argument("--skip", action="append", default=[], help="a contender that is not to be timed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        wheels = {"old": options.old, "new": options.new}
        builds = [Build(wheel, Path(folder, name)) for name, wheel in wheels.items()]
        document = {"environment": builds[1].ask("environment", command), "rows": []}
        for row in rows(builds, options.what, options.skip):
            print(line(row), flush=True)
            document["rows"].append(row)
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
