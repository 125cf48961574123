"""Lineage: all nodes and links of a known run, and every kind of break."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.verbs.lineage import describe_lineage, lineage_command
from pipeline.lineage.graph import Lineage, LineageBuilder, Node, fold_checkpoints, reduced_links
from pipeline.lineage.openlineage import openlineage_events
from pipeline.lineage.training import check_lineage, read_lineage
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.mix import Mix, SourceMix, mix_toml
from schemas.origin import ModelOrigin
from schemas.storage import Store
from schemas.versions import attach_run
from tests.support.lineage_run import SKIPPED, add_checkpoint, edit, lineage_run, next_version


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run whose lineage is known."""
    return lineage_run(tmp_path / "run")


def titles(lineage: Lineage, keys: list[str]) -> list[str]:
    """Return the titles of nodes."""
    return [lineage.node(key).title for key in keys]


def drawn(lineage: Lineage) -> set[tuple[str, str]]:
    """Return the drawn links by title."""
    names = {node.key: node.title for node in lineage.nodes}
    return {(names[a], names[b]) for a, b in reduced_links(lineage)}


def messages(lineage: Lineage) -> list[str]:
    """Return the messages of all breaks."""
    return [entry.message for entry in lineage.breaks]


def test_the_whole_chain(run: Store) -> None:
    lineage = read_lineage(run)
    assert messages(lineage) == []
    assert [node.title for node in lineage.nodes] == [
        *("files of the crawl", "documents, text", "clusters", "verdicts", "dedup", "audit", "clean", "tokenizer"),
        *("dataset", "plan", "checkpoint 2", "checkpoint 4", "checkpoint 6", "rewound from step 8 to 6", "skip list"),
        *("checkpoint 8", "checkpoint 10", "checkpoint 12", "end of training"),
    ]
    assert drawn(lineage) == {
        ("files of the crawl", "documents, text"),
        *(("documents, text", table) for table in ("clusters", "verdicts")),
        ("clusters", "dedup"),
        ("dedup", "audit"),
        *(("verdicts", "dedup"), ("dedup", "clean"), ("clean", "tokenizer"), ("tokenizer", "dataset")),
        *(("dataset", "plan"), ("plan", "checkpoint 2"), ("checkpoint 2", "checkpoint 4")),
        *(("checkpoint 4", "checkpoint 6"), ("checkpoint 6", "rewound from step 8 to 6")),
        *(("rewound from step 8 to 6", "checkpoint 8"), ("skip list", "checkpoint 8")),
        *(("checkpoint 8", "checkpoint 10"), ("checkpoint 10", "checkpoint 12"), ("checkpoint 12", "end of training")),
    }


def test_digests_counts_times_and_code(run: Store) -> None:
    lineage = read_lineage(run)
    nodes = {node.title: node for node in lineage.nodes}
    for name, title in {"documents": "documents, text", "dedup": "dedup", "tokens": "dataset"}.items():
        assert nodes[title].digest == open_table(run, name)[1].digest
    assert nodes["documents, text"].counts["rows"] == 53
    assert nodes["dedup"].counts["kept"] == 20
    assert (nodes["dedup"].at, nodes["dedup"].code) == ("2026-01-01T00:00:00+00:00", "0.1.0")
    assert dict(nodes["files of the crawl"].counts) == {"files": 2, "bytes": 52_000}
    assert dict(nodes["plan"].counts) == {"parameters": 1000, "steps": 12, "tokens": 12 * 16 * 4}
    assert nodes["plan"].digest == digest_of(run.read_json("train/plan.json"))
    assert nodes["checkpoint 8"].digest == run.sha256("train/checkpoints/step-000008/checkpoint.json")
    assert (nodes["skip list"].digest, nodes["skip list"].notes) == (digest_of(SKIPPED), ("spike at step 8",))
    assert dict(nodes["rewound from step 8 to 6"].counts) == {"samples skipped": 2}
    assert dict(nodes["end of training"].counts) == {"steps": 12, "loss": 4.0}
    assert all(node.at for node in lineage.nodes if node.kind != "inputs")


