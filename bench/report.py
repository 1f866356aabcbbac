"""Tables of results: `python bench/report.py FILE...` prints them in the form of docs/benchmarks.md."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MATH = "math"  # contender of attention: torch's math backend
OTHERS = (
    "decode",
    "forward",
    "derivatives",
    "heads",
    "accuracy",
    "memory",
    "overhead",
    "first_call",
    "interpreter",
    "fold_kernels",
    "models",
    "traffic",
    "ranks",
    "collectives",
    "overlap",
)  # measurements other than speed
# Largest relative error of the planner's formulas of collectives, and the least size that it holds for.
COLLECTIVE_TOLERANCE, LEAST_MIB = 0.25, 64
QUIET = 0.5  # load average, as a share of the hardware threads, above which times are not to be trusted


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _verdict(met: bool) -> str:
    return "met" if met else "**MISSED**"


def in_words(parameters: dict[str, Any]) -> str:
    """Parameters as text: names with values, then the names of flags that are True."""
    flags = [name for name, value in parameters.items() if value is True]
    others = [f"{name} {value}" for name, value in parameters.items() if not isinstance(value, bool)]
    return ", ".join([*others, *flags])


def _title(row: Row) -> str:
    return f"{row['op']} {in_words(row['parameters'])}"


def _met_phase(phase: Row) -> bool:
    return phase["target"] is None or bool(phase["speedup"]["torch"] >= phase["target"])


def _met_memory(row: Row) -> bool:
    return bool(max(row["bytes"]["monoidreduce"]) <= row["limit"] and row["flat"])


def _more_over_ranks(row: Row) -> float:
    more: float = row["microseconds"]["over ranks"] - row["microseconds"]["alone"]
    return more


def _met_host(row: Row) -> bool:
    return _more_over_ranks(row) <= float(row["limit"])


def _met_overhead(row: Row) -> bool:
    return bool(row["microseconds"]["overhead"] <= row["limit"])


def met_traffic(row: Row) -> bool:
    """Whether the counted bytes are in the model's range and not fewer than the compulsory bytes."""
    moved = row["counter"]["read"] + row["counter"]["written"]
    counted = row["counter"] | {"moved": moved}
    inside = all(low <= counted[part] <= high for part, (low, high) in row["allowed"].items())
    return inside and bool(moved + row["unwritten"] >= row["compulsory"])


def met_collective(row: Row) -> bool | None:
    """Whether a collective's time is near the planner's.

    None if small, or if the formula was fitted to it.
    """
    if row["fitted"] or row["bytes"] < LEAST_MIB << 20:
        return None
    return bool(abs(row["milliseconds"]["median"] / row["predicted"] - 1) <= COLLECTIVE_TOLERANCE)


def _met_speed(row: Row, name: str) -> bool:
    """Whether a contender's time over ours reaches the target, for a row of a model."""
    return bool(row["speedup"][name] >= row["targets"][name])


def _met_peak(row: Row) -> bool:
    """Whether our peak memory is at most Liger's, for a row of a model."""
    return bool(row["peak_bytes"]["monoidreduce"] <= row["peak_bytes"]["Liger"])


def _held_to(row: Row) -> list[str]:
    """The measured contenders of a model for which there is a target."""
    return [name for name in row["targets"] if name in row["speedup"]]


def speed_table(rows: list[Row], product_gflops: dict[str, float]) -> str:
    """Medians of each phase, ours and torch's, with half the distance from 20th to 80th percentile."""

    def spread(times: dict[str, float]) -> str:
        return f"{times['median']:.3g}±{(times['p80'] - times['p20']) / 2 / times['median']:.0%}"

    def phase_cell(phase: Row) -> str:
        own, theirs = (spread(phase["milliseconds"][name]) for name in ("monoidreduce", "torch"))
        cell = f"{own} vs {theirs}: {phase['speedup']['torch']:.2f}x"
        if phase["target"] is None:
            return cell
        return f"{cell}, {phase['target']:.1f}x {_verdict(_met_phase(phase))}"

    def cells(row: Row) -> list[str]:
        phases = row["phases"]
        total = phases["total"]
        return [
            _title(row),
            row["dtype"],
            *(phase_cell(phase) for phase in phases.values()),
            f"{total['gflops'] / product_gflops[row['dtype']]:.0%}",
        ]

    header = ["operator", "dtype", "forward", "backward", "total", "of matmul rate"]
    return table(header, [cells(row) for row in rows])


