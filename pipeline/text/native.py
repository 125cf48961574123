"""The one place that decides whether the native module or the functions in Python are used.

`module` is the native module, or None if this machine has not built it from the sources beside it. Both return equal
results for every text, so workers with and without it may write parts of one run. Tests set `module` to None to measure
in Python alone: `python_only` of `tests/support/native.py`.
"""

import hashlib
from importlib.resources import files
from types import ModuleType

_built: ModuleType | None = None
try:
    from pipeline.text import _native

    _built = _native
except ImportError:  # no compiler where Penstock was installed, or a package in an archive
    pass


def sources_digest() -> str:
    """Return the SHA-256 over the sources of the native module, as `setup.py` computes it when it builds the module."""
    folder = files("pipeline.text") / "cpp"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith((".h", ".cpp")))
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def current(built: ModuleType | None) -> ModuleType | None:
    """Return the built module, or None if it was built from other sources, such as those before an update."""
    return built if built is not None and sources_digest() == built.SOURCES else None


module = current(_built)


def loaded() -> ModuleType:
    """Return the native module. Raises RuntimeError if it is not used."""
    if module is None:
        raise RuntimeError("native words: expected the native module, got none. Call `pip install -e .` to build it.")
    return module


def implementation() -> str:
    """Return `native` or `python`: what computes the words of texts in this process."""
    return "python" if module is None else "native"