def test_the_text_names_the_sources_by_number(run: Store) -> None:
    lines = describe_lineage(fold_checkpoints(read_lineage(run)), "run").splitlines()
    rows = dict(enumerate((line.split("  ") for line in lines[1:] if line.split()[0].isdigit()), start=1))
    numbers = {next(filter(None, row[1:])).strip(): number for number, row in rows.items()}
    assert lines[0] == "lineage of run: 19 steps"
    dedup = next(line for line in lines if " dedup " in line)
    assert open_table(run, "dedup")[1].digest[:12] in dedup
    assert "37 rows, 20 kept" in dedup
    assert dedup.endswith(f"from {numbers['verdicts']}, {numbers['clusters']}")
    assert lines[lines.index(next(line for line in lines if "skip list" in line)) + 1].strip() == "spike at step 8"


def follow(run: Store, dataset: str) -> str:
    """Let the plan follow a mix that was measured on a dataset; returns the path of the mix."""
    part = {"share": 1.0, "repeat": 1.0, "why": "because", "keep": 1.0, "wanted_tokens": None}
    mix = Mix(dataset=dataset, plan="p" * 64, reference="its own losses", sources={"web": SourceMix(**part)})
    data = mix_toml(mix).encode()
    digest = hashlib.sha256(data).hexdigest()
    run.write_atomic(f"train/mix-{digest[:12]}.toml", data)
    plan = run.read_json("train/plan.json")
    settings = {"train": plan["settings"]["train"] | {"mix": digest}}
    run.write_atomic("train/plan.json", canonical_json(plan | {"settings": settings}))
    return f"train/mix-{digest[:12]}.toml"


def test_a_mix_is_between_dataset_and_plan(run: Store) -> None:
    place = follow(run, open_table(run, "tokens")[1].digest)
    lineage = read_lineage(run)
    assert messages(lineage) == []
    assert {("dataset", "mix"), ("mix", "plan")} <= drawn(lineage)
    node = lineage.node(place)
    assert (node.digest, dict(node.counts)) == (run.sha256(place), {"sources": 1})
    assert node.notes == ("measured in the run of plan pppppppppppp, by its own losses", "web 1")


def test_a_model_comes_from_the_weights_that_it_began_from(run: Store) -> None:
    first = ModelOrigin(path="models/llama", format="llama", digest="1" * 64, vocab_size=97)
    origin = ModelOrigin(
        path="runs/old", format="checkpoint", digest="2" * 64, vocab_size=97, step=20, dataset="d" * 64, origin=first
    )
    plan = run.read_json("train/plan.json")
    run.write_atomic("train/plan.json", canonical_json(plan | {"origin": origin.model_dump(mode="json")}))
    lineage = read_lineage(run)
    assert messages(lineage) == []
    node = lineage.node("outside/222222222222")
    assert (node.title, dict(node.counts)) == ("weights of another run", {"steps": 20})
    assert node.notes == ("runs/old", "trained on dataset dddddddddddd")
    assert lineage.node("outside/111111111111").title == "weights of a llama model"
    assert {("outside/111111111111", node.key), (node.key, "train/plan.json")} <= set(lineage.links)
    run.write_atomic("train/plan.json", canonical_json(plan | {"origin": {"path": 5}}))
    with pytest.raises(ContractError, match="expected the origin of the weights, got an invalid one"):
        read_lineage(run)


def test_a_mix_of_an_earlier_dataset_has_a_note(run: Store) -> None:
    place = follow(run, "e" * 64)
    node = read_lineage(run).node(place)
    assert "measured on dataset eeeeeeeeeeee" in node.notes
    assert messages(read_lineage(run)) == []


@pytest.mark.parametrize(("change", "actual"), [(b"format = 1", r"[0-9a-f]{12}"), (None, "no file")])
def test_a_mix_with_another_digest_is_a_break(run: Store, change: bytes | None, actual: str) -> None:
    place = follow(run, "e" * 64)
    run.delete(place)
    if change is not None:
        run.write_atomic(place, change)
    with pytest.raises(ContractError, match=rf"{place}: expected .*, got {actual}\. Restore the file\."):
        check_lineage(read_lineage(run), "run")


# ------------------------------------------------------------------------------------------------------------- breaks


def an_altered_table(run: Store) -> None:
    edit(run, "dedup", lambda content: content["figures"].update(bait=1))


def an_altered_dataset(run: Store) -> None:
    edit(run, "tokens", lambda content: content["figures"].update(bait=1))