def in_order(lists: Iterable[Iterable[str]]) -> list[str]:
    """Every name once, ours first, otherwise in order of appearance."""
    names = dict.fromkeys(name for names in lists for name in names)
    return sorted(names, key=lambda name: not name.startswith("monoidreduce"))


def peer_table(rows: list[Row], product_gflops: dict[str, float]) -> str:
    """All contenders of one operator's cases. The longer of the two lists is in the rows."""

    def cell(row: Row, name: str) -> str:
        phases = row["phases"]
        if name not in phases["total"]["milliseconds"]:
            return "-"
        forward, backward = (
            phases[phase]["milliseconds"][name]["median"] for phase in ("forward", "backward")
        )
        rate = phases["total"]["gflops"] / phases["total"]["speedup"][name]
        text = f"{forward:.3g} + {backward:.3g}, {rate / product_gflops[row['dtype']]:.0%}"
        if (peak := row.get("peak_bytes", {}).get(name)) is not None:
            step = row.get("step_peak_bytes", {}).get(name, peak)
            forward_alone = f" (forward {peak / 2**20:.0f})" if peak - step >= 1 << 20 else ""
            text += f", {step / 2**20:.0f} MiB{forward_alone}"
        if (clock := row.get("sm_clock", {}).get(name)) is not None:
            text += f", {clock:.0f} MHz"
        return text

    names = in_order(row["phases"]["total"]["milliseconds"] for row in rows)
    titles = [f"{in_words(row['parameters'])}, {row['dtype']}" for row in rows]
    cells = [[cell(row, name) for name in names] for row in rows]
    across, down = names, titles
    if len(names) > len(titles):
        across, down, cells = titles, names, [list(column) for column in zip(*cells, strict=True)]
    return table([rows[0]["op"], *across], [[name, *line] for name, line in zip(down, cells, strict=True)])


def not_measured(rows: list[Row]) -> str:
    """The contenders that were not measured, in how many of the rows, and why."""
    places: dict[tuple[str, str, str], int] = {}
    for row in rows:
        for name, reason in row.get("absent", {}).items():
            places[row["op"], name, reason] = places.get((row["op"], name, reason), 0) + 1
    return "\n".join(
        f"- {name} in {op}, {count} times: {reason}" for (op, name, reason), count in places.items()
    )


def decode_table(rows: list[Row], copy_gbytes: float) -> str:
    """Microseconds of each contender, and its bandwidth as a share of a copy's."""

    def cell(row: Row, name: str) -> str:
        if name not in row["milliseconds"]:
            return "-"
        milliseconds = row["milliseconds"][name]["median"]
        rate = row["bytes"] / milliseconds / 1e6
        return f"{milliseconds * 1e3:.3g} us, {rate:.0f} GB/s, {rate / copy_gbytes:.0%}"

    names = in_order(row["milliseconds"] for row in rows)
    header = ["decode", *names]
    return table(
        header, [[in_words(row["parameters"]), *(cell(row, name) for name in names)] for row in rows]
    )


def forward_table(rows: list[Row]) -> str:
    """Milliseconds of each contender, the matrix product's share of them and, on a GPU, our memory."""

    def cell(row: Row, name: str) -> str:
        milliseconds = row["milliseconds"][name]["median"]
        if name == product:
            return f"{milliseconds:.3g}"
        text = f"{milliseconds:.3g}, {row['milliseconds'][product]['median'] / milliseconds:.2f}"
        peak = row["peak_bytes"].get(name)
        return text if peak is None else f"{text}, {peak / 2**20:.1f} MiB"

    names = in_order(row["milliseconds"] for row in rows)
    product = names[-1]
    return table(
        ["cross_entropy", *names],
        [[in_words(row["parameters"]), *(cell(row, name) for name in names)] for row in rows],
    )


