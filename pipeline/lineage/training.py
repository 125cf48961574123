"""The lineage of training: mix, plan, skip list, checkpoints, rewinds, quarantined documents, and the end.

It is read from the JSON files that the trainer writes, without the trainer's code. A mix comes after the dataset that
it was measured on and before the plan. The documents that one spike adds to the quarantine list come after its rewind.
The quarantine file only grows, so the digest of the file up to the last line of such an addition identifies it.
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
from pipeline.lineage.graph import Lineage, LineageBuilder, Node
from schemas.checkpoints import CHECKPOINTS, METADATA_NAME, read_checkpoints
from schemas.errors import REMOVE_CHECKPOINT, ConfigError, ContractError, reading
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME
from schemas.mix import parse_mix
from schemas.origin import CHECKPOINT, ModelOrigin, origin_of
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.versions import DATASET, list_versions


def add_mix(walk: TableTraversal, digest: str, at: str | None) -> str:
    """Add the mix with this digest to the lineage, and return the key of its node.

    The train folder has a copy of the mix. `at` is the time at which the plan was written.
    """
    run, path = walk.run, f"train/mix-{digest[:12]}.toml"
    actual = run.sha256(path) if run.exists(path) else "no file"
    if actual != digest:
        key = walk.builder.add(Node(path, "mix", "mix", digest, {}, at))
        walk.builder.add_break(key, f"{path}: expected {digest[:12]}, got {actual[:12]}. Restore the file.")
        return key
    mix = parse_mix(run.read_bytes(path), path)
    known = {manifest.digest: walk.nodes[version] for version, manifest in walk.manifests.items()}
    notes = [f"measured in the run of plan {mix.plan[:12]}, by {mix.reference}"]
    if mix.dataset not in known:
        notes.append(f"measured on dataset {mix.dataset[:12]}")
    notes.append(", ".join(f"{name} {part.share:.4g}" for name, part in mix.sources.items()))
    node = Node(path, "mix", "mix", digest, {"sources": len(mix.sources)}, at, notes=tuple(notes))
    return walk.builder.add(node, *([known[mix.dataset]] if mix.dataset in known else []))


def add_origin(walk: TableTraversal, origin: ModelOrigin) -> str:
    """Add the weights that a model began from, after those that they began from; return the key of their node."""
    sources = [add_origin(walk, origin.origin)] if origin.origin is not None else []
    counts = {} if origin.step is None else {"steps": origin.step}
    notes = (origin.path, *([f"trained on dataset {origin.dataset[:12]}"] if origin.dataset else []))
    title = "weights of another run" if origin.format == CHECKPOINT else f"weights of a {origin.format} model"
    node = Node(f"outside/{origin.digest[:12]}", "outside", title, origin.digest, counts, notes=notes)
    return walk.builder.add(node, *sources)


QUARANTINE_NAME = "train/quarantine.jsonl"
IN_STEP = re.compile(r"\bspike in step (\d+)\b")
FOLLOWED = "quarantined documents"
"""Reason in the skip list for samples that contain documents that were in the quarantine list already."""


@dataclass(frozen=True)
class QuarantineExtension:
    """The documents that one spike added to the quarantine list."""

    step: int
    """Step of the spike."""
    doc_ids: tuple[str, ...]
    """Ids of the documents, hex."""
    total: int
    """Number of documents in the list, up to and including these."""
    digest: str
    """SHA-256 (hex) of the quarantine file, up to and including these documents."""
    at: str

    @property
    def key(self) -> str:
        """Key of the node of these documents in the lineage."""
        return f"{QUARANTINE_NAME}@{self.digest[:12]}"


def quarantine_extensions(run: Store) -> list[QuarantineExtension]:
    """Return what each spike added to the quarantine list, in the order of the file. Incomplete lines are ignored."""
    lines = []
    text, end = run.read_bytes(QUARANTINE_NAME) if run.exists(QUARANTINE_NAME) else b"", 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        try:
            lines.append((json.loads(line), end))
        except (ValueError, RecursionError):
            continue
    extensions, seen = list[QuarantineExtension](), set[str]()
    for (_, step), group in groupby(lines, key=lambda line: (line[0]["rewind"], line[0]["step"])):
        own = list(group)
        doc_ids = tuple(line["doc_id"] for line, _ in own)
        seen |= set(doc_ids)
        digest = hashlib.sha256(text[: own[-1][1]]).hexdigest()
        extensions.append(QuarantineExtension(int(step), doc_ids, len(seen), digest, own[-1][0]["at"]))
    return extensions


class Quarantines:
    """The extensions of a run's quarantine list, each added to the lineage after its rewind."""

    def __init__(self, run: Store, builder: LineageBuilder):
        self._builder, self._extensions = builder, quarantine_extensions(run)
        self._added: set[str] = set()
        self._skipped: set[str] = set()

    def add_after(self, rewind: str, step: int, doc_ids: Sequence[str]) -> None:
        """Add to the lineage the documents `doc_ids` that a rewind put into quarantine.

        `rewind` is the key of the rewind, and `step` is the step of the spike. Adds a break if the quarantine list does
        not contain exactly these documents for the step.
        """
        if not doc_ids:
            return
        extension = next((own for own in self._extensions if (own.step, own.doc_ids) == (step, tuple(doc_ids))), None)
        if extension is None:
            known = {doc_id for own in self._extensions for doc_id in own.doc_ids}
            lacking = sum(doc_id not in known for doc_id in doc_ids)
            self._builder.add_break(
                rewind,
                f"{rewind}: expected {len(doc_ids)} quarantined document(s) of step {step} in {QUARANTINE_NAME}, "
                f"got {len(doc_ids) - lacking}. Restore the file.",
            )
        elif extension.key not in self._added:
            self._add(extension, rewind)

    def skipped_for(self, reasons: Sequence[str], source: str) -> list[str]:
        """Return the keys of the extensions that `reasons` of skipped samples name, without the keys returned before.

        An extension that no rewind added to the lineage is added after the node `source`.
        """
        steps = {int(step) for reason in reasons for step in IN_STEP.findall(reason)}
        follows = FOLLOWED in reasons
        skipped = [own for own in self._extensions if own.key not in self._skipped and (follows or own.step in steps)]
        # An extension has no rewind if the training process was killed or the list came from a different run.
        for extension in skipped:
            if extension.key not in self._added:
                self._add(extension, source)
        self._skipped |= {extension.key for extension in skipped}
        return [extension.key for extension in skipped]

    def add_rest(self, source: str) -> None:
        """Add all extensions that are not in the lineage yet, after the node `source`."""
        for extension in self._extensions:
            if extension.key not in self._added:
                self._add(extension, source)

    def _add(self, extension: QuarantineExtension, source: str) -> None:
        new = {"new": len(extension.doc_ids)} if extension.total > len(extension.doc_ids) else {}
        notes = (f"blamed for the spike in step {extension.step:,}",)
        counts = {"documents": extension.total, **new}
        node = Node(extension.key, "quarantine", "quarantine", extension.digest, counts, extension.at, notes=notes)
        self._builder.add(node, source)
        self._added.add(extension.key)


