"""Inputs that take the most memory of a worker, and the worker's code that reads them, in processes of their own.

`python -m tests.support.worst_inputs make CASE FOLDER` writes a file and prints its path. `documents CASE
PATH` reads it as the step `documents` does, and prints the drops and the peak memory [MiB]. `clean CASE` does the same
for a text and the step `clean`.
"""

import gzip
import json
import resource
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brotli
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from jobs.recipe import read_recipe
from pipeline.engine.worker import FusedStages
from pipeline.models import ModelsConfig, ensure_model
from pipeline.pii.stage import PII
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.stages import MEASURED, SOURCE
from pipeline.steps.documents import DocumentsTask, documents_part
from schemas.storage import Store
from tests.support.paths import ROOT
from tests.support.tiny_archive import record

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SENTENCE = "The penstock carries water from the reservoir down to the turbine, and its gate can be closed by hand. "
CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": lambda data: brotli.compress(data, quality=5),
    "zstd": lambda data: zstandard.compress(data, 3),
    "deflate": zlib.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
}


def page(body: bytes, header: str = "") -> tuple[str, bytes]:
    """A WARC file of a usual page and this one."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
    return "worst.warc", record(f"{head}\r\n<p>{SENTENCE}".encode()) + record(f"{head}{header}\r\n".encode() + body)


def bomb(coding: str) -> tuple[str, bytes]:
    """A page of 200 MB that is stored in some KB."""
    return page(CODERS[coding](b"<p>" + b"a" * (200 << 20)), f"Content-Encoding: {coding}\r\n")


def rows(texts: list[str]) -> tuple[str, bytes]:
    """A Parquet file of texts."""
    sink = pa.BufferOutputStream()
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, row_group_size=1)
    return "worst.parquet", sink.getvalue().to_pybytes()


def lines(text: str) -> tuple[str, bytes]:
    """A file of one JSON line."""
    return "worst.jsonl", json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


DOCUMENTS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "a usual page": lambda: page(f"<p>{SENTENCE}</p>".encode() * 50),
    "a text of 512 MB in 16 KB of Parquet": lambda: rows([SENTENCE, "x" * (512 << 20)]),
    "chunks of one byte": lambda: page(b"1\r\nx\r\n" * (5 << 20) + b"0\r\n\r\n", "Transfer-Encoding: chunked\r\n"),
    **{f"200 MB in {coding}": (lambda coding=coding: bomb(coding)) for coding in CODERS},
    "a table of 1 million cells": lambda: page(b"<table>" + b"<td>a b" * 1_000_000),
    "3 million line breaks": lambda: page(b"<p>" + b"a<br>" * 3_000_000),
    "16 MiB of paragraphs": lambda: page(f"<p>{SENTENCE}</p>".encode() * ((16 << 20) // (len(SENTENCE) + 7))),
    "5 million characters": lambda: lines((SENTENCE * 50_000)[:5_000_000]),
    "5 million characters of 4 bytes": lambda: lines("\U0001f30a\u4e2d\u6587\u3002" * 1_200_000),
}
CLEAN = {
    "5 million characters": (SENTENCE * 50_000)[:5_000_000],
    "5 million characters of personal data": ("write to a@b.de or call +49 30 1234567 now, " * 120_000)[:5_000_000],
}


def models_of(recipe: Any, stages: Any) -> dict[str, dict[str, str]]:
    """The paths of the models of stages; raises ConfigError if one is not on this machine."""
    return {
        stage.name: {
            name: str(ensure_model(model, ModelsConfig()).path)
            for name, model in stage.models(recipe[stage.name]).items()
        }
        for stage in stages
    }


def read_documents(path: Path) -> dict[str, int]:
    """Run a file through the step `documents`, as a worker does, and return the drops."""
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{path}"]'])
    (split,) = find_splits(recipe.section("source", SourceConfig))
    tables = Store(f"{path.parent}/documents"), Store(f"{path.parent}/text")
    task = DocumentsTask((split,), SOURCE, MEASURED, recipe, models_of(recipe, MEASURED), *tables)
    return {name: number for name, number in documents_part(task, False).counts.dropped.items() if number}


def clean_text(case: str) -> dict[str, int]:
    """Run a text through the stages of the step `clean`."""
    recipe = read_recipe(str(RECIPE), ['source.paths=["x"]'])
    fused = FusedStages((PII,), recipe, models_of(recipe, (PII,)))
    row = fused({"text": CLEAN[case], "title": None, "url": None, "language": "en", "meta": None, "licence": None})
    return {} if row.get("drop_stage") is None else {f"{row['drop_stage']}/{row['drop_rule']}": 1}


def main(step: str, case: str, path: str = "") -> None:
    """Make the input of a case, or read it and print what it took."""
    if step == "make":
        name, data = DOCUMENTS[case]()
        (Path(path) / name).write_bytes(data)
        print(json.dumps({"path": f"{path}/{name}", "bytes": len(data)}))
        return
    drops = read_documents(Path(path)) if step == "documents" else clean_text(case)
    print(json.dumps({"drops": drops, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))


if __name__ == "__main__":
    main(*sys.argv[1:])
