"""The half of a lineage that training wrote: plan, skip list, checkpoints, what they were rewound to, and the end.

It is read from the JSON that the trainer leaves; neither half's code is needed.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from pipeline.lineage.data import TableTraversal
from pipeline.lineage.graph import LineageBuilder, Node
from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.mix import parse_mix
from schemas.storage import Store
from schemas.versions import DATASET, list_versions

# The mix that a plan follows, in a lineage: behind the dataset that it was measured on, before the plan.


def add_mix(walk: TableTraversal, digest: str, at: str | None) -> str:
    """Add the mix of a digest as it is kept beside the plan, which was written at `at`; returns its key."""
    run, place = walk.run, f"train/mix-{digest[:12]}.toml"
    found = run.sha256(place) if run.exists(place) else "no file"
    if found != digest:
        key = walk.growing.add(Node(place, "mix", "mix", digest, {}, at))
        walk.growing.broken(key, f"{place}: expected {digest[:12]}, got {found[:12]}. Restore the file.")
        return key
    mix = parse_mix(run.read_bytes(place), place)
    known = {manifest.digest: walk.nodes[version] for version, manifest in walk.manifests.items()}
    notes = [f"measured in the run of plan {mix.plan[:12]}, by {mix.reference}"]
    if mix.dataset not in known:
        notes.append(f"measured on dataset {mix.dataset[:12]}")
    notes.append(", ".join(f"{name} {part.share:.4g}" for name, part in mix.sources.items()))
    node = Node(place, "mix", "mix", digest, {"sources": len(mix.sources)}, at, notes=tuple(notes))
    return walk.growing.add(node, *([known[mix.dataset]] if mix.dataset in known else []))


# The documents that a run was kept from behind its spikes, for its lineage: each growth of `train/quarantine.jsonl`.
#
# A growth is known by the digest of the file up to there, as the file only grows.

QUARANTINE_NAME = "train/quarantine.jsonl"
IN_STEP = re.compile(r"\bspike in step (\d+)\b")
FOLLOWED = "quarantined documents"
"""Reason of samples that are skipped for documents which stood in the list already."""


@dataclass(frozen=True)
class QuarantineExtension:
    """The documents that one spike added to the list."""

    step: int
    """Step of the spike."""
    doc_ids: tuple[str, ...]
    """Documents, hex."""
    total: int
    """Documents of the list by then."""
    digest: str
    """SHA-256 (hex) of the list by then."""
    at: str

    @property
    def key(self) -> str:
        """Its place in the lineage."""
        return f"{QUARANTINE_NAME}@{self.digest[:12]}"


def quarantine_extensions(run: Store) -> list[QuarantineExtension]:
    """Every growth of the list, in order; half a line is passed over."""
    lines = []
    text, end = run.read_bytes(QUARANTINE_NAME) if run.exists(QUARANTINE_NAME) else b"", 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        try:
            lines.append((json.loads(line), end))
        except ValueError:
            continue
    found, seen = list[QuarantineExtension](), set[str]()
    for (_, step), group in groupby(lines, key=lambda line: (line[0]["rewind"], line[0]["step"])):
        own = list(group)
        doc_ids = tuple(line["doc_id"] for line, _ in own)
        seen |= set(doc_ids)
        digest = hashlib.sha256(text[: own[-1][1]]).hexdigest()
        found.append(QuarantineExtension(int(step), doc_ids, len(seen), digest, own[-1][0]["at"]))
    return found


class Quarantines:
    """The growths of a run's list, each added to the lineage behind the rewind that it belongs to."""

    def __init__(self, run: Store, growing: LineageBuilder):
        self._growing, self._growths = growing, quarantine_extensions(run)
        self._added: set[str] = set()
        self._skipped: set[str] = set()

    def behind(self, rewind: str, step: int, doc_ids: Sequence[str]) -> None:
        """Add what a rewind from `step`, at this key, says that it quarantined."""
        if not doc_ids:
            return
        found = next((one for one in self._growths if (one.step, one.doc_ids) == (step, tuple(doc_ids))), None)
        if found is None:
            known = {doc_id for one in self._growths for doc_id in one.doc_ids}
            lacking = sum(doc_id not in known for doc_id in doc_ids)
            self._growing.broken(
                rewind,
                f"{rewind}: expected {len(doc_ids)} quarantined document(s) of step {step} in {QUARANTINE_NAME}, "
                f"found {len(doc_ids) - lacking}. Restore it.",
            )
        elif found.key not in self._added:
            self._add(found, rewind)

    def skipped_for(self, reasons: Sequence[str], source: str) -> list[str]:
        """The keys of what samples are skipped for, by the reasons that their list gives, each once; what no rewind
        tells of, since its process was killed or the list was handed on, is added behind `source`."""
        steps = {int(step) for reason in reasons for step in IN_STEP.findall(reason)}
        follows = FOLLOWED in reasons
        found = [one for one in self._growths if one.key not in self._skipped and (follows or one.step in steps)]
        for one in found:
            if one.key not in self._added:
                self._add(one, source)
        self._skipped |= {one.key for one in found}
        return [one.key for one in found]

    def rest(self, source: str) -> None:
        """Add what no checkpoint stands behind yet."""
        for one in self._growths:
            if one.key not in self._added:
                self._add(one, source)

    def _add(self, one: QuarantineExtension, source: str) -> None:
        new = {"new": len(one.doc_ids)} if one.total > len(one.doc_ids) else {}
        notes = (f"blamed for the spike in step {one.step:,}",)
        counts = {"documents": one.total, **new}
        self._growing.add(Node(one.key, "quarantine", "quarantine", one.digest, counts, one.at, notes=notes), source)
        self._added.add(one.key)


