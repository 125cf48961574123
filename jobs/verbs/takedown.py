"""`penstock takedown`: documents out of a run, with a certificate; and the check of such a certificate."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from pipeline.takedown.certificate import check_certificate, describe_check
from pipeline.takedown.commit import begin_takedown, drop_old, finish_takedown, read_pending
from pipeline.takedown.select import Selection, TakedownRequest, earlier_takedowns, select_documents
from pipeline.takedown.shards import find_removed_rows
from schemas.errors import ConfigError
from schemas.locks import lock_tables
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.takedown import REMOVED_ID, Certificate, Effects, OtherRun, certificate_name, parse_certificate
from schemas.tokens import open_dataset
from schemas.versions import attached_runs, check_own_tables
from train.takedown_replay import Span, affected

Arguments = argparse.Namespace
SHOWN_STEPS = 12


def add_takedown_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `takedown`."""
    parser.add_argument("run", help="run folder: a local path or s3://, gs://, hdfs://")
    for name, what in (
        ("domain", "every document of a domain or host"),
        ("url", "every document of a URL"),
        ("doc", "a document by its id, 32 hex digits"),
        ("near", "a document by its id, with all its near copies"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], help=f"{what}; may be repeated")
    parser.add_argument("--docs", metavar="FILE", help="documents by the doc_id of each line, as in quarantine.jsonl")
    parser.add_argument("--compact", action="store_true", help="move positions; old checkpoints cannot go on")
    parser.add_argument("--keep-old", action="store_true", help="leave the old files until --drop-old")
    parser.add_argument("--drop-old", action="store_true", help="only delete files that no version names")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed; write nothing")
    parser.add_argument("--check", metavar="CERTIFICATE", help="check a certificate against the run; write nothing")


def takedown_command(arguments: Arguments) -> int:
    """Remove documents from a run's dataset, tables and indexes, and write a certificate that anyone can check."""
    run = Store(arguments.run)
    listed = _listed(arguments.docs) if arguments.docs else ()
    docs = (*arguments.doc, *listed)
    request = TakedownRequest(tuple(arguments.domain), tuple(arguments.url), docs, tuple(arguments.near))
    alone = [name for name in ("check", "drop_old") if getattr(arguments, name)]
    others = [f"--{kind}" for kind, _ in request.items()]
    others += [f"--{name.replace('_', '-')}" for name in ("compact", "keep_old", "dry_run") if getattr(arguments, name)]
    if alone and (others or len(alone) > 1):
        found = [f"--{name.replace('_', '-')}" for name in alone] + others
        raise ConfigError(f"takedown: expected --check or --drop-old by itself, got {', '.join(found)}")
    if arguments.check:
        return _check(run, arguments.check)
    # A dry run changes nothing, so it may look at a run that somebody works on.
    with nullcontext() if arguments.dry_run else lock_tables(run, "penstock takedown"):
        return _drop_old(run) if arguments.drop_old else _take_down(run, request, arguments)


def _listed(name: str) -> tuple[str, ...]:
    """The doc_ids of a file of JSON objects, each once. Raises ConfigError if a line has none."""
    found: dict[str, None] = {}
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"takedown --docs {name}: cannot be read: {error}; name a file of JSON lines") from error
    for number, line in enumerate(lines, start=1):
        try:
            found |= {str(json.loads(line)["doc_id"]): None} if line.strip() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"takedown --docs {name}, line {number}: expected an object with a doc_id, got {line[:60]!r}"
            ) from error
    return tuple(one for one in found if one != REMOVED_ID.hex())


def _take_down(run: Store, request: TakedownRequest, arguments: Arguments) -> int:
    check_own_tables(run, "takedown")
    if (pending := read_pending(run)) is not None:
        print(f"takedown {pending.id} was broken off; it is brought to its end first", flush=True)
        if arguments.dry_run:
            raise ConfigError("takedown --dry-run: expected a run without a takedown under way. Finish that one first.")
        print("\n".join(_said(run, finish_takedown(run, pending))))
        if not request.items() or earlier_takedowns(run, request):
            return 0
    if request.items() and (earlier := earlier_takedowns(run, request)) and not _stands(run, request):
        names = ", ".join(certificate_name(one) for one in earlier)
        print(f"everything asked for was taken down before, see {names}; nothing is left to do")
        return 0
    selection = select_documents(run, request)
    effects = _effects(run, selection)
    print("\n".join(_about(selection, effects, arguments.compact)), flush=True)
    if arguments.dry_run:
        return 0
    pending = begin_takedown(
        run, selection, "compact" if arguments.compact else "tombstones", effects, arguments.keep_old
    )
    print("\n".join(_said(run, finish_takedown(run, pending))))
    return 0


def _stands(run: Store, request: TakedownRequest) -> bool:
    """Whether something that was asked for stands in the run."""
    try:
        return bool(select_documents(run, request).documents)
    except ConfigError:
        return False


