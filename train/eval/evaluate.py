"""Held-out losses across runs: checkpoints measured on the held-out rows of any dataset of the same tokenizer.

The rows are the first of each source in stored order, evaluated in fp32 by one process. A document is left out for all
runs if one of the runs, or of the weights from which its training began, was trained on it, or on a copy of it by the
duplicate clusters of any run. All checkpoints are therefore measured on the same tokens, and none was trained on any of
them. A warning names weights of which it is not known.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from schemas.ablation import Measurement, SourceLoss, sum_losses
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.ids import canonical_json, digest_of
from schemas.logs import LOGGER, print_error, printable_output
from schemas.storage import Store
from schemas.text import format_duration, printable_json_bytes
from schemas.tokens import Dataset, open_dataset
from train.ancestors import EarlierData, data_before
from train.checkpoint.folder import CheckpointMetadata
from train.checkpoint.state import STORED_WEIGHTS, default_device, open_checkpoint, read_model, sequence_length_of
from train.config.train import TrainConfig
from train.data.batches import Batches, HeldoutRows
from train.data.heldout import (
    OBJECTIVES,
    HeldoutDocument,
    heldout_documents,
    row_starts,
    trained_copies,
    trained_documents,
)
from train.data.order import SampleOrder, heldout_streams
from train.data.rows import IGNORED, Rows
from train.data.stages import StagePlan
from train.model.loss import LossTally

SEQUENCES = 512
"""Default number of held-out rows of each source."""
BATCH_TOKENS = 8192
"""Positions of a forward pass. Not a setting: other batch shapes can change the last bits of the losses."""


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint whose held-out losses are measured."""

    name: str
    run: Store
    dataset: Dataset
    note: CheckpointMetadata
    weights: str = STORED_WEIGHTS[0]

    @property
    def seq_len(self) -> int:
        """Sequence length of the training stage that the checkpoint was written in [tokens]."""
        return sequence_length_of(self.note)


@dataclass(frozen=True)
class HeldoutExam:
    """Held-out rows of a dataset, without targets in documents that an evaluated run was trained on."""

    dataset: Dataset
    heldout: HeldoutRows
    """The rows, with the documents of their positions if a candidate was trained with a document mask."""
    bytes_per_token: dict[str, float]
    documents: int
    left_out: int
    left_out_targets: int


def open_candidate(name: str, step: int | None, weights: str = STORED_WEIGHTS[0]) -> EvaluatedCheckpoint:
    """Return the checkpoint of a step in the run folder `name`; None = the last step. `weights`: of STORED_WEIGHTS.

    Raises ContractError if the checkpoint was trained on a dataset or with a plan other than the run's current one.
    """
    run = Store(name)
    dataset, note = open_checkpoint(run, step, *OBJECTIVES)
    if note.identity.dataset != dataset.digest:
        raise ContractError(
            f"{name}/{note.name}: expected dataset {note.identity.dataset[:12]}, on which the checkpoint was trained, "
            f"got the run's dataset {dataset.digest[:12]}. Train on the run's dataset with `penstock train`, then "
            "evaluate the new checkpoint."
        )
    return EvaluatedCheckpoint(name, run, dataset, note, weights)


def check_tokenizers(candidates: Sequence[EvaluatedCheckpoint], exams: Sequence[tuple[str, Dataset]]) -> None:
    """Check that all datasets and checkpoints have the same tokenizer contract. Raises ContractError if not."""
    contracts = [(item.name, digest_of(item.dataset.tokenizer.model_dump(mode="json"))) for item in candidates]
    contracts += [(name, digest_of(dataset.tokenizer.model_dump(mode="json"))) for name, dataset in exams]
    first, expected = contracts[0]
    for name, digest in contracts:
        if digest != expected:
            raise ContractError(
                f"{name}: expected the tokenizer contract of {first} ({expected[:12]}), got {digest[:12]}. Losses per "
                "token of two tokenizers cannot be compared: set tokenizer.model to one file for both runs."
            )


