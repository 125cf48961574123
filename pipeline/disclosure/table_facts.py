"""The facts that the manifests of a run's tables have: what entered, what stages dropped, and what they measured."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.bias.audit import BIAS_FIGURE, judge, stored_comparisons
from pipeline.bias.stage import BIAS, BiasConfig
from pipeline.disclosure.fact import DisclosedFacts, Fact, Origin
from pipeline.pii.stage import PII
from pipeline.plant.stage import PLANT
from pipeline.tokens.streams import live_tokens
from schemas.errors import reading
from schemas.manifest import TableVersion
from schemas.planted import describe_planted
from schemas.tables import DERIVED, DROPPED_BEFORE, LATER_VERDICTS, META_CUT
from schemas.versions import DATASET

STAGE_TABLES = ("documents", *LATER_VERDICTS, "clean", "tokenizer")
POINTERS = {DATASET: ".content.figures", "documents": ".content | {inputs, counts, figures, stages, config, models}"}
"""What the origin of a table shows of its manifest, by table."""
POINTER = ".content | {counts, figures, stages, config, models}"
"""The same for other tables."""
CUTS = ("repeats", "templates", "paragraphs")
"""Tables whose steps cut passages out of texts."""
SHOWN_MODELS = 3
"""Maximum number of models of a stage that a paper names; the bills of materials have all with their digests."""
SECRETS = frozenset(f"{stage.name}/{name}" for stage in (PII, PLANT) for name in stage.secrets)
"""Entries among the models of manifests that are commitments to keys, and digests of no model."""
TOXICITY_FIGURES = ("toxic_documents", "toxic_words", "toxicity_by")


def facts_of_tables(tables: Mapping[str, TableVersion]) -> DisclosedFacts:
    """Return the facts of the tables of a run, each with its origins."""
    tables = {name: table for name, table in tables.items() if name in (*STAGE_TABLES, *CUTS, DATASET)}
    origins = {name: _origin(name, table) for name, table in tables.items()}
    facts = _facts_of_stages({name: tables[name] for name in tables if name in (*STAGE_TABLES, DATASET)})
    if cuts := tuple(name for name in CUTS if name in tables):
        facts["cuts"] = Fact(cuts, cuts)
    if "documents" in tables:
        facts |= _facts_of_documents(tables["documents"])
    if "clean" in tables:
        facts |= _facts_of_clean(tables["clean"])
    if DATASET in tables:
        folder, manifest = tables[DATASET].folder, tables[DATASET].manifest
        facts["stored_tokens"] = Fact(sum(live_tokens(folder.child("../.."), manifest).values()), (DATASET,))
    return DisclosedFacts(facts | _facts_of_bias(tables), origins)


def manifest_path(table: TableVersion) -> str:
    """Return the path of a manifest in its run, without the place of the run."""
    return f"{'/'.join(table.folder.uri.split('/')[-2:])}/manifest.json"


def dropped_by(facts: DisclosedFacts, prefixes: Iterable[str]) -> int:
    """Return how many documents reasons dropped whose names begin with one of the prefixes, such as `toxicity/`."""
    starts = tuple(prefixes)
    return sum(number for reason, number in facts.value("dropped").items() if reason.startswith(starts))


def stage_rows(facts: DisclosedFacts) -> list[tuple[str, ...]]:
    """Return (stage, tables, version, documents dropped, models) of each stage once; long lists of models are cut."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for stage in facts.value("stages"):
        by_stage.setdefault(stage["stage"], []).append(stage)
    rows: list[tuple[str, ...]] = []
    for name, own in by_stage.items():
        models = sorted({model for stage in own for model in stage["models"]})
        more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
        rows.append(
            (
                name,
                ", ".join(stage["table"] for stage in own),
                ", ".join(sorted({str(stage["version"]) for stage in own})),
                f"{sum(stage['dropped'] for stage in own):,}",
                ", ".join(models[:SHOWN_MODELS]) + more,
            )
        )
    return rows


def _origin(name: str, table: TableVersion) -> Origin:
    path = manifest_path(table)
    return Origin(name, path, table.manifest.digest, f"jq '{POINTERS.get(name, POINTER)}' {path}")