def calls_table(rows: list[Row], digits: int) -> str:
    """Milliseconds of each call, how many times the first call's they are and, on a GPU, its memory."""

    def cell(row: Row, name: str) -> str:
        if name not in row["milliseconds"]:
            return "out of memory"
        first = next(iter(row["milliseconds"]))
        milliseconds, of_first = (row["milliseconds"][of]["median"] for of in (name, first))
        text = f"{milliseconds:.3g}"
        if name != first:
            text += f", {milliseconds / of_first:.{digits}f}x"
        peak = row["peak_bytes"].get(name)
        return text if peak is None else f"{text}, {peak / 2**20:.0f} MiB"

    texts = []
    for op, group in itertools.groupby(rows, key=lambda row: row["op"]):
        of_op = list(group)
        names = list(dict.fromkeys(name for row in of_op for name in row["milliseconds"]))
        texts.append(
            table(
                [op, *names],
                [[in_words(row["parameters"]), *(cell(row, name) for name in names)] for row in of_op],
            )
        )
    return "\n\n".join(texts)


def accuracy_parts(row: Row) -> list[str]:
    """The names of the parts that errors are of: the output and the gradients."""
    return list(next(iter(row["errors"].values())))


def accuracy_sweeps(rows: list[Row]) -> list[list[Row]]:
    """Groups of rows of one operator and size, which differ only in the standard deviation."""
    return [list(group) for _, group in itertools.groupby(rows, key=_title)]


def _of_contenders(rows: list[Row], corner: str, names: list[str], cell: Callable[[Row, str], str]) -> str:
    """A table with a line for each contender and a column for each standard deviation."""
    lines = [[name, *(cell(row, name) if name in row["errors"] else "-" for row in rows)] for name in names]
    return table([corner, *(f"std {row['std']:g}" for row in rows)], lines)


def accuracy_table(rows: list[Row]) -> str:
    """Relative errors of one sweep."""

    def cell(row: Row, name: str) -> str:
        return ", ".join(f"{value:.1e}" for value in row["errors"][name].values())

    return _of_contenders(rows, _title(rows[0]), in_order(row["errors"] for row in rows), cell)


def has_math(row: Row) -> bool:
    """Whether torch's math backend was measured, with largest and mean errors. Old results lack these."""
    return MATH in row.get("mean", {})


def math_table(rows: list[Row]) -> str:
    """Largest/mean errors of one sweep as multiples of the errors of torch's math backend."""

    def cell(row: Row, name: str) -> str:
        ratios = (
            [f"{row[measure][name][part] / row[measure][MATH][part]:.1f}" for measure in ("largest", "mean")]
            for part in accuracy_parts(row)
        )
        return ", ".join("/".join(pair) for pair in ratios)

    names = [name for name in in_order(row["errors"] for row in rows) if name != MATH]
    return _of_contenders(rows, _title(rows[0]), names, cell)


def _accuracy(rows: list[Row]) -> list[str]:
    """Tables of all sweeps. Sweeps with the same parts share a heading."""
    blocks = []
    for parts, group in itertools.groupby(rows, key=accuracy_parts):
        sweeps = accuracy_sweeps(list(group))
        named = f"{', '.join(parts[:-1])} and {parts[-1]}"
        blocks += [
            f"### Accuracy of {named}",
            "Relative errors against float64, by the standard deviation of logits or scores.",
            *(accuracy_table(sweep) for sweep in sweeps),
        ]
        if beside_math := [sweep for sweep in sweeps if all(has_math(row) for row in sweep)]:
            blocks += [
                f"Largest/mean errors of {named} as multiples of the errors of torch's math path, which "
                "computes in float32 and rounds results once. The acceptance rule (docs/numerics.md) allows "
                '2/1.5 times the errors of "torch, 16-bit scores", plus a rounding floor.',
                *(math_table(sweep) for sweep in beside_math),
            ]
    return blocks


def memory_table(rows: list[Row]) -> str:
    """Peak memory in MiB at each size of the axis that doubles."""

    def mebibytes(values: list[int]) -> str:
        return ", ".join(f"{value / 2**20:.1f}" for value in values)

    def cells(row: Row) -> list[str]:
        return [
            row["op"],
            row["dtype"],
            in_words(row["parameters"]),
            f"{row['axis']} {', '.join(str(size) for size in row['sizes'])}",
            mebibytes(row["bytes"]["monoidreduce"]),
            mebibytes(row["bytes"]["torch"]),
            f"{row['limit'] >> 20} MiB {_verdict(max(row['bytes']['monoidreduce']) <= row['limit'])}",
            "yes" if row["flat"] else "**NO**",
        ]

    return table(
        ["operator", "dtype", "size", "axis", "MiB", "torch MiB", "limit", "flat"],
        [cells(row) for row in rows],
    )


