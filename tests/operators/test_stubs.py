"""The descriptions of the calls in `_C`, and the stub that the build generates from them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from monoidreduce import _C


def test_the_stub_has_what_the_module_has() -> None:
    stub = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text("utf-8"))
    names = [node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names += [node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert sorted(names) == sorted(name for name in vars(_C) if not name.startswith("_"))


@pytest.mark.parametrize("name", _C.CALLS)
def test_a_call_takes_its_fields_by_position(name: str) -> None:
    signature = str(getattr(_C, name).__doc__).splitlines()[0]
    taken = [argument.split(":")[0].strip() for argument in signature[signature.index("(") + 1 :].split(",")]
    unplanned = ("scale_rows", "copy_fitted", "order_rows", "clear_rows", "rows_product", "columns_product")
    unplanned += ("gated_hidden", "gated_gradient", "sequence_spans", "undefine")
    unplanned += ("reduce_losses", "score_product", "jsd_rows", "jsd_gradient")
    unplanned += ("target_scores", "target_dlogits")
    unplanned += ("split_rows", "split_columns", "plane_product", "plane_dots")
    unplanned += tuple(name for name in _C.CALLS if name.startswith("combine_"))
    unplanned += ("statistics_forward", "statistics_backward")
    launch = ["threads", "stream", *([] if name in unplanned else ["plan"])]
    assert taken == [*(field.name for field in _C.CALLS[name]), *launch]


def test_a_description_names_axes_types_choices_and_defaults() -> None:
    fields = {field.name: field for field in _C.CALLS["attention_forward"]}
    assert fields["k"] == ("k", "tensor", "same", False, ("B", "Hkv", "N", "F"), (), None)
    assert fields["bias"].optional and fields["bias"].type == "same, accumulation or bool"
    assert fields["lse"][1:5] == ("result", "accumulation", False, ("B", "H", "M"))
    assert fields["left"] == ("left", "option", "int", False, (), (), -1)
    activation = next(field for field in _C.CALLS["mlp_forward"] if field.name == "activation")
    assert activation.kind == "choice" and activation.choices[activation.default] == "identity"
