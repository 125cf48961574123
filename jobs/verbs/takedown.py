"""`penstock takedown`: the removal of documents from a run, with a certificate, and the check of a certificate."""

import argparse
import json
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from shlex import quote

from jobs.arguments import Command, add_checker
from jobs.verbs.export import OPTIONS as EXPORT_OPTIONS
from jobs.verbs.export import export_command
from pipeline.register.record import read_registrations, stale_commands
from pipeline.takedown.certificate import check_certificate
from pipeline.takedown.check_result import describe_check
from pipeline.takedown.commit import (
    DERIVED_FILES,
    PendingTakedown,
    begin_takedown,
    drop_old,
    files_left,
    finish_takedown,
    read_pending,
)
from pipeline.takedown.erased import check_erased
from pipeline.takedown.exports import (
    OTHER_VERSION,
    delete_export,
    describe_exports,
    exports_before,
    is_of_current,
)
from pipeline.takedown.exports import files_left as files_at_destination
from pipeline.takedown.papers import papers_of
from pipeline.takedown.planted import check_planted
from pipeline.takedown.select import (
    Selection,
    TakedownRequest,
    earlier_takedowns,
    requested_items,
    select_documents,
)
from pipeline.takedown.shards import find_removed_rows
from schemas.document_ids import ID_HELP, MIN_ID_DIGITS, resolve_doc_ids
from schemas.errors import ConfigError, PenstockError
from schemas.exports import TRAINED_ON, ExportReceipt, destination_of, read_receipts
from schemas.locks import lock_checkpoints, lock_tables
from schemas.logs import LOGGER
from schemas.manifest import RUN_NAME, read_run
from schemas.origin import origin_of
from schemas.paths import check_own_folders, check_unlinked_tables, is_on_known_server
from schemas.removed import certificates_of
from schemas.storage import Store
from schemas.takedown import (
    REMOVED_ID,
    TAKEDOWNS,
    Certificate,
    Effects,
    Mode,
    OtherRun,
    TrainedCheckpoint,
    certificate_name,
    check_no_pending_takedown,
    parse_certificate,
    proofs_name,
)
from schemas.text import printable
from schemas.tokens import Dataset, open_dataset
from schemas.urls import parse_domain
from schemas.versions import DATASET, attached_runs, check_own_tables, source_runs
from train.ancestors import with_origins
from train.data.document_index import DocumentIndex
from train.erase import erase_replaced, find_replaced
from train.takedown_replay import Span, find_effects

GROUP = "join"
VERBS = {
    "takedown": "Remove documents from a run, with a certificate. They are removed from its dataset, tables and "
    "indexes.",
}

Arguments = argparse.Namespace
SHOWN_STEPS = 12
SHOWN = 10
"""Maximum number of documents, or of requested items, that are listed."""


