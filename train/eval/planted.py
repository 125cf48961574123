"""The test on the weights of a checkpoint for planted identifiers, of documents that it read and of removed ones.

The mean loss per token of an identifier, alone on its line, is compared with those of its controls: strings of the same
function that no file ever held. Without knowledge of the identifier its rank among them is uniform, whatever the model.
Source: Wei, Wang and Jia 2024, arXiv 2402.10892, section 3; the rank is the exposure of Carlini et al. 2019,
arXiv 1802.08232, as a share.
"""

import argparse
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from schemas.document_ids import resolve_doc_ids
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.ids import canonical_json
from schemas.key_file import commitment, read_key
from schemas.logs import print_error, printable_output
from schemas.planted import PURPOSE, planted_string
from schemas.ranks import LEVEL, POWER, rank_test
from schemas.storage import Store
from schemas.takedown import TAKEDOWN_ID, certificate_name, planted_name, read_certificate, salted_digest
from schemas.text import printable, printable_json_bytes
from schemas.tokens import Dataset
from train.checkpoint.folder import CheckpointMetadata, open_trained_order
from train.checkpoint.state import default_device, open_checkpoint, read_model, sequence_length_of
from train.data.order import SampleOrder
from train.dataset_history import digests_at_same_positions
from train.eval.planted_documents import (
    GROUPS,
    PlantedDocument,
    PlantedGroup,
    PlantedQuery,
    find_planted,
)
from train.eval.score import CheckpointScorer, open_offset_encoder
from train.plan.plan import stored_plan
from train.trace.consumed import order_until

VERSION = 1
CONTROLS, MOST = 99, 1000
"""Defaults: controls of an identifier, and maximum number of documents of a group."""
TEXTS_AT_ONCE = 512


