"""Monoids in C++ for tests of `cpp_monoid`: some with their results by torch, some that break a law."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.cpp.cpp_laws import Samples, count_of_numbers
from monoidreduce.folds.cpp.cpp_source import CppSource, unit
from monoidreduce.folds.cuda import cache

# The log-probability that none of many causes fires. Each column is a cause, and fires with probability
# sigmoid(score). No frame.
NONE_FIRES = """
template <class R>
struct NoneFires {
  using Real = R;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State {
    R log_none;
  };
  MR_HD State identity() const { return {R(-0.f)}; }
  MR_HD State lift(mr::Element<R> e) const { return {-max(e.score, R(0)) - log(R(1) + exp(-abs(e.score)))}; }
  MR_HD State combine(State a, State b) const { return {a.log_none + b.log_none}; }
  MR_HD R project(State s) const { return s.log_none; }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, R, R g) const {
    return {-g * sigmoid(e.score), R(0)};
  }
};
"""

# log(mean of exp(score)), with a frame. The count of columns is saved for the gradient.
LOG_MEAN_EXP = """
template <class R>
struct LogMeanExp {
  using Real = R;
  using Frame = R;
  struct Output {
    R value, count;
  };
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State {
    R frame, mass, count;
  };
  MR_HD State identity() const { return {-infinity<R>(), R(0), R(0)}; }
  MR_HD State lift(mr::Element<R> e) const { return {e.score, weight(e.score, e.score), R(1)}; }
  MR_HD Output project(State s) const { return {s.frame + log(s.mass / s.count), s.count}; }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, Output p, R g) const {
    return {g * weight(e.score, p.value) / p.count, R(0)};
  }
  MR_HD R frame(mr::Element<R> e) const { return e.score; }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const { return {f, s.mass * weight(s.frame, f), s.count}; }
  MR_HD State add(State a, State b) const { return {a.frame, a.mass + b.mass, a.count + b.count}; }
  MR_HD State accumulate(State s, mr::Element<R> e) const {
    return {s.frame, s.mass + weight(e.score, s.frame), s.count + R(1)};
  }
  MR_HD R weight(R x, R f) const { return exp(x - select(f == -infinity<R>(), R(0), f)); }
};
"""

# The largest score and its column: a monoid of the library, by #include.
LARGEST = """
#include "monoidreduce/monoids/argmax.h"
template <class R>
struct Largest : mr::ArgMax<R> {};
"""

# Two scores, two results and the row's label: sums of score * tanh(other) and of the score at the label.
PAIR = """
template <class R>
struct Pair {
  using Real = R;
  struct State {
    R product, target;
  };
  using Output = State;
  using Upstream = State;
  static constexpr int kScores = 2;
  MR_HD State identity() const { return {R(-0.f), R(-0.f)}; }
  MR_HD State lift(mr::Element<R> e) const {
    return {e.score * tanh(e.other), select(e.column == e.label, e.score, R(-0.f))};
  }
  MR_HD State combine(State a, State b) const { return {a.product + b.product, a.target + b.target}; }
  MR_HD Output project(State s) const { return s; }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, Output, Upstream g) const {
    const R t = tanh(e.other);
    const R of_target = select(e.column == e.label, g.target, R(0));
    return {g.product * t + of_target, g.product * e.score * (R(1) - t * t)};
  }
};
"""

# Keeps the first of two states: associative with an identity, but not commutative.
FIRST = """
template <class R>
struct First {
  using Real = R;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State {
    R value, count;
  };
  MR_HD State identity() const { return {R(0), R(0)}; }
  MR_HD State lift(mr::Element<R> e) const { return {e.score, R(1)}; }
  MR_HD State combine(State a, State b) const { return COMBINED; }
  MR_HD R project(State s) const { return s.value; }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, R p, R g) const { return {g, R(0)}; }
};
"""

OF_LOG_MEAN_EXP = {"results": {"value": "real", "count": "kept"}}


class Specimen(NamedTuple):
    """A monoid, options of its calls, and a function that computes its results with torch.

    The function takes scores [N, V], second scores [N, V] and labels [N].
    """

    source: str
    options: dict[str, Any]
    reference: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _target(score: Tensor, label: Tensor) -> Tensor:
    columns = torch.arange(score.shape[1], device=score.device)
    return torch.where(columns == label[:, None], score, 0.0).sum(1)


GOOD = {
    "none fires": Specimen(NONE_FIRES, {}, lambda s, o, label: (torch.nn.functional.logsigmoid(-s).sum(1),)),
    "log mean exp": Specimen(
        LOG_MEAN_EXP,
        OF_LOG_MEAN_EXP,
        lambda s, o, label: (s.logsumexp(1) - torch.tensor(s.shape[1]).to(s).log(),),
    ),
    "largest": Specimen(
        LARGEST,
        {"results": {"value": "real", "column": "index"}},
        lambda s, o, label: tuple(s.max(1)),
    ),
    "pair": Specimen(
        PAIR,
        {"results": {"product": "real", "target": "real"}, "scores": 2},
        lambda s, o, label: ((s * o.tanh()).sum(1), _target(s, label)),
    ),
}

# Name -> (the law that the monoid breaks, its source).
BAD = {
    "identity": ("identity", NONE_FIRES.replace("{R(-0.f)}", "{R(1e-3f)}")),
    "frame of nothing": (
        "identity",
        LOG_MEAN_EXP.replace("x - select(f == -infinity<R>(), R(0), f)", "x - f"),
    ),
    "first": ("commutativity", FIRST.replace("COMBINED", "a.count == R(0) ? b : a")),
    "average": (
        "associativity",
        FIRST.replace(
            "COMBINED",
            "a.count == R(0) ? b : b.count == R(0) ? a : State{(a.value + b.value) / R(2), R(1)}",
        ),
    ),
    "gradient": ("local gradient", NONE_FIRES.replace("sigmoid(e.score)", "sigmoid(-e.score)")),
    "gradient without the count": ("local gradient", LOG_MEAN_EXP.replace(" / p.count", "")),
    "accumulate": (
        "tile fold",
        LOG_MEAN_EXP.replace("s.mass + weight(e.score, s.frame)", "s.mass + weight(s.frame, e.score)"),
    ),
}

_RUN = """
#include <cstdint>
using namespace monoidreduce;
extern "C" void run(const double* real, const std::int64_t* label, std::int64_t samples, double* out) {
  using Claims = LawClaims<CppMonoid, CppFields>;
  for (std::int64_t row = 0; row < samples; ++row) {
    const double* at = real + row;
    const auto next = [&] { const double x = *at; at += samples; return x; };
    Element<double> e[Claims::kElements];
    for (int i = 0; i < Claims::kElements; ++i) {
      const double score = next(), other = CppMonoid::kScores == 2 ? next() : 0.;
      e[i] = {score, other, i, label[row]};
    }
    Claims::Upstream g;
    for (int k = 0; k < CppFields::kGradients; ++k) g[k] = next();
    double* number = out + row;
    Claims::write_all(e, g, [&](double x) { *number = x, number += samples; });
    if (number != out + Claims::kNumbers * samples + row) __builtin_trap();
  }
}
"""
_HEADERS = ("device/program/law_claims.h", "monoids/argmax.h")


def tried_on_the_host(monoid: CppSource, samples: Samples, folder: Path) -> Tensor:
    """The numbers of the law check, computed by code of the host's compiler in place of a kernel."""
    includes = "".join(f'#include "monoidreduce/{header}"\n' for header in _HEADERS)
    text = unit(monoid, "double", includes, _RUN)
    written = folder / f"{cache.key(text)}.cpp"  # unique: dlopen caches by name
    library = written.with_suffix(".so")
    written.write_text(text)
    compiler = os.environ.get("CXX", "c++")
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off")
    subprocess.run([compiler, *flags, "-I", mr.get_include(), written, "-o", library], check=True)
    count = samples.real.shape[1]
    numbers = torch.empty((count_of_numbers(monoid), count), dtype=torch.float64)
    given = [ctypes.c_void_p(t.data_ptr()) for t in (samples.real, samples.label)]
    ctypes.CDLL(str(library)).run(*given, ctypes.c_int64(count), ctypes.c_void_p(numbers.data_ptr()))
    return numbers


def options_of_bad(name: str) -> dict[str, Any]:
    """Arguments of `cpp_monoid` for a source of BAD."""
    return OF_LOG_MEAN_EXP if "struct LogMeanExp" in BAD[name][1] else {}
