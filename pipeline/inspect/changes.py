"""Which settings a what-if may change: those that only decide. Every other one is refused, with the reason."""

from collections.abc import Mapping
from typing import Any

from pipeline.dedup.config import DEDUP
from pipeline.steps.documents import STAGES as DOCUMENTS_STAGES
from pipeline.steps.scores import STAGES as SCORES_STAGES
from pipeline.steps.verdicts import JUDGED
from schemas.config import Recipe
from schemas.errors import ConfigError

Settings = Mapping[str, Any]
SURVIVORS = {("dedup", "keep"), ("dedup", "source_ranks")}
"""Settings that choose among copies. They also say which document of a bucket the others are compared with, so a run
could find a few other pairs; a what-if takes the clusters as they are."""
WHY = {
    **{stage.name: "it changes what is measured, or the text itself" for stage in DOCUMENTS_STAGES},
    **{stage.name: "it changes the scores" for stage in SCORES_STAGES},
    "dedup": "it changes which documents are copies of one another",
    "pii": "it changes the text that is kept, not which documents are",
    "tokens": "it changes the shards, and which clean documents a mix leaves out of them",
}


def changed_settings(committed: Recipe, wanted: Recipe) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, as `section.key` → (committed, wanted).

    Raises ConfigError that names every one that cannot be tried, with the reason.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    refused: list[str] = []
    judged = {DEDUP.name, *(stage.name for stage in JUDGED)}
    for name, section in wanted.items():
        before, after = committed[name].model_dump(mode="json"), section.model_dump(mode="json")
        decides = section.fields_of("decision") if name in judged else set()
        idle = section.fields_of("execution")
        for key in after:
            if before[key] == after[key]:
                continue
            changed[f"{name}.{key}"] = before[key], after[key]
            if key in idle:
                refused.append(f"{name}.{key}: it has no effect on what is kept")
            elif key not in decides and (name, key) not in SURVIVORS:
                refused.append(f"{name}.{key}: {_why(name)}")
        refused += _follows(name, committed[name].content(), section.content(), changed)
    if refused:
        raise ConfigError(
            "what-if: promised settings that only decide, found\n  "
            + "\n  ".join(refused)
            + "\nrun the recipe with them instead; steps that they do not touch are not repeated"
        )
    return changed


def _follows(
    section: str, before: Mapping[str, Any], after: Mapping[str, Any], changed: Mapping[str, Any]
) -> list[str]:
    """Settings that nobody changed but that follow from one that was, such as the signals another dialect needs."""
    return [
        f"{section}.{key}: would become {after[key]!r} (now {before[key]!r}); {_why(section)}"
        for key in after
        if before[key] != after[key] and f"{section}.{key}" not in changed
    ]


def _why(section: str) -> str:
    return WHY.get(section, "it has no part in which documents are kept")
