"""The step `repeats` of the synthetic run without Spark; shared by the tests of the report and of `penstock show`."""

from pathlib import Path

import pyarrow.parquet as pq

from pipeline.engine.parquet import PartWriter
from pipeline.report.facts import collect_facts
from schemas.manifest import RunFile, make_manifest, part_key, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import REPEATS
from tests.support.report_run import SCRIPT


def add_repeats(run: Store) -> None:
    """Write the table of the step `repeats` over the 20 survivors: it cuts 3 of them and drops 2 of those."""
    folder, files, paths = run.child("repeats/v-0000000071a9"), [], {}
    counts = {"rows_in": 37, "rows_kept": 18, "dropped": dict.fromkeys(["repeats/repeated_share"], 0)}
    counts["dropped"] |= {"repeats/dropped_before": 17, "repeats/nothing_left": 1, "quality/gopher_short_doc": 1}
    dropped = iter([("repeats", "nothing_left"), ("quality", "gopher_short_doc")])
    for part in range(2):
        written = []
        for row in pq.read_table(
            *(Path(run.uri) / "dedup/v-0000000071a9").glob(f"{part_key(part)}-*.parquet")
        ).to_pylist():
            stage, rule = ("repeats", "dropped_before") if row["drop_stage"] else next(dropped, (None, None))
            cuts = None if rule == "dropped_before" else [{"start": 3, "end": 9, "reason": "line"}]
            row = {"doc_id": row["doc_id"], "drop_stage": stage, "drop_rule": rule, "cuts": cuts}
            written.append(row | ({} if stage == "repeats" else {"body_chars": 894, "gopher_num_words": 8.0}))
        with PartWriter(folder, part_key(part), REPEATS) as writer:
            for row in written:
                writer.add(row)
        entry = writer.written.to_json()
        paths[entry["key"]] = entry.pop("path")
        files.append(entry)
    figures = {
        "kept_chars": 15_555,
        "dropped_chars": {"repeats/dropped_before": 9900, "repeats/nothing_left": 900, "quality/gopher_short_doc": 900},
        "cut_chars": {"line": 500, SCRIPT: 150},
        "cut_spans": {"line": 12, SCRIPT: 2},
        "cut_documents": {"line": 4, SCRIPT: 1, "any": 5},
    }
    digests = {name: table.digest for name, table in collect_facts(run).tables.items()}
    inputs = [{"name": name, "bytes": 1, "sha256": digests[name]} for name in ("documents", "text", "dedup")]
    content = {"table": "repeats", "stages": {"repeats": 1}, "config": {}, "inputs": inputs, "files": files}
    how = {"paths": paths, "started": "2026-01-01T00:00:00+00:00", "wall_seconds": 1.0, "cpu_seconds": 0.5}
    how |= {"code_version": "0.1.0"}
    write_manifest(folder, make_manifest(content | {"counts": counts, "figures": figures}, how, "repeats"))
    state = read_run(run)
    write_run(run, RunFile(tables=state.tables | {"repeats": "v-0000000071a9"}, recipe=state.recipe))
