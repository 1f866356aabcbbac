"""A user's C++ monoid: as data, as a compilation unit, and compiler errors mapped to the user's lines.

The op `cpp_monoid` takes `CppSource.text` as its argument, as the op `statistics` takes a program's text.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import NamedTuple

from monoidreduce.folds.program.errors import CppMonoidError

__all__ = ["KINDS", "CppSource", "as_error", "parse", "unit"]

# A member of Output: a result with a gradient, an integer, or a real that only the gradient reads.
KINDS = ("real", "index", "kept")

_USER, _OWN = "monoid of the user", "unit of monoidreduce"
_UNIT = """\
{includes}
namespace mr = monoidreduce;
namespace monoidreduce::user {{
#line 1 "{user}"
{source}
#line 1 "{own}"
}}  // namespace monoidreduce::user
namespace monoidreduce {{
using CppMonoid = user::{name}<{real}>;
static_assert(Projected<CppMonoid>, "it has not the members of every monoid: see Projected of monoid.h");
static_assert(Monoid<CppMonoid>, "it has neither combine nor the members of a FramedMonoid, of monoid.h");
static_assert(std::is_empty_v<CppMonoid>, "it has members: write its constants into the text");

{fields}
using CppFields = CppFieldsOf<CppMonoid>;
}}  // namespace monoidreduce
{more}"""
_FIELDS = """\
// P_i as numbers: reals with a gradient, then those without, and integers.
template <class M>
struct CppFieldsOf {{
  using R = typename M::Real;
  using I = Index<R>;
  using Output = typename M::Output;
  using Upstream = typename M::Upstream;
  static constexpr int kGradients = {gradients}, kReals = {reals}, kIndices = {indices};
  static_assert(M::kScores == {scores}, "kScores is not {scores}, the argument scores of cpp_monoid");
  static_assert(sizeof(Upstream) == kGradients * sizeof(R),
                "Upstream is not one number for each result that is real, of which there are {gradients}");
  static_assert(!std::is_same_v<Output, R> || (kReals == 1 && kIndices == 0),
                "Output is one real, and cpp_monoid was given other results");

  MR_HD static void unpack(const Output& p, Numbers<R, kReals>& real, Numbers<I, kIndices>& index) {{
    if constexpr (std::is_same_v<Output, R>) {{
      real[0] = p;
    }} else {{
      const auto& [{members}] = p;
{unpack}
    }}
  }}
  MR_HD static Output pack(const Numbers<R, kReals>& real, const Numbers<I, kIndices>& index) {{
    return Output{{{pack}}};
  }}
  MR_HD static Upstream upstream(const Numbers<R, kGradients>& g) {{ return Upstream{{{upstream}}}; }}
}};"""
_MEMBER = """\
      static_assert(std::is_same_v<decltype({member}), const {type}>, "result {name} is no {type} in Output");
      {number} = {member};"""
_MESSAGE = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.M)

_FAILED = re.compile(r'^static assertion failed with "(.*)"$')


class CppSource(NamedTuple):
    """A C++ monoid: a struct template over a real type."""

    source: str
    name: str  # name of the struct
    results: tuple[tuple[str, str], ...]  # (name, kind) of the members of Output, in order
    scores: int
    file: str  # file that contains the text, for errors
    line: int  # line of the file where the text begins

    @property
    def text(self) -> str:
        return json.dumps(self)

    def count(self, kind: str) -> int:
        """Number of members of Output with this kind."""
        return sum(of == kind for _, of in self.results)

    @property
    def struct_line(self) -> int:
        """The line of the file where the struct begins."""
        found = re.search(rf"\bstruct\s+{re.escape(self.name.rpartition('::')[2])}\b", self.source)
        return self.line + (self.source[: found.start()].count("\n") if found else 0)


@lru_cache(1024)
def parse(text: str) -> CppSource:
    """The inverse of `CppSource.text`."""
    source, name, results, *rest = json.loads(text)
    return CppSource(source, name, tuple((name, kind) for name, kind in results), *rest)


def unit(monoid: CppSource, real: str, includes: str, more: str = "") -> str:
    """The compilation unit: the library's headers, the user's text, and a struct that stores its results.

    The text is in a namespace inside the library's, so it can call the library's functions by their plain
    names. The unit has no line numbers of files, so moving the text does not compile it again.

    Args:
        real: "float" or "double".
        includes, more: text before and after everything else.
    """
    given = {"includes": includes, "user": _USER, "own": _OWN, "source": monoid.source, "name": monoid.name}
    return _UNIT.format(**given, real=real, fields=_fields(monoid), more=more)


def _fields(monoid: CppSource) -> str:
    numbers = dict(zip(("real", "kept", "index"), ([], [], []), strict=True))  # type: dict[str, list[int]]
    for at, (_, kind) in enumerate(monoid.results):
        numbers[kind].append(at)
    places = {at: f"real[{i}]" for i, at in enumerate(numbers["real"] + numbers["kept"])}
    places |= {at: f"index[{i}]" for i, at in enumerate(numbers["index"])}
    members = [f"member{at}" for at in range(len(monoid.results))]
    unpack = [
        _MEMBER.format(member=member, type="I" if kind == "index" else "R", name=name, number=places[at])
        for at, (member, (name, kind)) in enumerate(zip(members, monoid.results, strict=True))
    ]
    return _FIELDS.format(
        gradients=len(numbers["real"]),
        reals=len(numbers["real"]) + len(numbers["kept"]),
        indices=len(numbers["index"]),
        scores=monoid.scores,
        members=", ".join(members),
        unpack="\n".join(unpack),
        pack=", ".join(places[at] for at in range(len(monoid.results))),
        upstream=", ".join(f"g[{i}]" for i in range(len(numbers["real"]))),
    )


def as_error(log: str, monoid: CppSource) -> CppMonoidError:
    """The compiler's messages as an error that points to the user's lines.

    If there are errors in the user's text, only these are shown. Otherwise the text is valid C++ but the
    struct lacks something, and the errors are those of the unit's checks.
    """
    lines, messages = monoid.source.split("\n"), list(_MESSAGE.finditer(log))
    shown: list[re.Match[str]] = []
    for file in (_USER, _OWN):
        shown = shown or [match for match in messages if match["file"] == file]
    found = []
    for match in shown or messages:
        line = int(match["line"]) if match["file"] == _USER else monoid.struct_line - monoid.line + 1
        quoted = lines[line - 1].strip() if line <= len(lines) else ""
        found.append((monoid.line + line - 1, _FAILED.sub(r"\1", match["text"]), quoted))
    return CppMonoidError(found or [(monoid.struct_line, log, "")], monoid.file, monoid.name, log)
