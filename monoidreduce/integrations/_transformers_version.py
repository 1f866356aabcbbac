"""Raises ImportError for a transformers that is too old, before an import of something it lacks fails."""

from packaging.version import Version
from transformers import __version__

OLDEST = "4.57"

if Version(__version__) < Version(OLDEST):
    expected = f"version {OLDEST} or later (pip install 'transformers>={OLDEST}')"
    raise ImportError(f"transformers: expected {expected}, got {__version__}")