def a_lost_table(run: Store) -> None:
    run.delete("verdicts/v-0000000071a9/manifest.json")


def an_edited_skip_list(run: Store) -> None:
    run.write_atomic("train/skips.txt", b"96\n98\n")


def another_end(run: Store) -> None:
    end = run.read_json("train/manifest.json")
    run.write_atomic("train/manifest.json", canonical_json(end | {"dataset": "9" * 64}))


def an_end_elsewhere(run: Store) -> None:
    end = run.read_json("train/manifest.json")
    run.write_atomic("train/manifest.json", canonical_json(end | {"checkpoint": "train/checkpoints/step-000099"}))


def another_tokenizer(run: Store) -> None:
    plan = run.read_json("train/plan.json")
    run.write_atomic("train/plan.json", canonical_json(plan | {"tokenizer": "7" * 64}))


@pytest.mark.parametrize(
    ("harm", "where", "expected"),
    [
        (
            an_altered_table,
            "dedup",
            r"^dedup/v-0000000071a9: expected \w{12}, got \w{12}\. Restore the altered manifest\.$",
        ),
        (
            an_altered_dataset,
            "plan",
            r"^train/plan\.json: expected dataset \w{12}, got \w{12}\. Restore the dataset\.$",
        ),
        (a_lost_table, "verdicts", r"^verdicts/v-0000000071a9: expected a table, got no manifest\.json"),
        (
            an_edited_skip_list,
            "checkpoint 8",
            r"^train/checkpoints/step-000008: expected a skip list \w+ of 2, got .* in train/skips.txt\. Restore",
        ),
        (another_end, "end of training", r"expected dataset 999999999999, got \w{12} in train/checkpoints/step-0000"),
        (
            an_end_elsewhere,
            "end of training",
            r"expected train/checkpoints/step-000099, got .*step-000012\. Restore the checkpoint\.$",
        ),
        (
            another_tokenizer,
            "plan",
            r"expected tokenizer 777777777777, got \w{12} in the dataset\. Restore the plan\.$",
        ),
    ],
)
def test_a_break_is_marked_at_its_node_and_rejected(
    run: Store, harm: Callable[[Store], None], where: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run)
    lineage = read_lineage(run)
    titles_of = [lineage.node(entry.key).title for entry in lineage.breaks]
    assert where in titles_of
    with pytest.raises(ContractError, match=f"(?m){expected.replace('^', '^ *')}"):
        check_lineage(lineage, run.uri)
    out = Path(run.uri) / "out.json"
    with pytest.raises(ContractError, match="expected an unbroken lineage"):
        lineage_command(arguments(run.uri, out=str(out), openlineage=f"{out}l"))
    assert not out.exists()
    assert f"! {lineage.breaks[0].message}" in capsys.readouterr().out


def test_only_reading_files_again_finds_a_flipped_byte(run: Store) -> None:
    path = open_table(run, "clean")[1].paths_of()[1]
    data = bytearray(run.read_bytes(f"clean/v-0000000071a9/{path}"))
    data[10] ^= 1
    run.write_atomic(f"clean/v-0000000071a9/{path}", bytes(data))
    run.write_atomic("train/checkpoints/step-000004/state.bin", b"5")
    run.delete("train/checkpoints/step-000006/state.bin")
    assert messages(read_lineage(run)) == []
    breaks = messages(read_lineage(run, verify=True))
    assert [message.partition(":")[0] for message in breaks] == [
        f"clean/v-0000000071a9/{path}",
        "train/checkpoints/step-000004/state.bin",
        "train/checkpoints/step-000006/state.bin",
    ]
    assert breaks[2].endswith("got no file. Restore the file.")


def test_a_plan_by_its_own_law_has_a_note(run: Store) -> None:
    plan, dataset = run.read_json("train/plan.json"), open_table(run, "tokens")[1].digest
    plan["settings"]["plan"] = {"law": "own", "own_law": {"num_runs": 9, "dataset": dataset}}
    run.write_atomic("train/plan.json", canonical_json(plan))
    note = f"sized by a law fitted to 9 runs on dataset {dataset[:12]}"
    assert read_lineage(run).node("train/plan.json").notes == (note,)


# ----------------------------------------------------------------------------------------------------------- versions


