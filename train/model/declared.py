"""The models that `plan.model` may name: those of Penstock, and those that installed packages declare.

A package declares a model as an entry point of the group `penstock.models`, with the value `package.module:function`.
No other function is imported, so a run folder of a stranger cannot choose code that runs. The source files of a
declared model have a digest, which is part of a plan: a run never continues with other code.
"""

import hashlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.ids import file_sha256
from train.model.shape import ModelShape, OwnShape

GROUP = "penstock.models"
"""Group of the entry points that declare models."""
BUILT_IN = {"moe": "train.model.moe:build"}
"""Models of Penstock: short name, and function that builds the model."""

Builder = Callable[[OwnShape, bool], Any]
"""A function that returns a model from its shape; the second argument is False for a bidirectional objective."""


def function_of(name: str) -> str:
    """Return the function that a value of `plan.model` names, as `package.module:function`; nothing is imported.

    Raises ConfigError if no model has this name or function.
    """
    declared = BUILT_IN | {point.name: point.value for point in entry_points(group=GROUP)}
    if name in declared:
        return declared[name]
    if name in declared.values():
        return name
    hint = suggest_name(name, [*declared, *declared.values()])
    raise ConfigError(
        f"plan.model: expected one of {', '.join(sorted(declared))}, or a function that an installed package declares "
        f"as an entry point of {GROUP}, got {name}{hint}. Install the package of the model."
    )


def code_digest(function: str) -> str:
    """Return the SHA-256 of the Python files of the package of a function; empty for a model of Penstock.

    The files are those in the folder of the function's module and below, or the module alone if it is in no package.
    """
    if function in BUILT_IN.values():
        return ""
    module = function.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"plan.model = {function}: expected a module, got {error}. Install its package.") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"plan.model = {function}: expected a module with a Python file, got "
            f"{(spec and spec.origin) or 'none'}. Install its package."
        )
    file = Path(spec.origin)
    in_package = "." in module or spec.submodule_search_locations is not None
    files = sorted(file.parent.rglob("*.py")) if in_package else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(file.parent).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def check_code(shape: ModelShape) -> None:
    """Check that the model of a shape is declared, and that its code has the digest in the shape.

    Raises ConfigError if not. A shape of a transformer has no code.
    """
    if not isinstance(shape, OwnShape):
        return
    actual = code_digest(function_of(shape.model))
    if actual != shape.code:
        raise ConfigError(
            f"plan.model = {shape.model}: expected code with SHA-256 {shape.code or '(of Penstock)'}, got "
            f"{actual or '(of Penstock)'}. Restore the files of its package, or plan a new run."
        )


def load_builder(shape: OwnShape) -> Builder:
    """Return the function that builds the model of a shape. Raises ConfigError as `check_code` does."""
    check_code(shape)
    try:
        function: Builder = resolve_name(shape.model)
    except Exception as error:
        raise ConfigError(
            f"plan.model = {shape.model}: expected a function, got {type(error).__name__}: {error}. Correct the module."
        ) from error
    return function