# The plan, the skip list, the checkpoints and the end of training.


EVENTS_NAME = "train/events.jsonl"
OUTCOME_NAME = "train/manifest.json"
REPLAYS_NAME = "train/replays.json"
SKIPS_OF_REWINDS = "skips.txt"
"""Name of the skip list if the plan's settings do not name one; rewinds write it."""
NO_SKIPS = digest_of([])
SHOWN_REASONS = 3
LOSSES = {"loss": "loss", "held-out loss": "heldout_loss"}
OF_PLAN = ("dataset", "order")
"""Keys of checkpoint metadata and plan whose values are equal if the checkpoint was trained with the plan."""
Json = Mapping[str, Any]


def add_training(walk: TableTraversal, verify: bool) -> None:
    """Add the plan, skip list, checkpoints, rewinds and end of training in the run's train folder to the lineage.

    `verify`: also compare the digest of every checkpoint file with the metadata. Raises ContractError if a file lacks
    an expected key.
    """
    run, builder = walk.run, walk.builder
    plan = _json(run, PLAN_NAME)
    try:
        if plan is not None:
            _add_plan(walk, plan)
        skips = _Skips(run, builder, plan)
        checkpoints = _checkpoints(run)
        last = _add_checkpoints(walk, plan, checkpoints, skips)
        if verify:
            for metadata in checkpoints:
                _verify(run, builder, metadata)
        outcome = _json(run, OUTCOME_NAME)
        if outcome is not None:
            _add_end(walk, outcome, last)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ContractError(
            f"{run.uri}/train: expected files of the trainer, got an invalid one ({error!r}). Restore it from a backup."
        ) from error