def test_an_end_whose_checkpoints_were_removed_is_no_break(run: Store) -> None:
    shutil.rmtree(run.path("train/checkpoints"))
    lineage = read_lineage(run)
    assert messages(lineage) == []
    assert lineage.node("train/manifest.json").notes == ("train/checkpoints/step-000012 was removed",)
    assert lineage.sources("train/manifest.json") == []
    assert [event for event in openlineage_events(lineage, run) if event["job"]["name"] == "penstock.train"] == []


def test_checkpoints_of_an_earlier_dataset_are_linked_to_it(run: Store) -> None:
    earlier = next_version(run, "tokens", lambda content: content["figures"].update(chunk_tokens=512))
    lineage = read_lineage(run)
    assert messages(lineage) == []
    assert [(node.digest == earlier, node.is_current) for node in lineage.nodes if node.kind == "dataset"] == [
        (False, True),
        (True, False),
    ]
    assert titles(lineage, lineage.sources("train/plan.json")) == ["dataset"]
    assert lineage.sources("train/plan.json") == ["tokens/v-0000000071a9"]


def test_a_plan_made_since_is_no_source_of_the_checkpoints(run: Store) -> None:
    plan = run.read_json("train/plan.json")
    run.write_atomic("train/plan.json", canonical_json(plan | {"order": "1" * 64}))
    lineage = read_lineage(run)
    assert titles(lineage, lineage.sources("train/checkpoints/step-000002")) == ["dataset"]
    assert lineage.node("train/checkpoints/step-000002").notes == ("of an earlier plan", "2 × cpu")


def takedown(run: Store) -> None:
    """Write a version of the dataset as a takedown does; plan and checkpoints still name the version before."""
    old = open_table(run, "tokens")[1]
    run.write_atomic("takedowns/abc123abc123/tokens.json", run.read_bytes("tokens/v-0000000071a9/manifest.json"))
    descent: dict[str, Any] = {"id": "abc123abc123", "mode": "tombstones", "read_before": {}}
    descent |= dict.fromkeys(("parent", "origin", "positions"), old.digest)
    next_version(run, "tokens", lambda content: content["figures"].update(takedown=descent))
    for name in list(run.child("tokens/v-0000000071a9").walk()):
        run.delete(f"tokens/v-0000000071a9/{name}")
    change = {"before": old.digest, "after": open_table(run, "tokens")[1].digest, "rows": 1, "shared": 1}
    change |= {"version_before": "v-0000000071a9", "version_after": "v-000000000ae8", "rewritten": []}
    certificate = {
        "id": "abc123abc123",
        "made": "2026-03-01T00:00:00+00:00",
        "mode": "tombstones",
        "salt": "",
        "requests": [],
    }
    certificate |= {"documents": [{"document": "d", "num_tokens": 9}], "copies_left": 0, "tables": {"tokens": change}}
    certificate |= {
        "windows": {},
        "effects": {},
        "tokenizer": None,
        "versions": {},
        "code_version": "0.1.0",
        "pyarrow_version": "26",
    }
    run.write_atomic("takedowns/abc123abc123.json", canonical_json(certificate))


def test_a_takedown_is_between_two_datasets(run: Store) -> None:
    takedown(run)
    lineage = read_lineage(run)
    assert messages(lineage) == []
    assert {("dataset", "takedown"), ("takedown", "dataset"), ("dataset", "plan")} <= drawn(lineage)
    node = lineage.node("takedowns/abc123abc123.json")
    assert (dict(node.counts), node.at) == ({"documents removed": 1, "tokens": 9}, "2026-03-01T00:00:00+00:00")
    assert lineage.sources("train/plan.json") == ["takedowns/abc123abc123/tokens.json"]  # trained before it


def test_a_takedown_whose_certificate_disagrees_is_a_break(run: Store) -> None:
    takedown(run)
    certificate = run.read_json("takedowns/abc123abc123.json")
    run.write_atomic("takedowns/abc123abc123.json", canonical_json(certificate | {"mode": "compact"}))
    assert "takedowns/abc123abc123.json: expected (before, after, mode) = (" in messages(read_lineage(run))[0]


