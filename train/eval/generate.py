"""Text sampled from a checkpoint, token by token, in a single process.

Every token costs a forward pass over the last seq_len tokens. That is enough to inspect a model, but too slow to serve
one.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.logs import print_error, printable_output
from schemas.storage import Store
from schemas.tokens import Dataset, TokenizerContract, encode_exactly, escape
from train.checkpoint.state import (
    STORED_WEIGHTS,
    default_device,
    open_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
)
from train.model.transformer import Transformer
from train.trace.documents import open_decoder


@dataclass(frozen=True)
class Codec:
    """The encoder and decoder of a tokenizer; control tokens are neither parsed from text nor written to it."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def generate(
    run: Store, prompt: str, num_tokens: int, temperature: float = 1.0, seed: int = 0, step: int | None = None
) -> str:
    """Return the prompt and up to `num_tokens` generated tokens; `step`: of the checkpoint (None = the last).

    The text ends before a token that ends documents. Temperature 0 always chooses the most probable token. Raises
    ConfigError for a wrong argument. Raises ContractError if there is no such checkpoint, or if it was not trained on
    next-token prediction with the dataset's tokenizer.
    """
    return TextSampler(run, step).continue_text(prompt, num_tokens, temperature, seed)


class TextSampler:
    """A checkpoint that writes text: its model and tokenizer, read at the first text."""

    def __init__(self, run: Store, step: int | None, weights: str = STORED_WEIGHTS[0]):
        """`step`: of the checkpoint; None = the last. `weights`: of STORED_WEIGHTS."""
        self._run, self._step, self._weights = run, step, weights

    def continue_text(self, prompt: str, num_tokens: int, temperature: float = 1.0, seed: int = 0) -> str:
        """Return the prompt and up to `num_tokens` generated tokens, as `generate` does."""
        if num_tokens < 0 or not 0 <= temperature < math.inf:
            raise ConfigError(
                f"generate: expected --tokens >= 0 and a finite --temperature >= 0, got {num_tokens} and "
                f"{temperature}. Correct the one that is wrong."
            )
        dataset, note = open_checkpoint(self._run, self._step, "causal")
        contract = dataset.tokenizer
        codec = open_codec(dataset)
        ids = encode_prompt(prompt, contract, codec)
        model = read_model(self._run, note, default_device(), self._weights)
        ids = continue_ids(model, ids, num_tokens, sequence_length_of(note), Sampler(contract, temperature, seed))
        return codec.decode(ids[len(contract.before) :])


def open_codec(dataset: Dataset) -> Codec:
    """Return the tokenizer of a dataset. Raises ContractError if the model file does not match the contract."""
    contract, data = dataset.tokenizer, read_tokenizer(dataset)
    if contract.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_proto=data)
        return Codec(
            encode=lambda text: processor.encode(escape(text)),
            decode=open_decoder(dataset),
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    encode_exactly(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Codec(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=open_decoder(dataset),
    )


def encode_prompt(prompt: str, contract: TokenizerContract, codec: Codec) -> list[int]:
    """Return the token ids of the prompt, after the ids that begin a document.

    Raises ConfigError if the prompt contains control tokens or has no ids.
    """
    ids, names = codec.encode(prompt), {number: name for name, number in contract.reserved.items()}
    if control := sorted({names[number] for number in ids if number in names}):
        raise ConfigError(
            f"generate: expected a prompt of plain text, got control tokens: {', '.join(control)}. "
            "Remove them from --prompt."
        )
    ids = [*(contract.reserved[name] for name in contract.before), *ids]
    if not ids:
        raise ConfigError(
            "generate: expected a prompt, because the tokenizer has no token that begins documents, got none. "
            "Give one with --prompt."
        )
    return ids


class Sampler:
    """Samples token ids from logits, reproducibly by seed.

    The only reserved ids that it samples are those that end documents. Rows of weights beyond the ids of the tokenizer
    are never sampled.
    """

    def __init__(self, contract: TokenizerContract, temperature: float, seed: int):
        self._num_ids = contract.vocab_size
        self.ends = {contract.reserved[name] for name in contract.after}
        self._excluded = sorted(set(contract.reserved.values()) - self.ends)
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits_V: Tensor) -> int:
        """Return one sampled token id. Raises ContractError if a logit is not a number, or all are infinite."""
        logits_V = logits_V[: self._num_ids].detach().double().cpu()
        logits_V[self._excluded] = -torch.inf
        if not (most := logits_V.max()).isfinite():
            raise ContractError(
                f"generate: expected finite logits, got {most.item()}, because the model has diverged. Name an earlier "
                "checkpoint with --step."
            )
        if self._temperature == 0:
            return int(logits_V.argmax())
        weights_V = torch.softmax((logits_V - most) / self._temperature, dim=-1)
        return int(torch.multinomial(weights_V, 1, generator=self._generator))


@torch.no_grad()
def continue_ids(model: Transformer, ids: list[int], num_tokens: int, seq_len: int, sampler: Sampler) -> list[int]:
    """Return `ids` with up to `num_tokens` sampled ids appended; stop before an id that ends documents."""
    device, ids = next(model.parameters()).device, list(ids)
    for _ in range(num_tokens):
        window_BT = torch.tensor([ids[-seq_len:]], device=device)
        drawn = sampler.draw(model(window_BT)[0, -1])
        if drawn in sampler.ends:
            break
        ids.append(drawn)
    return ids


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, print the text, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.generate", description="Sample text from a checkpoint.")
    parser.add_argument("run", help="run folder with a checkpoint")
    parser.add_argument("--prompt", default="", help="beginning of the text; empty: a new document")
    parser.add_argument("--tokens", type=int, default=100, help="maximum number of tokens to add")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 chooses the most probable token every time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument(
        "--weights", choices=STORED_WEIGHTS, default=STORED_WEIGHTS[0], help="those of the last update, or averaged"
    )
    a = parser.parse_args(argv)
    try:
        print(TextSampler(Store(a.run), a.step, a.weights).continue_text(a.prompt, a.tokens, a.temperature, a.seed))
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
