"""`penstock prove`: proofs that documents are, or are not, in a dataset version, and the script that checks them."""

import argparse
import importlib.resources
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.arguments import RUN_HELP, Command
from pipeline.membership.dataset import DatasetProofs, prove_in, tables_of
from pipeline.takedown.membership import encode_proofs
from pipeline.takedown.select import TakedownRequest, select_documents
from schemas.document_ids import ID_HELP, resolve_doc_ids
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.text import printable
from schemas.tokens import open_dataset
from schemas.versions import open_run

GROUP = "join"
VERBS = {
    "prove": "Prove that documents are, or are not, in a dataset. A script of the standard library checks it.",
}
SHOWN = 20
"""Maximum number of documents that are printed; the file has all of them."""


def add_prove_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `prove`."""
    parser.add_argument("run", nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--doc", action="append", default=[], help=f"a document by {ID_HELP}, or a whole id; may be repeated"
    )
    parser.add_argument("--url", action="append", default=[], help="the documents of a URL; may be repeated")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the proofs to this file, a JSON object in each line; those of a union to a file for each member, "
        "with its digest in the name",
    )
    parser.add_argument("--checker", action="store_true", help="print the script that checks proofs, and nothing else")


def prove_command(arguments: argparse.Namespace) -> int:
    """Print the root of a dataset and whether documents are in it, and write the proofs."""
    if arguments.checker:
        _print_checker(arguments)
        return 0
    if not arguments.run or not (arguments.doc or arguments.url):
        raise ConfigError("prove: expected a run with --doc or --url, got none. Give both, or --checker alone.")
    run = open_run(arguments.run)
    documents = {bytes.fromhex(own) for own in resolve_doc_ids(run, dict.fromkeys(arguments.doc, "--doc"))}
    if arguments.url:
        documents |= select_documents(run, TakedownRequest(urls=tuple(arguments.url))).documents
    dataset = open_dataset(run, even_replaced=True)
    proven = [prove_in(table, documents) for table in tables_of(dataset)]
    files = _files(arguments.out, proven) if arguments.out else []
    for path, own in zip(files, proven):
        Store(str(path.parent)).write_atomic(path.name, encode_proofs(own.proofs))
    if len(proven) > 1:
        print(f"dataset {dataset.digest[:12]}, a union of {len(proven)}; a document is absent if no member has it")
        print("\n".join(_describe_union(proven)))
    for own in proven:
        print("\n".join(_describe(own)))
    if files:
        names = ", ".join(printable(str(path)) for path in files)
        print(f"proofs: {names}; check one with the script of `penstock prove --checker`")
    return 0


def _files(out: str, proven: Sequence[DatasetProofs]) -> list[Path]:
    """Return the file for the proofs of each dataset. Those of the members of a union are named by their digests."""
    path = Path(out).absolute()
    if len(proven) == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{own.digest[:12]}{path.suffix}") for own in proven]


def _print_checker(arguments: argparse.Namespace) -> None:
    options = {"RUN": arguments.run, "--doc": arguments.doc, "--url": arguments.url, "--out": arguments.out}
    if given := [name for name, value in options.items() if value]:
        raise ConfigError(
            f"prove --checker: expected no other argument, got {', '.join(given)}. Remove the other arguments."
        )
    script = importlib.resources.files("pipeline.membership") / "check_proof.py"
    print(script.read_text(encoding="utf-8"), end="")


def _describe_union(proven: Sequence[DatasetProofs]) -> Iterator[str]:
    """Yield a line for each of the first documents: id, and the members of the union that have it."""
    rows = [*zip(*(own.proofs for own in proven), strict=True)]
    for proofs in rows[:SHOWN]:
        members = [own.digest[:12] for own, proof in zip(proven, proofs, strict=True) if proof.is_present]
        state = f"present in {', '.join(members)}" if members else "absent"
        yield f"  {proofs[0].doc_id.hex()}  {state}"
    yield from _more(rows)


def _describe(own: DatasetProofs) -> Iterator[str]:
    """Yield the digest and the root of a dataset, and of each of the first documents id, presence and size of proof."""
    yield f"dataset {own.digest[:12]}"
    yield f"root {own.root}"
    if not own.has_index:
        yield "an earlier version of penstock wrote it without an index by id, so all of its shards were read"
    for proof in own.proofs[:SHOWN]:
        yield f"  {proof.doc_id.hex()}  {'present' if proof.is_present else 'absent'}, {len(proof.path)} hashes"
    yield from _more(own.proofs)


def _more(rows: Sequence[object]) -> Iterator[str]:
    if len(rows) > SHOWN:
        yield f"  … and {len(rows) - SHOWN:,} more"


COMMANDS = {
    "prove": Command(
        (add_prove_arguments,),
        prove_command,
        "prove run --doc 554af381a185 --out proofs.jsonl",
    ),
}
