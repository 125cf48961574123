"""The one place that decides whether the native module or the functions in Python are used.

`module` is the native module, or None if this machine has not built it from the sources beside it. Both return equal
results for every text, so workers with and without it may write parts of one run; only a probability of a fastText
model may differ in its last bit, as `fasttext_model.py` says. Tests set `module` to None to measure in Python alone:
`python_only` of `tests/support/native.py`.
"""

import hashlib
from importlib import import_module
from importlib.resources import files
from types import ModuleType


def load(package: str) -> ModuleType | None:
    """Return the native module of a package if it was built from the sources beside it, else None."""
    try:
        built = import_module(f"{package}._native")
    except ImportError:  # no compiler where Penstock was installed, or a package in an archive
        return None
    return current(built, package)


def current(built: ModuleType, package: str) -> ModuleType | None:
    """Return the built module, or None if it was built from other sources, such as those before an update."""
    return built if sources_digest(package) == built.SOURCES else None


def sources_digest(package: str) -> str:
    """Return the SHA-256 over the sources of a native module, as `setup.py` computes it when it builds the module."""
    folder = files(package) / "cpp"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith((".h", ".cpp")))
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


module = load("pipeline.text")


def loaded() -> ModuleType:
    """Return the native module of texts. Raises RuntimeError if it is not used."""
    return used(module)


def used(native: ModuleType | None) -> ModuleType:
    """Return a native module that is used. Raises RuntimeError for None."""
    if native is None:
        raise RuntimeError("native code: expected the native module, got none. Call `pip install -e .` to build it.")
    return native


def implementation() -> str:
    """Return `native` or `python`: what computes the words of texts in this process."""
    return "python" if module is None else "native"
