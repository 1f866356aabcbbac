"""Writes the parts of documents that are generated from bench/results: `python bench/publish.py`.

These are the README's table and chart, and the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

from bench.plot import Bar, save_bars
from bench.report import in_order, table, tables, without_what_was_measured_again

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "assets" / "measured.svg"
BEGIN, END = "<!-- bench: python bench/publish.py -->", "<!-- /bench -->"  # around generated text

DEVICE, DTYPE = "NVIDIA H100 80GB HBM3", "bfloat16"  # shown in the README's table and chart
OURS = "monoidreduce"
# Contenders that are not drawn: modes that a user has to ask for.
MODES = ("monoidreduce, deterministic", "monoidreduce, sm80", "monoidreduce, compensated")


class Headline(NamedTuple):
    """A case that the README's table shows under `title`; if `drawn`, the chart shows it too."""

    title: str
    op: str
    parameters: dict[str, Any]
    drawn: bool


LONG = {"B": 2, "H": 16, "L": 8192, "d": 128, "causal": True}
HEAD = {"N": 8192, "V": 128256, "D": 4096}
HEADLINES = (
    Headline("attention, causal, length 8192, width 128", "attention", LONG, True),
    Headline("the same with a softcap", "attention", LONG | {"softcap": 30.0}, False),
    Headline("cross entropy, 8192 tokens, 128256 classes, width 4096", "cross_entropy", HEAD, True),
    Headline("the same with half of the targets ignored", "cross_entropy", HEAD | {"ignored": 0.5}, False),
    Headline(
        "distillation, 4096 tokens, 128256 classes, widths 2048 and 4096",
        "distillation",
        {"N": 4096, "V": 128256, "D": 2048, "E": 4096, "loss": "forward_kl"},
        True,
    ),
    Headline("MLP, 16384 rows and hidden units, width 128", "mlp", {"B": 16384, "K": 16384, "d": 128}, True),
    Headline(
        "MLP, 16384 rows and hidden units, width 4096", "mlp", {"B": 16384, "K": 16384, "d": 4096}, True
    ),
    Headline(
        "log-sum-exp, 8192 rows, 128256 columns, width 4096",
        "logsumexp",
        {"M": 8192, "N": 128256, "F": 4096},
        False,
    ),
)


def committed() -> list[Row]:
    """The runs in bench/results, without results that a later run on the same device replaces."""
    documents = [json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    in_time = sorted(documents, key=lambda document: str(document["environment"]["date"]))
    newest = without_what_was_measured_again(in_time)
    return [run for run in newest if any(rows for name, rows in run.items() if name != "environment")]


def find(documents: list[Row], headline: Headline, device: str = DEVICE) -> Row:
    """The row of a headline, measured on a device; of several, the least favourable one.

    So a run that lacks a library does not hide an earlier one that has it. Raises LookupError if the case was
    not measured.
    """
    case = headline.op, DTYPE, headline.parameters
    found = [
        row
        for document in documents
        if document["environment"]["device"] == device
        for row in document["speed"]
        if (row["op"], row["dtype"], row["parameters"]) == case
    ]
    if not found:
        raise LookupError(f"no result of {headline.op} {headline.parameters} in {DTYPE} on {device}")
    return max(found, key=lambda row: cost(row, OURS).milliseconds / others(row)[0].milliseconds)


def cost(row: Row, name: str) -> Bar:
    """A contender's median time of forward and backward together, and its peak memory over both."""
    milliseconds = row["phases"]["total"]["milliseconds"][name]["median"]
    return Bar(name, milliseconds, row["step_peak_bytes"][name] / 2**20)


def others(row: Row) -> list[Bar]:
    """All contenders except ours, fastest first."""
    names = row["phases"]["total"]["milliseconds"]
    return sorted(
        (cost(row, name) for name in names if not name.startswith(OURS)), key=lambda bar: bar.milliseconds
    )


def traffic(documents: list[Row], headline: Headline) -> str:
    """DRAM bytes that both passes of a case move, relative to the compulsory bytes; "-" if not counted."""
    passes = [
        row
        for document in documents
        if document["environment"]["device"] == DEVICE
        for row in document.get("traffic", ())
        if (row["op"], row["dtype"], row["parameters"]) == (headline.op, DTYPE, headline.parameters)
    ]
    if not passes:
        return "-"
    moved = sum(row["counter"]["read"] + row["counter"]["written"] for row in passes)
    return f"{moved / sum(row['compulsory'] for row in passes):.1f}x"


def headline_table(documents: list[Row]) -> str:
    """The README's table: milliseconds and MiB of ours, the fastest other and torch; and our traffic."""

    def cells(headline: Headline) -> list[str]:
        row = find(documents, headline)
        ours, theirs, torch = cost(row, OURS), others(row)[0], cost(row, "torch")
        return [
            headline.title,
            f"{ours.time}, {ours.memory}",
            f"{theirs.name}: {theirs.time}, {theirs.memory}",
            f"{theirs.milliseconds / ours.milliseconds:.2f}x",
            f"{torch.time}, {torch.memory}",
            traffic(documents, headline),
        ]

    return table(
        ["layer", "monoidreduce", "fastest other", "its time / ours", "torch", "our traffic"],
        [cells(headline) for headline in HEADLINES],
    )


def headline_bars(documents: list[Row]) -> dict[str, list[Bar]]:
    """The chart's groups: ours with every measured workspace, then the others, fastest first."""
    groups = {}
    for headline in HEADLINES:
        if headline.drawn:
            row = find(documents, headline)
            names = in_order([row["phases"]["total"]["milliseconds"]])
            ours = [name for name in names if name.startswith(OURS) and name not in MODES]
            own = [cost(row, name)._replace(name=name.replace(", ", ", workspace ")) for name in ours]
            groups[headline.title] = own + others(row)
    return groups


def replace_block(text: str, block: str) -> str:
    """The text with the block between its two markers replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def pages(documents: list[Row]) -> dict[Path, str]:
    """The generated block of each page."""
    return {
        README: headline_table(documents),
        BENCHMARKS: "\n\n".join(tables(document) for document in documents),
    }


def main() -> None:
    documents = committed()
    for page, block in pages(documents).items():
        page.write_text(replace_block(page.read_text("utf-8"), block), "utf-8")
    save_bars(CHART, headline_bars(documents))


if __name__ == "__main__":
    main()
