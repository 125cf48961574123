"""`penstock trace`: the documents of an optimizer step, the steps that saw a document, and the original records."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from jobs.arguments import Command, add_run, whole
from jobs.recipe import check_addresses, stored_recipe
from pipeline.inspect.document_text import verdict_of
from pipeline.inspect.show import column_equals, find_documents, host_below
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import RefetchedRecord, refetch
from pipeline.sources.splits import splits_of
from pipeline.stages import reasons_of_run
from pipeline.tokens.streams import BUCKET_SEPARATOR
from schemas.document_ids import ID_HELP, MIN_ID_DIGITS, resolve_doc_ids
from schemas.errors import ConfigError, ContractError
from schemas.logs import LOGGER
from schemas.manifest import read_run
from schemas.overrides import add_override_options
from schemas.storage import Store
from schemas.tables import VERDICT_COLUMNS
from schemas.text import printable, printable_json, printable_lines
from schemas.versions import open_run_to_read
from train.trace.answer import (
    AnswerOptions,
    DocumentsAnswer,
    RowSelection,
    TraceAnswers,
    TracedDocument,
    present_documents,
    present_step,
)
from train.trace.documents import describe_scan
from train.trace.trace import Appearance, FoundDocument

GROUP = "join"
VERBS = {
    "trace": "Print the documents of a step, or the steps of a document. The checkpoints that saw a document are "
    "listed too.",
}

Arguments = argparse.Namespace
EMPTY_MESSAGES = {
    "url": "no document of the dataset has this URL; URLs are stored there with personal data replaced",
    "domain": "no document of the dataset is from this domain; give a domain such as example.com, or a host",
    "doc": "no document of the dataset has this id",
    "contains": "no document of the dataset contains exactly this string; upper and lower case differ",
}
"""The message for an empty result, by the option that selects documents."""
ABSENT_MESSAGES = {
    "url": "no document of the run has this URL, kept or dropped",
    "domain": "no document of the run, kept or dropped, is from this domain; give a domain such as example.com",
    "doc": "no document of the run has this id, kept or dropped",
}
"""The message if no row of `documents` matches either."""
LISTED = 20
"""Number of documents that a search lists unless `--limit` is set; a step lists all of its documents."""


def trace_command(arguments: Arguments) -> int:
    """Print the documents of a training step, or the steps and checkpoints that were trained on a document."""
    check_trace(arguments)
    run = open_run_to_read(arguments.run)
    answers = TraceAnswers(run, AnswerOptions(details=not arguments.brief, text=arguments.text))
    if arguments.step is not None:
        place = RowSelection(arguments.rank, arguments.micro_batch, arguments.ranks)
        step = answers.step(arguments.step, place, arguments.limit)
        return _print_answer(arguments, answers, step.to_json(), present_step(step), step.parts)
    selector = next(name for name in EMPTY_MESSAGES if getattr(arguments, name) is not None)
    answer = _find_documents(answers, selector, arguments)
    values = {selector: getattr(arguments, selector)}
    if answer.num_documents or selector == "contains":
        values, text = values | answer.to_json(), present_documents(answer, EMPTY_MESSAGES[selector])
    else:
        absent = _find_absent(answers, selector, arguments)
        values |= answer.to_json() | {"dropped": absent.dropped, "instead": absent.answer.to_json()}
        text, answer = "\n".join(absent.lines), absent.answer
    documents = [document for document, _ in answer.documents]
    code = _print_answer(arguments, answers, values, text, documents)
    return code if answer.num_documents else 1


@dataclass(frozen=True)
class Absent:
    """What became of documents that the dataset does not have under the requested URL, domain or id."""

    lines: list[str]
    """The text to print, with the trace of `answer`."""
    dropped: list[dict[str, Any]]
    """A JSON value for each dropped document: id, URL, stage, rule, value, limit and survivor."""
    answer: DocumentsAnswer
    """The trace of the documents that are in the dataset instead: survivors of dropped copies, and documents whose
    URL has personal data, which is replaced in the dataset."""


def _find_absent(answers: TraceAnswers, selector: str, arguments: Arguments) -> Absent:
    """Search the table `documents`, which also has dropped documents, and URLs as they were crawled."""
    if "documents" not in read_run(answers.run).tables:
        note = "the run has no table `documents`, which would show if it was dropped"
        return Absent([f"{EMPTY_MESSAGES[selector]}; {note}"], [], answers.documents(()))
    rows = list(_stored_documents(answers.run, selector, arguments))
    if not rows:
        return Absent([ABSENT_MESSAGES[selector]], [], answers.documents(()))
    meanings, lines, dropped = reasons_of_run(answers.run), list[str](), list[dict[str, Any]]()
    instead: dict[bytes, str] = {}
    for row in rows:
        own, named = row["doc_id"].hex()[:MIN_ID_DIGITS], f"  {printable(row['url'] or '')}".rstrip()
        if row["drop_stage"] is None:
            lines.append(f"document {own} is in the dataset, where its URL has placeholders for personal data{named}")
            instead[row["doc_id"]] = own
            continue
        survivor = row.get("dedup.survivor") if row["drop_stage"] == "dedup" else None
        lines.append(f"document {own} is not in the dataset: {verdict_of(row, meanings)}{named}")
        dropped.append(
            {"doc_id": row["doc_id"].hex(), "url": row["url"]}
            | {name.removeprefix("drop_"): row[name] for name in VERDICT_COLUMNS}
            | {"survivor": survivor.hex() if survivor else None}
        )
        if survivor:
            kind = "has the same text" if row["drop_rule"] == "exact_duplicate" else "is a near copy"
            lines.append(f"  document {survivor.hex()[:MIN_ID_DIGITS]} {kind} and was kept in its place")
            instead[survivor] = survivor.hex()[:MIN_ID_DIGITS]
    answer = answers.documents(instead)
    if answer.num_documents:
        lines += [f"trace of {', '.join(instead.values())}:", present_documents(answer, "")]
    elif instead:
        lines.append(
            f"{', '.join(instead.values())}: not in the dataset either; `penstock show RUN --doc ID` has the rule"
        )
    return Absent(lines, dropped, answer)


def _stored_documents(run: Store, selector: str, arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield up to `--limit` rows of `documents` with final verdicts, by URL (else its canonical form), domain or id."""
    LOGGER.info("trace: not in the dataset; searching the table `documents`")
    if selector == "domain":
        yield from find_documents(run, host_below(arguments.domain), _limit(arguments))
        return
    if selector == "doc":
        (whole,) = resolve_doc_ids(run, {arguments.doc: "--doc"})
        yield from find_documents(run, column_equals("doc_id", whole), 1)
        return
    rows = list(find_documents(run, column_equals("url", arguments.url), _limit(arguments)))
    yield from rows or find_documents(run, pc.field("url").is_valid(), _limit(arguments), arguments.url)