def make_exam(
    on: Dataset, candidates: Sequence[EvaluatedCheckpoint], number: int, left_out: Iterable[bytes] = ()
) -> HeldoutExam:
    """Return the first `number` held-out rows of each source of a dataset, which every candidate will read.

    Documents in `left_out`, and documents that a candidate was trained on, have no targets. Raises ConfigError if
    there are no held-out rows, and ContractError if a shard of theirs does not have its SHA-256.
    """
    first = candidates[0]
    streams = heldout_streams(on, first.seq_len)
    if not streams:
        raise ConfigError(
            f"{on.folder.uri}: expected held-out rows of {first.seq_len} tokens, got none. Run the recipe with a "
            "larger tokens.heldout_share."
        )
    # `Batches` needs a sample order; one over the held-out rows will do, since no training row is read.
    stage = StagePlan(
        first_step=0, num_steps=1, seq_len=first.seq_len, global_batch=1, counts=dict.fromkeys(streams, 1)
    )
    batches = Batches(on.by_sha256(), _config_of(candidates), SampleOrder(streams, [stage]))
    heldout = batches.heldout(number)
    documents = heldout_documents(on, first.seq_len, number)
    others = {item.dataset.digest: item.dataset for item in candidates if item.dataset.digest != on.digest}
    unfit = {*left_out}.union(
        *(trained_documents([d.doc_id for d in documents], dataset) for dataset in others.values())
    )
    hidden = [document for document in documents if document.doc_id in unfit]
    remaining = mask_documents(heldout, hidden, row_starts(on, first.seq_len, number), OBJECTIVES[_objective(first)])
    lost = int((heldout.rows.targets_BT != IGNORED).sum() - (remaining.rows.targets_BT != IGNORED).sum())
    return HeldoutExam(on, remaining, batches.bytes_per_token, len(documents), len(hidden), lost)


def mask_documents(heldout: HeldoutRows, hidden: Sequence[HeldoutDocument], starts: Any, ahead: int) -> HeldoutRows:
    """Return the rows with every target in a document of `hidden` set to IGNORED.

    `starts`: stream position of each row's first token, by source. `ahead`: number of tokens from a position to its
    target.
    """
    if not hidden:
        return heldout
    targets_BT = heldout.rows.targets_BT.clone()
    length, row = targets_BT.shape[1], 0
    for source in heldout.sources:
        spans = [(document.first, document.end) for document in hidden if document.source == source]
        for start in starts[source].tolist():
            for first, end in spans:
                begin, stop = max(first - start - ahead, 0), min(end - start - ahead, length)
                if begin < stop:
                    targets_BT[row, begin:stop] = IGNORED
            row += 1
    return replace(heldout, rows=replace(heldout.rows, targets_BT=targets_BT, counted=None))


@torch.no_grad()
def measure_checkpoint(candidate: EvaluatedCheckpoint, exams: Sequence[HeldoutExam]) -> list[Measurement]:
    """Return the losses of a checkpoint on the held-out rows of each dataset."""
    device = default_device()
    model = read_model(candidate.run, candidate.note, device, candidate.weights)
    masked = bool(_setting(candidate, "document_mask"))
    measurements = []
    for exam in exams:
        model.loss.tally = tally = LossTally.empty(len(exam.heldout.sources), device, counts_right=True)
        for rows in _parts(exam.heldout.rows if masked else replace(exam.heldout.rows, documents_BT=None)):
            documents_BT = None if rows.documents_BT is None else rows.documents_BT.to(device)
            model(rows.inputs_BT.to(device), documents_BT, rows.targets_BT.to(device), rows.sources_B.to(device))
        if not math.isfinite(lost := float(tally.losses_S.sum())):
            raise ContractError(
                f"{candidate.name}/{candidate.note.name}: expected held-out losses, got {lost}, because the model has "
                "diverged. Train the run again with a lower optim.learning_rate."
            )
        right_S = [] if tally.right_S is None else tally.right_S.tolist()
        sums = zip(exam.heldout.sources, tally.losses_S.tolist(), tally.counts_S.tolist(), right_S, strict=True)
        sources = {
            name: SourceLoss(
                nats=nats, targets=round(count), bytes=count * exam.bytes_per_token[name], right=round(right)
            )
            for name, nats, count, right in sums
            if count
        }
        measurements.append(
            Measurement(
                run=candidate.name,
                checkpoint=candidate.note.name,
                trained_on=candidate.dataset.digest,
                on=exam.dataset.digest,
                sources=sources,
                documents=exam.documents,
                left_out=exam.left_out,
                left_out_targets=exam.left_out_targets,
            )
        )
    return measurements


