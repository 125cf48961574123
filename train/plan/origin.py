"""The weights that `train.init_from` names: their shape and digest, and the checks that a run can begin from them.

The shape of the model is that of the weights, and settings of `[plan]` that contradict it are refused. The dataset must
have the tokenizer of the weights. Reserved ids that the dataset adds after the ids of that tokenizer get rows of their
own, which are initialized as in a new model.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of, file_sha256
from schemas.origin import CHECKPOINT, ModelOrigin, origin_of
from schemas.storage import MAX_JSON_BYTES, Store
from schemas.tokens import Dataset
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints, shape_of
from train.config.plan import PlanConfig
from train.export.families import shape_of_config
from train.export.model_folder import CONFIG, check_file, read_json, weight_files
from train.model.shape import ModelShape, OwnShape

MAX_SHOWN = 3
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of a tokenizer in a folder of Hugging Face, the first that exists."""


def open_origin(path: str, dataset: Dataset) -> tuple[ModelOrigin, ModelShape]:
    """Return the origin at a path, and the shape of the model that begins from it.

    `path`: a run, a checkpoint of a run, or a folder of Hugging Face. Raises ConfigError if it is none of them, or if
    the dataset has another tokenizer; ContractError if files are damaged.
    """
    folder = Path(path).absolute()
    if (folder / CONFIG).exists():
        return _open_folder(folder, dataset)
    is_checkpoint = (folder / METADATA_NAME).exists()
    run = Store(str(folder.parents[2] if is_checkpoint else folder))
    checkpoints = list_checkpoints(run) if folder.is_dir() else []
    if is_checkpoint:
        checkpoints = [checkpoint for checkpoint in checkpoints if folder == Path(run.path(checkpoint.name))]
    if not checkpoints:
        raise ConfigError(
            f"train.init_from: expected a run with a checkpoint, a checkpoint, or a folder with {CONFIG}, got {path}. "
            "Set train.init_from to such a folder."
        )
    return _open_checkpoint(run, checkpoints[-1], dataset)


def _open_checkpoint(run: Store, checkpoint: CheckpointMetadata, dataset: Dataset) -> tuple[ModelOrigin, ModelShape]:
    contract = digest_of(dataset.tokenizer.model_dump(mode="json"))
    if checkpoint.identity.tokenizer != contract:
        raise ConfigError(
            f"train.init_from: expected a dataset with the tokenizer of {run.uri}, contract "
            f"{checkpoint.identity.tokenizer[:12]}, got {contract[:12]}. Make the dataset with the tokenizer of that "
            "run (tokenizer.model)."
        )
    shape = shape_of(checkpoint)
    if isinstance(shape, OwnShape):
        raise ConfigError(
            f"train.init_from: expected weights of the transformer of Penstock, got {run.uri}, a run with plan.model = "
            f"{shape.model}. Name another run, or remove train.init_from."
        )
    origin = ModelOrigin(
        path=run.uri,
        format=CHECKPOINT,
        digest=hashlib.sha256(run.read_bytes(f"{checkpoint.name}/{METADATA_NAME}")).hexdigest(),
        vocab_size=shape.vocab_size,
        step=checkpoint.step,
        dataset=checkpoint.identity.dataset,
        plan=checkpoint.identity.plan,
        origin=origin_of(run),
    )
    return origin, shape


def _open_folder(folder: Path, dataset: Dataset) -> tuple[ModelOrigin, ModelShape]:
    family, shape = shape_of_config(read_json(folder / CONFIG), str(folder / CONFIG))
    paths = [folder / CONFIG, *weight_files(folder)]
    for path in paths:
        check_file(path)
    _check_tokenizer(folder, dataset, shape.vocab_size)
    files = {path.name: file_sha256(path) for path in paths}
    origin = ModelOrigin(
        path=str(folder),
        format=family.model_type,
        digest=digest_of(files),
        files=files,
        vocab_size=shape.vocab_size,
    )
    rows = max(shape.vocab_size, dataset.tokenizer.vocab_size)
    return origin, shape.model_copy(update={"vocab_size": rows})


# The tokenizer of a folder, compared with that of the dataset piece by piece.