def _add_plan(walk: TableTraversal, plan: Json) -> None:
    """Add the plan after its dataset and mix, with a break if the plan's tokenizer is not that of the dataset."""
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
    began_from = origin_of(walk.run)
    origins = [add_origin(walk, began_from)] if began_from is not None else []
    walk.builder.add(node, *source, *([add_mix(walk, mix, node.at)] if mix else []), *origins)
    held = [table for key in source for table in walk.builder.nodes[key].tables]
    tokenizers = [table.manifest.content.figures.get("tokenizer", {}).get("sha256") for table in held]
    for digest in tokenizers:
        if digest != plan.get("tokenizer", digest):
            walk.builder.add_break(
                PLAN_NAME,
                f"{PLAN_NAME}: expected tokenizer {plan['tokenizer'][:12]}, got {str(digest)[:12]} in the dataset. "
                "Restore the plan.",
            )


def _dataset(walk: TableTraversal, where: str, digest: str) -> list[str]:
    """Return [key] of the node of the dataset with this digest; if there is none, add a break and return []."""
    known = {manifest.digest: walk.nodes[folder] for folder, manifest in walk.manifests.items()}
    if digest in known:
        return [known[digest]]
    versions = list_versions(walk.run, DATASET)
    for version, table in versions.items():
        if table.manifest.digest == digest:
            return [walk.visit(DATASET, version, digest)]
    known = dict.fromkeys([table.manifest.digest for table in versions.values()], "")
    datasets = ", ".join(sorted(own[:12] for own in known)) or "none"
    walk.builder.add_break(where, f"{where}: expected dataset {digest[:12]}, got {datasets}. Restore the dataset.")
    return []


class _Skips:
    """The skip list of the plan.

    The metadata of a checkpoint has the length and digest that the skip list had at the checkpoint's step.
    """

    def __init__(self, run: Store, builder: LineageBuilder, plan: Json | None):
        self.quarantines = Quarantines(run, builder)
        name = (plan or {}).get("settings", {}).get("train", {}).get("skip_file") or SKIPS_OF_REWINDS
        self.path = f"train/{name}"
        self.builder = builder
        self.run = run
        text = run.read_bytes(self.path).decode("utf-8", "replace") if run.exists(self.path) else ""
        lines = [line.partition("#") for line in text.splitlines()]
        self.entries = [(number.strip(), reason.strip()) for number, _, reason in lines if number.strip()]

    def node(self, metadata: Json, before: int) -> list[str]:
        """Add the skip list that a checkpoint used. Return [key of the node], or [] if no node is added.

        No node is added if the list is empty or as long as at the previous checkpoint (`before`). Adds a break if the
        list's digest is not the digest in the checkpoint's metadata.
        """
        identity, key = metadata["identity"], checkpoint_folder(metadata["step"])
        length, digest = identity.get("skip_length", 0), identity["skip_list"]
        # A line that is no number gives another digest.
        is_number = re.compile(r"[0-9]{1,19}").fullmatch
        numbers = [int(number) if is_number(number) else number for number, _ in self.entries[:length]]
        actual = digest_of(numbers) if len(numbers) == length else f"a list of {len(self.entries)}"
        if actual != digest and "skip_length" in identity:
            self.builder.add_break(
                key,
                f"{key}: expected a skip list {digest[:12]} of {length}, got {actual[:12]} in {self.path}. "
                "Restore the file.",
            )
        if length == before or not length:
            return []
        reasons = list(dict.fromkeys(reason for _, reason in self.entries[before:length] if reason))
        more = [f"{len(reasons) - SHOWN_REASONS} more reasons"] if len(reasons) > SHOWN_REASONS else []
        counts = {"samples": length, **({"new": length - before} if before else {})}
        notes = (*reasons[:SHOWN_REASONS], *more)
        at = modification_time(self.run, self.path)
        node = Node(f"{self.path}@{digest[:12]}", "skips", "skip list", digest, counts, at, notes=notes)
        return [self.builder.add(node, *self.quarantines.skipped_for(reasons, PLAN_NAME))]


