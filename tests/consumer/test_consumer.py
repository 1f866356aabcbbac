"""A foreign CMake extension builds against the installed headers and folds a monoid of its own."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest
import torch

import monoidreduce as mr


@pytest.fixture(scope="module")
def noisy_or(tmp_path_factory):
    """The extension in this folder, built as its author would."""
    build = tmp_path_factory.mktemp("consumer")
    configure = [
        shutil.which("cmake"),
        "-S",
        Path(__file__).parent,
        "-B",
        build,
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    configure += [f"-Dmonoidreduce_DIR={mr.get_cmake_dir()}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DPYBIND11_FINDPYTHON=ON"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    spec = importlib.util.spec_from_file_location("noisy_or", next(build.glob("noisy_or*.so")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_fold_and_gradients_equal_autograd_through_the_product(noisy_or, threads):
    a = torch.randn(37, 5, dtype=torch.float64, requires_grad=True)
    b = (0.3 * torch.randn(101, 5, dtype=torch.float64) - 1).requires_grad_()
    grad = torch.randn(37, 1, dtype=torch.float64)
    expected = 1 - (1 - torch.sigmoid(a @ b.T)).prod(dim=1, keepdim=True)
    expected_d_a, expected_d_b = torch.autograd.grad(expected, (a, b), grad)

    p, d_a, d_b = torch.empty_like(grad), torch.zeros_like(a), torch.empty_like(b)
    inputs = [a.detach().numpy(), b.detach().numpy(), p.numpy()]
    noisy_or.forward(*inputs, threads)
    noisy_or.backward(grad.numpy(), *inputs, d_a.numpy(), d_b.numpy(), threads)
    torch.testing.assert_close(p, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_a, expected_d_a, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(d_b, expected_d_b, rtol=1e-10, atol=1e-12)


@pytest.mark.release
@pytest.mark.slow
def test_a_fold_over_no_columns_is_the_identity(noisy_or):
    p = torch.full((3, 1), torch.nan, dtype=torch.float64)
    empty = torch.empty(0, 5, dtype=torch.float64)
    noisy_or.forward(torch.randn(3, 5, dtype=torch.float64).numpy(), empty.numpy(), p.numpy(), 1)
    assert torch.equal(p, torch.zeros_like(p))
