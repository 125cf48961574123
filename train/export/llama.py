"""Export and import of models as Llama folders of Hugging Face, and the export of a checkpoint with its tokenizer.

Llama's architecture is ours with rotary positions and gated feed-forward layers, without norms of queries and keys.
Every weight has a counterpart and rotary positions pair the halves of a head alike, so nothing is permuted or rounded.
A folder is written under a temporary name and then renamed, so it is complete or absent.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.exports import MODEL, write_receipt
from schemas.logs import LOGGER, print_error, printable_output
from schemas.paths import is_below
from schemas.storage import MAX_JSON_BYTES, Store
from schemas.tokens import TokenizerContract
from schemas.versions import DATASET
from train.checkpoint.folder import CheckpointMetadata
from train.checkpoint.state import (
    STORED_WEIGHTS,
    open_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
    shape_of,
)
from train.export.tokenizer_json import convert_sentencepiece, problems_of
from train.model.attention import HIGH_TURNS, LOW_TURNS
from train.model.shape import ModelShape, OwnShape
from train.model.transformer import build_model

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
    """Return the unchanged model file, its `tokenizer.json` if it has an equal one, and the settings, by file name.

    Raises ConfigError for a SentencePiece model that is not of kind bpe: `transformers` would load it as bpe.
    """
    contract = tokenizer.contract
    # The name of a reserved token in a text is encoded as ordinary text, as in training.
    settings: dict[str, Any] = {"model_max_length": seq_len, "split_special_tokens": True}
    settings |= {"clean_up_tokenization_spaces": False}
    files = {"tokenizer.json" if contract.kind == "huggingface" else "tokenizer.model": tokenizer.data}
    if contract.kind == "huggingface":
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_buffer(tokenizer.data)
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


def json_bytes(value: object) -> bytes:
    """Return a value as the bytes of an indented JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


MAX_SHARD_BYTES = 5_000_000_000
"""Maximum size of a weight file, as `transformers` writes them; a parameter is never split."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
"""The model card, as the Hugging Face Hub names it."""
TOP_LEVEL_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
"""Names of a layer's modules: ours, below `blocks.N`, and those of Llama, below `model.layers.N`."""