PLAN_NAME = "train/plan.json"
EVENTS_NAME = "train/events.jsonl"
OUTCOME_NAME = "train/manifest.json"
REPLAYS_NAME = "train/replays.json"
CHECKPOINTS = "train/checkpoints"
NOTE_NAME = "checkpoint.json"
SKIPS_OF_REWINDS = "skips.txt"
"""The skip list of a plan that rewinds and names no other."""
NO_SKIPS = digest_of([])
SHOWN_REASONS = 3
LOSSES = {"loss": "loss", "held-out loss": "heldout_loss"}
OF_PLAN = ("dataset", "order")
"""What a checkpoint has from the plan it was trained by."""
Json = Mapping[str, Any]


def add_training(walk: TableTraversal, verify: bool) -> None:
    """Add everything that stands in a run's train folder to the lineage."""
    run, growing = walk.run, walk.growing
    plan = _json(run, PLAN_NAME)
    try:
        if plan is not None:
            _add_plan(walk, plan)
        skips = _Skips(run, growing, plan)
        notes = _notes(run)
        last = _add_checkpoints(walk, plan, notes, skips)
        if verify:
            for note in notes:
                _verify(run, growing, note)
        outcome = _json(run, OUTCOME_NAME)
        if outcome is not None:
            _add_end(walk, outcome, last)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ContractError(f"{run.uri}/train: expected what the trainer writes, got {error!r}. Restore it.") from error


def _add_plan(walk: TableTraversal, plan: Json) -> None:
    stages = plan["stages"]
    steps = stages[-1]["first_step"] + stages[-1]["num_steps"]
    tokens = sum(stage["num_steps"] * stage.get("global_batch", 0) * stage.get("seq_len", 0) for stage in stages)
    counts = {"parameters": plan.get("num_params"), "steps": steps, "tokens": tokens}
    counts = {name: count for name, count in counts.items() if count}
    source = _dataset(walk, PLAN_NAME, plan["dataset"])
    settings = plan.get("settings", {})
    mix, law = settings.get("train", {}).get("mix"), settings.get("plan", {}).get("own_law")
    of = f" on dataset {law['dataset'][:12]}" if law and law.get("dataset") else ""
    notes = (f"sized by a law fitted to {law['num_runs']} runs{of}",) if law else ()
    node = Node(PLAN_NAME, "plan", "plan", digest_of(plan), counts, modification_time(walk.run, PLAN_NAME), notes=notes)
    walk.growing.add(node, *source, *([add_mix(walk, mix, node.at)] if mix else []))
    held = [table for key in source for table in walk.growing.nodes[key].tables]
    tokenizers = [table.manifest.content.figures.get("tokenizer", {}).get("sha256") for table in held]
    for found in tokenizers:
        if found != plan.get("tokenizer", found):
            walk.growing.broken(
                PLAN_NAME,
                f"{PLAN_NAME}: expected tokenizer {plan['tokenizer'][:12]}, got {str(found)[:12]} in the dataset",
            )


