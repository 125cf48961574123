"""The vocabularies of a worker: one for each way to split, so that their number does not grow with the languages."""

from collections.abc import Callable, Sequence

from pipeline.text.spacy_tokens import splitter_of
from pipeline.text.words import CAPACITY, Vocabulary


class Vocabularies:
    """The vocabulary of each language; languages that are split alike share one."""

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._by_splitter: dict[Callable[[str], Sequence[str]], Vocabulary] = {}

    def __getitem__(self, language: str) -> Vocabulary:
        split = splitter_of(language)
        if split not in self._by_splitter:
            self._by_splitter[split] = Vocabulary(split, self._capacity)
        return self._by_splitter[split]
