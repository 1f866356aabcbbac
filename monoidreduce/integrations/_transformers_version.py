"""Refuses a transformers that is too old, by its version, before anything that it lacks is imported."""

from packaging.version import Version
from transformers import __version__

OLDEST = "4.57"

if Version(__version__) < Version(OLDEST):
    expected = f"version {OLDEST} or later (pip install 'transformers>={OLDEST}')"
    raise ImportError(f"transformers: expected {expected}, got {__version__}")