def _dataset(walk: TableTraversal, where: str, digest: str) -> list[str]:
    """The key of the dataset of a digest, whichever version it is; a break if none has it."""
    known = {manifest.digest: walk.nodes[place] for place, manifest in walk.manifests.items()}
    if digest in known:
        return [known[digest]]
    versions = list_versions(walk.run, DATASET)
    for version, table in versions.items():
        if table.manifest.digest == digest:
            return [walk.visit(DATASET, version, digest)]
    known = dict.fromkeys([table.manifest.digest for table in versions.values()], "")
    found = ", ".join(sorted(found[:12] for found in known)) or "none"
    walk.growing.broken(where, f"{where}: expected dataset {digest[:12]}, got {found}. Restore it.")
    return []


class _Skips:
    """The skip list that the plan names, as every checkpoint carries it: a length and a digest."""

    def __init__(self, run: Store, growing: LineageBuilder, plan: Json | None):
        self.quarantines = Quarantines(run, growing)
        name = (plan or {}).get("settings", {}).get("train", {}).get("skip_file") or SKIPS_OF_REWINDS
        self.place = f"train/{name}"
        self.growing = growing
        self.run = run
        text = run.read_bytes(self.place).decode("utf-8", "replace") if run.exists(self.place) else ""
        lines = [line.partition("#") for line in text.splitlines()]
        self.entries = [(number.strip(), reason.strip()) for number, _, reason in lines if number.strip()]

    def node(self, note: Json, before: int) -> list[str]:
        """The key of the list as a checkpoint knew it, where it had grown since the one before."""
        identity, key = note["identity"], checkpoint_folder(note["step"])
        length, digest = identity.get("skip_length", 0), identity["skip_list"]
        numbers = [int(number) for number, _ in self.entries[:length]]
        found = digest_of(numbers) if len(numbers) == length else f"a list of {len(self.entries)}"
        if found != digest and "skip_length" in identity:
            self.growing.broken(
                key, f"{key}: expected a skip list {digest[:12]} of {length}, got {found[:12]} in {self.place}"
            )
        if length == before or not length:
            return []
        reasons = list(dict.fromkeys(reason for _, reason in self.entries[before:length] if reason))
        more = [f"{len(reasons) - SHOWN_REASONS} more reasons"] if len(reasons) > SHOWN_REASONS else []
        counts = {"samples": length, **({"new": length - before} if before else {})}
        notes = (*reasons[:SHOWN_REASONS], *more)
        at = modification_time(self.run, self.place)
        node = Node(f"{self.place}@{digest[:12]}", "skips", "skip list", digest, counts, at, notes=notes)
        return [self.growing.add(node, *self.quarantines.skipped_for(reasons, PLAN_NAME))]


def _add_checkpoints(walk: TableTraversal, plan: Json | None, notes: Sequence[Json], skips: _Skips) -> Json | None:
    """Add the checkpoints in the order of their steps; returns the note of the last one."""
    run, growing = walk.run, walk.growing
    rewinds = _rewinds(run)
    replays: Sequence[Json] = run.read_json(REPLAYS_NAME) if run.exists(REPLAYS_NAME) else []
    last: Json | None = None
    for note in notes:
        identity, key, since = note["identity"], checkpoint_folder(note["step"]), last["step"] if last else 0
        dataset = _dataset(walk, key, identity["dataset"])
        of_plan = plan is not None and all(plan.get(name) == identity.get(name) for name in OF_PLAN)
        remarks = [] if of_plan or plan is None else ["of an earlier plan"]
        is_same = last is not None and last["identity"]["dataset"] == identity["dataset"]
        chosen = [one["from_step"] for one in replays if last and one["after"] == identity["dataset"] and not is_same]
        replayed = [step for step in chosen if since <= step < note["step"]][-1:]
        remarks += [f"replayed from step {step:,}" for step in replayed]
        before = last if is_same or replayed else None
        sources = [] if before is None else [checkpoint_folder(before["step"])]
        if not is_same:
            sources += [PLAN_NAME] if of_plan else dataset
        back = [event for event in rewinds if (since if before else 0) <= event["to_step"] < note["step"]]
        sources += [_add_rewind(growing, event, skips.quarantines) for event in back]
        sources += skips.node(note, before["identity"].get("skip_length", 0) if before else 0)
        growing.add(_checkpoint(run, note, tuple(remarks)), *sources)
        last = note
    skips.quarantines.rest(PLAN_NAME)
    return last