def overhead_table(rows: list[Row]) -> str:
    """Microseconds per call. Each pair is the call alone and the call with its backward pass."""

    def pair(times: dict[str, float], name: str) -> str:
        return f"{times[name]:.1f}, {times[name + ', with backward']:.1f}"

    def cells(row: Row) -> list[str]:
        times = row["microseconds"]
        verdict = f"{row['limit']:.0f} us {_verdict(_met_overhead(row))}"
        return [
            row["op"],
            pair(times, "overhead"),
            verdict,
            pair(times, "one row"),
            pair(times, "torch, one row"),
        ]

    return table(
        ["operator", "overhead us", "limit", "one row us", "torch, one row us"], [cells(row) for row in rows]
    )


def ranks_profile_table(rows: list[Row]) -> str:
    """Milliseconds and numbers of a rank's kernels by kind, for ours and for faster contenders."""
    found = [(row, name, seen) for row in rows for name, seen in row.get("profile", {}).items()]
    kinds = [*sorted({kind for _, _, seen in found for kind in seen} - {"others"}), "others"]

    def cell(of_kind: Row | None) -> str:
        return "-" if of_kind is None else f"{of_kind['milliseconds']:.2f} in {of_kind['kernels']}"

    return table(
        ["operator", "over ranks", *(f"{kind}, ms" for kind in kinds)],
        [[row["op"], name, *(cell(seen.get(kind)) for kind in kinds)] for row, name, seen in found],
    )


def host_table(rows: list[Row]) -> str:
    """Microseconds of host time of a call, without a process group and over ranks."""

    def cells(row: Row) -> list[str]:
        alone, over, collectives = (row["microseconds"][k] for k in ("alone", "over ranks", "collectives"))
        verdict = f"{_more_over_ranks(row):.1f}, {row['limit']:.0f} us {_verdict(_met_host(row))}"
        inside = f"{collectives:.1f} of {row['collectives']}"
        return [row["op"], f"{alone:.1f}", f"{over:.1f}", verdict, inside]

    header = ["operator", "alone us", "over ranks us", "more us", "in torch's collectives us"]
    return table(header, [cells(row) for row in rows])


def first_call_table(rows: list[Row]) -> str:
    """Milliseconds of a process's first call of a function."""

    def cell(row: Row, phase: str) -> str:
        text, limit = f"{row['milliseconds'][phase]:.0f}", row["limits"].get(phase)
        return (
            text
            if limit is None
            else f"{text}, {limit:.0f} ms {_verdict(row['milliseconds'][phase] <= limit)}"
        )

    phases = list(rows[0]["milliseconds"])
    return table(
        ["function", *phases], [[row["op"], *(cell(row, phase) for phase in phases)] for row in rows]
    )


def interpreter_table(rows: list[Row]) -> str:
    """Milliseconds of each pass, and the interpreter's rate relative to the compiled monoid's."""

    def cell(row: Row, phase: str) -> str:
        compiled, interpreted = row["milliseconds"][phase]
        rate = compiled / interpreted
        verdict = "" if row["target"] is None else f", {row['target']:.2f} {_verdict(rate >= row['target'])}"
        return f"{compiled:.2f}, {interpreted:.2f}: {rate:.2f}{verdict}"

    phases = list(rows[0]["milliseconds"])
    return table(
        ["width", *phases], [[str(row["width"]), *(cell(row, phase) for phase in phases)] for row in rows]
    )


def fold_kernels_table(rows: list[Row]) -> str:
    """Milliseconds of each kernel, and its rate relative to the built-in kernel's."""

    def cell(row: Row, phase: str) -> str:
        own, built_in = (row["milliseconds"][phase][name] for name in ("own", "built-in"))
        rate, target = built_in / own, row["target"]
        return f"{own:.3g}, {built_in:.3g}: {rate:.2f}, {target:.2f} {_verdict(rate >= target)}"

    return table(
        ["fold", "size", "forward", "local gradients"],
        [
            [row["op"], in_words(row["parameters"]), cell(row, "forward"), cell(row, "backward")]
            for row in rows
        ],
    )


