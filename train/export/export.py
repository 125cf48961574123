"""The export of a checkpoint: its model and the dataset's tokenizer as a Llama folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from schemas.errors import PenstockError
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.checkpoint.load import check_objective, check_tokenizer, find_note, length_of, read_model, read_tokenizer
from train.checkpoint.metadata import Note
from train.export.llama import export_llama
from train.export.tokenizer import TokenizerFile


def export_checkpoint(run: Store, folder: Path, step: int | None = None) -> Note:
    """Write the model of a checkpoint (None: the last one) into a new folder; returns the note of the checkpoint.

    Raises ConfigError if Llama has no such model or the folder holds something, ContractError if files are amiss.
    """
    dataset, note = open_dataset(run), find_note(run, step)
    check_tokenizer(note, dataset)
    check_objective(note, "causal", "span")
    tokenizer = TokenizerFile(dataset.tokenizer, read_tokenizer(dataset))
    model = read_model(run, note, torch.device("cpu"))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_llama(state, model.shape, length_of(note), tokenizer, folder)
    return note


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and export; returns the exit code."""
    parser = argparse.ArgumentParser(prog="train.export.export", description="Export a checkpoint as a Llama folder.")
    parser.add_argument("run", help="run folder with a checkpoint")
    parser.add_argument("--out", required=True, help="folder to write; a new one")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    arguments = parser.parse_args(argv)
    try:
        note = export_checkpoint(Store(arguments.run), Path(arguments.out), arguments.step)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: the model of {note.name} and its tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
