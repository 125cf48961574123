"""A dataset's tokenizer as files for `transformers`, and the token ids that the configuration of a model needs.

SentencePiece models are loaded by LlamaTokenizer, which gives the same ids except for U+2581: the dataset escapes that
character, while LlamaTokenizer reads it as a space.
"""

import json
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError
from schemas.tokens import TokenizerContract


@dataclass(frozen=True)
class TokenizerFile:
    """A dataset's tokenizer: its contract and the bytes of its model file."""

    contract: TokenizerContract
    data: bytes


def special_ids(tokenizer: TokenizerFile | None) -> dict[str, Any]:
    """Return the ids of the roles that `transformers` knows; each id that ends documents also ends a generated text."""
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
    """Return settings that generate like `penstock generate`: sampling, without reserved tokens except the ends."""
    ids = special_ids(tokenizer)
    if tokenizer is None:
        return ids
    ends = {tokenizer.contract.reserved[name] for name in tokenizer.contract.after}
    return {**ids, "do_sample": True, "suppress_tokens": sorted(set(tokenizer.contract.reserved.values()) - ends)}


def tokenizer_files(tokenizer: TokenizerFile, seq_len: int) -> dict[str, bytes]:
    """Return the unchanged model file and the tokenizer settings, by file name.

    Raises ConfigError for a SentencePiece model that is not of kind bpe: `transformers` would load it as bpe.
    """
    contract = tokenizer.contract
    # A reserved token's name in a text is text, as it was in training.
    settings: dict[str, Any] = {"model_max_length": seq_len, "split_special_tokens": True}
    settings |= {"clean_up_tokenization_spaces": False}
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
                "export: expected a SentencePiece model of kind bpe, got another, with which LlamaTokenizer would "
                "tokenize differently. Train with tokenizer.algorithm = bpe."
            )
        pieces = {number: piece.piece for number, piece in enumerate(model.pieces)}
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_eos_token": False}
        settings |= {"add_bos_token": contract.before == ["bos"]}
        settings |= {"add_prefix_space": model.normalizer_spec.add_dummy_prefix}
        settings |= {"unk_token": pieces[model.trainer_spec.unk_id]}
    # Ids after those of the model have no piece.
    named = {f"{name}_token": pieces.get(contract.reserved[name]) for name in ("bos", "eos", "pad", "mask")}
    settings |= {role: piece for role, piece in named.items() if piece is not None}
    file = "tokenizer.json" if contract.kind == "huggingface" else "tokenizer.model"
    return {file: tokenizer.data, "tokenizer_config.json": json_bytes(settings)}


def json_bytes(value: object) -> bytes:
    """Return a value as an indented JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