def traffic_table(rows: list[Row]) -> str:
    """MB that each pass moves, predicted by the model and counted."""

    def pair(row: Row, part: str) -> str:
        if row["model"].get(part) is None:
            return "-"
        model, counted = (row[of][part] / 1e6 for of in ("model", "counter"))
        return f"{model:.4g}, {counted:.4g}"

    def cells(row: Row) -> list[str]:
        moved = row["counter"]["read"] + row["counter"]["written"]
        return [
            _title(row),
            row["dtype"],
            row["phase"],
            *(pair(row, part) for part in ("read", "written", "l2")),
            f"{moved / row['compulsory']:.2f}",
            _verdict(met_traffic(row)),
        ]

    header = ["operator", "dtype", "pass", "MB read", "MB written", "MB of L2", "of compulsory", "model"]
    return table(header, [cells(row) for row in rows])


def ranks_table(rows: list[Row]) -> str:
    """Medians of each phase on one rank and over ranks, efficiency, the planner's prediction and others."""
    header = [
        "operator",
        "ranks",
        "forward ms, alone / over ranks",
        "backward ms, alone / over ranks",
        "total ms, alone / over ranks",
        "efficiency",
        "predicted total ms, alone / over ranks",
        "predicted efficiency",
        "target",
        "MiB over ranks",
        "others over ranks: total ms (of ours), MiB",
    ]

    def others(row: Row) -> str:
        times, memory = row["phases"]["total"]["milliseconds"], row.get("memory_mib", {})
        own, found = times["over ranks"]["median"], []
        for name in times:
            if name not in ("alone", "over ranks"):
                total = times[name]["median"]
                bytes = f", {memory[name]:.0f}" if name in memory else ""
                found.append(f"{name}: {total:.3g} ({total / own:.2f}x){bytes}")
        return "; ".join(found) or "-"

    def cells(row: Row) -> list[str]:
        times = (phase["milliseconds"] for phase in row["phases"].values())
        pairs = [" / ".join(f"{t[name]['median']:.3g}" for name in ("alone", "over ranks")) for t in times]
        efficiency = f"{row['phases']['total']['efficiency']:.2f}"
        model = ["-", "-"]
        if (of := row["predicted"]) is not None:
            alone, over = of["alone"], of["over ranks"]
            model = [f"{alone:.3g} / {over:.3g}", f"{alone / (row['ranks'] * over):.2f}"]
        name = f"{row['op']}, {in_words(row['parameters'])}, {row['dtype']}"
        target = "-" if row["target"] is None else f"{row['target']:.2f}"
        if row.get("target_phase") == "forward":
            target += f", forward: {row['phases']['forward']['efficiency']:.2f}"
        memory = row.get("memory_mib", {}).get("over ranks")
        own = "-" if memory is None else f"{memory:.0f}"
        return [name, str(row["ranks"]), *pairs, efficiency, *model, target, own, others(row)]

    return table(header, [cells(row) for row in rows])


def overlap_table(rows: list[Row]) -> str:
    """Medians of kernels and exchanges, in turn and at once, and the share of the exchange that is hidden."""
    header = [
        "kernel",
        "MiB exchanged",
        "kernel ms",
        "exchange ms",
        "one after the other",
        "together",
        "hidden",
    ]

    def cells(row: Row) -> list[str]:
        times = (f"{each['median']:.3g}" for each in row["milliseconds"].values())
        return [row["kernel"], f"{row['mib']:.0f}", *times, f"{row['hidden']:.0%}"]

    return table(header, [cells(row) for row in rows])


def collectives_table(rows: list[Row]) -> str:
    """The measured time of each collective and size, and the time by the planner's formula."""

    def cells(row: Row) -> list[str]:
        median, met = row["milliseconds"]["median"], met_collective(row)
        return [
            row["collective"],
            str(row["ranks"]),
            f"{row['bytes'] / 2**20:.4g}",
            f"{row['sent'] / 2**20:.4g}",
            f"{median:.3g}",
            f"{row['sent'] / median / 1e6:.3g}",
            f"{row['predicted']:.3g}",
            f"{median / row['predicted']:.2f}",
            "fitted" if row["fitted"] else "-" if met is None else _verdict(met),
        ]

    header = ["collective", "ranks", "MiB", "MiB that a rank sends", "ms", "GB/s sent", "formula ms"]
    return table([*header, "measured / formula", "within 25 %"], [cells(row) for row in rows])