def _effects(run: Store, selection: Selection) -> Effects:
    """What the training of a run had seen, and that of runs below it which stand on its tables."""
    others = []
    for folder, tables in attached_runs(run).items():
        found = _seen(run.child(folder), selection)
        models = [model.model_copy(update={"checkpoint": f"{folder}/{model.checkpoint}"}) for model in found.models]
        others.append(OtherRun(run=folder, tables=tables, steps=found.steps, models=models))
    return _seen(run, selection).model_copy(update={"others": others})


def _seen(run: Store, selection: Selection) -> Effects:
    if "tokens" not in read_run(run).tables:
        return Effects()
    dataset = open_dataset(run)
    spans: list[Span] = []
    for place in find_removed_rows(dataset, selection.documents):
        shards = dataset.streams[place.shard.stream]
        first = sum(shard.num_tokens for shard in shards[: place.shard.number])
        spans += [(place.shard.stream, first + start, length) for start, length in place.spans]
    return affected(run, dataset, spans)


def _about(selection: Selection, effects: Effects, compact: bool) -> Iterator[str]:
    """What is about to be removed, and who saw it."""
    yield f"{len(selection.documents):,} document(s) to be removed"
    if selection.copies_left:
        yield f"{selection.copies_left:,} near copies of them stand and were not asked for; --near takes copies too"
    yield from describe_effects(effects)
    if compact and effects.models:
        yield "positions move (--compact): the checkpoints that stand cannot go on with the new dataset"


def describe_effects(effects: Effects) -> Iterator[str]:
    """Steps and checkpoints that saw the documents, as lines of text."""
    if effects.steps:
        shown = ", ".join(map(str, effects.steps[:SHOWN_STEPS]))
        more = f" and {len(effects.steps) - SHOWN_STEPS:,} more" if len(effects.steps) > SHOWN_STEPS else ""
        yield f"{len(effects.steps):,} step(s) of the plan hold them: {shown}{more}"
    else:
        yield "no step of a plan holds them"
    for model in effects.models:
        # Without such a step it was trained on other positions, where the documents cannot be looked up.
        seen = "has seen them" if any(step <= model.step for step in effects.steps) else "may have seen them"
        yield f"  {model.checkpoint}: {seen if model.saw else 'clean'}"
    if effects.models:
        clean = "none, train from the beginning" if effects.last_clean is None else f"step {effects.last_clean}"
        yield f"last clean checkpoint: {clean}"
    for other in effects.others:
        saw = sum(model.saw for model in other.models)
        yield (
            f"{other.run} stands on {', '.join(other.tables)} as they are now; {saw} of its {len(other.models)} "
            "checkpoint(s) have seen them: remove this run"
        )


def _said(run: Store, certificate: Certificate) -> Iterator[str]:
    """What was done."""
    yield f"takedown {certificate.id}: {len(certificate.documents):,} document(s), {certificate.num_tokens:,} tokens"
    for name, change in certificate.tables.items():
        yield (
            f"  {name}: {change.before[:12]} -> {change.after[:12]}, {change.rows:,} row(s), "
            f"{len(change.rewritten)} file(s) rewritten, {change.shared} shared"
        )
    if certificate.tokenizer is not None:
        yield f"  the tokenizer {certificate.tokenizer.sha256[:12]} was trained before and stays as it is"
    name = certificate_name(certificate.id)
    yield f"certificate: {run.uri}/{name}; anyone checks it with `penstock takedown {run.uri} --check {name}`"
    yield f"its seal: {certificate.seal}; who was told it sees that the certificate is this one"
    if "tokens" in certificate.tables and not open_dataset(run).manifest.content.counts.rows_kept:
        yield "no document is left in the dataset: there is nothing to train on"
    elif certificate.effects.models and certificate.mode == "tombstones":
        yield f"to train again without the documents: `penstock train {run.uri} --replay-from clean`"
    yield "not reached: input files, exports, and other runs that read this one"


def _check(run: Store, name: str) -> int:
    path = Path(name)
    store, place = (Store(str(path.parent)), path.name) if path.is_file() else (run, name)
    if not store.exists(place):
        raise ConfigError(f"takedown --check: expected a certificate, got no {name}, here or in {run.uri}")
    certificate = parse_certificate(store.read_json(place), name)
    checked = check_certificate(run, certificate)
    print("\n".join(describe_check(certificate, checked)))
    return 1 if checked.problems else 0


def _drop_old(run: Store) -> int:
    if read_pending(run) is not None:
        raise ConfigError("takedown --drop-old: expected no takedown under way, got one. Run it again to finish it.")
    dropped = drop_old(run)
    print(f"{len(dropped)} file(s) deleted that no standing version names", file=sys.stdout)
    return 0