def test_a_takedown_with_an_invalid_descent_is_a_break(run: Store) -> None:
    edit(run, "tokens", lambda content: content["figures"].update(takedown={"id": "abc123abc123"}))
    assert (
        "tokens/v-0000000071a9: expected a valid record of a takedown in its manifest, got wrong values of parent"
        in messages(read_lineage(run))[0]
    )


def test_a_replay_resumes_from_the_chosen_checkpoint(run: Store) -> None:
    before = open_table(run, "tokens")[1].digest
    takedown(run)
    after = open_table(run, "tokens")[1].digest
    plan = run.read_json("train/plan.json") | {"dataset": after}
    run.write_atomic("train/plan.json", canonical_json(plan))
    for step in (6, 8, 10, 12):
        add_checkpoint(run, step, plan, SKIPPED)
    run.write_atomic("train/replays.json", canonical_json([{"from_step": 4, "before": before, "after": after}]))
    lines = run.read_bytes("train/events.jsonl") + b'{"kind":"resumed","step":4,"at":"2026-03-02"}\n'
    run.write_atomic("train/events.jsonl", lines)
    lineage = read_lineage(run)
    chosen, first = "train/checkpoints/step-000004", "train/checkpoints/step-000006"
    skips = next(node.key for node in lineage.nodes if node.kind == "skips")
    assert lineage.sources(first) == [chosen, "train/plan.json", skips]
    assert lineage.sources("train/checkpoints/step-000002") == ["takedowns/abc123abc123/tokens.json"]
    assert lineage.node(first).notes == ("replayed from step 4", "2 × cpu")
    assert lineage.sources("train/checkpoints/step-000008") == [first]
    assert "rewind" not in {node.kind for node in lineage.nodes}  # from step 8 to 6, which was set aside
    run.write_atomic("train/replays.json", canonical_json([{"from_step": 0, "before": before, "after": after}]))
    assert chosen not in read_lineage(run).sources(first)


def test_a_run_on_a_branch_of_another_run_leads_to_its_crawl(run: Store, tmp_path: Path) -> None:
    branch, new = Store(str(tmp_path / "branch")), Store(str(tmp_path / "new"))
    for table in (tables := read_run(run).tables):
        manifest = run.read_json(name := f"{table}/v-0000000071a9/manifest.json")
        read = {entry["name"] for entry in manifest["content"]["inputs"]} & {*tables}
        manifest["run"]["lineage"] = dict.fromkeys(sorted(read), "v-0000000071a9")
        run.write_atomic(name, canonical_json(manifest))
    state = attach_run(branch, run)
    for name in ("tokens", "tokenizer"):
        shutil.copytree(run.path(f"{name}/v-0000000071a9"), branch.path(f"{name}/v-0000000071a9"))
        write_run(branch, RunFile(tables=read_run(branch).tables | {name: "v-0000000071a9"}, recipe=state.recipe))
    attach_run(new, branch, ("tokens", "tokenizer"))
    lineage = read_lineage(new)
    assert messages(lineage) == []
    assert {("files of the crawl", "documents, text"), ("clean", "tokenizer")} <= drawn(lineage)
    assert {node.digest for node in lineage.nodes} <= {node.digest for node in read_lineage(run).nodes}
    assert [node.title for node in lineage.nodes if not node.is_current] == []


# -------------------------------------------------------------------------------------------------------------- graph


def checkpoints(count: int) -> LineageBuilder:
    """Return a sequence of checkpoints after a plan."""
    growing = LineageBuilder()
    growing.add(Node("plan", "plan", "plan", "", {}))
    for step in range(1, count + 1):
        before = f"c{step - 1}" if step > 1 else "plan"
        growing.add(Node(f"c{step}", "checkpoint", f"checkpoint {step}", "", {"steps": step, "bytes": 10}), before)
    return growing


@pytest.mark.parametrize(("count", "shown"), [(4, 4), (5, 3), (40, 3)])
def test_a_row_of_checkpoints_is_folded(count: int, shown: int) -> None:
    shown_titles = [node.title for node in fold_checkpoints(checkpoints(count).done()).nodes[1:]]
    assert (len(shown_titles), shown_titles[0], shown_titles[-1]) == (shown, "checkpoint 1", f"checkpoint {count}")
    if count == 40:
        assert shown_titles[1] == "38 more checkpoints, of steps 2 to 39"