def _add_checkpoints(
    walk: TableTraversal, plan: Json | None, checkpoints: Sequence[Json], skips: _Skips
) -> Json | None:
    """Add the checkpoints and the rewinds between them in the order of steps; return the last checkpoint's metadata."""
    run, builder = walk.run, walk.builder
    rewinds = _rewinds(run)
    replays: Sequence[Json] = run.read_json(REPLAYS_NAME) if run.exists(REPLAYS_NAME) else []
    last: Json | None = None
    for metadata in checkpoints:
        identity, key, since = metadata["identity"], checkpoint_folder(metadata["step"]), last["step"] if last else 0
        dataset = _dataset(walk, key, identity["dataset"])
        of_plan = plan is not None and all(plan.get(name) == identity.get(name) for name in OF_PLAN)
        remarks = [] if of_plan or plan is None else ["of an earlier plan"]
        is_same = last is not None and last["identity"]["dataset"] == identity["dataset"]
        after = [replay for replay in replays if last and replay["after"] == identity["dataset"] and not is_same]
        replayed = [own["from_step"] for own in after if since <= own["from_step"] < metadata["step"]][-1:]
        remarks += [f"replayed from step {step:,}" for step in replayed]
        before = last if is_same or replayed else None
        sources = [] if before is None else [checkpoint_folder(before["step"])]
        if not is_same:
            sources += [PLAN_NAME] if of_plan else dataset
        back = [event for event in rewinds if (since if before else 0) <= event["to_step"] < metadata["step"]]
        sources += [_add_rewind(builder, event, skips.quarantines) for event in back]
        sources += skips.node(metadata, before["identity"].get("skip_length", 0) if before else 0)
        builder.add(_checkpoint(run, metadata, tuple(remarks)), *sources)
        last = metadata
    skips.quarantines.add_rest(PLAN_NAME)
    return last


def _add_rewind(builder: LineageBuilder, event: Json, quarantines: Quarantines) -> str:
    """Add a rewind and the documents that it put into quarantine; return the key of the rewind."""
    digest = digest_of(event)
    back = checkpoint_folder(event["to_step"])
    source = back if back in builder.nodes else PLAN_NAME  # that checkpoint may have been removed since
    title = f"rewound from step {event['step']:,} to {event['to_step']:,}"
    doc_ids = event.get("quarantined", [])
    counts = {"samples skipped": len(event["samples"])}
    counts |= {"documents quarantined": len(doc_ids)} if doc_ids else {}
    key = builder.add(Node(f"rewind/{digest[:12]}", "rewind", title, digest, counts, event["at"]), source)
    quarantines.add_after(key, event["step"], doc_ids)
    return key


def _checkpoint(run: Store, metadata: Json, remarks: tuple[str, ...]) -> Node:
    folder = checkpoint_folder(metadata["step"])
    layout, name = metadata["layout"], f"{folder}/{METADATA_NAME}"
    ranks = f"{layout['ranks']} × {layout['device']}"
    size = sum(file["size"] for file in metadata["files"].values())
    return Node(
        key=folder,
        kind="checkpoint",
        title=f"checkpoint {metadata['step']:,}",
        digest=run.sha256(name),
        counts={"steps": metadata["step"], "bytes": size},
        at=modification_time(run, name),
        code=metadata["identity"].get("code_version"),
        notes=(*remarks, *([ranks] if layout["ranks"] > 1 else [])),
    )


