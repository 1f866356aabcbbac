"""The words that algorithms for the gradient of attention move, beside bounds on them."""

from __future__ import annotations

from monoidreduce._command_line import Parser, plot_file, whole_number
from monoidreduce.theory.io.comparison import compare
from monoidreduce.theory.io.figure import save_figure

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Print the table; return the exit status. argv: arguments after `python -m monoidreduce io`."""
    size = whole_number(1, 10**9)
    parser = Parser(prog="python -m monoidreduce io", description=__doc__)
    parser.add_argument("-n", type=size, default=8192, help="length of the sequence (default: %(default)s)")
    parser.add_argument("-d", type=size, default=128, help="width of the head (default: %(default)s)")
    parser.add_argument(
        "--words",
        type=size,
        nargs="+",
        metavar="M",
        help="sizes of the cache (default: d^2/16, d^2/4, d^2, 4 d^2, 16 d^2)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in words")
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw figure 1 of the paper; needs matplotlib"
    )
    options = parser.parse_args(argv)
    square = options.d**2
    words = options.words or [max(1, square // 16), max(1, square // 4), square, 4 * square, 16 * square]
    comparison = compare(options.n, options.d, words)
    if options.plot:
        try:
            save_figure(options.plot, options.n, options.d)
        except ImportError:
            parser.error("argument --plot: matplotlib is not installed: pip install matplotlib")
    print(comparison.to_json() if options.json else comparison)
    return 0