def _facts_of_stages(tables: Mapping[str, TableVersion]) -> dict[str, Fact]:
    """Return what was dropped by reason, in the order of tables and sorted, and the stages with settings and models."""
    dropped = Counter[str]()
    stages: list[dict[str, Any]] = []
    used = tuple(name for name in tables if name != DATASET)
    for name, table in tables.items():
        content = table.manifest.content
        own = {
            reason: number
            for reason, number in content.counts.dropped.items()
            if number and not reason.endswith(f"/{DROPPED_BEFORE}")
        }
        dropped.update(own)
        for stage, version in sorted(content.stages.items()):
            stages.append(
                {
                    "stage": stage,
                    "version": version,
                    "table": name,
                    "settings": content.config.get(stage, {}),
                    "models": {
                        key: sha
                        for key, sha in content.models.items()
                        if key.startswith(f"{stage}/") and key not in SECRETS
                    },
                    "dropped": sum(number for reason, number in own.items() if reason.startswith(f"{stage}/")),
                }
            )
    in_order = [name for name in STAGE_TABLES if name in tables]
    funnel = [
        [reason, number]
        for name in in_order
        for reason, number in tables[name].manifest.content.counts.dropped.items()
        if number and not reason.endswith(f"/{DROPPED_BEFORE}")
    ]
    return {
        "dropped": Fact(dict(sorted(dropped.items())), used),
        "funnel": Fact(funnel, tuple(in_order)),
        "stages": Fact(stages, used),
    }


def _facts_of_documents(table: TableVersion) -> dict[str, Fact]:
    content, origins = table.manifest.content, ("documents",)
    inputs = {"files": len(content.inputs), "bytes": sum(entry.bytes for entry in content.inputs)}
    facts = {
        "derived": Fact(dict(sorted(content.figures.get(DERIVED, {}).items())), origins),
        "inputs": Fact(inputs, origins),
        "rows_in": Fact(content.counts.rows_in, origins),
        "meta_cut": Fact(sum(content.figures.get(META_CUT, {}).values()), origins),
    }
    found = {name: content.figures[name] for name in TOXICITY_FIGURES if content.figures.get(name)}
    return facts | ({"toxicity": Fact(found, origins)} if found else {})


def _facts_of_clean(table: TableVersion) -> dict[str, Fact]:
    content, run = table.manifest.content, table.manifest.run
    folder = manifest_path(table).rpartition("/")[0]
    files = [entry.model_dump() | {"path": f"{folder}/{run.paths[entry.key]}"} for entry in content.files]
    values = {
        "clean": content.counts.rows_kept,
        "clean_bytes": sum(content.figures.get("kept_bytes", {}).values()),
        "clean_sources": content.figures.get("kept_documents", {}),
        "clean_languages": content.figures.get("kept_languages", {}),
        "files": files,
        "personal_data": dict(content.figures.get("pii", {})),
        "built": run.started[:10],
        "code_version": run.code_version,
        "planted": describe_planted(content),
    }
    return {name: Fact(value, ("clean",)) for name, value in values.items()}


def _facts_of_bias(tables: Mapping[str, TableVersion]) -> dict[str, Fact]:
    """Return the findings of the bias audit, judged with the settings of the run; nothing if it was not measured."""
    measured = [
        name for name in STAGE_TABLES if name in tables and BIAS_FIGURE in tables[name].manifest.content.figures
    ]
    if not measured:
        return {}
    last = tables[measured[-1]]
    with reading(manifest_path(last), "valid figures and settings of the bias audit"):
        config = BiasConfig.model_validate(last.manifest.content.config.get(BIAS.name, {}))
        compared = stored_comparisons(tables[name].manifest.content.figures for name in measured)
        judged = judge(compared, config)
    findings = [
        {
            "filter": one.comparison.filter,
            "group": one.comparison.group,
            "documents": one.comparison.rates.documents,
            "rate": one.comparison.rates.rate,
            "expected": one.comparison.rates.expected,
            "adjusted_p": one.adjusted,
        }
        for one in judged
        if one.is_significant
    ]
    return {"bias": Fact({"compared": len(judged), "findings": findings}, tuple(measured))}
