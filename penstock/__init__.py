"""Penstock from Python: single texts, whole runs, and what a run has stored.

    import penstock

    penstock.extract(html).text                     # what the pipeline does to one page or one text
    penstock.signals("some text", language="en")
    penstock.check("some text", language="en")      # the quality rules that would drop it
    penstock.redact("write to jane@example.org")
    penstock.detect_language("Guten Morgen")

    run = penstock.run("recipe.toml", out="run")    # every data step, on Spark
    run = penstock.open("s3://bucket/run")          # or a run that exists
    run.documents.where("drop_rule = 'gopher_short_doc'").to_pandas()
    run.whatif({"quality.min_words": 30})
    run.tokens.torch_dataset()
    run.trace(step=12)

    penstock.register_source(spark)                 # then spark.read.format("penstock").load("run")

Importing it takes a few milliseconds. Spark and torch are imported by the functions that need them. The names
`schemas`, `pipeline`, `jobs` and `train` lead to the packages of Penstock from then on, whatever files the folder of a
script has.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runs import Rows, Run, Tokens, WhatIf, demo_crawl
    from penstock.runs import open_run as open
    from penstock.runs import run_recipe as run
    from penstock.text import Extracted, Language, Redacted, check, detect_language, extract, redact, signals
    from pipeline.engine.stage import Drop
    from pipeline.quality.recipe_rules import BrokenRule
    from pipeline.register.spark_reader import register_source
    from schemas.errors import ConfigError, ContractError, PenstockError

__all__ = [
    "BrokenRule",
    "ConfigError",
    "ContractError",
    "Drop",
    "Extracted",
    "Language",
    "PenstockError",
    "Redacted",
    "Rows",
    "Run",
    "Tokens",
    "WhatIf",
    "__version__",
    "check",
    "demo_crawl",
    "detect_language",
    "extract",
    "open",
    "redact",
    "register_source",
    "run",
    "signals",
]

_PLACES = {
    **dict.fromkeys(("Extracted", "Language", "Redacted"), "penstock.text"),
    **dict.fromkeys(("check", "detect_language", "extract", "redact", "signals"), "penstock.text"),
    **dict.fromkeys(("Rows", "Run", "Tokens", "WhatIf"), "penstock.runs"),
    **dict.fromkeys(("ConfigError", "ContractError", "PenstockError"), "schemas.errors"),
    "BrokenRule": "pipeline.quality.recipe_rules",
    "Drop": "pipeline.engine.stage",
    "demo_crawl": "penstock.runs",
    "open": "penstock.runs:open_run",
    "register_source": "pipeline.register.spark_reader",
    "run": "penstock.runs:run_recipe",
}
"""Public name → module that defines it, or module:name where the names differ."""


_PACKAGES = ("schemas", "pipeline", "jobs", "train")
"""Packages that are installed beside this one."""


def _claim(name: str, folder: str) -> None:
    """Import the package `name` from `folder`, unless it is imported.

    Python searches the folder of a script first, so a `train.py` there would hide the package. A module of this name
    that the script imported before stays reachable: the package returns its attributes.
    """
    earlier = sys.modules.get(name)
    paths = [os.path.realpath(path) for path in getattr(earlier, "__path__", ())]
    if os.path.join(folder, name) in paths:
        return
    if paths:
        raise ImportError(
            f"penstock: expected to import its own package `{name}`, got the package {paths[0]}, imported before. "
            "Rename that folder."
        )
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"penstock: expected the package `{name}` in {folder}, got none. Install penstock again.")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    vars(package)["__getattr__"] = partial(_attribute_of_user, name, earlier)


def _attribute_of_user(name: str, earlier: ModuleType | None, attribute: str) -> Any:
    """Return an attribute of the user's own module `name`, for code that imported it before penstock."""
    if earlier is not None and not attribute.startswith("__"):
        return getattr(earlier, attribute)
    raise AttributeError(
        f"module {name!r} has no attribute {attribute!r}; it is a package of penstock. Rename your own {name}.py, or "
        "import it before penstock."
    )


for _name in _PACKAGES:
    _claim(_name, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def __getattr__(name: str) -> Any:
    """Import and return a public name at its first use."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("penstock")
    if name not in _PLACES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, _, other = _PLACES[name].partition(":")
    value = getattr(importlib.import_module(module), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