def add_takedown_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `takedown`."""
    parser.add_argument("run", help="run folder: a local path or s3://, gs://, abfs://, hdfs://")
    for name, description in (
        ("domain", "every document of a domain, the hosts below it included"),
        ("url", "every document of a URL"),
        ("doc", f"a document by {ID_HELP}"),
        ("near", f"a document by {ID_HELP}, with all its near-duplicates"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], help=f"{description}; may be repeated")
    parser.add_argument(
        "--with-copies", action="store_true", help="remove the near-duplicates of all selected documents too"
    )
    parser.add_argument(
        "--no-derived",
        action="store_true",
        help="keep documents that name a selected one as their parent, such as its translation",
    )
    parser.add_argument(
        "--remake-exports",
        action="store_true",
        help="delete exports with removed documents, and make them again in the same folders; models are only named",
    )
    parser.add_argument(
        "--erase-replaced",
        action="store_true",
        help="delete the checkpoints that were trained on removed documents, and those that a replay has replaced; "
        "without documents to remove, this is done for earlier takedowns",
    )
    parser.add_argument("--docs", metavar="FILE", help="JSON lines with a doc_id each, such as quarantine.jsonl")
    parser.add_argument(
        "--compact",
        action="store_true",
        help="delete the tokens instead of replacing them by tombstones; later tokens move, so existing checkpoints "
        "cannot resume",
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="write proofs that the dataset had the documents and no longer has them; see `penstock prove`",
    )
    parser.add_argument("--keep-old", action="store_true", help="keep the old files until a takedown with --drop-old")
    parser.add_argument(
        "--drop-old", action="store_true", help="delete the files that no current version contains, and do nothing else"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and write nothing")
    parser.add_argument(
        "--check",
        metavar="CERTIFICATE",
        help="check a certificate against the run, and write nothing; with --domain, --url or --doc, check also that "
        "the takedown was for these",
    )
    add_checker(parser, "pipeline.takedown", "check_alone.py", "a certificate")


def takedown_command(arguments: Arguments) -> int:
    """Remove documents from the dataset, tables and indexes of a run, and write a certificate of the removal."""
    run = Store(arguments.run)
    listed = _listed(arguments.docs) if arguments.docs else ()
    docs = resolve_doc_ids(run, dict.fromkeys(listed, "--docs") | dict.fromkeys(arguments.doc, "--doc"))
    near = resolve_doc_ids(run, dict.fromkeys(arguments.near, "--near"))
    request = TakedownRequest(
        domains=tuple(arguments.domain),
        urls=tuple(arguments.url),
        documents=tuple(docs),
        near=tuple(near),
        with_copies=arguments.with_copies,
        keep_derived=arguments.no_derived,
    )
    _check_options(arguments, [f"--{kind}" for kind, _ in request.items()])
    if arguments.check:
        return _check(run, arguments.check, request)
    # A dry run changes nothing, so it may read a run that another command is writing.
    with nullcontext() if arguments.dry_run else lock_tables(run, "penstock takedown"):
        check_unlinked_tables(run)
        check_own_folders(run, TAKEDOWNS)
        if arguments.drop_old:
            return _drop_old(run)
        code = 0 if _only_erases(arguments, request) else _take_down(run, request, arguments)
        return code or (_erase(run, arguments.dry_run) if arguments.erase_replaced else 0)


def _only_erases(arguments: Arguments, request: TakedownRequest) -> bool:
    return bool(arguments.erase_replaced and not request.items())


def _erase(run: Store, dry_run: bool) -> int:
    """Delete the weights that have read documents of takedowns, and print what was deleted."""
    check_no_pending_takedown(run)
    with nullcontext() if dry_run else lock_checkpoints(run, "penstock takedown --erase-replaced"):
        found = find_replaced(run)
        chosen = {own.checkpoint: own for checkpoints in found.values() for own in checkpoints}
        size = sum(file.size for own in chosen.values() for file in own.files)
        records = [] if dry_run or not chosen else erase_replaced(run, found)
    print(f"{len(chosen):,} checkpoint(s), {size:,} bytes, {'would be' if dry_run else 'were'} erased")
    print("".join(f"  {name}\n" for name in sorted(chosen)), end="")
    for name in records:
        print(f"recorded in {run.uri}/{name}")
    print("not erased: exports of models, copies elsewhere, and what the storage keeps of deleted files")
    return 0


def _check_options(arguments: Arguments, selectors: list[str]) -> None:
    """Raise ConfigError if --check or --drop-old is given with an option that it does not use."""
    alone = [f"--{name.replace('_', '-')}" for name in ("check", "drop_old") if getattr(arguments, name)]
    names = ("compact", "prove", "keep_old", "dry_run", "with_copies", "no_derived", "remake_exports", "erase_replaced")
    others = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    others += [] if alone == ["--check"] else selectors
    if alone and (others or len(alone) > 1):
        raise ConfigError(
            f"takedown: expected --check or --drop-old without other options, got {', '.join([*alone, *others])}. "
            "Remove the other options."
        )


def _listed(name: str) -> tuple[str, ...]:
    """Return the distinct doc_ids in a file of JSON lines. Raises ConfigError if the file or a line is not valid."""
    doc_ids: dict[str, None] = {}
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"takedown --docs {name}: expected a readable file of JSON lines, got an error: {error}. Correct the path."
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            doc_ids |= {str(json.loads(line)["doc_id"]): None} if line.strip() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"takedown --docs {name}, line {number}: expected an object with a doc_id, got {line[:60]!r}. "
                "Correct this line."
            ) from error
    return tuple(doc_id for doc_id in doc_ids if doc_id != REMOVED_ID.hex())


def _take_down(run: Store, request: TakedownRequest, arguments: Arguments) -> int:
    check_own_tables(run, "takedown")
    read_registrations(run)  # a damaged record ends the command before anything is changed
    if (pending := read_pending(run)) is not None:
        if arguments.dry_run:
            raise ConfigError(
                f"takedown --dry-run: expected no unfinished takedown, got {pending.id}. Finish it with "
                f"`penstock takedown {quote(arguments.run)}`, without other options, then repeat the dry run."
            )
        print(f"takedown {pending.id} was interrupted; it is completed first", flush=True)
        _finish(run, pending)
        if not request.items() or earlier_takedowns(run, request):
            return 0
    if arguments.remake_exports and not request.items() and not arguments.dry_run:
        return _remake_exports(run)
    if request.items() and (earlier := earlier_takedowns(run, request)) and not _has_documents(run, request):
        names = ", ".join(certificate_name(certificate_id) for certificate_id in earlier)
        print(f"all of these documents were taken down before, see {names}; nothing to do")
        return _remake_exports(run) if arguments.remake_exports and not arguments.dry_run else 0
    if arguments.prove and DATASET not in read_run(run).tables:
        raise ConfigError(f"takedown --prove: expected a run with a dataset, got none in {run.uri}. Remove --prove.")
    selection = select_documents(run, request)
    effects = effects_of(run, selection.documents, addresses_of(selection))
    kept = frozenset(selection.survivors.values())
    survivor_steps = _affected(run, kept).steps if kept else []
    print("\n".join(_describe_selection(selection, effects, survivor_steps, arguments)), flush=True)
    if arguments.dry_run:
        print("\n".join(_describe_outside(run, exports_before(run, selection.documents, effects))))
        return 0
    mode: Mode = "compact" if arguments.compact else "tombstones"
    pending = begin_takedown(run, selection, mode, effects, keep_old=arguments.keep_old, prove=arguments.prove)
    _finish(run, pending)
    return _remake_exports(run) if arguments.remake_exports else 0


def _remake_exports(run: Store) -> int:
    """Delete the exports with documents of any takedown, and make them again; return 1 if one was not.

    An export of tables with other settings than the current ones stays as it is, and counts until its files are gone.
    """
    named = {identifier for certificate in certificates_of(run) for identifier in certificate.exports}
    failed = 0
    for receipt in [own for own in read_receipts(run) if own.id in named and not own.replaced_by]:
        if receipt.options.get("format") == TRAINED_ON:
            continue  # another run, which the takedown has named
        if receipt.checkpoint is not None:
            # Exported again, the same checkpoint would be the same model.
            print(f"export {receipt.id} is a model that was trained on removed documents, so it was not made again")
            continue
        if not is_of_current(run, receipt):
            if files_at_destination(run, receipt) != []:
                failed += 1
                print(f"export {receipt.id} was not made again: {OTHER_VERSION}. Delete it in {receipt.destination}.")
            continue
        words = {name: receipt.options.get(name) for name in ("format", *EXPORT_OPTIONS)}
        arguments = Arguments(run=run.address, out=receipt.destination, verbose=False, trust_run=False, **words)
        try:
            destination_of(run, receipt)
            delete_export(run, receipt)
            export_command(arguments)
        except (PenstockError, OSError) as error:
            failed += 1
            print(f"export {receipt.id} was not made again: {error}")
        else:
            print(f"export {receipt.id} was deleted and made again")
    return 1 if failed else 0


def _finish(run: Store, pending: PendingTakedown) -> None:
    """Carry out a takedown, or the rest of an interrupted one, and print its result."""
    quoting, papers = [name for name in DERIVED_FILES if run.exists(name)], papers_of(run)
    print("\n".join(_describe_result(run, finish_takedown(run, pending))))
    for name in quoting:
        print(f"deleted, because it may quote them: {name}; write a new one with `penstock report {quote(run.uri)}`")
    if papers:
        listed = f"{len(papers)} file(s) of `penstock summary`"
        print(f"deleted, because they describe the data with them: {listed}; write new ones with that command")


def _has_documents(run: Store, request: TakedownRequest) -> bool:
    """Return True if the run still holds a document of the request."""
    try:
        return bool(select_documents(run, request).documents)
    except ConfigError:
        return False


def effects_of(run: Store, documents: frozenset[bytes], sought: Sequence[tuple[str, str]] = ()) -> Effects:
    """Return the optimizer steps and checkpoints that were trained on the documents.

    Runs that use tables of `run` are included: those in subfolders, and those elsewhere that have left a receipt.
    `sought`: (kind, value) of the URLs and domains by which the documents are looked up in runs from whose weights a
    training began.
    """
    others = []
    for folder, tables in (attached_runs(run) | _runs_elsewhere(run)).items():
        try:
            seen = _affected(run.child(folder), documents, sought)
        except (PenstockError, OSError) as error:
            if not folder.startswith("../"):
                raise
            LOGGER.warning(
                f"takedown: {run.child(folder).uri} cannot be read, so its checkpoints are not named: {error}"
            )
            continue
        models = [model.model_copy(update={"checkpoint": f"{folder}/{model.checkpoint}"}) for model in seen.models]
        others.append(OtherRun(run=folder, tables=tables, steps=seen.steps, models=models))
    return _affected(run, documents, sought).model_copy(update={"others": others})


def _runs_elsewhere(run: Store) -> dict[str, list[str]]:
    """Return folder, relative to a run, and tables of the runs outside of it that were trained on its tables."""
    found: dict[str, list[str]] = {}
    for receipt in read_receipts(run):
        # A receipt may be from somebody else: it leads to no other storage than that of this run.
        is_here = receipt.destination.partition("://")[0] == run.uri.partition("://")[0] or (
            run.is_local and "://" not in receipt.destination
        )
        if receipt.options.get("format") != TRAINED_ON or receipt.replaced_by:
            continue
        if not is_here or not is_on_known_server(run, receipt.destination):
            continue
        other = Store(receipt.destination)
        if other.fs != run.fs or not other.exists(RUN_NAME):
            continue
        if run.uri in {source.uri for source in source_runs(other)}:
            tables = read_run(other).tables
            own = [name for name, path in tables.items() if other.child(f"{name}/{path}/../..").uri == run.uri]
            # The dataset of a union is its own; its manifest names shards of this run.
            is_on_dataset = receipt.checkpoint is None or not own
            found[posixpath.relpath(other.root, run.root)] = sorted({*own, *([DATASET] if is_on_dataset else [])})
    return found


def addresses_of(selection: Selection) -> list[tuple[str, str]]:
    """Return the URLs and domains by which the documents of a selection are looked up in other runs."""
    asked = [item for item in selection.request.items() if item[0] in ("url", "domain")]
    by_id = {own for (kind, _), found in selection.matched.items() if kind not in ("url", "domain") for own in found}
    return [*asked, *(("url", url) for own, url in sorted(selection.urls.items()) if own in by_id and url)]


def _affected(run: Store, documents: frozenset[bytes], sought: Sequence[tuple[str, str]] = ()) -> Effects:
    """Return the effects of some documents on this run alone."""
    if "tokens" not in read_run(run).tables:
        return Effects()
    dataset = open_dataset(run, even_replaced=True)  # another run's may be one that an earlier takedown has replaced
    effects = find_effects(run, dataset, _spans(dataset, documents))
    return with_origins(run, effects, documents, lambda other: _spans(other, documents, sought))


def _spans(dataset: Dataset, documents: frozenset[bytes], sought: Sequence[tuple[str, str]] = ()) -> list[Span]:
    """Return the spans of documents with these ids, and of those with these URLs or domains."""
    spans: list[Span] = []
    for place in find_removed_rows(dataset, documents):
        shards = dataset.streams[place.shard.stream]
        first = sum(shard.num_tokens for shard in shards[: place.shard.number])
        spans += [(place.shard.stream, first + start, length) for start, length in place.spans]
    index = DocumentIndex(dataset)
    for kind, value in sought:
        found = index.of_url(value) if kind == "url" else index.of_host(parse_domain(value))
        spans += [(stream, begin, row["num_tokens"]) for stream, row, begin in found]
    return spans


def _describe_survivors(selection: Selection, steps: Sequence[int]) -> Iterator[str]:
    """Yield lines about the documents that have the text of removed exact copies and are not selected."""
    if selection.survivors:
        yield (
            f"the text of {len(selection.survivors):,} of them stays: they are exact copies of documents that are not "
            "selected; --with-copies removes these too"
        )
        shown = sorted(selection.survivors.items())[:SHOWN]
        yield from (f"  {own.hex()[:MIN_ID_DIGITS]} is a copy of {kept.hex()[:MIN_ID_DIGITS]}" for own, kept in shown)
        if len(selection.survivors) > SHOWN:
            yield f"  … and {len(selection.survivors) - SHOWN:,} more"
        yield f"  {len(steps):,} step(s) of the plan contain that text{_first_steps(steps)}"


def _first_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:SHOWN_STEPS]))
    more = f" and {len(steps) - SHOWN_STEPS:,} more" if len(steps) > SHOWN_STEPS else ""
    return f": {shown}{more}" if steps else ""


def _describe_selection(
    selection: Selection, effects: Effects, survivor_steps: Sequence[int], arguments: Arguments
) -> Iterator[str]:
    """Yield lines about the documents to be removed, and about the checkpoints trained on these documents."""
    yield f"{len(selection.documents):,} document(s) to be removed"
    if len(selection.matched) > 1:
        for (kind, value), documents in [*selection.matched.items()][:SHOWN]:
            yield f"  --{kind} {printable(value)}: {len(documents):,}"
    if arguments.dry_run:
        yield from _listing({own: selection.urls.get(own, "a near-duplicate") for own in selection.documents})
    if selection.copies:
        yield f"{len(selection.copies):,} near-duplicates of them are not selected; --with-copies removes them too"
        yield from _listing(dict.fromkeys(selection.copies, ""))
    if selection.derived:
        verb = "are kept" if selection.request.keep_derived else "are among them; --no-derived keeps them"
        yield f"{len(selection.derived):,} document(s) that were made from these {verb}"
        yield from _listing({own: f"derived from {parent}" for own, parent in selection.derived.items()})
    yield from describe_effects(effects)
    yield from _describe_survivors(selection, survivor_steps)
    if arguments.compact and effects.models:
        yield "token positions move (--compact): existing checkpoints cannot resume on the new dataset"


def _listing(documents: Mapping[bytes, str]) -> Iterator[str]:
    """Yield a line with id and URL for each of the first documents, sorted by URL and id."""
    for url, document in sorted((url, own) for own, url in documents.items())[:SHOWN]:
        yield f"  {document.hex()[:MIN_ID_DIGITS]}  {printable(url)}".rstrip()
    if len(documents) > SHOWN:
        yield f"  … and {len(documents) - SHOWN:,} more"


def describe_effects(effects: Effects) -> Iterator[str]:
    """Yield lines of text about the optimizer steps and checkpoints that were trained on the documents."""
    if effects.steps:
        yield f"{len(effects.steps):,} step(s) of the plan contain them{_first_steps(effects.steps)}"
    else:
        yield "no step of a plan contains them"
    for model in effects.models:
        yield f"  {model.checkpoint}: {_describe_model(model, effects)}"
    if effects.models:
        clean = "none, train from step 0" if effects.last_clean is None else f"step {effects.last_clean}"
        if effects.saw_before is not False:
            clean = "none" if effects.saw_before else "not known, since it is not known of the weights before it"
        yield f"last clean checkpoint: {clean}"
    yield from describe_origins(effects)
    for other in effects.others:
        saw = sum(model.may_have_seen for model in other.models)
        yield (
            f"{other.run} uses the tables {', '.join(other.tables)}; {saw} of its {len(other.models)} checkpoint(s) "
            "have seen them, or may have: delete that run folder"
        )


def _describe_model(model: TrainedCheckpoint, effects: Effects) -> str:
    """Return in words what a checkpoint has read of the documents."""
    if model.saw:
        # Without such a step it was trained on other token positions, in which the documents cannot be looked up.
        return "has seen them" if any(step <= model.step for step in effects.steps) else "may have seen them"
    if model.saw_before:
        return "has seen them, in the weights that its training began from"
    if model.saw_earlier:
        return "has seen documents of an earlier takedown"
    return "clean" if model.saw_before is False else "not known of the weights that its training began from"


def describe_origins(effects: Effects) -> Iterator[str]:
    """Yield a line about each of the weights that a model began from."""
    words = {
        True: "whose training had read them",
        False: "whose training had not read them",
        None: "of which this is NOT KNOWN: search there too",
    }
    answers = [*effects.origins_saw, *[None] * len(effects.origins)]
    for name, saw in zip(effects.origins, answers, strict=False):
        yield f"the model began from {printable(name)}, {words[saw]}"


def _describe_result(run: Store, certificate: Certificate) -> Iterator[str]:
    """Yield the lines that describe a completed takedown."""
    yield f"takedown {certificate.id}: {len(certificate.documents):,} document(s), {certificate.num_tokens:,} tokens"
    for name, change in certificate.tables.items():
        yield (
            f"  {name}: {change.before[:12]} -> {change.after[:12]}, {change.rows:,} row(s), "
            f"{len(change.rewritten)} file(s) rewritten, {change.shared} shared"
        )
    if certificate.tokenizer is not None:
        yield f"  the tokenizer {certificate.tokenizer.sha256[:12]} was trained before the takedown and is not changed"
    name = certificate_name(certificate.id)
    yield f"certificate: {run.uri}/{name}; check it with `penstock takedown {quote(run.uri)} --check {name}`"
    if certificate.membership is not None:
        for when, root in certificate.membership.model_dump().items():
            yield f"root of the dataset {when}: {root}; proofs: {run.uri}/{proofs_name(certificate.id, when)}"
    yield f"its seal: {certificate.seal}; publish it, so that a changed certificate can be detected"
    if "tokens" in certificate.tables and not open_dataset(run).manifest.content.counts.rows_kept:
        yield "no document is left in the dataset, so nothing can be trained on it"
    elif certificate.effects.saw_before:
        yield "no checkpoint is clean: `penstock plan` a new run that begins from other weights (train.init_from)"
    elif certificate.effects.models and certificate.mode == "tombstones":
        yield f"to train again without the documents: `penstock train {quote(run.uri)} --replay-from clean`"
    yield from _describe_left(run)
    for command in stale_commands(run, [*certificate.tables]):
        yield f"registered tables still name the replaced files; register them again: `{printable(command)}`"
    yield from _describe_outside(run, [own for own in read_receipts(run) if own.id in certificate.exports])


def _describe_outside(run: Store, exports: Sequence[ExportReceipt]) -> Iterator[str]:
    """Yield lines about exports with removed documents, and about what else a takedown does not change."""
    yield from map(printable, describe_exports(run, exports))
    yield "not changed: input files, exports without a receipt, and other runs that read this one"


def _describe_left(run: Store) -> Iterator[str]:
    """Yield a line about the files in the folders of tables that belong to no version."""
    if names := files_left(run):
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        yield (
            f"left, because no version of a table has such a path; may hold removed documents: "
            f"{', '.join(map(printable, names[:SHOWN]))}{more}"
        )


def _check(run: Store, name: str, request: TakedownRequest) -> int:
    path = Path(name)
    store, place = (Store(str(path.parent)), path.name) if path.is_file() else (run, name)
    if not store.exists(place):
        raise ConfigError(
            f"takedown --check: expected a certificate, got no file {name} in the current folder or in {run.uri}. "
            "Correct the path."
        )
    certificate = parse_certificate(store.read_json(place), name)
    checked = check_certificate(run, certificate)
    check_planted(run, certificate, checked)
    check_erased(run, certificate, checked)
    items = request.items()
    found = requested_items(certificate, items)
    checked.problems += [
        f"--{kind} {printable(value)}: expected an item of the takedown's request, got another one. Write it as in the "
        "request."
        for kind, value in items
        if (kind, value) not in found
    ]
    checked.notes += describe_origins(certificate.effects)
    if (began_from := origin_of(run)) is not None and began_from.digest != certificate.effects.began_from:
        checked.notes += [
            f"the model of this run began from {printable(origin.name)}"
            + (f", trained on dataset {origin.dataset[:12]}" if origin.dataset else "")
            for origin in began_from.line
        ]
    checked.notes += [f"--{kind} {printable(value)} is an item of the takedown's request" for kind, value in found]
    print("\n".join(describe_check(certificate, checked)))
    return 1 if checked.problems else 0


def _drop_old(run: Store) -> int:
    if read_pending(run) is not None:
        raise ConfigError(
            "takedown --drop-old: expected no unfinished takedown, got one. Finish it with "
            f"`penstock takedown {quote(run.uri)}`, without other options, then repeat this command."
        )
    dropped = drop_old(run)
    lines = (f"{len(dropped)} file(s) deleted that no current version contains", *_describe_left(run))
    print("\n".join(lines), file=sys.stdout)
    return 0


COMMANDS = {
    "takedown": Command((add_takedown_arguments,), takedown_command, "takedown run --domain example.com"),
}