def evaluate(
    names: Sequence[str],
    on: Sequence[str],
    number: int,
    left_out: Iterable[bytes],
    step: int | None,
    weights: str = STORED_WEIGHTS[0],
) -> Any:
    """Yield the losses of every checkpoint on every dataset. `weights`: of STORED_WEIGHTS.

    Runs and datasets are checked before anything is measured; raises PenstockError if a check fails.
    """
    candidates = [open_candidate(name, step, weights) for name in names]
    datasets = [(name, open_dataset(Store(name))) for name in on]
    check_tokenizers(candidates, datasets)
    # These decide the tokens that are predicted; every run is read with a document mask of its own.
    facts = [(own.seq_len, _objective(own), *([_setting(own, "mask_share")] * _masks(own))) for own in candidates]
    if len(set(facts)) > 1:
        got = "; ".join(f"{own.name}: {', '.join(map(str, fact))}" for own, fact in zip(candidates, facts, strict=True))
        raise ConfigError(
            f"evaluate: expected runs with equal train.seq_len, train.objective and train.mask_share, got {got}. Leave "
            "out the runs that differ."
        )
    seq_len, opened = candidates[0].seq_len, [dataset for _, dataset in datasets]
    held = {document.doc_id for dataset in opened for document in heldout_documents(dataset, seq_len, number)}
    unfit = {*left_out, *_read_documents(candidates, [Store(name) for name in on], held)}
    exams = [make_exam(dataset, candidates, number, unfit) for dataset in opened]
    for candidate in candidates:
        yield from measure_checkpoint(candidate, exams)


def _read_documents(candidates: Sequence[EvaluatedCheckpoint], on: Sequence[Store], held: set[bytes]) -> set[bytes]:
    """Return those of the held-out documents that weights before a training have read, and those with a trained copy.

    Documents that a candidate itself was trained on are left to `make_exam`.
    """
    earlier = [_earlier_data(candidate) for candidate in candidates]
    before = [entry for data in earlier for entry in data.opened]
    trained = {own.digest: own for own in (*(candidate.dataset for candidate in candidates), *(d for _, d in before))}
    runs = {run.uri: run for run in (*(candidate.run for candidate in candidates), *on, *(run for run, _ in before))}
    read = trained_copies([*runs.values()], [*trained.values()], held)
    return read.union(
        *(trained_documents(held, dataset) for dataset in {own.digest: own for _, own in before}.values()),
        *(data.removed(held) for data in earlier),
    )


def _earlier_data(candidate: EvaluatedCheckpoint) -> EarlierData:
    """Return the datasets of the weights that a candidate's training began from; warn of those that are not known."""
    data = data_before(candidate.run, candidate.note)
    for name in data.unknown:
        LOGGER.warning(
            f"evaluate: it is NOT KNOWN whether {name}, from which {candidate.name} began, was trained on held-out "
            "documents. If so, its losses are too low."
        )
    return data


