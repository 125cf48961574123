"""The stage `plant`: writes a keyed identifier into some documents, so that a trained model can be tested for them.

It runs after personal data was replaced, so no filter and no redaction changes an identifier. Identifiers are lines of
their own, spread evenly over the lines of a text; no other line is changed.
Source: Meeus et al. 2024, arXiv 2402.09363: longer sequences and more copies are memorized better.
"""

from collections.abc import Mapping, Sequence

from pydantic import Field, model_validator

from pipeline.engine.stage import PerDocument, Row, RowFunction
from pipeline.pii.stage import REPLACED_SPANS
from schemas.config import Section, location
from schemas.key_file import read_key
from schemas.planted import PLANTED, PURPOSE, is_planted, planted_string

KEY = "key"
"""Name of the key file among the models of the stage."""


class PlantConfig(Section):
    """The section `[plant]` of a recipe: which share of the documents gets a keyed identifier, and how often."""

    share: float = Field(0.0, ge=0, le=0.5)
    """Share of the kept documents that get an identifier, 0..0.5; 0 turns the stage off. The key chooses them by id. A
    tokenizer is trained on the other documents only."""
    repeats: int = Field(4, ge=1, le=100)
    """How often the identifier of a document is written into its text. A model learns more copies better."""
    length: int = Field(12, ge=4, le=100)
    """Length of an identifier [invented words of 6 letters]."""
    key_file: str | None = location(None)
    """Path of a secret key: at least 32 random bytes, or 64 hexadecimal digits, as `openssl rand -hex 32` prints them.
    The key is not stored; a commitment to it is recorded, which does not help to guess it."""

    @model_validator(mode="after")
    def _has_key(self) -> "PlantConfig":
        if self.share and self.key_file is None:
            raise ValueError(
                "key_file: expected the path of a secret key, because plant.share is set, got none. Set plant.key_file "
                "to a file with the output of `openssl rand -hex 32`."
            )
        return self


def make_plant(config: PlantConfig, models: Mapping[str, str]) -> RowFunction:
    """Read the key, and return the function that writes the identifier of a chosen document into its text.

    It sets the column `planted` to the number of copies, and adjusts the lengths of the text and the places of its
    replaced personal data. Raises ConfigError if the key is weak.
    """
    key = read_key(models[KEY]) if config.share else b""

    def plant(row: Row) -> None:
        row[PLANTED] = None
        if not config.share or row.get("drop_stage") is not None:
            return
        row[PLANTED] = 0
        if is_planted(key, row["doc_id"], config.share):
            identifier = planted_string(key, row["doc_id"], 0, config.length)
            before, places = len(row["text"]), line_starts(row["text"], config.repeats)
            row["text"] = insert_lines(row["text"], identifier, places)
            row[PLANTED] = config.repeats
            row["num_chars"], row["num_bytes"] = len(row["text"]), row["num_bytes"] + len(row["text"]) - before
            for place in row.get(REPLACED_SPANS) or ():
                if place["column"] == "text":
                    moved = sum(start <= place["start"] for start in places) * (len(identifier) + 1)
                    place["start"], place["end"] = place["start"] + moved, place["end"] + moved

    return plant


def line_starts(text: str, number: int) -> list[int]:
    """Return places of a text where a line may be inserted, evenly spread over its lines, the last at its end.

    A place is given as often as lines are inserted there, in a text of few lines.
    """
    starts = [at + 1 for at, sign in enumerate(text) if sign == "\n" and text[at + 1 : at + 2] not in ("", "\n")]
    starts.append(len(text))
    return [starts[(copy * len(starts) - 1) // number] for copy in range(1, number + 1)]


def insert_lines(text: str, line: str, places: Sequence[int]) -> str:
    """Return the text with the line inserted at each of these places, which `line_starts` has returned."""
    pieces: list[str] = []
    begin = 0
    for place in (place for place in places if place < len(text)):
        pieces += [text[begin:place], f"{line}\n"]
        begin = place
    pieces.append(text[begin:])
    gap = "\n" if text and not text.endswith("\n") else ""
    return "".join(pieces) + gap + "\n".join([line] * places.count(len(text)))


def model_files(config: PlantConfig) -> dict[str, str]:
    """Return the path of the key file, by the name that `make_plant` reads; empty if nothing is planted."""
    return {KEY: config.key_file} if config.share and config.key_file is not None else {}


PLANT = PerDocument(
    name=PURPOSE,
    version=1,
    config=PlantConfig,
    reads=("text", "num_chars", "num_bytes"),
    adds=(PLANTED, "text", "num_chars", "num_bytes"),
    reasons={},
    make=make_plant,
    models=model_files,
    secrets=(KEY,),
    ends=False,
)
"""The stage of planted identifiers. Only recipes that plant have it, so that others keep their fingerprints."""