def models_table(rows: list[Row]) -> str:
    """Milliseconds of forward + backward and memory; for others, also the ratio of their time to ours."""

    def cell(row: Row, name: str) -> str:
        if name not in row["milliseconds"]:
            return "-"
        phases = row["milliseconds"][name]
        text = f"{phases['forward']['median']:.3g} + {phases['backward']['median']:.3g}"
        if name in row["peak_bytes"]:
            text += f", {row['peak_bytes'][name] / 2**30:.1f} GiB"
        if name != "monoidreduce":
            text += f": {row['speedup'][name]:.2f}x"
        if name in _held_to(row):
            text += f", {row['targets'][name]:.2f}x {_verdict(_met_speed(row, name))}"
            text += f", memory {_verdict(_met_peak(row))}" if name == "Liger" else ""
        return text

    names = in_order(row["milliseconds"] for row in rows)
    return table(
        ["training step", *names], [[_title(row), *(cell(row, name) for name in names)] for row in rows]
    )


def in_effect(rows: list[Row]) -> str:
    """The packages that the parts of each contender's model came from, as recorded in the measurement."""

    def packages(parts: dict[str, str]) -> str:
        return ", ".join(f"{part} of {module.split('.')[0]}" for part, module in parts.items())

    found = {name: parts for row in rows for name, parts in row["parts"].items()}
    return "\n".join(f"- {name}: {packages(parts)}" for name, parts in found.items())


def _by_operator(rows: list[Row]) -> list[list[Row]]:
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["op"])]


def missed(document: Row) -> list[str]:
    """The targets that were not reached, each in words."""
    speed = [
        f"{_title(row)} {row['dtype']} {name}: {phase['speedup']['torch']:.2f}x of {phase['target']:.1f}x"
        for row in document["speed"]
        for name, phase in row["phases"].items()
        if not _met_phase(phase)
    ]
    memory = [
        f"{row['op']} {row['dtype']}: {max(row['bytes']['monoidreduce']) / 2**20:.1f} MiB"
        + ("" if row["flat"] else f", grows with {row['axis']}")
        for row in document["memory"]
        if not _met_memory(row)
    ]
    overhead = [
        f"{row['op']}: {row['microseconds']['overhead']:.1f} us a call"
        for row in document["overhead"]
        if not _met_overhead(row)
    ]
    host = [
        f"{row['op']} over ranks: {_more_over_ranks(row):.1f} us more than without a group"
        for row in document.get("host", [])
        if not _met_host(row)
    ]
    models = document.get("models", [])
    steps = [
        f"{_title(row)} beside {name}: {row['speedup'][name]:.2f}x of {row['targets'][name]:.2f}x"
        for row in models
        for name in _held_to(row)
        if not _met_speed(row, name)
    ]
    peaks = [
        f"{_title(row)}: {row['peak_bytes']['monoidreduce'] / 2**30:.1f} GiB, Liger "
        f"{row['peak_bytes']['Liger'] / 2**30:.1f} GiB"
        for row in models
        if "Liger" in _held_to(row) and not _met_peak(row)
    ]
    links = [
        f"{row['collective']} of {row['bytes'] / 2**20:.4g} MiB over {row['ranks']} ranks: "
        f"{row['milliseconds']['median'] / row['predicted']:.2f} of the formula"
        for row in document.get("collectives", [])
        if met_collective(row) is False
    ]
    return speed + memory + overhead + host + steps + peaks + links


def _short(commit: str) -> str:
    """As git abbreviates it, if it is a whole hash."""
    return commit[:12] if len(commit) == 40 else commit


def _versions(machine: Row) -> str:
    """The versions of the other libraries that were installed."""
    return ", ".join(f"{name} {version}" for name, version in machine.get("peers", {}).items() if version)


