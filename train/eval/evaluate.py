"""Held-out losses across runs: checkpoints measured on the held-out rows of any dataset of the same tokenizer.

Rows are the first ones of each source as they stand, read in fp32 by one process. A document that one of the runs was
trained on, or on a copy of it that any run's clusters know, is left out for all of them: so all are asked about the
same tokens, none of which any has seen.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from schemas.ablation import Measurement, SourceLoss
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.ids import canonical_json, digest_of
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.load import check_objective, default_device, find_checkpoint, read_model, sequence_length_of
from train.checkpoint.metadata import CheckpointMetadata
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
"""Held-out rows of each source that are read where nothing else is asked."""
BATCH_TOKENS = 8192
"""Positions that go through the model at once. Not a setting: other shapes of a batch can change the last bits."""


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint to be measured."""

    name: str
    run: Store
    dataset: Dataset
    note: CheckpointMetadata

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return sequence_length_of(self.note)


@dataclass(frozen=True)
class HeldoutExam:
    """Held-out rows with what may not be asked taken out of their targets."""

    dataset: Dataset
    heldout: HeldoutRows
    bytes_per_token: dict[str, float]
    documents: int
    left_out: int
    left_out_targets: int


def open_candidate(name: str, step: int | None) -> EvaluatedCheckpoint:
    """The checkpoint of a run, None = its last. Raises ContractError if it is not of the dataset that stands."""
    run = Store(name)
    note, dataset = find_checkpoint(run, step), open_dataset(run)
    check_objective(note, *OBJECTIVES)
    if note.identity.dataset != dataset.digest:
        raise ContractError(
            f"{name}/{note.name}: expected dataset {note.identity.dataset[:12]}, the run now holds "
            f"{dataset.digest[:12]}, so what it was trained on cannot be told. Train on it, or replay the takedown."
        )
    return EvaluatedCheckpoint(name, run, dataset, note)


def check_tokenizers(candidates: Sequence[EvaluatedCheckpoint], exams: Sequence[tuple[str, Dataset]]) -> None:
    """Raises ContractError if a dataset has not the tokenizer of the checkpoints: their losses mean other things."""
    contracts = [(one.name, digest_of(one.dataset.tokenizer.model_dump(mode="json"))) for one in candidates]
    contracts += [(name, digest_of(dataset.tokenizer.model_dump(mode="json"))) for name, dataset in exams]
    first, expected = contracts[0]
    for name, found in contracts:
        if found != expected:
            raise ContractError(
                f"{name}: expected the tokenizer contract of {first} ({expected[:12]}), got {found[:12]}. Losses per "
                "token of two tokenizers cannot be compared: give both runs one (tokenizer.model)."
            )


def make_exam(
    on: Dataset, candidates: Sequence[EvaluatedCheckpoint], number: int, left_out: Iterable[bytes] = ()
) -> HeldoutExam:
    """The held-out rows of a dataset for these candidates. Raises ConfigError if there are none."""
    first = candidates[0]
    streams = heldout_streams(on, first.seq_len)
    if not streams:
        raise ConfigError(
            f"{on.folder.uri}: expected held-out rows of {first.seq_len} tokens, got none. Run the recipe with a "
            "larger tokens.heldout_share."
        )
    # The training rows are nobody's concern here, so the order that has to be named is one of held-out rows.
    stage = StagePlan(
        first_step=0, num_steps=1, seq_len=first.seq_len, global_batch=1, counts=dict.fromkeys(streams, 1)
    )
    batches = Batches(on, _config_of(first), SampleOrder(streams, [stage]))
    heldout = batches.heldout(number)
    documents = heldout_documents(on, first.seq_len, number)
    others = {one.dataset.digest: one.dataset for one in candidates if one.dataset.digest != on.digest}
    unfit = {*left_out}.union(
        *(trained_documents([d.doc_id for d in documents], dataset) for dataset in others.values())
    )
    hidden = [document for document in documents if document.doc_id in unfit]
    asked = mask_documents(heldout, hidden, row_starts(on, first.seq_len, number), OBJECTIVES[_objective(first)])
    lost = int((heldout.rows.targets_BT != IGNORED).sum() - (asked.rows.targets_BT != IGNORED).sum())
    return HeldoutExam(on, asked, batches.bytes_per_token, len(documents), len(hidden), lost)