def _parts(rows: Rows) -> Iterable[Rows]:
    size = max(1, BATCH_TOKENS // rows.inputs_BT.shape[1])
    for start in range(0, len(rows.inputs_BT), size):
        part = slice(start, start + size)
        documents_BT = None if rows.documents_BT is None else rows.documents_BT[part]
        yield Rows(rows.inputs_BT[part], rows.targets_BT[part], documents_BT, rows.sources_B[part])


def _setting(candidate: EvaluatedCheckpoint, name: str) -> Any:
    """Return a setting of `[train]` that the checkpoint was trained with."""
    return candidate.note.identity.settings[f"train.{name}"]


def _objective(candidate: EvaluatedCheckpoint) -> str:
    return str(_setting(candidate, "objective"))


def _masks(candidate: EvaluatedCheckpoint) -> bool:
    """Return True if the objective masks a share of the tokens."""
    return _objective(candidate) != "causal"


def _config_of(candidates: Sequence[EvaluatedCheckpoint]) -> TrainConfig:
    """Return the checkpoints' training settings that affect how held-out rows are read."""
    first = candidates[0]
    values = {name: _setting(first, name) for name in ("objective", *(["mask_share"] if _masks(first) else []))}
    masked = any(_setting(candidate, "document_mask") for candidate in candidates)
    return TrainConfig.model_validate(values | {"document_mask": masked, "seq_len": first.seq_len})


def read_ids(path: str) -> list[bytes]:
    """Return the document ids of a file, one per line. Raises ConfigError if a line is not an id."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [bytes.fromhex(line) for line in lines.read().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--leave-out {path}: expected a file with one document id in hex per line, got an error: "
            f"{error}. Correct the file or its path."
        ) from error


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.evaluate", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders; the last checkpoint of each is measured")
    parser.add_argument(
        "--on", action="append", required=True, help="run folder whose held-out rows are read; may be repeated"
    )
    parser.add_argument("--out", help="JSON file for the measurements")
    parser.add_argument("--step", type=int, help="step of the checkpoints; default: the last of each")
    parser.add_argument(
        "--weights", choices=STORED_WEIGHTS, default=STORED_WEIGHTS[0], help="those of the last update, or averaged"
    )
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="held-out rows of each source")
    parser.add_argument("--leave-out", help="file of document ids that are left out")
    a = parser.parse_args(argv)
    measurements: list[Measurement] = []
    try:
        if a.sequences < 1:
            raise ConfigError(f"--sequences: expected at least 1, got {a.sequences}. Set --sequences to at least 1.")
        left_out, started = read_ids(a.leave_out) if a.leave_out else [], time.monotonic()
        for measurement in evaluate(a.runs, a.on, a.sequences, left_out, a.step, a.weights):
            measurements.append(measurement)
            print(describe_measurement(measurement, time.monotonic() - started), flush=True)
        if a.out:
            folder, _, name = a.out.rpartition("/")
            Store(folder or ".").write_atomic(
                name,
                printable_json_bytes(canonical_json([item.model_dump(mode="json") for item in measurements])),
            )
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


def describe_measurement(measurement: Measurement, seconds: float) -> str:
    """Return a measurement as a few lines of text."""
    took = format_duration(seconds)
    lines = [f"{measurement.run}/{measurement.checkpoint} on dataset {measurement.on[:12]}  ({took})"]
    sources = sorted(measurement.sources.items())
    # The mean over all targets, as the held-out loss that training prints.
    rows = [*sources, ("all", sum_losses(measurement.sources.values()))] if len(sources) > 1 else sources
    width = max(12, *(len(name) for name, _ in rows)) if rows else 12
    for name, loss in rows:
        bits = "" if loss.bits_per_byte is None else f"  {loss.bits_per_byte:.4f} bits/byte"
        right = "" if loss.accuracy is None else f"  {100 * loss.accuracy:.1f} % right"
        lines.append(f"  {name:<{width}} {loss.loss:.4f} nats/token{bits}{right}  {loss.targets:,} targets")
    if measurement.left_out:
        left_out = f"{measurement.left_out:,} of {measurement.documents:,} documents"
        lines.append(f"  left out: {left_out} that a run was trained on, or on a copy")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