def check_trace(arguments: Arguments) -> None:
    """Raise ConfigError if an option would have no effect, or a number is out of range."""
    if arguments.step is None and (arguments.rank, arguments.micro_batch, arguments.ranks) != (None, None, None):
        raise ConfigError("trace: expected --step with --rank, --micro-batch or --ranks, got no --step. Add --step.")
    if arguments.rank is None and (arguments.micro_batch, arguments.ranks) != (None, None):
        raise ConfigError("trace: expected --rank with --micro-batch or --ranks, got no --rank. Add --rank.")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"trace --ranks: expected at least 1, got {arguments.ranks}. Give the number of ranks.")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"trace --limit: expected at least 1 document, got {arguments.limit}. Give a larger number.")
    if arguments.overrides and not arguments.refetch:
        raise ConfigError(
            "trace: expected --set and --unset only together with --refetch, got no --refetch. Add --refetch."
        )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace` except the run."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--step", type=whole, help="the documents of this step, from 1")
    either.add_argument("--url", help="the steps and checkpoints that saw this URL")
    either.add_argument(
        "--domain",
        metavar="HOST",
        help="the steps and checkpoints that saw a domain, the hosts below it included",
    )
    either.add_argument("--doc", metavar="ID", help=f"the steps and checkpoints that saw this document; {ID_HELP}")
    either.add_argument(
        "--contains",
        metavar="TEXT",
        help="the steps and checkpoints that saw a document with this text; reads the text of all documents",
    )
    parser.add_argument("--rank", type=whole, help="with --step: only the rows of this rank, from 0")
    parser.add_argument("--micro-batch", type=whole, help="with --rank: only the rows of this micro-batch, from 0")
    parser.add_argument(
        "--ranks",
        type=whole,
        help="number of ranks of the layout; default: the layout that training recorded for the step",
    )
    parser.add_argument(
        "--text", action="store_true", help="print the text that the model read, decoded from its tokens"
    )
    parser.add_argument(
        "--brief", action="store_true", help="omit title and signals, so that only the document index is read"
    )
    parser.add_argument(
        "--limit",
        type=whole,
        metavar="N",
        help=f"maximum number of documents to list, or to scan for; default {LISTED}, and all of a step",
    )
    parser.add_argument(
        "--refetch", action="store_true", help="read the original records again by byte range and compare them"
    )
    add_override_options(parser, "override a setting of [source] for --refetch")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _limit(arguments: Arguments) -> int:
    return LISTED if arguments.limit is None else int(arguments.limit)


def _find_documents(answers: TraceAnswers, selector: str, arguments: Arguments) -> DocumentsAnswer:
    if selector == "url":
        return answers.url(arguments.url)
    if selector == "doc":
        return answers.document(arguments.doc)
    if selector == "domain":
        return answers.domain(arguments.domain, _limit(arguments))
    if arguments.contains:
        LOGGER.info(f"trace: {describe_scan(answers.dataset)}")
    return answers.containing(arguments.contains, _limit(arguments))


def _print_answer(
    arguments: Arguments, answers: TraceAnswers, values: dict[str, Any], text: str, documents: Sequence[TracedDocument]
) -> int:
    """Print an answer. Return 1 if a refetched record has changed, else 0."""
    records = list(_refetch_records(arguments, answers, documents)) if arguments.refetch else []
    if arguments.json:
        known = {"run": answers.run.uri, "dataset": answers.dataset.digest, "steps": answers.trace.num_steps}
        again = {"records": [record | {"head": record["head"].decode("utf-8", "replace")} for record in records]}
        print(printable_json(known | values | (again if arguments.refetch else {}), indent=1))
    else:
        missing = [] if arguments.brief else answers.details.missing
        note = f"(without title or signals: the table {' and '.join(missing)} is missing)" if missing else ""
        print("\n".join(filter(None, [text, note, *(_present_record(record) for record in records)])))
    return int(any(record["changes"] for record in records))


def _refetch_records(
    arguments: Arguments, answers: TraceAnswers, documents: Sequence[TracedDocument]
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each distinct document: its original record, and the differences from the stored row."""
    recipe = stored_recipe(answers.run, arguments.overrides)
    fix = "Give the paths by --set source.paths='[\"…\"]' if you trust this server."
    check_addresses(answers.run, recipe, arguments.overrides, fix=fix)
    splits = {(split.source, split.name): split for split in splits_of(recipe)}
    for doc_id, place in {document.place.doc_id: document.place for document in documents}.items():
        source = _source_of(place)
        if (source, place.split) not in splits:
            raise ContractError(
                f"--refetch: expected the file {place.split} in source.paths, got no such file. Give its path by "
                "--set source.paths='[\"…\"]'."
            )
        recorded = answers.details.record(place.split, place.offset, doc_id)
        # Without the documents table only the byte range is known; the URL in the index is redacted.
        recorded = recorded or {"offset": place.offset, "length": place.length}
        config = recipe.of_source(source).section("source", SourceConfig)
        refetched: RefetchedRecord = refetch(splits[source, place.split], recorded, config)
        yield {"doc_id": doc_id, "record_known": "url" in recorded} | vars(refetched)


def _source_of(place: Appearance | FoundDocument) -> str:
    """Return the source of a document, without the quality bucket of its token stream."""
    stream = place.source if isinstance(place, Appearance) else place.stream.rpartition("/")[0]
    return stream.partition(BUCKET_SEPARATOR)[0]


def _present_record(record: dict[str, Any]) -> str:
    where = f"{record['doc_id'][:12]}  {printable(record['uri'])}@{record['offset']}+{record['length']}"
    if record["changes"]:
        changes = (f"  {printable(change)}" for change in record["changes"])
        return "\n".join([f"{where}: differs from the record that was read", *changes])
    same = "the same record" if record["record_known"] else "a record (not compared: there is no documents table)"
    lines = printable_lines(record["head"].decode("utf-8", "replace"))
    return "\n".join([f"{where}: {same}; RAW:", *(f"  | {line}" for line in lines)])


COMMANDS = {
    "trace": Command(
        (add_run, add_trace_arguments),
        trace_command,
        "trace run --step 12 --rank 0 --text",
    ),
}