def ranks_of(
    scorer: CheckpointScorer, key: bytes, documents: Sequence[PlantedDocument], controls: int
) -> Iterator[float]:
    """Yield the rank of each document's identifier: the number of its controls with a higher loss, and half of ties.

    Raises ContractError if a loss is not finite.
    """
    at_once = max(1, TEXTS_AT_ONCE // (controls + 1))
    for start in range(0, len(documents), at_once):
        own = documents[start : start + at_once]
        texts = [
            f"\n{planted_string(key, document.doc_id, number, document.length)}\n"
            for document in own
            for number in range(controls + 1)
        ]
        losses = scorer.losses_between(texts, [(1, len(text) - 1) for text in texts])
        means = np.array([loss.mean() if len(loss) else np.nan for loss in losses]).reshape(len(own), -1)
        if not np.isfinite(means).all():
            raise ContractError(
                "plant-test: expected finite losses of all strings, got others, because the model has diverged. Test "
                "an earlier checkpoint with --step."
            )
        higher, equal = (means[:, 1:] > means[:, :1]).sum(axis=1), (means[:, 1:] == means[:, :1]).sum(axis=1)
        yield from (higher + equal / 2).tolist()


def order_of(run: Store, dataset: Dataset, note: CheckpointMetadata) -> SampleOrder | None:
    """Return the order of the samples that a checkpoint was trained on; None at step 0.

    Raises ContractError if the plan of the run is for a dataset with other token positions.
    """
    plan = stored_plan(run)
    same = digests_at_same_positions(dataset)
    if plan is None or plan.dataset not in same or note.identity.dataset not in same:
        raise ContractError(
            f"{run.uri}: expected a plan and a checkpoint for dataset {dataset.digest[:12]}, or for one that "
            f"takedowns with tombstones have made it from, got {note.name} on {note.identity.dataset[:12]}. Train on "
            "the current dataset."
        )
    order = open_trained_order(run, dataset, plan.model_copy(update={"dataset": dataset.digest}))
    return order_until(order, note.step) if note.step else None


def result_of(
    run: Store, opened: tuple[Dataset, CheckpointMetadata], query: PlantedQuery, controls: int
) -> dict[str, Any]:
    """Return the result of the test as a JSON object, without the key and without strings."""
    dataset, note = opened
    groups = find_planted(dataset, order_of(run, dataset, note), query)
    if not any(group.number for group in groups.values()):
        raise ConfigError(
            "plant-test: expected at least one planted document, got none of this selection. Select other documents."
        )
    model = read_model(run, note, default_device())
    scorer = CheckpointScorer(model, open_offset_encoder(dataset), dataset.tokenizer, sequence_length_of(note))
    salt, certificates = secrets.token_hex(16), _certificates(dataset, groups)
    salts = {identifier: certificate.salt for identifier, certificate in certificates.items()}
    rows: list[dict[str, Any]] = [
        {
            "document": salted_digest(salts.get(own.takedown or "", salt), "document", own.doc_id),
            "group": name,
            "rank": rank,
            "takedown": own.takedown,
        }
        for name, group in groups.items()
        for own, rank in zip(group.documents, ranks_of(scorer, query.key, group.documents, controls), strict=True)
    ]
    rows.sort(key=lambda row: (row["group"], row["document"]))
    return {
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "dataset": dataset.digest,
        "checkpoint": {"step": note.step, "sha256": run.sha256(f"{note.name}/checkpoint.json")},
        "commitment": commitment(query.key, PURPOSE),
        "controls": controls,
        "salt": salt,
        "takedowns": {identifier: own.seal for identifier, own in certificates.items()},
        "documents": rows,
        "groups": {
            name: rank_test([row["rank"] for row in rows if row["group"] == name], controls) | {"of": group.number}
            for name, group in groups.items()
        },
    }


def _certificates(dataset: Dataset, groups: Mapping[str, PlantedGroup]) -> dict[str, Any]:
    """Return the certificates, by id, of the takedowns that removed documents of the test."""
    ids = sorted({own.takedown for group in groups.values() for own in group.documents if own.takedown})
    runs = [member.run for member in dataset.members]
    return {own: read_certificate(next(run for run in runs if run.exists(certificate_name(own))), own) for own in ids}


def describe_result(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a result: for each group its numbers and the verdict in words."""
    step, controls = result["checkpoint"]["step"], result["controls"]
    yield f"checkpoint of step {step}, dataset {result['dataset'][:12]}, {controls} controls for each identifier"
    for name, own in result["groups"].items():
        if not own["n"]:
            yield f"{name} ({GROUPS[name]}): no planted document"
            continue
        some = f" of {own['of']:,}" if own["of"] > own["n"] else ""
        yield f"{name} ({GROUPS[name]}): {own['n']:,}{some} documents, {own['verdict']}"
        yield (
            f"  mean rank {own['mean']:.3f} as AUC, {LEVEL:.0%} interval (Wilson) {own['low']:.3f} to "
            f"{own['high']:.3f}, z {own['z']:+.2f}, p {own['p']:.2g}; without knowledge it is 0.5"
        )
        yield f"  so many documents show a mean of {own['detectable']:.3f} or more with a probability of {POWER:.0%}"
    for identifier, seal in result["takedowns"].items():
        yield f"takedown {identifier}, seal {printable(seal)}"


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, test the checkpoint, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.planted", description="Test a checkpoint for identifiers.")
    parser.add_argument("run")
    parser.add_argument("--key-file", required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--controls", type=int, default=CONTROLS)
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("--takedown")
    parser.add_argument("--domain", action="append", default=[])
    parser.add_argument("--doc", action="append", default=[])
    parser.add_argument("--out")
    a = parser.parse_args(argv)
    try:
        if a.controls < 19 or a.most < 1:
            raise ConfigError(
                f"plant-test: expected --controls of at least 19 and --most of at least 1, got {a.controls} and "
                f"{a.most}. Raise the smaller one."
            )
        run, key = Store(a.run), read_key(a.key_file)
        opened = open_checkpoint(run, a.step, "causal")
        if a.takedown is not None and not re.fullmatch(TAKEDOWN_ID, a.takedown):
            raise ConfigError(
                f"--takedown: expected the id of a takedown, 12 hex digits, got {a.takedown!r:.80}. Copy it from the "
                "name of its certificate."
            )
        docs = frozenset(map(bytes.fromhex, resolve_doc_ids(run, dict.fromkeys(a.doc, "--doc"))))
        query = PlantedQuery(key, a.most, frozenset(a.domain), docs, a.takedown)
        result = result_of(run, opened, query, a.controls)
        print("\n".join(describe_result(result)))
        for place in _write(run, result, a.takedown, a.out):
            print(f"result: {place}; check it with the script of `penstock plant-test --checker`")
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


def _write(run: Store, result: Mapping[str, Any], takedown: str | None, out: str | None) -> Iterator[str]:
    """Write a result to the file `out`, and beside the certificate of a takedown; yield the paths."""
    data = printable_json_bytes(canonical_json(result))
    if out is not None:
        folder, _, name = out.rpartition("/")
        Store(folder or ".").write_atomic(name, data)
        yield out
    if takedown is not None:
        name = planted_name(takedown, result["checkpoint"]["step"])
        run.write_atomic(name, data)
        yield f"{run.uri}/{name}"


if __name__ == "__main__":
    sys.exit(main())
