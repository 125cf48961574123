"""Pains of joins and removals: verdicts that do not fit into memory, ids that get lost, and data that must go."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

import penstock
from jobs.recipe import stored_recipe
from pipeline.engine.part import PartResults
from pipeline.engine.step import StepContext
from pipeline.inspect.show import find_documents, parse_where
from pipeline.stages import canonical_recipe, steps_for
from pipeline.steps.clean import build_clean
from schemas.manifest import TableVersion, open_table, read_run
from schemas.storage import Store
from tests.support.step_run import gathered
from tests.support.tiny_runs import make_run, trained
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, take_down
from train.trace import documents_of_step


def rows_of(run: Store, table: str, *columns: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    paths = [folder.path(path) for path in manifest.paths_of("part-")]
    return [row for path in paths for row in pq.read_table(path, columns=list(columns) or None).to_pylist()]


@pytest.mark.spark
def test_verdicts_meet_their_texts_part_by_part(finished: Store, tmp_path: Path) -> None:
    """NeMo Curator: the ids to remove were sent to every worker. Removal from 24 TB ran out of memory, although the ids
    had 58 GB only.

    https://github.com/NVIDIA-NeMo/Curator/issues/723

    The step that removes reads the same part of each table, and nothing of the others: memory does not grow with a run.
    """
    recipe = canonical_recipe(stored_recipe(finished, []))
    (step,) = [step for step in steps_for(recipe) if step.name == "clean"]
    names = [name for name in step.inputs(recipe) if name in read_run(finished).tables]
    inputs = {name: TableVersion(*open_table(finished, name)) for name in names}
    files, opened_files, open_input = {}, [], Store.open_input

    def opening(store: Store, name: str) -> Any:
        opened_files.append(store.path(name))
        return open_input(store, name)

    def one_by_one(spark: None, function: Any, tasks: Sequence[Any], *options: Any) -> PartResults:
        results = []
        for task in tasks:
            opened_files.clear()
            results.append(function(task, False))
            files[task.ordinal] = {*opened_files}
        return gathered(results)

    context = StepContext(None, recipe, step.stages, {"clean": Store(str(tmp_path))}, inputs, (), {}, None)
    with (
        mock.patch("pipeline.steps.clean.run_parts", one_by_one),
        mock.patch.object(Store, "open_input", opening),
    ):
        built = build_clean(context)["clean"]
    assert len(files) > 2
    for ordinal, own in files.items():
        expected = {t.folder.path(t.manifest.run.paths[f"part-{ordinal:05d}"]) for t in inputs.values()}
        assert own <= expected
        assert len(own) >= 3
    assert built.counts == open_table(finished, "clean")[1].content.counts


@pytest.mark.spark
def test_what_was_removed_is_kept_with_its_reason(finished: Store) -> None:
    """Data-Juicer: a user had 0.98 GB left of 1.07 GB after deduplication, and asked how to see the rest.

    https://github.com/datajuicer/data-juicer/issues/134

    A dropped copy stays in the tables, with its text, the rule and the document that was kept for it.
    """
    texts = {row["doc_id"]: row["text"] for row in rows_of(finished, "text", "doc_id", "text")}
    verdicts = {
        row["doc_id"]: row for row in rows_of(finished, "dedup", "doc_id", "survivor", "drop_stage", "drop_rule")
    }
    dropped = [row for row in verdicts.values() if row["drop_rule"] in ("exact_duplicate", "near_duplicate")]
    assert len(dropped) > 10
    for row in dropped:
        assert texts[row["doc_id"]]
        assert verdicts[row["survivor"]]["drop_rule"] is None
    exact = [row for row in dropped if row["drop_rule"] == "exact_duplicate"]
    words = lambda doc_id: texts[doc_id].lower().split()  # noqa: E731
    assert exact
    assert all(words(row["doc_id"]) == words(row["survivor"]) for row in exact)


@pytest.mark.spark
def test_the_audit_of_a_distributed_run_is_that_of_one_process(finished: Store) -> None:
    """Data-Juicer: with the distributed executor, traces of samples and counts by operator were missing; with the local
    one they were there.

    https://github.com/datajuicer/data-juicer/issues/705

    A run on Spark counts each reason of each stage, and the signals of its documents are those of a call without Spark.
    """
    for table in ("documents", "verdicts", "dedup", "clean"):
        counts = open_table(finished, table)[1].content.counts
        found = Counter(f"{r['drop_stage']}/{r['drop_rule']}" for r in rows_of(finished, table) if r["drop_stage"])
        assert found == {name: number for name, number in counts.dropped.items() if number}
    texts = {row["doc_id"]: row for row in rows_of(finished, "text", "doc_id", "text", "cuts")}
    rows = [row for row in rows_of(finished, "documents") if row["language"] == "en" and not row["drop_stage"]]
    rows = [row for row in rows if not texts[row["doc_id"]]["cuts"]][:20]
    assert len(rows) == 20
    for row in rows:
        alone = penstock.signals(texts[row["doc_id"]]["text"], language="en", keep_structure=True)
        shared = {name for name in alone if name in row and isinstance(alone[name], (int, float))}
        assert len(shared) > 10
        assert {name: np.float32(row[name]) for name in shared} == {name: np.float32(alone[name]) for name in shared}


@pytest.mark.spark
def test_ids_of_the_input_lead_to_clusters_and_survivors(run_at: Any, tmp_path: Path) -> None:
    """NeMo Curator: fuzzy deduplication replaced the ids of the input by its own. A user who wanted to look at
    clusters, or choose the document to keep, could not map them back.

    https://github.com/NVIDIA-NeMo/Curator/issues/1229

    The id of the input stays with the document: it finds the document, its cluster, and the id of the one that was
    kept.
    """
    text = (
        "The {0} port of the {0} town has {0} piers, and the master of the harbour of {0} wrote down every {0} ship. "
    )
    names = ("river", "north", "island", "old")
    lines = [{"id": f"{name}-{n}", "text": text.format(name) * 12 + "end " * n} for name in names for n in (1, 2, 3)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = [f'source.paths=["{tmp_path}/lines.jsonl"]', "quality.rules=[]", "language.languages=[]"]
    run = run_at(2, settings, until="dedup")
    (found,) = find_documents(run, parse_where("url = 'island-2'"), 9)
    given = {row["doc_id"]: row["url"] for row in rows_of(run, "documents", "doc_id", "url")}
    assert sorted(given.values()) == sorted(line["id"] for line in lines)
    verdicts = {row["doc_id"]: row for row in rows_of(run, "dedup")}
    own = verdicts[found["doc_id"]]
    cluster = {given[row["doc_id"]] for row in verdicts.values() if row["cluster"] == own["cluster"]}
    assert cluster == {"island-1", "island-2", "island-3"}
    assert given[own["survivor"]] == "island-3"


@pytest.mark.dist
def test_a_removal_names_every_checkpoint_that_saw_the_document(tmp_path: Path) -> None:
    """BigCode: a research group asked to leave out a repository. Four months later the maintainers answered by hand,
    for later versions of the data and one model.

    https://github.com/bigcode-project/opt-out-v2/issues/54

    A takedown lists the steps that read a document and every checkpoint with an answer, and leaves none of its bytes.
    """
    changes = {"train": {"steps": 8, "eval_every": 0}, "checkpoint": {"every": 4, "keep": 9}}
    folder = trained(make_run(tmp_path / "run", changes), 1)
    run = Store(str(folder))
    steps: dict[str, set[int]] = {}
    for step in range(1, 9):
        for part in documents_of_step(run, step):
            steps.setdefault(part.doc_id, set()).add(step)
    documents = {row["doc_id"].hex(): row for row in documents_of(opened(folder))}
    late = next(name for name, own in steps.items() if min(own) > 4 and documents[name]["num_tokens"] > 40)
    content = np.array(documents[late]["tokens"][1:-1], np.uint16).tobytes()
    assert sum(content in data for data in all_bytes(folder).values()) == 1
    shutil.rmtree(folder / "train/packing", ignore_errors=True)
    assert take_down(folder, doc=[late]) == 0
    (certificate,) = certificates(folder)
    assert certificate.effects.steps == sorted(steps[late])
    assert {model.step: model.saw for model in certificate.effects.models} == {4: False, 8: True}
    assert certificate.effects.last_clean == 4
    assert not any(content in data for data in all_bytes(folder).values())
    assert take_down(folder, check=f"takedowns/{certificate.id}.json") == 0
