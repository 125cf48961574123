"""The card of a dataset for the Hugging Face Hub: of the clean text of a run, or of an export of it.

Everything in it is from manifests, what a checkpoint has read, and what the publisher states, so equal facts give equal
bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.card_sections import (
    bias,
    count_table,
    known_limits,
    limits,
    origins,
    personal_data,
    rights,
    selection,
    toxicity,
)
from pipeline.disclosure.eu import language_name
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.hub import (
    UNKNOWN,
    CardSection,
    HubCard,
    language_codes,
    licence_entries,
    size_category,
)
from pipeline.disclosure.markdown import code, escaped, paragraph, table
from pipeline.disclosure.publish import stated
from schemas.errors import ContractError

NAME = "dataset-card"
TAGS = ("pretraining", "web-text", "penstock")
ASKED = ("dataset.name", "dataset.licence", "dataset.link", "provider.name")
"""Answers that the card of a run states."""


@dataclass(frozen=True)
class CardText:
    """What only the publisher of a dataset knows."""

    name: str
    """Name of the dataset."""
    licence: str = UNKNOWN
    """Licence of the whole dataset, as the Hugging Face Hub names it, such as `odc-by`."""
    creator: str = UNKNOWN
    """Person or organization that publishes the dataset."""
    url: str | None = None
    """Address where the dataset is published; None: not yet known."""
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings that made the dataset, as `published_recipe` returns them."""


@dataclass(frozen=True)
class DescribedPart:
    """The documents that a card describes: all clean text of a run, or those of an export."""

    num_documents: int
    num_bytes: int
    """Size of their texts in UTF-8; 0: not known."""
    sources: Mapping[str, int]
    """Documents by source."""
    languages: Mapping[str, int]
    """Documents by most probable language."""
    digest: str
    """SHA-256 by which the dataset is cited."""
    licences: Mapping[str, int] = field(default_factory=dict)
    """Documents by licence of their own."""
    with_licence: int | None = None
    """Documents that state a licence of their own; None: not counted."""
    head: Mapping[str, Any] = field(default_factory=dict)
    """Further metadata."""
    before: tuple[CardSection, ...] = ()
    """Sections before the selection of documents."""
    left: tuple[tuple[str, ...], ...] = ()
    """Further rows of the selection."""
    made: tuple[str, ...] = ()
    """Paragraphs on how it was made."""


def dataset_card(facts: DisclosedFacts, text: CardText, part: DescribedPart) -> HubCard:
    """Return the card of a dataset."""
    size = f", {part.num_bytes:,} bytes of UTF-8" if part.num_bytes else ""
    intro = (
        f"{part.num_documents:,} documents of clean text{size}. Made with Penstock from the sources below; every "
        "document has an id, its URL and its date, as far as known."
    )
    sections = (
        *part.before,
        selection(facts, part.left, _tokens(facts)),
        CardSection("Sources, languages and licences", _origins(text, part)),
        *_training(facts),
        personal_data(facts),
        rights(facts),
        toxicity(facts),
        bias(facts),
        limits([*known_limits(facts), *(("No licence of a document is known.",) if part.with_licence == 0 else ())]),
        CardSection("How it was made", "\n\n".join([*part.made, origins(facts)])),
        CardSection("How to cite it", _citation(facts, text, part)),
    )
    head = {
        "pretty_name": text.name,
        **licence_entries(text.licence),
        **_languages(part),
        "size_categories": [size_category(part.num_documents)],
        "task_categories": ["text-generation"],
        "language_creators": ["found"],
        "source_datasets": ["original"],
        "tags": list(TAGS),
        **part.head,
    }
    return HubCard(NAME, head, escaped(text.name), intro, sections, file_name="dataset/README.md")


def card_of_run(facts: DisclosedFacts, answers: FactsFile) -> HubCard:
    """Return the card of the clean text of a run. Raises ContractError if the run has no table `clean`."""
    if facts.get("clean") is None:
        raise ContractError(
            "summary --dataset-card: expected a run with the table `clean`, got one without. Name the run that wrote "
            "the dataset."
        )
    digest = facts.origins["clean"].digest
    text = CardText(
        stated(answers, "dataset.name") or f"penstock-{digest[:12]}",
        stated(answers, "dataset.licence") or UNKNOWN,
        stated(answers, "provider.name") or UNKNOWN,
        stated(answers, "dataset.link") or None,
    )
    made = f"The clean text was made on {facts.value('built')} with Penstock {facts.value('code_version')}."
    part = DescribedPart(
        facts.value("clean"),
        facts.value("clean_bytes"),
        facts.value("clean_sources"),
        facts.value("clean_languages"),
        digest,
        before=(CardSection("Contents", _contents(facts)),),
        made=(made,),
    )
    card = dataset_card(facts, text, part)
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    return HubCard(card.name, card.head, card.title, card.intro, card.sections, missing, card.file_name)


def _languages(part: DescribedPart) -> dict[str, Any]:
    ranked = sorted(part.languages, key=lambda name: (-part.languages[name], name))
    if not (codes := language_codes(ranked)):
        return {}
    return {"language": codes, "multilinguality": ["monolingual" if len(codes) == 1 else "multilingual"]}


def _contents(facts: DisclosedFacts) -> str:
    files = facts.value("files")
    return (
        f"{len(files):,} Parquet file(s), {sum(file['bytes'] for file in files):,} bytes. `croissant.json`, which "
        "`penstock summary RUN --croissant` writes, has the columns and the SHA-256 of each file."
    )


def _tokens(facts: DisclosedFacts) -> str:
    stored = facts.get("stored_tokens")
    return "" if stored is None else f"The token dataset of the same run has {stored:,} tokens."


def _origins(text: CardText, part: DescribedPart) -> str:
    languages = _named(part.languages)
    tables = [
        count_table("source", "documents", part.sources),
        count_table("language", "documents", languages),
        count_table("licence", "documents", part.licences),
    ]
    own = "Licences of single documents are in the field `licence` where they are known."
    if part.with_licence is not None:
        own = (
            f"{part.with_licence:,} of {part.num_documents:,} documents state a licence of their own in the field "
            "`licence`."
        )
    licence = (
        f"Licence of the dataset as a whole: {escaped(text.licence)}. {own} For all others it is unknown, and the "
        "rights of their authors apply."
    )
    return "\n\n".join(filter(None, [*tables, licence]))


def _named(languages: Mapping[str, int]) -> dict[str, int]:
    return {language_name(code): number for code, number in languages.items()}


def _training(facts: DisclosedFacts) -> Iterable[CardSection]:
    """Yield what a checkpoint has read, if the run was trained."""
    if facts.step is None:
        return
    read, documents, shares = facts.value("sources"), facts.value("documents_read"), facts.value("shares")
    rows = [
        (escaped(name), f"{number:,}", f"{shares[name]:.2%}", f"{documents.get(name, 0):,}")
        for name, number in read.items()
    ]
    text = (
        f"The {facts.step:,} steps of the newest checkpoint of the run have read {facts.value('consumed'):,} tokens. "
        "A document that was read twice counts twice.\n\n"
    )
    yield CardSection("Use in training", text + table(("source", "tokens", "share", "documents"), rows))


def _citation(facts: DisclosedFacts, text: CardText, part: DescribedPart) -> str:
    """Return how to cite the dataset; its digest identifies it."""
    year = facts.value("built")[:4]
    words = f"{text.creator}: {text.name}, {year}, sha256:{part.digest}"
    place = f" {escaped(text.url)}" if text.url else ""
    return f"{paragraph(words)}{place}\n\nThe digest {code(part.digest)} identifies exactly these documents."