def mask_documents(heldout: HeldoutRows, hidden: Sequence[HeldoutDocument], starts: Any, ahead: int) -> HeldoutRows:
    """The rows with the targets of some documents taken out; `ahead`: how far a target lies behind its position."""
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
    """What a checkpoint loses on each of the exams."""
    device = default_device()
    model = read_model(candidate.run, candidate.note, device)
    found = []
    for exam in exams:
        model.loss.tally = tally = LossTally.empty(len(exam.heldout.sources), device)
        for rows in _parts(exam.heldout.rows):
            documents_BT = None if rows.documents_BT is None else rows.documents_BT.to(device)
            model(rows.inputs_BT.to(device), documents_BT, rows.targets_BT.to(device), rows.sources_B.to(device))
        if not math.isfinite(lost := float(tally.losses_S.sum())):
            raise ContractError(
                f"{candidate.name}/{candidate.note.name}: expected held-out losses, got {lost}: the model has "
                "diverged. Train it at a lower optim.learning_rate."
            )
        sums = zip(exam.heldout.sources, tally.losses_S.tolist(), tally.counts_S.tolist(), strict=True)
        sources = {
            name: SourceLoss(nats=nats, targets=round(count), bytes=count * exam.bytes_per_token[name])
            for name, nats, count in sums
            if count
        }
        found.append(
            Measurement(
                run=candidate.name,
                checkpoint=candidate.note.name,
                trained_documents=candidate.dataset.digest,
                on=exam.dataset.digest,
                sources=sources,
                documents=exam.documents,
                left_out=exam.left_out,
                left_out_targets=exam.left_out_targets,
            )
        )
    return found


def evaluate(names: Sequence[str], on: Sequence[str], number: int, left_out: Iterable[bytes], step: int | None) -> Any:
    """Every checkpoint on every dataset, as they come. Raises PenstockError before anything is measured."""
    candidates = [open_candidate(name, step) for name in names]
    datasets = [(name, open_dataset(Store(name))) for name in on]
    check_tokenizers(candidates, datasets)
    if len(shapes := {(one.seq_len, _objective(one)) for one in candidates}) > 1:
        raise ConfigError(f"evaluate: expected checkpoints of one seq_len and objective, got {sorted(shapes)}")
    seq_len, runs = candidates[0].seq_len, [*(one.run for one in candidates), *(Store(name) for name in on)]
    held = {one.doc_id for _, dataset in datasets for one in heldout_documents(dataset, seq_len, number)}
    trained = {one.dataset.digest: one.dataset for one in candidates}
    unfit = trained_copies(runs, list(trained.values()), held).union(left_out)
    exams = [make_exam(dataset, candidates, number, unfit) for _, dataset in datasets]
    for candidate in candidates:
        yield from measure_checkpoint(candidate, exams)


def _parts(rows: Rows) -> Iterable[Rows]:
    size = max(1, BATCH_TOKENS // rows.inputs_BT.shape[1])
    for start in range(0, len(rows.inputs_BT), size):
        part = slice(start, start + size)
        documents_BT = None if rows.documents_BT is None else rows.documents_BT[part]
        yield Rows(rows.inputs_BT[part], rows.targets_BT[part], documents_BT, rows.sources_B[part])


def _objective(candidate: EvaluatedCheckpoint) -> str:
    return str(candidate.note.identity.settings["train.objective"])


def _config_of(candidate: EvaluatedCheckpoint) -> TrainConfig:
    """What decides how held-out rows are read, as the checkpoint was trained."""
    settings = candidate.note.identity.settings
    names = ["objective", "document_mask", *(["mask_share"] if _objective(candidate) != "causal" else [])]
    given = {name: settings[f"train.{name}"] for name in names}
    return TrainConfig.model_validate(given | {"seq_len": candidate.seq_len})


def read_ids(path: str) -> list[bytes]:
    """The document ids of a file, a line each. Raises ConfigError if one is none."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [bytes.fromhex(line) for line in lines.read().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--leave-out {path}: expected ids of documents in hex, a line each, got {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.evaluate", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders, the last checkpoint of each")
    parser.add_argument("--on", action="append", required=True, help="run folder whose held-out rows are read")
    parser.add_argument("--out", help="JSON file of what was measured")
    parser.add_argument("--step", type=int, help="step of the checkpoints; default: the last of each")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="held-out rows of each source")
    parser.add_argument("--leave-out", help="file of document ids that do not count")
    a = parser.parse_args(argv)
    found: list[Measurement] = []
    try:
        if a.sequences < 1:
            raise ConfigError(f"--sequences: expected at least 1, got {a.sequences}")
        left_out, started = read_ids(a.leave_out) if a.leave_out else [], time.monotonic()
        for one in evaluate(a.runs, a.on, a.sequences, left_out, a.step):
            found.append(one)
            print(describe_measurement(one, time.monotonic() - started), flush=True)
        if a.out:
            folder, _, name = a.out.rpartition("/")
            Store(folder or ".").write_atomic(name, canonical_json([one.model_dump(mode="json") for one in found]))
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return 0


def describe_measurement(found: Measurement, seconds: float) -> str:
    """One measurement as a few lines."""
    lines = [f"{found.run}/{found.checkpoint} on dataset {found.on[:12]}  ({seconds:.1f} s)"]
    for source, one in sorted(found.sources.items()):
        bits = "" if one.bits_per_byte is None else f"  {one.bits_per_byte:.4f} bits/byte"
        lines.append(f"  {source:<12} {one.loss:.4f} nats/token{bits}  {one.targets:,} targets")
    if found.left_out:
        left_out = f"{found.left_out:,} of {found.documents:,} documents"
        lines.append(f"  left out: {left_out} that a run was trained on, or on a copy of them")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
