"""`penstock trace`: from a step to its documents and back, and the original records behind them."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jobs.recipe import stored_recipe
from pipeline.sources.config import SourceConfig
from pipeline.sources.refetch import RefetchedRecord, refetch
from pipeline.sources.splits import find_splits
from schemas.errors import ConfigError, ContractError
from schemas.versions import open_run
from train.trace.answer import AnswerOptions, DocumentsAnswer, RowSelection, TraceAnswers, TracedDocument, to_json_value
from train.trace.answer_text import present_documents, present_step, replace_control_characters
from train.trace.documents import describe_scan

Arguments = argparse.Namespace
EMPTY_MESSAGES = {
    "url": "no document has this URL; URLs are stored with personal data replaced, compare with `penstock show`",
    "domain": "no document is of this domain; give a registrable domain such as example.com, or a host below one",
    "doc": "no document of the dataset has this id; `penstock show RUN --doc …` says whether one was dropped",
    "contains": "no document of the dataset contains this string, as it stands, case included",
}
"""What is said when nothing was found, by what was asked for."""


def trace_command(arguments: Arguments) -> int:
    """Print the documents of a step, or the steps and checkpoints that saw a document."""
    check_trace(arguments)
    run = open_run(arguments.run)
    answers = TraceAnswers(run, AnswerOptions(details=not arguments.brief, text=arguments.text))
    if arguments.step is not None:
        place = RowSelection(arguments.rank, arguments.micro_batch, arguments.ranks)
        step = answers.step(arguments.step, place)
        return _tell(arguments, answers, step.to_json(), present_step(step), step.parts)
    asked = next(name for name in EMPTY_MESSAGES if getattr(arguments, name) is not None)
    found = _documents(answers, asked, arguments)
    told = [one for one, _ in found.documents]
    text = present_documents(found, EMPTY_MESSAGES[asked])
    code = _tell(arguments, answers, {asked: getattr(arguments, asked)} | found.to_json(), text, told)
    return code if found.num_documents else 1


def check_trace(arguments: Arguments) -> None:
    """Raises ConfigError if an option would be ignored, or numbers are out of range."""
    if arguments.step is None and (arguments.rank, arguments.micro_batch, arguments.ranks) != (None, None, None):
        raise ConfigError("trace: expected --step with --rank, --micro-batch or --ranks, got none. Leave them out.")
    if arguments.rank is None and (arguments.micro_batch, arguments.ranks) != (None, None):
        raise ConfigError("trace: expected --rank with --micro-batch or --ranks, got none. Say which rank.")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"trace --ranks: expected 1 or more, got {arguments.ranks}")
    if arguments.limit < 1:
        raise ConfigError(f"trace --limit: expected 1 or more documents, got {arguments.limit}")
    if arguments.overrides and not arguments.refetch:
        raise ConfigError("trace --set: expected with --refetch, which reads [source], got without. Leave it out.")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace` but for the run."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--step", type=int, help="the documents of this step, from 1")
    either.add_argument("--url", help="the steps and checkpoints that saw this URL")
    either.add_argument("--domain", metavar="HOST", help="that saw a registrable domain, or a host and those below it")
    either.add_argument("--doc", metavar="ID", help="that saw this document, 32 hex digits")
    either.add_argument("--contains", metavar="TEXT", help="that saw a document with this text: a scan, not a look-up")
    parser.add_argument("--rank", type=int, help="of a step: the rows of this rank alone, from 0")
    parser.add_argument("--micro-batch", type=int, help="of a rank: the rows of this micro-batch alone, from 0")
    parser.add_argument("--ranks", type=int, help="lay out the plan on so many ranks; default: as checkpoints tell")
    parser.add_argument("--text", action="store_true", help="print the text as the model read it, from its tokens")
    parser.add_argument("--brief", action="store_true", help="leave out title and signals: the index alone is read")
    parser.add_argument("--limit", type=int, default=20, help="most documents to list, and to scan for; default 20")
    parser.add_argument("--refetch", action="store_true", help="read the original records again, by byte range")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _documents(answers: TraceAnswers, asked: str, arguments: Arguments) -> DocumentsAnswer:
    if asked == "url":
        return answers.url(arguments.url)
    if asked == "doc":
        return answers.document(arguments.doc)
    if asked == "domain":
        return answers.domain(arguments.domain, arguments.limit)
    if arguments.contains:
        print(f"trace: {describe_scan(answers.dataset)}", file=sys.stderr)
    return answers.containing(arguments.contains, arguments.limit)


def _tell(
    arguments: Arguments, answers: TraceAnswers, found: dict[str, Any], text: str, told: Sequence[TracedDocument]
) -> int:
    """Print an answer, with the records read again if they are asked for; 1 if one of them is another now."""
    records = list(_refetched(arguments, answers, told)) if arguments.refetch else []
    if arguments.json:
        known = {"run": answers.run.uri, "dataset": answers.dataset.digest, "steps": answers.trace.num_steps}
        again = {"records": [record | {"head": record["head"].decode("utf-8", "replace")} for record in records]}
        print(
            json.dumps(
                to_json_value(known | found | (again if arguments.refetch else {})), ensure_ascii=False, indent=1
            )
        )
    else:
        missing = [] if arguments.brief else answers.details.missing
        note = f"(without title or signals: the table {' and '.join(missing)} is not there)" if missing else ""
        print("\n".join(filter(None, [text, note, *(_present_record(record) for record in records)])))
    return int(any(record["changes"] for record in records))


def _refetched(arguments: Arguments, answers: TraceAnswers, told: Sequence[TracedDocument]) -> Iterator[dict[str, Any]]:
    """The record of every document, once each."""
    config = stored_recipe(answers.run, arguments.overrides).section("source", SourceConfig)
    splits = {split.name: split for split in find_splits(config)}
    for doc_id, place in {one.place.doc_id: one.place for one in told}.items():
        if place.split not in splits:
            raise ContractError(
                f"--refetch: expected the file {place.split}, got it in none of source.paths. Name where it lies by "
                "--set source.paths='[\"…\"]'."
            )
        recorded = answers.details.record(place.split, place.offset, doc_id)
        # Without the table only the place is known; the URL of the index is redacted.
        recorded = recorded or {"offset": place.offset, "length": place.length}
        found: RefetchedRecord = refetch(splits[place.split], recorded, config)
        yield {"doc_id": doc_id, "record_known": "url" in recorded} | vars(found)


def _present_record(record: dict[str, Any]) -> str:
    where = f"{record['doc_id'][:12]}  {record['uri']}@{record['offset']}+{record['length']}"
    if record["changes"]:
        return "\n".join([f"{where}: no longer the record that was read", *(f"  {one}" for one in record["changes"])])
    same = "the same record" if record["record_known"] else "a record (what it was is not known: no documents table)"
    lines = record["head"].decode("utf-8", "replace").splitlines()
    return "\n".join([f"{where}: {same}; RAW:", *(f"  | {replace_control_characters(line)}" for line in lines)])