def test_notes_that_checkpoints_share_appear_once() -> None:
    growing = checkpoints(40)
    for step in range(1, 41):
        growing.nodes[f"c{step}"] = replace(
            growing.nodes[f"c{step}"], notes=("2 × cpu",) if step <= 30 else ("4 × cpu",)
        )
    shown = fold_checkpoints(growing.done()).nodes
    assert [node.key for node in shown] == ["plan", "c1", "c30", "c31", "c39", "c40"]
    assert [node.title for node in shown][2::2] == [
        "29 more checkpoints, of steps 2 to 30",
        "8 more checkpoints, of steps 32 to 39",
    ]
    assert [node.notes for node in shown[1:]] == [("2 × cpu",)] * 2 + [("4 × cpu",)] * 3


def test_events_between_checkpoints_are_never_folded() -> None:
    growing = checkpoints(40)
    growing.add(Node("r", "rewind", "rewound", "", {}), "c20")
    growing.links.append(("r", "c21"))
    growing.add_break("c30", "c30: expected a, got b")
    lineage = fold_checkpoints(growing.done())
    assert [node.key for node in lineage.nodes] == ["plan", "c1", "c19", "c20", "r", "c21", "c29", "c30", "c39", "c40"]
    assert [node.title for node in lineage.nodes if "more" in node.title] == [
        "18 more checkpoints, of steps 2 to 19",
        "8 more checkpoints, of steps 22 to 29",
        "9 more checkpoints, of steps 31 to 39",
    ]
    assert dict(lineage.node("c19").counts) == {"bytes": 180}


def test_a_link_that_a_longer_path_implies_is_not_drawn() -> None:
    growing = LineageBuilder()
    for key, sources in {"a": [], "b": ["a"], "c": ["a", "b"], "d": ["a", "c", "missing"]}.items():
        growing.add(Node(key, "table", key, "", {}), *sources)
    lineage = growing.done()
    assert set(lineage.links) == {("a", "b"), ("a", "c"), ("b", "c"), ("a", "d"), ("c", "d")}
    assert set(reduced_links(lineage)) == {("a", "b"), ("b", "c"), ("c", "d")}


# ------------------------------------------------------------------------------------------------------------ command


def arguments(run: str, **given: Any) -> argparse.Namespace:
    """Return the arguments of `penstock lineage`."""
    return argparse.Namespace(**{"run": run, "out": None, "openlineage": None, "verify": False} | given)


def test_the_command_writes_the_graph(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.verbs.lineage.check_trained_order", lambda run: None)  # this plan trains nothing
    assert lineage_command(arguments(run.uri, out=str(tmp_path / "new" / "lineage.json"), verify=True)) == 0
    written = json.loads((tmp_path / "new" / "lineage.json").read_text())
    assert written["format_version"] == 1
    assert written["breaks"] == []
    documents = next(node for node in written["nodes"] if node["title"] == "documents, text")
    assert documents["tables"] == {name: open_table(run, name)[1].digest for name in ("documents", "text")}
    assert documents["dropped"]["source/unreadable_gap"] == 2
    assert documents["models"] == {"toxicity/wordlist_en": "e" * 64}
    assert {"from": "dedup/v-0000000071a9", "to": "clean/v-0000000071a9"} in written["links"]
    assert "files of the crawl" in capsys.readouterr().out


def test_bad_arguments_are_rejected(tmp_path: Path, run: Store) -> None:
    with pytest.raises(ConfigError, match=r"expected a run folder, got no run\.json"):
        lineage_command(arguments(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="expected two files, got x for both --out and --openlineage"):
        lineage_command(arguments(run.uri, out="x", openlineage="x"))
    run.write_atomic("train/manifest.json", b"[]")
    with pytest.raises(ContractError, match=r"train: expected files of the trainer, got an invalid one \("):
        lineage_command(arguments(run.uri))
    run.write_atomic("train/plan.json", b'{"dataset": 3}')
    with pytest.raises(ContractError, match=r"train: expected files of the trainer, got an invalid one \(KeyError"):
        lineage_command(arguments(run.uri))


def test_an_empty_run_has_an_empty_lineage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(str(tmp_path)).write_atomic("run.json", b"{}")
    assert lineage_command(arguments(str(tmp_path))) == 0
    assert "no table exists yet" in capsys.readouterr().out