def _add_end(walk: TableTraversal, outcome: Json, last: Json | None) -> None:
    """Add the end of training, with a break if its checkpoint, dataset or plan differs from the last checkpoint."""
    builder = walk.builder
    counts = {"steps": outcome["steps"]}
    counts |= {name: outcome[key] for name, key in LOSSES.items() if outcome.get(key) is not None}
    actual = checkpoint_folder(last["step"]) if last is not None else "none"
    expected = outcome.get("checkpoint", actual)
    # A new plan on another dataset requires the checkpoints to be removed, so missing checkpoints are no break.
    notes = (f"{expected} was removed",) if last is None else ()
    at = modification_time(walk.run, OUTCOME_NAME)
    node = Node(OUTCOME_NAME, "end", "end of training", digest_of(outcome), counts, at, notes=notes)
    builder.add(node, expected)
    if last is None:
        return
    if actual != expected:
        builder.add_break(OUTCOME_NAME, f"{OUTCOME_NAME}: expected {expected}, got {actual}. Restore the checkpoint.")
        return
    identity = last["identity"]
    for name, now in (("dataset", identity["dataset"]), ("plan", digest_of(identity["settings"]))):
        if (then := outcome.get(name, now)) != now:
            builder.add_break(
                OUTCOME_NAME,
                f"{OUTCOME_NAME}: expected {name} {then[:12]}, got {now[:12]} in {expected}. Restore the checkpoint.",
            )


def _verify(run: Store, builder: LineageBuilder, metadata: Json) -> None:
    """Add a break for every file of a checkpoint that is missing or whose digest differs from the metadata."""
    folder = checkpoint_folder(metadata["step"])
    for name, file in metadata["files"].items():
        path = f"{folder}/{name}"
        digest = run.sha256(path) if run.exists(path) else "no file"
        if digest != file["sha256"]:
            builder.add_break(folder, f"{path}: expected {file['sha256'][:12]}, got {digest[:12]}. Restore the file.")


def _checkpoints(run: Store) -> list[Json]:
    """Return the metadata of all checkpoints, in the order of steps."""
    checkpoints = dict(read_checkpoints(run))
    for where, metadata in checkpoints.items():
        with reading(where, "checkpoint metadata", REMOVE_CHECKPOINT):
            metadata["identity"]["dataset"], metadata["files"].items()
    return sorted(checkpoints.values(), key=lambda metadata: int(metadata["step"]))


def _rewinds(run: Store) -> list[Json]:
    """Return the events of the rewinds of the current training, in order.

    Rewinds of an earlier training, rewinds that a resume from an earlier checkpoint has undone, and incomplete lines
    are omitted.
    """
    rewinds: list[Json] = []
    for line in run.read_bytes(EVENTS_NAME).split(b"\n") if run.exists(EVENTS_NAME) else []:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if event["kind"] in ("begun", "resumed"):
            rewinds = [own for own in rewinds if own["to_step"] <= event["step"] and event["kind"] == "resumed"]
        elif event["kind"] == "rewound":
            rewinds.append(event)
    return rewinds


def _json(run: Store, name: str) -> Json | None:
    return run.read_json(name) if run.exists(name) else None


def checkpoint_folder(step: int) -> str:
    """Return the folder of the checkpoint of a step, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def modification_time(run: Store, name: str) -> str | None:
    """Return the modification time of a file, ISO 8601, UTC; None if the filesystem has none."""
    time = run.fs.get_file_info(run.path(name)).mtime
    return time.astimezone(UTC).isoformat(timespec="seconds") if isinstance(time, datetime) else None


# Reading and checking the lineage of a run folder, from the files of a crawl to the end of training.
#
# Only manifests and the JSON files of training are read, unless every file is verified.


def read_lineage(run: Store, verify: bool = False) -> Lineage:
    """Return the lineage of the run's tables, plan and checkpoints; `verify` also checks the digest of every file.

    An unexpected digest or a missing file is a break in the lineage, not an error. Raises ConfigError if the folder is
    not a run folder.
    """
    if not run.exists(RUN_NAME):
        raise ConfigError(
            f"{run.uri}: expected a run folder, got no {RUN_NAME}. Pass a folder that `penstock run` wrote."
        )
    walk = TableTraversal(run, LineageBuilder(), verify)
    for name, version in walk.current.items():
        walk.visit(name, version)
    add_training(walk, verify)
    return walk.builder.done()


def check_lineage(lineage: Lineage, where: str) -> None:
    """Raise ContractError if the lineage has breaks; the message lists them and starts with `where`."""
    if lineage.breaks:
        messages = list(dict.fromkeys(entry.message for entry in lineage.breaks))
        raise ContractError(f"{where}: expected an unbroken lineage, got\n  " + "\n  ".join(messages))
