"""A run folder with a known lineage: the synthetic crawl, a plan, a rewind, checkpoints and an end.

Nothing is computed: manifests are written in the form of a run, and `train/` in the form of the trainer.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from schemas.ids import canonical_json, digest_of
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.storage import Store
from schemas.tables import TABLES
from tests.support.report_run import make_run

SKIPPED = [96, 97]
SETTINGS = {"train.seed": 1}
REWIND = {"kind": "rewound", "step": 8, "at": "2026-01-02T03:04:05.678+00:00", "to_step": 6, "samples": SKIPPED}


def lineage_run(folder: Path) -> Store:
    """Write the synthetic crawl and 12 steps with checkpoints, rewound from step 8 to 6 without two samples."""
    run = make_run(folder)
    join_dataset(run)
    dataset = open_table(run, "tokens")[1]
    plan = {
        "dataset": dataset.digest,
        "tokenizer": dataset.content.figures["tokenizer"]["sha256"],
        "order": "0" * 64,
        "num_params": 1000,
        "stages": [{"first_step": 0, "num_steps": 12, "seq_len": 16, "global_batch": 4}],
        "figures": [],
        "settings": {"train": {"skip_file": "skips.txt"}},
    }
    run.write_atomic("train/plan.json", canonical_json(plan))
    run.write_atomic("train/skips.txt", b"".join(b"%d  # spike at step 8\n" % index for index in SKIPPED))
    lines = [
        {"kind": "rewound", "step": 3, "at": "2026-01-01", "to_step": 1, "samples": [5]},
        {"kind": "begun", "step": 0, "at": "2026-01-02", "layout": {}},
        REWIND,
    ]
    run.write_atomic("train/events.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    for step in range(2, 13, 2):
        add_checkpoint(run, step, plan, SKIPPED if step > 6 else [])
    end = {"steps": 12, "loss": 4.0, "heldout_loss": None, "checkpoint": "train/checkpoints/step-000012"}
    end |= {"dataset": dataset.digest, "plan": digest_of(SETTINGS)}
    run.write_atomic("train/manifest.json", canonical_json(end))
    return run


def join_dataset(run: Store) -> None:
    """Add the inputs of the tiny dataset and its tokenizer to their manifests."""
    clean = open_table(run, "clean")[1].digest
    edit(run, "tokenizer", lambda content: content.update(inputs=[{"name": "clean", "bytes": 1, "sha256": clean}]))
    tokenizer = open_table(run, "tokenizer")[1].digest
    pairs = {"clean": clean, "tokenizer": tokenizer}
    inputs = [{"name": name, "bytes": 1, "sha256": digest} for name, digest in pairs.items()]
    edit(run, "tokens", lambda content: content.update(inputs=inputs))


def edit(run: Store, table: str, change: Any, version: str = "v-0000000071a9") -> None:
    """Change the content of a table's manifest in place, which the program never does."""
    name = f"{table}/{version}/manifest.json"
    manifest = run.read_json(name)
    change(manifest["content"])
    run.write_atomic(name, canonical_json(manifest))


def record_files(run: Store, table: str) -> None:
    """Write the present sizes and digests of a table's files into its manifest, as if they had been written so."""
    folder, manifest = open_table(run, table)

    def change(content: Any) -> None:
        for entry in content["files"]:
            path = manifest.run.paths[entry["key"]]
            entry |= {"bytes": folder.size(path), "sha256": folder.sha256(path)}

    edit(run, table, change)
    digests: dict[str, str] = {}
    for name in (name for name in TABLES if name in read_run(run).tables):  # tables read the ones before them
        edit(run, name, partial(_read, digests))
        digests[name] = open_table(run, name)[1].digest


def _read(digests: Mapping[str, str], content: Any) -> None:
    for entry in content["inputs"]:
        entry["sha256"] = digests.get(entry["name"], entry["sha256"])


def add_checkpoint(run: Store, step: int, plan: dict[str, Any], skipped: list[int]) -> None:
    """Write a checkpoint of a single small file."""
    place = f"train/checkpoints/step-{step:06d}"
    run.write_atomic(f"{place}/state.bin", b"%d" % step)
    identity = {
        "dataset": plan["dataset"],
        "order": plan["order"],
        "tokenizer": "",
        "settings": SETTINGS,
        "code_version": "0.1.0",
    }
    identity |= {"skip_list": digest_of(skipped), "skip_length": len(skipped)}
    files = {"state.bin": {"size": run.size(f"{place}/state.bin"), "sha256": run.sha256(f"{place}/state.bin")}}
    layout = {"ranks": 2, "device": "cpu", "axes": {"shard": 2}, "settings": {}, "threads": 1}
    metadata = {"step": step, "identity": identity, "layout": layout, "files": files}
    run.write_atomic(f"{place}/checkpoint.json", canonical_json(metadata))


def next_version(run: Store, table: str, change: Any) -> str:
    """Write another version of a table with changed content and make it current; returns the former digest."""
    folder, manifest = open_table(run, table)
    for name in folder.walk():
        run.write_atomic(f"{table}/v-000000000ae8/{name}", folder.read_bytes(name))
    edit(run, table, change, "v-000000000ae8")
    state = read_run(run)
    write_run(run, RunFile(tables=state.tables | {table: "v-000000000ae8"}, recipe=state.recipe))
    return manifest.digest