def _check_tokenizer(folder: Path, dataset: Dataset, rows: int) -> None:
    """Raise ConfigError unless every id of the folder's tokenizer has the same piece in that of the dataset."""
    path = next((folder / name for name in TOKENIZERS if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(
            f"train.init_from: expected {' or '.join(TOKENIZERS)} beside the weights, got none in {folder}. Download "
            "the tokenizer of the model into the folder."
        )
    check_file(path, MAX_JSON_BYTES)
    contract = dataset.tokenizer
    own = dataset.tokenizer_folder.read_bytes(dataset.tokenizer_path)
    data = path.read_bytes()
    if own != data:
        are_json = path.suffix == ".json", contract.kind == "huggingface"
        theirs, ours = _pieces(data, are_json[0], str(path)), _pieces(own, are_json[1])
        # An export names the reserved ids that follow those of the tokenizer.
        ours = {number: f"<{name}>" for name, number in contract.reserved.items()} | ours
        others = [number for number, piece in theirs.items() if number < rows and ours.get(number) != piece]
        if others:
            shown = ", ".join(
                f"{n} is {ours.get(n)!r:.40} and not {theirs[n]!r:.40}" for n in sorted(others)[:MAX_SHOWN]
            )
            raise ConfigError(
                "train.init_from: expected a dataset with the tokenizer of the weights, got one in which "
                f"{len(others)} of {len(theirs)} ids have other pieces ({shown}). Make the dataset with "
                f"tokenizer.model = {path}."
            )
        if all(are_json) and (parts := [*_other_parts(data, own)]):
            raise ConfigError(
                "train.init_from: expected a dataset with the tokenizer of the weights, got one that divides texts in "
                f"another way, by its {', '.join(parts)}. Make the dataset with tokenizer.model = {path}."
            )
    taken = {name: number for name, number in contract.reserved.items() if number >= rows}
    if contract.vocab_size - len(taken) > rows:
        raise ConfigError(
            f"train.init_from: expected weights for every id of the dataset's tokenizer, got {rows} rows for "
            f"{contract.vocab_size - len(taken)} ids. Use the weights that belong to this tokenizer."
        )


PARTS = ("normalizer", "pre_tokenizer", "model")
"""Parts of a tokenizer.json that decide the ids of a text, besides the pieces."""


def _other_parts(data: bytes, own: bytes) -> Iterator[str]:
    """Yield the parts of two files tokenizer.json by which equal pieces are found in other places of a text."""
    from tokenizers import Tokenizer

    theirs, ours = (json.loads(Tokenizer.from_buffer(file).to_str()) for file in (data, own))
    for file in (theirs, ours):
        # Pieces are compared by id, and a dataset may have more of them. Those of a unigram model have scores.
        if isinstance(file["model"]["vocab"], dict):
            del file["model"]["vocab"]
    yield from (name for name in PARTS if theirs[name] != ours[name])


def _pieces(data: bytes, is_json: bool, where: str = "tokenizer") -> dict[int, str]:
    """Return the piece of each id of a tokenizer file."""
    try:
        if is_json:
            from tokenizers import Tokenizer

            return {number: piece for piece, number in Tokenizer.from_buffer(data).get_vocab().items()}
        from sentencepiece import SentencePieceProcessor

        if not data:
            raise ValueError("an empty file")
        model = SentencePieceProcessor(model_proto=data)
        return {number: model.id_to_piece(number) for number in range(model.get_piece_size())}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # both libraries raise exceptions of their own; a panic of Rust is no Exception
        raise ContractError(
            f"{where}: expected a file of a tokenizer, got one that cannot be read ({error}). Download it again."
        ) from error


# The settings of `[plan]` beside a shape that the weights decide.


def sizing_of(shape: ModelShape, sizing: PlanConfig) -> PlanConfig:
    """Return `[plan]` with the shape of the weights. Raises ConfigError if a setting contradicts the shape."""
    own: dict[str, Any] = {name: getattr(shape, name) for name in ModelShape.model_fields}  # defaults too
    own |= _parametrization(shape, sizing)
    given = sizing.model_dump(mode="json", exclude_unset=True)
    wrong = [
        f"plan.{name} = {json.dumps(value)} in place of {json.dumps(own[name])}"
        for name, value in given.items()
        if name in own and value not in (None, own[name])
    ]
    if sizing.params is not None:
        wrong.append(f"plan.params = {sizing.params:g}")
    if wrong:
        raise ConfigError(
            f"train.init_from: expected the model shape of the weights, got {'; '.join(wrong)}. Remove these settings."
        )
    fields = {name: value for name, value in own.items() if name in PlanConfig.model_fields}
    unused = {name for name in ROTARY_FIELDS if own[name] == PlanConfig.model_fields[name].default}
    return PlanConfig.model_validate(given | {name: value for name, value in fields.items() if name not in unused})


def _parametrization(shape: ModelShape, sizing: PlanConfig) -> dict[str, Any]:
    """Return the settings of muP that a shape has. At the base width, it has those that `sizing` sets."""
    base = round(shape.d_model / shape.width_multiplier)
    at_base = (sizing.parametrization, sizing.mup_base_width) == ("mup", base)
    if shape.width_multiplier == 1 and not at_base:
        return {"parametrization": "standard"}
    return {"parametrization": "mup", "mup_base_width": base}


ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_factor", "rope_original")
