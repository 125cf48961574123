"""Whether the native module of extraction is used, or the functions in Python, which give equal results for every page.

Tests set `module` to None to force Python; see `pipeline.text.native`.
"""

from types import ModuleType

from pipeline.text.native import load, used

module: ModuleType | None = load("pipeline.extract")
"""The native module, or None if this machine has not built it from the sources beside it."""


def loaded() -> ModuleType:
    """Return the native module of extraction. Raises RuntimeError if it is not used."""
    return used(module)


def implementation() -> str:
    """Return `native` or `python`: what reads the markup of pages in this process."""
    return "python" if module is None else "native"
