"""Models as Llama in Hugging Face's format: written as a folder that `transformers` can load, and read from one.

Llama's architecture is the part of ours with rotary positions and gated feed-forwards, without norms of queries and
keys; every weight has its counterpart and the halves of a head are paired alike, so nothing is permuted or rounded.
A folder is written under another name and then renamed: it is complete or absent.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.checkpoint.load import (
    check_objective,
    check_tokenizer,
    find_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
)
from train.checkpoint.metadata import CheckpointMetadata
from train.export.tokenizer import TokenizerFile, generation_settings, json_bytes, special_ids, tokenizer_files
from train.model.attention import HIGH_TURNS, LOW_TURNS
from train.model.shape import ModelShape
from train.model.transformer import build_model

MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of weights, as `transformers` writes them; a parameter is never cut."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
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
"""Our names of modules and theirs, in layer N below `blocks.N` and `model.layers.N`."""


def export_llama(
    state: Mapping[str, Tensor],
    shape: ModelShape,
    seq_len: int,
    tokenizer: TokenizerFile | None,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model, whose parameters are plain tensors, into a new folder, with its tokenizer if there is one.

    Raises ConfigError if Llama has no such shape or the folder holds something, ContractError if weights are amiss.
    """
    if problems := [text for wrong, text in _beyond_llama(shape) if wrong]:
        raise ConfigError(f"export: expected a shape that Llama has, got {'; '.join(problems)}. Keep our own format.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a new folder, got something in it. Name another.")
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
    """The shape of a Llama in a folder, and its parameters by our names, float32.

    Raises ConfigError if it is none that a shape can hold, ContractError if files or weights are amiss.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    shape = _shape_of(config, f"{folder}/config.json")
    ours = {theirs: name for name, theirs in _names(shape).items()}
    state: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            loaded = load_file(path)
        except Exception as error:  # safetensors raises an error of its own, which is no OSError
            raise ContractError(f"{path}: expected weights, got {error}. Fetch the file again.") from error
        for theirs, value in loaded.items():
            if theirs.endswith("rotary_emb.inv_freq") or (shape.tie_embeddings and theirs == "lm_head.weight"):
                continue  # what old versions wrote beside the parameters
            state[ours.get(theirs, theirs)] = value.float()
    _check_weights(state, shape, str(folder))
    return shape, {name: state[name] for name in _names(shape)}


def _beyond_llama(shape: ModelShape) -> Iterator[tuple[bool, str]]:
    yield shape.positions != "rope", f"positions = {shape.positions}"
    yield shape.activation != "swiglu", f"activation = {shape.activation}"
    yield shape.qk_norm, "qk_norm = true"


def _names(shape: ModelShape) -> dict[str, str]:
    """Their name of every parameter, by ours."""
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
    """Raises ContractError unless the state holds the parameters of the shape and nothing else."""
    expected = {name: tuple(parameter.shape) for name, parameter in build_model(shape).named_parameters()}
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is none of its parameters" for name in state if name not in expected]
    problems += [
        f"{name} is {tuple(state[name].shape)} and not {size}"
        for name, size in expected.items()
        if name in state and tuple(state[name].shape) != size
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ContractError(
            f"{where}: expected the weights of its shape, got {'; '.join(problems[:5])}{more}. "
            "Take the weights and the shape from one place."
        )


# -------------------------------------------------------------------------------------------------------------- writing


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
    """One file, or several and an index that says where each parameter is."""
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
        # Copies, as views that share a storage are refused.
        save_file({names[name]: state[name].detach().cpu().clone() for name in chosen}, folder / file, {"format": "pt"})
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


# -------------------------------------------------------------------------------------------------------------- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(f"{path}: expected a JSON file, got {error}. Fetch the folder again.") from error
    return value


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).exists():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(_read_json(folder / INDEX)["weight_map"].values()))]


def _shape_of(config: dict[str, Any], where: str) -> ModelShape:
    """Reads `rope_parameters` as well as `rope_theta` and `rope_scaling`, which older versions write."""
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
    if found := [text for wrong, text in problems if wrong]:
        raise ConfigError(f"{where}: expected a Llama that our shapes can hold, got {'; '.join(found)}. Take another.")
    try:
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
    except (KeyError, ValidationError) as error:
        raise ContractError(f"{where}: expected a Llama's configuration, got no usable {error}. Fetch it.") from error


# The export of a checkpoint: its model and the dataset's tokenizer as a Llama folder.


def export_checkpoint(run: Store, folder: Path, step: int | None = None) -> CheckpointMetadata:
    """Write the model of a checkpoint (None: the last one) into a new folder; returns the note of the checkpoint.

    Raises ConfigError if Llama has no such model or the folder holds something, ContractError if files are amiss.
    """
    dataset, note = open_dataset(run), find_checkpoint(run, step)
    check_tokenizer(note, dataset)
    check_objective(note, "causal", "span")
    tokenizer = TokenizerFile(dataset.tokenizer, read_tokenizer(dataset))
    model = read_model(run, note, torch.device("cpu"))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_llama(state, model.shape, sequence_length_of(note), tokenizer, folder)
    return note


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and export; returns the exit code."""
    parser = argparse.ArgumentParser(prog="train.export.llama", description="Export a checkpoint as a Llama folder.")
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
