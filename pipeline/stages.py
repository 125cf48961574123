"""Every stage and every step of a run, in order: what runs, the tables it reads and the tables it writes.

A stage processes one document, or declares the settings of a step that needs all documents; a step builds tables. They
are listed only here: a step gets its stages from this list, and the report, what-if and takedown read it.
"""

from collections.abc import Mapping
from functools import partial

import pyarrow as pa

from pipeline.classifier.importance import IMPORTANCE
from pipeline.classifier.stage import CLASSIFIER
from pipeline.decontaminate.stage import DECONTAMINATE
from pipeline.dedup.audit.step import build_audit
from pipeline.dedup.clusters import build_clusters
from pipeline.dedup.config import AUDIT, DEDUP, REPEATS
from pipeline.dedup.config import is_enabled as is_audited
from pipeline.dedup.index import representatives_of
from pipeline.dedup.repeats.step import build_repeats
from pipeline.dedup.repeats.step import is_enabled as cuts_repeats
from pipeline.dedup.survivors import build_dedup
from pipeline.engine.stage import PerDocument, extend_schema
from pipeline.engine.step import Stage, Step
from pipeline.extract.extract import EXTRACT
from pipeline.language import LANGUAGE
from pipeline.minhash.stage import SIGNATURE
from pipeline.perplexity.stage import PERPLEXITY
from pipeline.pii.stage import PII
from pipeline.quality.stage import QUALITY
from pipeline.sources.source import SOURCE
from pipeline.steps.clean import build_clean
from pipeline.steps.documents import KEEP_TEXT, build_documents
from pipeline.steps.requirements import bucket_tables, check_buckets, check_indexes, check_packages
from pipeline.steps.scores import build_scores, has_models
from pipeline.steps.verdicts import Reevaluation, build_verdicts
from pipeline.tokens.dataset import build_tokens
from pipeline.tokens.streams import TOKENS
from pipeline.tokens.train_tokenizer import TOKENIZER, build_tokenizer
from pipeline.toxicity import TOXICITY
from schemas.config import Section
from schemas.tables import DOCUMENTS

MEASURED: tuple[PerDocument, ...] = (
    EXTRACT,
    LANGUAGE,
    QUALITY,
    DECONTAMINATE,
    TOXICITY,
    SIGNATURE,
)
"""Stages that measure a document in the worker that reads it, in this order."""
DOCUMENT_COLUMNS: pa.Schema = extend_schema(DOCUMENTS, MEASURED)
"""All columns of the table `documents`: those of `schemas/tables.py`, then those that stages declare themselves."""
SCORED: tuple[PerDocument, ...] = (PERPLEXITY, CLASSIFIER, IMPORTANCE)
"""Stages that score the stored text with models."""
CHECKED: tuple[PerDocument, ...] = (*MEASURED, *SCORED)
"""Stages whose checks decide, in this order, whether a document is kept."""

STEPS: tuple[Step, ...] = (
    Step(
        writes=("documents", "text"),
        stages=(SOURCE, *MEASURED, KEEP_TEXT),
        reads=(),
        build=build_documents,
    ),
    Step(
        writes=("scores",),
        stages=SCORED,
        reads=("documents", "text"),
        build=build_scores,
        is_used=partial(has_models, SCORED),
    ),
    Step(
        writes=("verdicts",),
        stages=CHECKED,
        reads=("documents", "scores"),
        build=build_verdicts,
        settings="decision",
    ),
    Step(
        writes=("clusters", "index"),
        stages=(SIGNATURE, DEDUP),
        reads=("documents", "text", "scores"),
        build=build_clusters,
        external_inputs=partial(check_indexes, partial(has_models, SCORED)),
    ),
    Step(
        writes=("dedup", "representatives"),
        stages=(DEDUP,),
        reads=("documents", "scores", "verdicts", "clusters", "index"),
        build=build_dedup,
        settings="decision",
        external_inputs=representatives_of,
    ),
    Step(
        writes=("audit",),
        stages=(AUDIT,),
        reads=("documents", "text", "clusters"),
        build=build_audit,
        is_used=is_audited,
    ),
    Step(
        writes=("repeats",),
        stages=(REPEATS, *CHECKED),
        reads=("documents", "text", "scores", "verdicts", "dedup"),
        build=partial(build_repeats, make_reevaluator=partial(Reevaluation, CHECKED)),
        is_used=cuts_repeats,
    ),
    Step(
        writes=("clean",),
        stages=(PII,),
        reads=("documents", "text", "dedup", "repeats"),
        build=build_clean,
        external_inputs=check_packages,
    ),
    Step(
        writes=("tokenizer",),
        stages=(TOKENIZER,),
        reads=("clean",),
        build=build_tokenizer,
    ),
    Step(
        writes=("tokens",),
        stages=(TOKENS,),
        reads=("clean", "tokenizer"),
        build=build_tokens,
        optional_inputs=bucket_tables,
        external_inputs=check_buckets,
    ),
)


def stages_of(step: str) -> tuple[Stage, ...]:
    """Return the stages of the step with this name."""
    return {known.name: known.stages for known in STEPS}[step]


def all_stages() -> list[Stage]:
    """Return every stage of a run once, in order."""
    return list({stage.name: stage for step in STEPS for stage in step.stages}.values())


def sections() -> Mapping[str, type[Section]]:
    """Return the class of each recipe section of the data steps, by name; every stage has one section."""
    return {stage.name: stage.config for stage in all_stages()}