def _add_rewind(growing: LineageBuilder, event: Json, quarantines: Quarantines) -> str:
    digest = digest_of(event)
    back = checkpoint_folder(event["to_step"])
    source = back if back in growing.nodes else PLAN_NAME  # that checkpoint may have made room for later ones
    title = f"rewound from step {event['step']:,} to {event['to_step']:,}"
    doc_ids = event.get("quarantined", [])
    counts = {"samples skipped": len(event["samples"])}
    counts |= {"documents quarantined": len(doc_ids)} if doc_ids else {}
    key = growing.add(Node(f"rewind/{digest[:12]}", "rewind", title, digest, counts, event["at"]), source)
    quarantines.behind(key, event["step"], doc_ids)
    return key


def _checkpoint(run: Store, note: Json, remarks: tuple[str, ...]) -> Node:
    place = checkpoint_folder(note["step"])
    layout, name = note["layout"], f"{place}/{NOTE_NAME}"
    ranks = f"{layout['ranks']} × {layout['device']}"
    size = sum(file["size"] for file in note["files"].values())
    return Node(
        key=place,
        kind="checkpoint",
        title=f"checkpoint {note['step']:,}",
        digest=run.sha256(name),
        counts={"steps": note["step"], "bytes": size},
        at=modification_time(run, name),
        code=note["identity"].get("code_version"),
        notes=(*remarks, *([ranks] if layout["ranks"] > 1 else [])),
    )


def _add_end(walk: TableTraversal, outcome: Json, last: Json | None) -> None:
    growing = walk.growing
    counts = {"steps": outcome["steps"]}
    counts |= {name: outcome[key] for name, key in LOSSES.items() if outcome.get(key) is not None}
    found = checkpoint_folder(last["step"]) if last is not None else "none"
    expected = outcome.get("checkpoint", found)
    # Who plans again on another dataset is told to remove the checkpoints; the end of what was is then no promise.
    notes = (f"{expected} was removed",) if last is None else ()
    at = modification_time(walk.run, OUTCOME_NAME)
    node = Node(OUTCOME_NAME, "end", "end of training", digest_of(outcome), counts, at, notes=notes)
    growing.add(node, expected)
    if last is None:
        return
    if found != expected:
        growing.broken(OUTCOME_NAME, f"{OUTCOME_NAME}: expected {expected}, got {found}. Restore it.")
        return
    identity = last["identity"]
    for name, now in (("dataset", identity["dataset"]), ("plan", digest_of(identity["settings"]))):
        if (then := outcome.get(name, now)) != now:
            growing.broken(OUTCOME_NAME, f"{OUTCOME_NAME}: expected {name} {then[:12]}, got {now[:12]} in {expected}")


def _verify(run: Store, growing: LineageBuilder, note: Json) -> None:
    """Read every file of a checkpoint again."""
    place = checkpoint_folder(note["step"])
    for name, file in note["files"].items():
        path = f"{place}/{name}"
        found = run.sha256(path) if run.exists(path) else "no file"
        if found != file["sha256"]:
            growing.broken(place, f"{path}: expected {file['sha256'][:12]}, got {found[:12]}. Restore the file.")


def _notes(run: Store) -> list[Json]:
    """The notes that stand, by step; like the trainer, this looks for them in the folder."""
    folder = run.child(CHECKPOINTS)
    notes = [folder.read_json(name) for name in folder.walk() if name.endswith(f"/{NOTE_NAME}")]
    return sorted(notes, key=lambda note: int(note["step"]))


def _rewinds(run: Store) -> list[Json]:
    """The rewinds behind the training that stands: those since it was last begun, but for what a later start from an
    earlier checkpoint has undone; half a line is passed over."""
    found: list[Json] = []
    for line in run.read_bytes(EVENTS_NAME).split(b"\n") if run.exists(EVENTS_NAME) else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["kind"] in ("begun", "resumed"):
            found = [one for one in found if one["to_step"] <= event["step"] and event["kind"] == "resumed"]
        elif event["kind"] == "rewound":
            found.append(event)
    return found


def _json(run: Store, name: str) -> Json | None:
    return run.read_json(name) if run.exists(name) else None


def checkpoint_folder(step: int) -> str:
    """The folder of the checkpoint of a step, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def modification_time(run: Store, name: str) -> str | None:
    """When a file that holds no time was written, by its filesystem; a copied run folder has the time of the copy."""
    time = run.fs.get_file_info(run.path(name)).mtime
    return time.astimezone(UTC).isoformat(timespec="seconds") if isinstance(time, datetime) else None
