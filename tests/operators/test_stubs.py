"""The descriptions of the calls in `_C`, and the stub that is generated from them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monoidreduce import _C

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import generate_stubs  # noqa: E402


def test_the_stub_is_current() -> None:
    assert generate_stubs.STUB.read_text("utf-8") == generate_stubs.stub()


@pytest.mark.parametrize("name", _C.CALLS)
def test_a_call_takes_its_fields_by_position(name: str) -> None:
    signature = str(getattr(_C, name).__doc__).splitlines()[0]
    taken = [argument.split(":")[0].strip() for argument in signature[signature.index("(") + 1 :].split(",")]
    unplanned = ("scale_rows", "copy_fitted", "order_rows", "rows_product", "columns_product")
    unplanned += ("gated_hidden", "gated_gradient", "sequence_spans", "undefine")
    unplanned += ("reduce_losses", "score_product", "jsd_rows", "jsd_gradient")
    unplanned += tuple(name for name in _C.CALLS if name.startswith("combine_"))
    unplanned += ("statistics_forward", "statistics_backward")
    unplanned += ("modified_attention_forward", "modified_attention_backward")
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
