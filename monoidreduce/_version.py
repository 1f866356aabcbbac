"""The one place of the version: read by pyproject.toml, CMakeLists.txt and the CMake package."""

__version__ = "0.1.0"
