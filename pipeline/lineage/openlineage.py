"""The lineage as events of OpenLineage, specification 2-0-2, for data catalogs.

Each step that wrote tables becomes a job with one run, and so do the plan, the training and each takedown. Names and
ids depend on paths and digests alone, so the same lineage gives the same events.
"""

import posixpath
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa

from pipeline.lineage.graph import Lineage, Node, NodeTable
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.tokens import SHARD_DOCS, shard_schema
from schemas.versions import DATASET

SPEC = "https://openlineage.io/spec"
CORE = f"{SPEC}/2-0-2/OpenLineage.json#/$defs"
FACETS = {
    "schema": "1-2-0/SchemaDatasetFacet",
    "dataSource": "1-0-1/DatasourceDatasetFacet",
    "version": "1-0-1/DatasetVersionDatasetFacet",
    "storage": "1-0-1/StorageDatasetFacet",
    "outputStatistics": "1-0-2/OutputStatisticsOutputDatasetFacet",
    "processing_engine": "1-1-1/ProcessingEngineRunFacet",
    "jobType": "2-0-4/JobTypeJobFacet",
}
DOCUMENTATION = {"dataset": "1-1-0/DocumentationDatasetFacet", "job": "1-1-0/DocumentationJobFacet"}
OWN = {"penstock_counts": "RunFacet", "penstock_rewind": "RunFacet", "penstock_files": "DatasetFacet"}
"""Facets that are not part of the specification, with the type of each in the specification."""
NAMESPACE = "penstock"
PRODUCER = "urn:penstock"
IDS = uuid.uuid5(uuid.NAMESPACE_URL, PRODUCER)
TRAINED = ("checkpoint", "end")
DESCRIPTIONS = {
    "plan": "A training run sized from the dataset",
    "train": "Pretraining of a language model on the dataset",
    "skips": "Samples of the order that training passes over",
    "quarantine": "Documents that spikes were blamed on, which training is kept from",
    "takedown": "A version of the dataset without some documents",
}
Json = dict[str, Any]


def openlineage_events(lineage: Lineage, run: Store) -> list[Json]:
    """Return the OpenLineage events of a run: first of its steps, takedowns and plan, then of its training.

    Every job has a START and a COMPLETE event. A training that has not ended has RUNNING instead of COMPLETE. A rewind
    has only the event OTHER.
    """
    namer = _Namer(run, {node.key: node for node in lineage.nodes})
    of_steps: list[Json] = []
    for node in lineage.nodes:
        if node.tables or node.kind == "plan":
            of_steps += _made(lineage, node, namer)
    return [*of_steps, *_trained(lineage, namer)]


class _Namer:
    """Descriptions of nodes as OpenLineage datasets. The namespace is the storage; the name is the path in it."""

    def __init__(self, run: Store, nodes: Mapping[str, Node]):
        parts = urlsplit(run.uri) if "://" in run.uri else None
        self.namespace = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts else "file"
        self.root = parts.path.strip("/") if parts else run.root
        self.nodes = nodes

    def dataset(self, key: str, node: Node, held: NodeTable | None) -> Json:
        """Return a node, or one table of it, as an OpenLineage dataset with the facets that do not depend on a job.

        `key` is the path of the dataset relative to the run.
        """
        name = posixpath.normpath(f"{self.root}/{key}")  # a table of another run has one name in both lineages
        prefix = f"{self.namespace}/" if "://" in self.namespace else "file://"
        facets: Json = {
            "dataSource": _facet("dataSource", name=self.namespace, uri=prefix + quote(name)),
            "version": _facet("version", datasetVersion=held.manifest.digest if held else node.digest),
            "documentation": _documentation("dataset", _description(node, held)),
        }
        schema = _schema(held) if held else None
        if schema is not None:
            facets["schema"] = _facet("schema", fields=[_field(field) for field in schema])
            layer = "arrow" if held is not None and held.name == DATASET else "parquet"
            facets["storage"] = _facet("storage", storageLayer=self.namespace.partition(":")[0], fileFormat=layer)
        if node.files:
            facets["penstock_files"] = _facet("penstock_files", files=[entry.model_dump() for entry in node.files])
        return {"namespace": self.namespace, "name": name, "facets": facets}

    def of(self, key: str, read: Container[str] = ()) -> list[Json]:
        """Return the datasets of the node with this key, one for each of its tables.

        If `read` has digests of some tables of the node, only the datasets of these tables are returned.
        """
        node = self.nodes[key]
        tables = [held for held in node.tables if held.manifest.digest in read] or node.tables
        return [self.dataset(held.folder, node, held) for held in tables] or [self.dataset(key, node, None)]


def _made(lineage: Lineage, node: Node, namer: _Namer) -> Iterator[Json]:
    """Yield the events of the job that made a node: the step that wrote its tables, a takedown, or the plan."""
    sources = lineage.sources(node.key)
    taken = [key for key in sources if namer.nodes[key].kind == "takedown"]
    name = "takedown" if taken else node.tables[0].name if node.tables else "plan"
    reads = [key for key in sources if key not in taken]
    reads += [parent for key in taken for parent in lineage.sources(key)]
    begin = _time(lineage, node)
    seconds = max((held.manifest.run.wall_seconds for held in node.tables), default=0.0)
    counts: Json = dict(node.counts)
    if node.tables:
        rows = node.tables[0].manifest.content.counts
        counts = {"rowsIn": rows.rows_in, "rowsKept": rows.rows_kept, "dropped": dict(rows.dropped)}
    path = "/".join(node.key.split("/")[-2:]) if node.tables else node.key
    run = _run(f"{path} {node.digest}", node.code, penstock_counts=_facet("penstock_counts", **counts))
    job = _job(name, "SPARK" if node.tables else "PENSTOCK")
    digests = {entry.sha256 for held in node.tables for entry in held.manifest.content.inputs}
    inputs = [dataset for key in reads for dataset in namer.of(key, digests)]
    outputs = [_written(dataset, held) for dataset, held in zip(namer.of(node.key), node.tables or (None,))]
    yield _event("START", begin, run, job, (inputs, []))
    yield _event("COMPLETE", _later(begin, seconds), run, job, (inputs, outputs))


