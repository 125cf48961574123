"""Language profiles: the stop words and quality limits of a language, derived from clean text.

A limit has the name of a setting in `[quality]`. The built-in file was derived by `penstock derive-profiles` and
contains only function words and numbers. English is not in it, because the published rules were made for English; the
derived limits of English are a file of their own.
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
ENGLISH_LIMITS = Path(__file__).with_name("english.toml")
"""Limits of English that `quality.english_limits = "derived"` selects, as `tests/derive_english.py` derived them."""


@dataclass(frozen=True)
class LanguageProfile:
    """The stop words and limits of one language."""

    language: str
    """Code of the language, as in the column `language`."""
    script: str
    """ISO 15924 code of the script, such as `Latn`."""
    stop_words: frozenset[str] = frozenset()
    """Stop words, as the language's tokenizer splits words."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limit by the name of the setting in `[quality]` that it replaces, such as `min_alpha_words`."""


def load_profiles(path: str | None) -> Mapping[str, LanguageProfile]:
    """Load the profiles in a TOML file by language, sorted by code; None loads the built-in profiles.

    Raises ConfigError if the file is invalid; the message lists every problem.
    """
    return _load(str(path) if path else str(BUILT_IN))


def render_profiles(
    profiles: Mapping[str, LanguageProfile], words: Mapping[str, Sequence[str]], documents: Mapping[str, int], how: str
) -> str:
    """Return the TOML text of profiles.

    For each language, `words` are the stop words in the order to write, and `documents` is the number of documents.
    `how` is a description of the settings, for the comment at the top of the file.
    """
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
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"language profiles {path}: expected a TOML file, got one that cannot be read ({error}). "
            "Run `penstock derive-profiles` again."
        ) from error
    problems = [problem for language, value in values.items() for problem in _problems(language, value)]
    if problems:
        raise ConfigError(f"language profiles {path}: {'; '.join(problems)}. Correct the file.")
    return {language: _profile(language, values[language]) for language in sorted(values)}


def _profile(language: str, value: Mapping[str, Any]) -> LanguageProfile:
    limits = {name: float(limit) for name, limit in value.get("limits", {}).items()}
    return LanguageProfile(language, value["script"], frozenset(value.get("stop_words", ())), limits)


def _problems(language: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{language}: expected a table [{language}], got {value!r}"]
    problems = [
        f"{language}.{name}: expected one of script, stop_words, limits, got another key"
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
