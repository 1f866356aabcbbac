"""Private names of torch are in two files, and a torch without one of them is no surprise."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interpreter import Ended, run_after_torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import monoidreduce
from monoidreduce import _torch_private

PACKAGE = Path(monoidreduce.__file__).parent

CALL = """
import torch, monoidreduce as mr
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8)
mr.linear_cross_entropy(x, w, torch.arange(5)).backward()
print(x.grad.shape)
"""


def private_names(source: str) -> list[str]:
    """Names of torch with a leading underscore: of attributes and of what is imported from its modules."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            path = f"{node.module}." + ".".join(alias.name for alias in node.names)
        else:
            continue
        private = any(part.startswith("_") and not part.startswith("__") for part in path.split("."))
        if path.startswith("torch.") and private:
            names.append(path)
    return names


def test_they_are_in_two_files() -> None:
    assert private_names("from torch._C import x") and private_names("torch._C.of()")
    assert private_names("from torch.autograd.function import _Single") and not private_names(
        "torch.__version__"
    )
    files = ("_torch_private", "_dynamo")
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if (names := private_names(file.read_text("utf-8"))) and file.stem not in files
    }
    assert not found


def run_without(name: str) -> Ended:
    """A call in a process whose torch has lost the name."""
    owner, _, last = name.rpartition(".")
    lose = (
        f"import torch, torch._functorch.utils\nif hasattr({owner}, {last!r}): delattr({owner}, {last!r})\n"
    )
    return run_after_torch(lose + CALL)


@pytest.mark.oldest
@pytest.mark.parametrize(
    "name",
    [
        "torch._C._after_ADInplaceOrView_keyset",
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._dispatch_keys",
        "torch._C._dispatch_tls_is_dispatch_key_excluded",
        "torch._C._dispatch_tls_local_include_set",
        "torch._C._get_fp32_precision_getter",
        "torch._C._is_any_autocast_enabled",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._len_torch_function_stack",
        "torch._C._autograd._profiler_enabled",
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._autograd._top_saved_tensors_default_hooks",
    ],
)
def test_names_with_a_substitute_are_not_missed(name: str) -> None:
    process = run_without(name)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "torch.Size([5, 8])\n"


@pytest.mark.parametrize(
    "name",
    ["torch._functorch.utils.enable_single_level_autograd_function", "torch._C._AutoDispatchBelowAutograd"],
)
def test_a_torch_without_another_is_refused_by_name(name: str) -> None:
    process = run_without(name)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith(f"ImportError: monoidreduce needs {name}, which torch ")


@pytest.mark.oldest
@pytest.mark.parametrize("mode", [partial(FlopCounterMode, display=False), FakeTensorMode])
def test_modes_that_look_on_at_ops(mode: Any) -> None:
    assert not _torch_private.modes_are_active()
    with mode():
        assert _torch_private.modes_are_active()
    assert not _torch_private.modes_are_active()


@pytest.mark.oldest
def test_every_name_is_there() -> None:
    assert all(getattr(_torch_private, name) is not None for name in _torch_private.__all__)
