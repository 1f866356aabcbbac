"""What the packaging tests look at: the source tree, what `make build` made, the installed module."""

import os
from pathlib import Path

import pytest

import monoidreduce as mr


@pytest.fixture(scope="session")
def source() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def dist() -> Path:
    """The folder with the wheel and the source distribution."""
    if "MONOIDREDUCE_DIST" not in os.environ:
        pytest.skip("set MONOIDREDUCE_DIST to the folder that `make build` fills")
    return Path(os.environ["MONOIDREDUCE_DIST"])


@pytest.fixture(scope="session")
def extension() -> Path:
    """The file of the module monoidreduce._C under test."""
    return Path(mr._C.__file__)
