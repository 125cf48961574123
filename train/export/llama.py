"""Export and import of models as folders of Hugging Face, and the export of a checkpoint with its tokenizer.

The shape of a model decides its family: Llama, Qwen 3, GPT-2 or BERT (`families.py`). Every weight has a counterpart,
and rotary positions pair the halves of a head alike, so nothing is permuted or rounded. A folder is written under a
temporary name and then renamed, so it is complete or absent.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.exports import MODEL, write_receipt
from schemas.logs import LOGGER, print_error, printable_output
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.takedown import check_no_pending_takedown
from schemas.tokens import TokenizerContract
from schemas.versions import DATASET
from train.checkpoint.folder import CheckpointMetadata, shape_of
from train.checkpoint.state import (
    STORED_WEIGHTS,
    check_objective,
    open_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
)
from train.export.families import family_of
from train.export.model_folder import CONFIG, json_bytes
from train.export.tokenizer_json import convert_sentencepiece, problems_of, with_separators
from train.export.weights import StoredWeights, write_weights
from train.model.shape import ModelShape, OwnShape, check_sizes

# A dataset's tokenizer as files for `transformers`, and the token ids that the configuration of a model needs.
#
# A SentencePiece model is also written as tokenizer.json, which is loaded without the packages sentencepiece and
# protobuf and gives the same ids. A model that normalizes text has no equal tokenizer.json. LlamaTokenizer loads such a
# model with the same ids except for U+2581, which the dataset escapes and LlamaTokenizer reads as a space.


@dataclass(frozen=True)
class TokenizerFile:
    """A dataset's tokenizer: its contract and the bytes of its model file."""

    contract: TokenizerContract
    data: bytes


def special_ids(tokenizer: TokenizerFile | None) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for `transformers`; all None without a tokenizer."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    contract = tokenizer.contract
    ends = [contract.reserved[name] for name in contract.after]
    begins = [contract.reserved[name] for name in contract.before]
    return {
        "bos_token_id": begins[0] if begins else contract.reserved["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or contract.reserved["eos"],
        "pad_token_id": contract.reserved["pad"],
    }


def generation_settings(tokenizer: TokenizerFile | None) -> dict[str, Any]:
    """Return the settings with which `transformers` generates text as `penstock generate` does."""
    ids = special_ids(tokenizer)
    if tokenizer is None:
        return ids
    ends = {tokenizer.contract.reserved[name] for name in tokenizer.contract.after}
    return {**ids, "do_sample": True, "suppress_tokens": sorted(set(tokenizer.contract.reserved.values()) - ends)}


def tokenizer_files(tokenizer: TokenizerFile, seq_len: int) -> dict[str, bytes]:
    """Return the model file, its `tokenizer.json` if it has an equal one, and the settings, by file name.

    A SentencePiece model is unchanged; a `tokenizer.json` adds to a text the tokens that begin documents.

    Raises ConfigError for a SentencePiece model that is not of kind bpe: `transformers` would load it as bpe.
    """
    contract = tokenizer.contract
    # The name of a reserved token in a text is encoded as ordinary text, as in training.
    settings: dict[str, Any] = {"model_max_length": seq_len, "split_special_tokens": True}
    settings |= {"clean_up_tokenization_spaces": False}
    files = {"tokenizer.model": tokenizer.data}
    if contract.kind == "huggingface":
        from tokenizers import Tokenizer

        files = {"tokenizer.json": with_separators(tokenizer.data, contract)}
        loaded = Tokenizer.from_buffer(files["tokenizer.json"])
        pieces = {number: loaded.id_to_token(number) for number in contract.reserved.values()}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        from sentencepiece import sentencepiece_model_pb2

        model: Any = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.data)  # type: ignore[attr-defined]
        if model.trainer_spec.model_type != model.trainer_spec.BPE:
            raise ConfigError(
                "export: expected a SentencePiece model of kind bpe, got another kind, which LlamaTokenizer would read "
                'as bpe. Set tokenizer.algorithm = "bpe", then run `penstock run` and `penstock train` again.'
            )
        pieces = {number: piece.piece for number, piece in enumerate(model.pieces)}
        if problems_of(model):
            settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_eos_token": False}
            settings |= {"add_bos_token": contract.before == ["bos"]}
            settings |= {"add_prefix_space": model.normalizer_spec.add_dummy_prefix}
        else:
            files["tokenizer.json"] = convert_sentencepiece(model, contract)
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings |= {"unk_token": pieces[model.trainer_spec.unk_id]}
    # Reserved ids after those of the tokenizer's model have no text.
    named = {f"{name}_token": pieces.get(contract.reserved[name]) for name in ("bos", "eos", "pad", "mask")}
    settings |= {role: piece for role, piece in named.items() if piece is not None}
    return {**files, "tokenizer_config.json": json_bytes(settings)}


MAX_SHARD_BYTES = 5_000_000_000
"""Maximum size of a weight file, as `transformers` writes them; a parameter is never split."""
CARD = "README.md"
"""The model card, as the Hugging Face Hub names it."""


