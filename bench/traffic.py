"""Bytes that a pass moves, by a model and by a counter: common code of scripts/measure_traffic*.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.report import Row, met_traffic, tables
from monoidreduce._command_line import Parser, check_writable_folder, replacing, some_path

RESULTS = Path(__file__).resolve().parent / "results"


def add_options(parser: Parser) -> None:
    """Add options that say what to do with the rows."""
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a counter is not as the model"
    )
    parser.add_argument(
        "--out", type=some_path, metavar="DIR", help="folder for the results, as bench/results"
    )


def check_folder(parser: Parser, folder: Path | None) -> None:
    """Report an error for a folder that can not be written, before any work."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable_folder(folder)
    except OSError as error:
        parser.error(f"argument --out: {str(folder)!r}, cannot be written: {error.strerror}")


def row(
    op: str,
    dtype: str,
    parameters: dict[str, Any],
    phase: str,
    compulsory: int,
    model: dict[str, Any],
    tolerance: float,
    slack: int = 0,
    unwritten: int = 0,
    compared: tuple[str, ...] = ("read", "written"),
) -> Row:
    """The row of a pass, before its bytes are counted.

    Args:
        op, dtype, parameters: as in bench/results.
        phase: "forward" or "backward".
        compulsory: bytes, with each input read once and each output written once.
        model: bytes "read" and "written" and, on a GPU, "l2", which may be None if not known.
        tolerance: largest relative difference of compared parts.
        slack: bytes that compared parts may differ by in addition.
        unwritten: bytes that may still be in a cache when the counter stops.
        compared: parts of the model to compare with the counter; "moved" is "read" + "written".
    """
    said = model | {"moved": model["read"] + model["written"]}
    allowed = {}
    for part in compared:
        by, left = tolerance * said[part] + slack, 0 if part == "read" else unwritten
        allowed[part] = [max(0, round(said[part] - by - left)), round(said[part] + by)]
    return {
        "op": op,
        "dtype": dtype,
        "parameters": parameters,
        "phase": phase,
        "compulsory": compulsory,
        "model": model,
        "allowed": allowed,
        "unwritten": unwritten,
    }


def report(environment: Row, rows: list[Row], folder: Path | None, check: bool, kind: str) -> int:
    """Print the table and, given a folder, write a document as in bench/results. Returns the exit status.

    kind: "cpu" or "cuda", for the file's name.
    """
    document = {"environment": environment, "speed": [], "memory": [], "overhead": [], "traffic": rows}
    print(tables(document))
    if folder is not None:
        name = re.sub(r"[^a-z0-9]+", "_", environment["device"].lower()).strip("_")
        file = folder / f"{name}_{kind}_traffic.json"
        with replacing(file) as whole:
            whole.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nresults: {file}")
    missed = [one for one in rows if not met_traffic(one)]
    if check and missed:
        print(f"\n{len(missed)} of {len(rows)} passes are not as the model says", file=sys.stderr)
        return 1
    return 0