def tables(document: Row) -> str:
    """The report of one run, in Markdown. Old results have no peers, no decode and no accuracy."""
    machine = document["environment"]
    measured = dict.fromkeys(row["op"] for row in document["speed"])
    measured |= dict.fromkeys(name for name in OTHERS if document.get(name))
    parts = [
        f"## {machine['device']}: {', '.join(measured)}",
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, monoidreduce "
        f"{machine['monoidreduce']} ({_short(machine['commit'])}), {machine['date']}, `{machine['command']}`",
    ]
    if machine["load_average"] > QUIET * machine["threads"] and [*measured] != ["traffic"]:
        parts.append(
            f"The machine was busy (load average {machine['load_average']}): times are not to be trusted."
        )
    if document["speed"]:
        parts += [
            "### Speed",
            "Median milliseconds of monoidreduce vs torch, timed in turn, and the ratio.",
            speed_table(document["speed"], machine["product_gflops"]),
        ]
        with_peers = [row for row in document["speed"] if len(row["phases"]["total"]["milliseconds"]) > 2]
        if with_peers:
            parts += [
                "### Peers",
                "Median milliseconds of forward + backward, then the share of the matmul rate. On a GPU the "
                "peak memory beyond inputs, outputs and gradients follows. Where the forward pass has a "
                f"higher peak, it follows too: memory that becomes gradients. {_versions(machine)}".rstrip(),
                *(peer_table(rows, machine["product_gflops"]) for rows in _by_operator(with_peers)),
            ]
    accuracy = document.get("accuracy", [])
    parts += _accuracy(accuracy)
    decode = document.get("decode", [])
    if decode:
        parts += [
            "### Decode",
            "Median microseconds of attention with one query a head, bytes of keys and values read a second, "
            f"and their share of the {machine['copy_gbytes']:.0f} GB/s that a copy reaches.",
            decode_table(decode, machine["copy_gbytes"]),
        ]
    forward = document.get("forward", [])
    if forward:
        parts += [
            "### Forward alone, without gradients",
            "Median milliseconds, the share of it that the matrix product of the logits takes by itself, and "
            "peak memory.",
            forward_table(forward),
        ]
    derivatives = document.get("derivatives", [])
    if derivatives:
        parts += [
            "### Forward mode and second derivatives",
            "Median milliseconds, how many times the forward pass they are, and peak memory. torch "
            "differentiates its composition, which stores the scores.",
            calls_table(derivatives, 1),
        ]
    heads = document.get("heads", [])
    if heads:
        parts += [
            "### Classes of a head",
            "Median milliseconds, the ratio to the first column, and peak memory. The times of "
            "linear_log_probs, linear_cross_entropy and steps are of a forward and a backward pass, those of "
            "the others of a forward pass. A CUDA graph holds memory since it was recorded, which its peak "
            "leaves out.",
            calls_table(heads, 2),
        ]
    models = document.get("models", [])
    if models:
        parts += [
            "### Models",
            "Median milliseconds of the forward + the backward pass of a training step. On a GPU the peak "
            "memory beyond the weights follows, and of others their time over ours. "
            f"{_versions(machine)}".rstrip(),
            models_table(models),
            in_effect(models),
        ]
    if absent := not_measured(document["speed"] + accuracy + decode + models):
        parts += ["### Not measured", absent]
    if document["memory"]:
        parts += [
            "### Memory",
            "Peak of one forward and backward beyond inputs, outputs and gradients.",
            memory_table(document["memory"]),
        ]
    if document["overhead"]:
        parts += [
            "### Overhead",
            "Microseconds of a call that records gradients, alone and with its backward.",
            overhead_table(document["overhead"]),
        ]
    if host := document.get("host"):
        by = "nobody: the group has no other rank, and sends nothing"
        parts += [
            "### Host time over ranks",
            "Microseconds of the host for a small call without a group, and over two ranks. Last: how much "
            f"of that is in torch's collectives, and how many. Sent by {document.get('backend', by)}.",
            host_table(host),
        ]
    if document.get("first_call"):
        parts += [
            "### First call of a function of one's own",
            "Milliseconds in a fresh process: with an empty cache of kernels, then with a filled one.",
            first_call_table(document["first_call"]),
        ]
    if document.get("interpreter"):
        parts += [
            "### The interpreter of the CPU engine",
            "Milliseconds of the same fold compiled by g++ and interpreted, on one thread, and the ratio.",
            interpreter_table(document["interpreter"]),
        ]
    if kernels := document.get("fold_kernels"):
        parts += [
            "### Kernels of folds",
            "Milliseconds of the kernel of a fold and of its local gradients, then of the built-in "
            "operator's, and the ratio of rates. That is linear_cross_entropy, for divergences "
            "linear_distillation.",
            fold_kernels_table(kernels),
        ]
    if traffic := document.get("traffic"):
        parts += [
            "### Traffic",
            "Bytes that each pass moves: by the model, then as counted "
            "([how](cost.md#how-the-bounds-are-checked)). The last columns: the counted bytes as a multiple "
            "of the compulsory ones, and whether they are in the model's range.",
            traffic_table(traffic),
        ]
    if ranks := document.get("ranks"):
        parts += [
            "### Several devices",
            "Median milliseconds of the whole problem on one device, and over ranks; the efficiency "
            "T1 / (W TW) of W ranks; what the planner predicts; and what others take over the same ranks.",
            ranks_table(ranks),
        ]
        if any(row.get("profile") for row in ranks):
            parts += [
                "Where others are faster: a step of one rank by kinds of its kernels, milliseconds and how "
                "many. Collectives wait for the other rank too.",
                ranks_profile_table(ranks),
            ]
    if overlap := document.get("overlap"):
        parts += [
            "### Kernels beside an exchange",
            "Medians of a kernel and of what ranks exchange beside it: apart, one after the other, and "
            "together. Hidden is the time saved, as a share of the exchange.",
            overlap_table(overlap),
        ]
    if collectives := document.get("collectives"):
        link = document["link"]
        parts += [
            "### Collectives",
            "Median milliseconds of collectives between ranks, and what the planner's formulas say of links "
            f"with {link['rate'] / 1e9:.3g} GB/s and {1e6 * link['latency']:.3g} us, fitted to the "
            f"all-gathers. Others of {LEAST_MIB} MiB and more are to be within {COLLECTIVE_TOLERANCE:.0%}.",
            collectives_table(collectives),
        ]
    phases = [phase for row in document["speed"] for phase in row["phases"].values()]
    held = (
        document["memory"]
        or document["overhead"]
        or any(phase["target"] is not None for phase in phases)
        or any(_held_to(row) for row in models)
    )
    misses = missed(document)
    if misses:
        parts += ["### Targets missed", "\n".join(f"- {miss}" for miss in misses)]
    elif held:
        parts.append("All targets met.")
    return "\n\n".join(parts)