def _trained(lineage: Lineage, namer: _Namer) -> Iterator[Json]:
    """Yield the events of the training job, which reads datasets, plan and skip lists and writes checkpoints."""
    made = [node for node in lineage.nodes if node.kind in TRAINED]
    if not any(node.kind == "checkpoint" for node in made):
        return
    kinds = {node.key: node.kind for node in lineage.nodes}
    reads = [key for node in made for key in lineage.sources(node.key) if kinds[key] not in (*TRAINED, "rewind")]
    reads += [key for key in reads if kinds[key] in ("plan", "skips") for key in lineage.sources(key)]
    inputs = [dataset for key in dict.fromkeys(reads) for dataset in namer.of(key)]
    first = next((node for node in lineage.nodes if node.kind == "plan"), made[0])
    run, job = _run(f"train {first.digest}", made[0].code), _job("train", "TORCH")
    begin = _time(lineage, first)
    yield _event("START", begin, run, job, (inputs, []))
    for node in lineage.nodes:
        if node.kind == "rewind":
            facet = _facet("penstock_rewind", description=node.title, **node.counts)
            rewound = {**run, "facets": {**run["facets"], "penstock_rewind": facet}}
            yield _event("OTHER", node.at or begin, rewound, job, ([], []))
    outputs = [_written(dataset, None) for node in made for dataset in namer.of(node.key)]
    is_done = any(node.kind == "end" for node in made)
    times = [_time(lineage, node) for node in made]
    yield _event("COMPLETE" if is_done else "RUNNING", max(times), run, job, (inputs, outputs))


def _event(kind: str, at: str, run: Json, job: Json, data: tuple[Sequence[Json], Sequence[Json]]) -> Json:
    return {
        "eventType": kind,
        "eventTime": at,
        "producer": PRODUCER,
        "schemaURL": f"{CORE}/RunEvent",
        "run": run,
        "job": job,
        "inputs": list(data[0]),
        "outputs": list(data[1]),
    }


def _run(identity: str, code: str | None, **facets: Json) -> Json:
    engine = _facet("processing_engine", name=NAMESPACE, version=code or "unknown")
    return {"runId": str(uuid.uuid5(IDS, identity)), "facets": {"processing_engine": engine, **facets}}


def _job(name: str, integration: str) -> Json:
    facets = {
        "jobType": _facet("jobType", processingType="BATCH", integration=integration, jobType="JOB"),
        "documentation": _documentation("job", DESCRIPTIONS.get(name, f"The step that writes {name}")),
    }
    return {"namespace": NAMESPACE, "name": f"{NAMESPACE}.{name}", "facets": facets}


def _facet(name: str, /, **values: Any) -> Json:
    if name in OWN:
        url = f"{CORE}/{OWN[name]}"
    else:
        version, _, kind = FACETS[name].partition("/")
        url = f"{SPEC}/facets/{version}/{kind}.json#/$defs/{kind}"
    return {"_producer": PRODUCER, "_schemaURL": url, **values}


def _documentation(of: str, text: str) -> Json:
    version, _, kind = DOCUMENTATION[of].partition("/")
    url = f"{SPEC}/facets/{version}/{kind}.json#/$defs/{kind}"
    return {"_producer": PRODUCER, "_schemaURL": url, "description": text}


def _written(dataset: Json, held: NodeTable | None) -> Json:
    """Return a dataset as an output of a job. If `held` is a table, the number of rows, bytes and files is added."""
    if held is None:
        return dataset
    files = held.manifest.content.files
    sizes = {"size": sum(entry.bytes for entry in files), "fileCount": len(files)}
    rows = sum(entry.rows for entry in files if held.name != DATASET or entry.key.endswith(".docs"))
    return {**dataset, "outputFacets": {"outputStatistics": _facet("outputStatistics", rowCount=rows, **sizes)}}


def _description(node: Node, held: NodeTable | None) -> str:
    return TABLES[held.name].meaning if held else DESCRIPTIONS.get(node.kind, node.title)


def _schema(held: NodeTable) -> pa.Schema | None:
    if held.name != DATASET:
        return TABLES[held.name].schema
    vocabulary = held.manifest.content.figures.get("tokenizer", {}).get("vocab_size", 0)
    shard = shard_schema("uint16" if vocabulary <= 1 << 16 else "uint32")
    return pa.schema([*shard, *(field for field in SHARD_DOCS if field.name != "doc_id")])


def _field(field: pa.Field) -> Json:
    metadata = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    text = metadata.get("meaning", "") + (f" [{metadata['unit']}]" if "unit" in metadata else "")
    return {"name": field.name, "type": str(field.type), **({"description": text} if text else {})}


def _time(lineage: Lineage, node: Node) -> str:
    """Return the time at which a node was made; if it is unknown, the latest time of the node's sources."""
    if node.at is not None:
        return _later(node.at, 0.0)
    times = [_time(lineage, lineage.node(key)) for key in lineage.sources(node.key)]
    return max(times, default="1970-01-01T00:00:00+00:00")


def _later(at: str, seconds: float) -> str:
    return (datetime.fromisoformat(at) + timedelta(seconds=seconds)).isoformat()
