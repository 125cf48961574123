"""`penstock prove`: proofs that documents are, or are not, in a dataset version, and the script that checks them."""

import argparse
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from jobs.arguments import RUN_HELP, Command
from pipeline.membership.dataset import prove_documents
from pipeline.membership.tree import Proof
from pipeline.takedown.membership import encode_proofs
from pipeline.takedown.select import TakedownRequest, select_documents
from schemas.document_ids import ID_HELP, resolve_doc_ids
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.takedown import MEMBERSHIP
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
    parser.add_argument("--out", metavar="FILE", help="write the proofs to this file, a JSON object in each line")
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
    root, proofs = prove_documents(dataset.folder, dataset.streams, documents)
    stated = dataset.manifest.content.figures.get(MEMBERSHIP, root)
    if stated != root:
        raise ContractError(
            f"{dataset.folder.uri}: expected Merkle root {printable(str(stated))[:64]}, as in its manifest, got {root} "
            "from its shards. Restore the manifest from a backup."
        )
    if arguments.out:
        path = Path(arguments.out).absolute()
        Store(str(path.parent)).write_atomic(path.name, encode_proofs(proofs))
    print(f"dataset {dataset.digest[:12]}\nroot {root}\n{_describe(proofs)}")
    if arguments.out:
        print(f"proofs: {printable(arguments.out)}; check one with the script of `penstock prove --checker`")
    return 0


def _print_checker(arguments: argparse.Namespace) -> None:
    options = {"RUN": arguments.run, "--doc": arguments.doc, "--url": arguments.url, "--out": arguments.out}
    if given := [name for name, value in options.items() if value]:
        raise ConfigError(
            f"prove --checker: expected no other argument, got {', '.join(given)}. Remove the other arguments."
        )
    script = importlib.resources.files("pipeline.membership") / "check_proof.py"
    print(script.read_text(encoding="utf-8"), end="")


def _describe(proofs: Sequence[Proof]) -> str:
    """Return a line for each of the first documents: id, presence, and size of its proof."""
    lines = [
        f"  {proof.doc_id.hex()}  {'present' if proof.is_present else 'absent'}, {len(proof.path)} hashes"
        for proof in proofs[:SHOWN]
    ]
    more = len(proofs) - SHOWN
    return "\n".join([*lines, *([f"  … and {more:,} more"] if more > 0 else [])])


COMMANDS = {
    "prove": Command(
        (add_prove_arguments,),
        prove_command,
        "prove run --doc 554af381a185 --out proofs.jsonl",
    ),
}