def export_llama(
    state: Mapping[str, Tensor],
    shape: ModelShape,
    seq_len: int,
    tokenizer: TokenizerFile | None,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Llama model, and its tokenizer if given, to a new folder. `state`: the parameters, as plain tensors.

    Raises ConfigError if Llama does not support the shape or the folder is not empty, ContractError if the weights do
    not match the shape.
    """
    if problems := [text for wrong, text in _beyond_llama(shape) if wrong]:
        raise ConfigError(
            f"export: expected a model shape that Llama supports, got {'; '.join(problems)}. Use the checkpoint in its "
            "own format."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new folder, got one with files in it. Set --out to a new folder.")
    _check_weights(state, shape, "export")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_bytes(json_bytes(_config(state, shape, seq_len, tokenizer)))
        (partial / "generation_config.json").write_bytes(json_bytes(generation_settings(tokenizer)))
        _write_weights(partial, state, _names(shape), max_shard_bytes)
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
    """Return the shape of the Llama model in a folder, and its parameters in float32 by their names in our model.

    Raises ConfigError if our model does not support the configuration, ContractError if files are damaged or weights do
    not match.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    shape = _shape_of(config, f"{folder}/config.json")
    ours = {theirs: name for name, theirs in _names(shape).items()}
    state: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        _check_file(path)
        try:
            loaded = load_file(path)
        except Exception as error:  # safetensors raises an exception of its own, which is not an OSError
            raise ContractError(
                f"{path}: expected a safetensors file, got one that cannot be read ({error}). Download the file again."
            ) from error
        for theirs, value in loaded.items():
            if theirs.endswith("rotary_emb.inv_freq") or (shape.tie_embeddings and theirs == "lm_head.weight"):
                continue  # buffers that old versions wrote with the parameters
            if not value.is_floating_point():
                raise ContractError(
                    f"{path}: expected {theirs} as floating-point numbers, got {value.dtype}. Use a model that is not "
                    "quantized."
                )
            state[ours.get(theirs, theirs)] = value.float()
    _check_weights(state, shape, str(folder))
    return shape, {name: state[name] for name in _names(shape)}


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


def _beyond_llama(shape: ModelShape) -> Iterator[tuple[bool, str]]:
    yield shape.positions != "rope", f"positions = {shape.positions}"
    yield shape.activation != "swiglu", f"activation = {shape.activation}"
    yield shape.qk_norm, "qk_norm = true"
    yield shape.value_embeddings > 0, f"value_embeddings = {shape.value_embeddings}"
    yield shape.residual_mixing, "residual_mixing = true"
    yield shape.window is not None, f"window_pattern = {shape.window_pattern}"
    yield shape.logit_softcap is not None, f"logit_softcap = {shape.logit_softcap}"
    yield max(shape.width_multiplier, shape.query_scale) != 1, "factors of muP"


def _names(shape: ModelShape) -> dict[str, str]:
    """Return the name in Llama of every parameter, by its name in our model."""
    named = {}
    for name, _ in build_model(shape).named_parameters():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            named[name] = f"model.layers.{layer}.{LAYER_NAMES[inner]}.{kind}"
        else:
            named[name] = f"{TOP_LEVEL_NAMES[module]}.{kind}"
    return named


def _check_weights(state: Mapping[str, Tensor], shape: ModelShape, where: str) -> None:
    """Raise ContractError unless `state` holds exactly the parameters of a model of this shape."""
    expected = {name: tuple(parameter.shape) for name, parameter in build_model(shape).named_parameters()}
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is not one of its parameters" for name in state if name not in expected]
    problems += [
        f"{name} is {tuple(state[name].shape)} and not {size}"
        for name, size in expected.items()
        if name in state and tuple(state[name].shape) != size
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ContractError(
            f"{where}: expected the parameters of the model shape, got {'; '.join(problems[:5])}{more}. "
            "Use weights and a configuration of the same model."
        )


# The files of an exported folder.


def _config(
    state: Mapping[str, Tensor], shape: ModelShape, seq_len: int, tokenizer: TokenizerFile | None
) -> dict[str, Any]:
    scaling: dict[str, Any] | None = {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_scaling == "none":
        scaling = None
    elif shape.rope_scaling == "llama3":
        waves = {"low_freq_factor": LOW_TURNS, "high_freq_factor": HIGH_TURNS}
        scaling = {**(scaling or {}), **waves, "original_max_position_embeddings": shape.rope_original}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ffw,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        **special_ids(tokenizer),
    }


def _write_weights(folder: Path, state: Mapping[str, Tensor], names: Mapping[str, str], max_bytes: int) -> None:
    """Write the parameters to one file, or to several with an index that names the file of each parameter."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        if shards[-1] and filled + state[name].nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += state[name].nbytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, chosen in zip(files, shards):
        # safetensors makes a file that only its owner may read; the mode of a new file is that of the process.
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        # Copies, since safetensors rejects views that share storage.
        save_file({names[name]: state[name].detach().cpu().clone() for name in chosen}, folder / file, {"format": "pt"})
        (folder / file).chmod(mode)
    if len(shards) > 1:
        places = {names[name]: file for file, chosen in zip(files, shards) for name in chosen}
        total = sum(state[name].nbytes for name in names)
        (folder / INDEX).write_bytes(json_bytes({"metadata": {"total_size": total}, "weight_map": places}))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The files of an imported folder.


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ContractError if there is none."""
    _check_file(path, MAX_JSON_BYTES)
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{path}: expected a JSON file, got one that cannot be read ({error}). Download the folder again."
        ) from error
    if not isinstance(value, dict):
        raise ContractError(f"{path}: expected a JSON object, got another value. Download the folder again.")
    return value


def _check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise ContractError if there is no file, or one that is too large. Reading a pipe would never end."""
    if not path.is_file() or (max_bytes is not None and path.stat().st_size > max_bytes):
        most = "" if max_bytes is None else f" of at most {max_bytes} bytes"
        raise ContractError(
            f"{path}: expected a file{most}, got none, a larger one, or a pipe or folder. Download the folder again."
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights. Raises ContractError if the index names one outside of the folder."""
    if not (folder / INDEX).exists():
        return [folder / WEIGHTS]
    places = _read_json(folder / INDEX).get("weight_map")
    names: list[Any] = [*places.values()] if isinstance(places, dict) else [places]
    for name in names:
        if not isinstance(name, str) or not is_below(name):
            raise ContractError(
                f"{folder / INDEX}: expected the names of files in the folder in `weight_map`, got {name!r:.100}. "
                "Download the folder again."
            )
    return [folder / name for name in sorted(set(names))]


def _shape_of(config: dict[str, Any], where: str) -> ModelShape:
    """Return the shape of the model that a config.json describes.

    Raises ConfigError if our model does not support it, ContractError if a value is missing or of a wrong type.
    """
    try:
        return _read_shape(config, where)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ContractError(
            f"{where}: expected the complete configuration of a Llama model, got a missing or invalid key: {error}. "
            "Download config.json again."
        ) from error


def _read_shape(config: dict[str, Any], where: str) -> ModelShape:
    # Older versions of `transformers` wrote `rope_theta` and `rope_scaling` instead of `rope_parameters`.
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
    rope |= config.get("rope_parameters") or {}
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    turns = (rope.get("low_freq_factor"), rope.get("high_freq_factor"))
    bias = bool(config.get("attention_bias", False))
    problems = [
        (config.get("model_type") != "llama", f"model_type = {config.get('model_type')}"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act = {config.get('hidden_act')}"),
        (kind not in ("default", "linear", "llama3"), f"rope_type = {kind}"),
        (kind == "llama3" and turns != (LOW_TURNS, HIGH_TURNS), f"low and high_freq_factor = {turns}"),
        (bool(config.get("mlp_bias", False)) != bias, "attention_bias and mlp_bias that differ"),
    ]
    if unsupported := [text for is_wrong, text in problems if is_wrong]:
        raise ConfigError(
            f"{where}: expected a supported Llama model, got {'; '.join(unsupported)}. Import a model without "
            "these settings."
        )
    heads = config["num_attention_heads"]
    return ModelShape(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        d_ffw=config["intermediate_size"],
        bias=bias,
        rope_theta=rope["rope_theta"],
        rope_scaling=kind if kind != "default" else "none",
        rope_factor=rope.get("factor", 1.0),
        rope_original=rope.get("original_max_position_embeddings", 8192),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


# Export of a checkpoint: its model and the tokenizer of its dataset.


def export_checkpoint(
    run: Store, folder: Path, step: int | None = None, card: bytes | None = None, weights: str = STORED_WEIGHTS[0]
) -> CheckpointMetadata:
    """Write the model and tokenizer of a checkpoint to a new folder; return the checkpoint metadata.

    `step`: step of the checkpoint; None = the last. `card`: the model card; None = without one.
    `weights`: of STORED_WEIGHTS.

    Raises ConfigError if Llama does not support the model or the folder is not empty, ContractError if files are
    damaged.
    """
    dataset, note = open_checkpoint(run, step, "causal", "span")
    if isinstance(shape := shape_of(note), OwnShape):
        raise ConfigError(
            f"{run.uri}/{note.name}: expected a transformer of Penstock, got plan.model = {shape.model}, which the "
            "format of Llama does not describe. Read the weights of the checkpoint with the model's own code."
        )
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
    parser = argparse.ArgumentParser(prog="train.export.llama", description="Export a checkpoint as a Llama folder.")
    parser.add_argument("run", help="run folder with a checkpoint")
    parser.add_argument("--out", required=True, help="new folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument("--card", help="file with the model card")
    parser.add_argument(
        "--weights", choices=STORED_WEIGHTS, default=STORED_WEIGHTS[0], help="those of the last update, or averaged"
    )
    arguments = parser.parse_args(argv)
    card = None if arguments.card is None else Path(arguments.card).read_bytes()
    try:
        note = export_checkpoint(Store(arguments.run), Path(arguments.out), arguments.step, card, arguments.weights)
    except PenstockError as error:
        print_error(error)
        return 2
    _leave_receipt(arguments, note)
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
