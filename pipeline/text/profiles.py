"""Profiles: what clean text of a language looks like, as stop words and limits of quality thresholds.

A limit has the name of a setting of `[quality]`. The built-in file was derived by `pipeline/text/derive_profiles.py`
and holds function words and numbers alone. English is not in it: the published rules were made for English.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

BUILT_IN = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True)
class LanguageProfile:
    """What is known of clean text in one language."""

    language: str
    """Code as the language model names it."""
    script: str
    """ISO 15924 code of the writing, such as `Latn`."""
    stop_words: frozenset[str] = frozenset()
    """Most frequent words, as the language's splitter gives them."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limit by the name of the setting it replaces; its prefix `min_` or `max_` tells the side."""


def load_profiles(path: str | None) -> Mapping[str, LanguageProfile]:
    """The profiles in a TOML file by language, in order of their codes; None: the built-in ones.

    Raises ConfigError that names everything wrong in the file.
    """
    return _load(str(path) if path else str(BUILT_IN))


def render_profiles(
    profiles: Mapping[str, LanguageProfile], words: Mapping[str, Sequence[str]], documents: Mapping[str, int], how: str
) -> str:
    """The TOML text of profiles, with the stop words in this order, the numbers of documents and how they were used."""
    lines = [f"# Derived from clean reference text: {how}."]
    for language, profile in profiles.items():
        listed = ", ".join(json.dumps(word, ensure_ascii=False) for word in words[language])
        lines += ["", f"[{language}] # {documents[language]} documents", f'script = "{profile.script}"']
        lines += [f"stop_words = [{listed}]", f"[{language}.limits]"]
        lines += [f"{name} = {limit:g}" for name, limit in profile.limits.items()]
    return "\n".join(lines) + "\n"


@cache
def _load(path: str) -> Mapping[str, LanguageProfile]:
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"language profiles {path}: expected a TOML file, got {error}. Derive it anew.") from error
    problems = [problem for language, value in values.items() for problem in _problems(language, value)]
    if problems:
        raise ConfigError(f"language profiles {path}: {'; '.join(problems)}; derive the file anew or correct it")
    return {language: _profile(language, values[language]) for language in sorted(values)}


def _profile(language: str, value: Mapping[str, Any]) -> LanguageProfile:
    limits = {name: float(limit) for name, limit in value.get("limits", {}).items()}
    return LanguageProfile(language, value["script"], frozenset(value.get("stop_words", ())), limits)


def _problems(language: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{language}: expected a table [{language}], got {value!r}"]
    problems = [
        f"{language}.{name}: no such key (valid: script, stop_words, limits)"
        for name in sorted(value.keys() - {"script", "stop_words", "limits"})
    ]
    if not isinstance(value.get("script"), str):
        problems.append(f"{language}.script: expected an ISO 15924 code, got {value.get('script')!r}")
    words = value.get("stop_words", [])
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        problems.append(f"{language}.stop_words: expected a list of words, got {words!r}")
    limits = value.get("limits", {})
    if not isinstance(limits, dict):
        return [*problems, f"{language}.limits: expected a table of numbers, got {limits!r}"]
    for name, limit in limits.items():
        if not name.startswith(("min_", "max_")):
            problems.append(f"{language}.limits.{name}: expected the name of a threshold, min_… or max_…")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
            problems.append(f"{language}.limits.{name}: expected a number, got {limit!r}")
    return problems