def _case(row: Row) -> tuple[Any, ...]:
    return row["op"], row["dtype"], row["parameters"]


def _replaces(later: Row, row: Row) -> bool:
    before, after = (of["phases"]["total"]["milliseconds"].keys() for of in (row, later))
    return _case(later) == _case(row) and before <= after


def without_what_was_measured_again(documents: list[Row]) -> list[Row]:
    """The runs without results that a later run on the same device replaces. documents: in order of time.

    If a later run of a case lacks a contender (a library that was not installed), the earlier one is kept
    too.
    """
    kept = []
    for at, document in enumerate(documents):
        device = document["environment"]["device"]
        later = [other for other in documents[at + 1 :] if other["environment"]["device"] == device]
        lists: Row = {name: rows for name, rows in document.items() if isinstance(rows, list)}
        for name, rows in lists.items():
            again = [row for other in later for row in other.get(name, [])]
            if name == "speed":  # replaced case by case
                lists[name] = [row for row in rows if not any(_replaces(other, row) for other in again)]
            elif name in ("accuracy", "derivatives"):  # replaced operator by operator
                lists[name] = [row for row in rows if row["op"] not in {other["op"] for other in again}]
            elif any(other.get(name) for other in later):
                lists[name] = []
        kept.append(document | lists)
    return kept


def main(paths: list[str]) -> int:
    """Print the report of each result file. Files of one device have to be in order of time."""
    documents = [json.loads(Path(path).read_text()) for path in paths]
    print("\n\n".join(tables(document) for document in without_what_was_measured_again(documents)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
