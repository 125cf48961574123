"""The text of documents as the model read it: tokens of the shards, decoded; nothing of torch."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from schemas.errors import ContractError
from schemas.tokens import Dataset, unescape
from train.data.shards import StreamReader

Decode = Callable[[list[int]], str]


class Texts:
    """Text of spans of a dataset's streams. Reserved tokens but separators show by name, such as `<tombstone>`."""

    def __init__(self, dataset: Dataset):
        """Raises ContractError if the model file is not the one of the contract."""
        self._dataset, self._decode = dataset, open_decoder(dataset)
        contract = dataset.tokenizer
        hidden = {*contract.before, *contract.after}
        self._shown = {number: "" if name in hidden else f"<{name}>" for name, number in contract.reserved.items()}
        self._readers: dict[str, StreamReader] = {}

    def read(self, stream: str, start: int, stop: int) -> str:
        """The text of tokens [start, stop) of a stream; a cut character is U+FFFD."""
        if stream not in self._readers:
            shards = self._dataset.streams[stream]
            self._readers[stream] = StreamReader(self._dataset.folder, shards, self._dataset.tokenizer.dtype)
        out = np.empty(stop - start, self._dataset.tokenizer.dtype)
        self._readers[stream].read(out, np.zeros(1, np.int64), np.array([start]), np.array([stop - start]))
        return self.decode(out.tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        parts, plain = list[str](), list[int]()
        for number in ids:
            if number not in self._shown:
                plain.append(number)
                continue
            parts += [self._decode(plain)] * bool(plain) + [self._shown[number]]
            plain = []
        return "".join([*parts, self._decode(plain) if plain else ""])


def open_decoder(dataset: Dataset) -> Decode:
    """From ids of a dataset's tokenizer, none of them reserved, to text. Raises ContractError if the model file is not
    the one of the contract."""
    folder, path, contract = dataset.tokenizer_folder, dataset.tokenizer_path, dataset.tokenizer
    data = folder.read_bytes(path)
    found = hashlib.sha256(data).hexdigest()
    if found != contract.sha256:
        raise ContractError(f"{folder.uri}/{path}: promised SHA-256 {contract.sha256}, found {found}; restore the file")
    if contract.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_proto=data)
        return lambda ids: unescape(processor.decode(ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