def export_llama(
    state: Mapping[str, Tensor],
    shape: ModelShape,
    seq_len: int,
    tokenizer: TokenizerFile | None,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model, and its tokenizer if given, to a new folder. `state`: the parameters, as plain tensors.

    The family of the model is the first of `FAMILIES` that has its shape. Raises ConfigError if none has it or the
    folder is not empty, ContractError if the weights do not match the shape.
    """
    family_of(shape)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new folder, got one with files in it. Set --out to a new folder.")
    check_sizes({name: value.shape for name, value in state.items()}, shape, "export")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG).write_bytes(json_bytes(_config(state, shape, seq_len, tokenizer)))
        (partial / "generation_config.json").write_bytes(json_bytes(generation_settings(tokenizer)))
        write_weights(partial, state, shape, max_shard_bytes)
        if tokenizer is not None:
            for name, content in tokenizer_files(tokenizer, seq_len).items():
                (partial / name).write_bytes(content)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def import_llama(folder: Path | str) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return the shape of the model in a folder, and its parameters in float32 by their names in our model.

    Raises ConfigError if our model does not support the configuration, ContractError if files are damaged or weights do
    not match.
    """
    with ExitStack() as stack:
        weights = StoredWeights(Path(folder), stack)
        return weights.shape, weights.read_whole()


def without_scales(state: Mapping[str, Tensor], shape: ModelShape) -> tuple[dict[str, Tensor], ModelShape]:
    """Return parameters and shape of an equal model in the standard parametrization, whose matrices hold muP's factors.

    Its output matrix is its own, even if that of the model is the embedding.
    """
    if shape.width_multiplier == shape.query_scale == 1:
        return {**state}, shape
    queries = "attention.query_norm.weight" if shape.qk_norm else ("attention.query.weight", "attention.query.bias")
    scaled = {name: value * shape.query_scale if name.endswith(queries) else value for name, value in state.items()}
    head = state["embedding.weight" if shape.tie_embeddings else "head.weight"]
    scaled["head.weight"] = head / shape.width_multiplier
    plain = {"width_multiplier": 1.0, "query_scale": 1.0, "tie_embeddings": False}
    return scaled, shape.model_copy(update=plain)


# The files of an exported folder.


def _config(
    state: Mapping[str, Tensor], shape: ModelShape, seq_len: int, tokenizer: TokenizerFile | None
) -> dict[str, Any]:
    family = family_of(shape)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(shape, field) for key, field in family.keys.items()},
        **family.write(shape, seq_len),
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        **special_ids(tokenizer),
    }


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Export of a checkpoint: its model and the tokenizer of its dataset.


def export_checkpoint(
    run: Store, folder: Path, step: int | None = None, card: bytes | None = None, weights: str = STORED_WEIGHTS[0]
) -> CheckpointMetadata:
    """Write the model and tokenizer of a checkpoint to a new folder; return the checkpoint metadata.

    `step`: step of the checkpoint; None = the last. `card`: the model card; None = without one.
    `weights`: of STORED_WEIGHTS.

    Raises ConfigError if no family has the model's shape or the folder is not empty, ContractError if files are
    damaged.
    """
    dataset, note = open_checkpoint(run, step, "causal", "span", "mlm")
    if isinstance(shape := shape_of(note), OwnShape):
        raise ConfigError(
            f"{run.uri}/{note.name}: expected a transformer of Penstock, got plan.model = {shape.model}, which the "
            "formats of Hugging Face do not describe. Read the weights of the checkpoint with the model's own code."
        )
    check_objective(note, *family_of(shape).objectives)
    tokenizer = TokenizerFile(dataset.tokenizer, read_tokenizer(dataset))
    model = read_model(run, note, torch.device("cpu"), weights)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state, shape = without_scales(state, model.shape)
    export_llama(state, shape, sequence_length_of(note), tokenizer, folder)
    if card is not None:
        Store(str(folder)).write_atomic(CARD, card)
    return note


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, export, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="train.export.llama", description="Export a checkpoint as a folder of Hugging Face."
    )
    parser.add_argument("run", help="run folder with a checkpoint")
    parser.add_argument("--out", required=True, help="new folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument("--card", help="file with the model card")
    parser.add_argument(
        "--weights", choices=STORED_WEIGHTS, default=STORED_WEIGHTS[0], help="those of the last update, or averaged"
    )
    arguments = parser.parse_args(argv)
    card = None if arguments.card is None else Path(arguments.card).read_bytes()
    run = Store(arguments.run)
    try:
        before = read_run(run).tables
        note = export_checkpoint(run, Path(arguments.out), arguments.step, card, arguments.weights)
        _leave_receipt(arguments, note)
        # A takedown that begins now reads the receipt.
        check_no_pending_takedown(run)
        if read_run(run).tables != before:
            raise ContractError(
                f"{arguments.out}: expected unchanged tables of {run.uri} during the export, got others. Delete this "
                "folder, and export the model again."
            )
    except PenstockError as error:
        print_error(error)
        return 2
    print(f"{arguments.out}: the model of {note.name} and its tokenizer")
    return 0


def _leave_receipt(arguments: argparse.Namespace, note: CheckpointMetadata) -> None:
    """Write the receipt of an export into its run; a run that cannot be written has a warning instead."""
    run, out = arguments.run, arguments.out
    options: dict[str, Any] = {"format": MODEL, "step": arguments.step}
    if arguments.weights != STORED_WEIGHTS[0]:
        options["weights"] = arguments.weights
    read = {DATASET: note.identity.dataset}
    try:
        write_receipt(Store(run), Store(out), options, read, checkpoint=note.name, counts={"steps": note.step})
    except (OSError, ContractError) as error:
        LOGGER.warning(f"export: {run} has no receipt of {out}, so a takedown will not name it: {error}")


if __name__ == "__main__":
    sys.exit(main())
