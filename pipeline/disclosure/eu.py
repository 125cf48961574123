"""The public summary of training content for general-purpose models, by the template of the AI Office of the EU.

Source of sections and fields: Template for the Public Summary of Training Content, C(2025) 8311 final, under
Article 53(1)(d) of Regulation (EU) 2024/1689. Data of a crawl by others, such as Common Crawl, are a public dataset
there (2.1); section 2.3 is for crawlers of the provider or on its behalf.
"""

import json
from collections.abc import Iterator

from pipeline.disclosure.answers import GIVEN, MISSING, FactsFile
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.facts import LARGE_SHARE
from pipeline.disclosure.paper import COMPUTED, Entry, Filler, Paper, PaperField, PaperSection
from pipeline.disclosure.table_facts import dropped_by, stage_rows

NAME = "eu"
TITLE = "Public summary of training content"
FORM = (
    "template of the AI Office, C(2025) 8311, Article 53(1)(d) of Regulation (EU) 2024/1689, "
    "https://digital-strategy.ec.europa.eu/en/library/"
    "explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models"
)
EU_LANGUAGES = {
    **{"bg": "Bulgarian", "hr": "Croatian", "cs": "Czech", "da": "Danish", "nl": "Dutch", "en": "English"},
    **{"et": "Estonian", "fi": "Finnish", "fr": "French", "de": "German", "el": "Greek", "hu": "Hungarian"},
    **{"ga": "Irish", "it": "Italian", "lv": "Latvian", "lt": "Lithuanian", "mt": "Maltese", "pl": "Polish"},
    **{"pt": "Portuguese", "ro": "Romanian", "sk": "Slovak", "sl": "Slovenian", "es": "Spanish", "sv": "Swedish"},
}
"""The official languages of the Union by ISO 639-1 code."""
OTHER_LANGUAGES = {
    **{"ar": "Arabic", "ca": "Catalan", "eu": "Basque", "fa": "Persian", "gl": "Galician", "he": "Hebrew"},
    **{"hi": "Hindi", "id": "Indonesian", "is": "Icelandic", "ja": "Japanese", "ko": "Korean", "no": "Norwegian"},
    **{"ru": "Russian", "sr": "Serbian", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese"},
    **{"zh": "Chinese", "bn": "Bengali", "cy": "Welsh", "sq": "Albanian", "ms": "Malay", "ur": "Urdu"},
}
"""Other frequent languages of the web; the rest are stated by code."""
RIGHTS_STAGES = ("rights",)
"""Names of stages that drop documents for reservations of rights."""
SETTING_CHARS = 300
"""Maximum length of the value of a setting that is stated."""
HARM_STAGES = ("toxicity",)
"""Names of stages that drop documents for words or scores of harmful text."""


def eu_summary(facts: DisclosedFacts, answers: FactsFile) -> Paper:
    """Return the summary of a run."""
    filler = Filler(facts, answers)
    sections = (
        PaperSection("0", "Document", (_document(filler), _updated(filler))),
        PaperSection("1", "General information", (*_provider(filler), *_sizes(filler))),
        PaperSection("2.1", "Publicly available datasets", tuple(_public(filler))),
        PaperSection("2.2", "Private datasets of third parties", tuple(_private(filler))),
        PaperSection("2.3", "Data crawled and scraped from online sources", tuple(_crawled(filler))),
        PaperSection("2.4", "User data", tuple(_users(filler))),
        PaperSection("2.5", "Synthetic data", tuple(_synthetic(filler))),
        PaperSection("2.6", "Other sources of data", tuple(_other(filler))),
        PaperSection("3", "Data processing", tuple(_processing(filler))),
    )
    return Paper(NAME, TITLE, FORM, (_note(facts),), sections, filler.origins())


def _note(facts: DisclosedFacts) -> str:
    if facts.step is None:
        return (
            "The run has no checkpoint. Each document of the training data counts once, as if it were read once. "
            "Tokens include separators between documents."
        )
    removed = facts.value("removed")
    later = f" A takedown has since removed documents with {removed:,} of these tokens." if removed else ""
    return (
        f"Figures are tokens that the {facts.step:,} steps of the newest checkpoint read, so a document that was read "
        f"twice counts twice. Tokens include separators between documents.{later}"
    )


def _field(identifier: str, title: str, *entries: Entry) -> PaperField:
    return PaperField(identifier, title, entries)


def _document(filler: Filler) -> PaperField:
    dataset = filler.computed("dataset", "Dataset", filler.facts.value("dataset"), "dataset")
    keys = ("document.previous", "document.location", "document.notices")
    return _field("0.a", "Version of the summary", dataset, *map(filler.asked, keys))


def _updated(filler: Filler) -> PaperField:
    return _field("0.b", "Last update", filler.asked("document.updated"))


def _provider(filler: Filler) -> Iterator[PaperField]:
    asked = filler.asked
    yield _field("1.1.a", "Provider name and contact", asked("provider.name"), asked("provider.contact"))
    yield _field("1.1.b", "Authorised representative", asked("representative.name"), asked("representative.contact"))
    step = filler.facts.step
    trained = "no checkpoint" if step is None else f"{step:,} optimizer steps"
    checkpoint = filler.computed("step", "Newest checkpoint", trained, "step")
    yield _field("1.2.a", "Versioned model names", asked("model.names"), asked("model.links"), checkpoint)
    yield _field("1.2.b", "Model dependencies", asked("model.base_models"), asked("model.base_summaries"))
    yield _field("1.2.c", "Date of placement on the Union market", asked("model.placed_on_market"))


def _sizes(filler: Filler) -> Iterator[PaperField]:
    facts, asked = filler.facts, filler.asked
    yield _field("1.3.a", "Modality", filler.computed("modality", "Modalities of the training data", "text", "dataset"))
    stored, read = facts.value("stored"), facts.value("consumed")
    yield _field(
        "1.3.b",
        "Training data size",
        filler.computed("size.band", "Text, band", facts.value("size_band"), "size_band"),
        filler.computed("size.stored", "Text, exact size after processing", f"{stored['train']:,} tokens", "stored"),
        filler.computed("size.heldout", "Text held out of training", f"{stored['heldout']:,} tokens", "stored"),
        filler.computed("size.consumed", "Text that was read in training", f"{read:,} tokens", "consumed"),
        filler.unused("size.other", "Image, audio, video and other modalities"),
    )
    types = filler.table(
        "content.sources",
        "Sources",
        ("source", "tokens", "share", "documents"),
        [_source_row(facts, source) for source in facts.value("sources")],
        "sources",
        "documents_read",
    )
    yield _field("1.3.c", "Types of content", asked("content.types"), types)
    latest = facts.value("latest") or "no document has a date"
    latest_entry = filler.computed("latest", "Latest date of data acquisition (MM/YYYY)", latest, "latest")
    yield _field("1.3.d", "Latest date of data acquisition", latest_entry, asked("content.continuous_training"))
    yield _field("1.3.e", "Linguistic characteristics", *_languages(filler))
    yield _field("1.3.f", "Other characteristics", asked("content.regions"), asked("content.demography"))
    contract = facts.value("tokenizer")
    words = f"{contract['kind']}, {contract['vocab_size']:,} tokens, SHA-256 {contract['sha256']}"
    yield _field(
        "1.3.g",
        "Additional comments",
        filler.computed("tokenizer", "Tokenizer with which sizes are counted", words, "tokenizer"),
        asked("content.comments"),
    )


def _source_row(facts: DisclosedFacts, source: str) -> tuple[str, ...]:
    # A source that no step has reached has no tokens.
    tokens, share = (facts.value(name).get(source, 0) for name in ("sources", "shares"))
    return source, f"{tokens:,}", f"{share:.2%}", f"{facts.value('documents_read').get(source, 0):,}"


def language_name(code: str) -> str:
    """Return a language code with the name of the language, if it is an official one of the Union or a frequent one."""
    name = EU_LANGUAGES.get(code) or OTHER_LANGUAGES.get(code)
    return f"{name} ({code})" if name else code or "unknown"


def _languages(filler: Filler) -> Iterator[Entry]:
    found = filler.facts.value("languages")
    official = tuple(language_name(code) for code, _ in found if code in EU_LANGUAGES)
    yield filler.computed("languages.eu", "Official languages of the Union", official or "none", "languages")
    total = sum(number for _, number in found)
    rows = [(language_name(code), f"{number:,}", f"{number / total:.2%}") for code, number in found if total]
    yield filler.table("languages", "All languages, as detected", ("language", "tokens", "share"), rows, "languages")


def _kind_entry(filler: Filler, kind: str, label: str) -> Entry:
    """Return whether a source has a kind; missing as long as the kind of a source is not given."""
    names = filler.answers.sources_of(kind)
    key = f"{kind}.used"
    if names:
        return Entry(key, label, GIVEN, f"yes: {', '.join(names)}", origins=("facts file",))
    unknown = [source for source in filler.answers.sources if not filler.answers.kind_of(source)]
    if unknown:
        return Entry(f"sources.{unknown[0]}.kind", label, MISSING)
    return Entry(key, label, GIVEN, "no", origins=("facts file",))


def _modality(filler: Filler, kind: str) -> Entry:
    """Return the modality of the sources of a kind: text, or not applicable if there is none."""
    if filler.answers.sources_of(kind):
        return filler.computed(f"{kind}.modality", "Modalities", "text", "dataset")
    state = _kind_entry(filler, kind, "Modalities")
    return state if state.state == MISSING else filler.unused(f"{kind}.modality", "Modalities")


def _public(filler: Filler) -> Iterator[PaperField]:
    facts, answers = filler.facts, filler.answers
    names = answers.sources_of("public")
    tokens = facts.value("sources")
    total = sum(tokens.get(name, 0) for name in names)
    large = [name for name in names if total and tokens.get(name, 0) > LARGE_SHARE * total]
    yield _field("2.1.a", "Were publicly available datasets used?", _kind_entry(filler, "public", "Public datasets"))
    yield _field("2.1.b", "Modalities", _modality(filler, "public"))
    yield _field("2.1.c", "Large publicly available datasets, above 3 % of the public text", *_large(filler, large))
    others = [name for name in names if name not in large]
    yield _field("2.1.d", "Other publicly available datasets", *_others(filler, others, bool(names)))
    rows = [_source_row(facts, name) for name in names]
    head = ("source", "tokens", "share", "documents")
    sizes = [filler.table("public.sizes", "Sizes", head, rows, "sources", "documents_read")] if rows else []
    yield _field("2.1.e", "Additional comments", *sizes, filler.asked("public.comments"))


def _large(filler: Filler, large: list[str]) -> Iterator[Entry]:
    if not large:
        state = _kind_entry(filler, "public", "Large public datasets")
        yield state if state.state == MISSING else filler.unused("public.large", "Large public datasets")
    for name in large:
        share = filler.facts.value("shares")[name]
        yield filler.computed(f"public.{name}", name, f"{share:.2%} of all tokens", "shares")
        yield from (filler.asked(key, name) for key in ("title", "link", "version", "selection"))


def _others(filler: Filler, others: list[str], any_public: bool) -> Iterator[Entry]:
    if not others:
        state = _kind_entry(filler, "public", "Other public datasets")
        unused = filler.unused("public.others", "Other public datasets")
        yield unused if any_public or state.state != MISSING else state
    for name in others:
        yield filler.asked("content", name)
        yield filler.computed(f"public.{name}.languages", f"{name}: languages", _codes(filler, name), "languages_of")
        yield filler.computed(f"public.{name}.period", f"{name}: period", _period(filler, name), "months")
        yield filler.computed(f"public.{name}.modality", f"{name}: modality", "text", "dataset")


def _codes(filler: Filler, source: str) -> str:
    found = filler.facts.value("languages_of").get(source, [])
    return ", ".join(language_name(code) for code, _ in found) or "none was read"


def _period(filler: Filler, source: str) -> str:
    months = filler.facts.value("months").get(source)
    return "not known" if months is None else " to ".join(f"{month[5:]}/{month[:4]}" for month in months)


def _private(filler: Filler) -> Iterator[PaperField]:
    asked = filler.asked
    yield _field(
        "2.2.1.a", "Commercial licences of rightsholders", asked("licensed.agreements"), *_audit(filler, "licensed")
    )
    yield _field("2.2.1.b", "Modalities", _modality(filler, "licensed"))
    yield _field(
        "2.2.2.a", "Private datasets of other third parties", asked("private.obtained"), *_audit(filler, "private")
    )
    yield _field("2.2.2.b", "Modalities", _modality(filler, "private"))
    yield _field("2.2.2.c", "Private datasets that are publicly known", asked("private.datasets"))
    yield _field("2.2.2.d", "Other private datasets", asked("private.description"))
    yield _field("2.2.2.e", "Additional comments", asked("private.comments"))


def _audit(filler: Filler, kind: str) -> Iterator[Entry]:
    """Yield the sources of a kind with their tokens, so that an answer can be compared with the data."""
    names = filler.answers.sources_of(kind)
    if names:
        rows = [_source_row(filler.facts, name) for name in names]
        head = ("source", "tokens", "share", "documents")
        yield filler.table(f"{kind}.sources", "Sources of the run", head, rows, "sources", "documents_read")


def _crawled(filler: Filler) -> Iterator[PaperField]:
    facts, asked = filler.facts, filler.asked
    names = filler.answers.sources_of("crawled")
    used = _kind_entry(filler, "crawled", "Crawlers of the provider, or on its behalf")
    yield _field("2.3.a", "Were crawlers used by the provider or on its behalf?", used)
    yield _field("2.3.b", "Crawler names", asked("crawler.names"))
    yield _field("2.3.c", "Purposes of the crawlers", asked("crawler.purposes"))
    behaviour = ("captchas", "passwords", "paywalls", "robots_txt", "protocols")
    yield _field("2.3.d", "Behaviour of the crawlers", *(asked(f"crawler.{name}") for name in behaviour))
    periods = [filler.computed(f"period.{name}", name, _period(filler, name), "months") for name in names]
    yield _field("2.3.e", "Period of data collection (MM/YYYY)", *(periods or [_unused_or(filler, used, "period")]))
    types = [asked(f"crawler.{name}") for name in ("regions", "demography", "site_types")]
    spoken = [
        filler.computed(f"spoken.{name}", f"{name}: languages", _codes(filler, name), "languages_of") for name in names
    ]
    yield _field("2.3.f", "Type of content and online sources crawled", *types, *spoken)
    yield _field("2.3.g", "Modality", _modality(filler, "crawled"))
    yield _field("2.3.h", "Most relevant domain names", *_domains(filler, bool(names)))
    without = f"{facts.value('without_domain'):,} tokens"
    no_domain = filler.computed("domains.without", "Text of documents without a domain", without, "without_domain")
    yield _field("2.3.i", "Additional comments", no_domain, asked("crawler.comments"))


def _unused_or(filler: Filler, used: Entry, name: str) -> Entry:
    return used if used.state == MISSING else filler.unused(f"crawled.{name}", "Crawled data")


def _domains(filler: Filler, is_crawled: bool) -> Iterator[Entry]:
    facts = filler.facts
    listed, number = facts.value("domains"), facts.value("num_domains")
    tokens = facts.value("domain_tokens") + facts.value("without_domain")
    share = facts.value("listed_tokens") / tokens if tokens else 0.0
    named = ", ".join(facts.value("domain_sources"))
    why = "" if is_crawled else " No source is given as crawled; the list is of all sources."
    words = (
        f"{len(listed):,} of {number:,} domains, {facts.value('domain_rule')} by tokens that were read, with "
        f"{share:.2%} of the tokens of {named}.{why}"
    )
    yield filler.computed("domains.rule", "Rule of the list", words, "domains")
    rows = [(domain, f"{tokens:,}") for domain, tokens in listed]
    yield filler.table("domains", "Domains", ("domain", "tokens"), rows, "domains")


def _users(filler: Filler) -> Iterator[PaperField]:
    asked = filler.asked
    yield _field("2.4.a", "Interactions with the model", asked("user.interactions"), *_audit(filler, "user"))
    yield _field("2.4.b", "Interactions with other services", asked("user.other_services"))
    yield _field("2.4.c", "Services that collected the data", asked("user.services"))
    yield _field("2.4.d", "Modality", _modality(filler, "user"))
    yield _field("2.4.e", "Additional comments", asked("user.comments"))


def _synthetic(filler: Filler) -> Iterator[PaperField]:
    asked = filler.asked
    audit = (*_audit(filler, "synthetic"), *_derived(filler))
    yield _field("2.5.a", "Synthetic data of the provider", asked("synthetic.created"), *audit)
    yield _field("2.5.b", "Modality", _modality(filler, "synthetic"))
    yield _field("2.5.c", "General-purpose models that generated them", asked("synthetic.models"))
    yield _field("2.5.d", "Other models that generated them", asked("synthetic.other_models"))
    yield _field("2.5.e", "Additional comments", asked("synthetic.comments"))


def _derived(filler: Filler) -> Iterator[Entry]:
    """Yield the documents that name their parents by source, whatever kind the sources have; none if there are none."""
    if numbers := filler.facts.facts.get("derived"):
        rows = [(source, f"{number:,}") for source, number in numbers.value.items()]
        head = ("source", "documents after the filters of single documents")
        yield from (
            [filler.table("synthetic.derived", "Documents made from others", head, rows, "derived")] if rows else []
        )


def _other(filler: Filler) -> Iterator[PaperField]:
    asked = filler.asked
    yield _field("2.6.a", "Were other sources used?", asked("other.used"), *_audit(filler, "other"))
    yield _field("2.6.b", "Description", asked("other.description"))
    yield _field("2.6.c", "Additional comments", asked("other.comments"))


def _processing(filler: Filler) -> Iterator[PaperField]:
    facts, asked = filler.facts, filler.asked
    yield _field("3.1.a", "Code of Practice", asked("rights.code_of_practice"))
    measures = (asked("rights.robots_txt"), asked("rights.datasets"), asked("rights.requests"))
    yield _field("3.1.b", "Measures for reservations of rights", *measures, *_measured(filler, "rights", RIGHTS_STAGES))
    yield _field("3.1.c", "Additional comments", asked("rights.copyright_policy"))
    yield _field(
        "3.2.a", "Removal of illegal content", asked("illegal.measures"), *_measured(filler, "harm", HARM_STAGES)
    )
    head = ("stage", "tables", "version", "documents dropped", "models")
    rows = stage_rows(facts)
    yield _field("3.3.a", "Other information", filler.table("stages", "Stages of processing", head, rows, "stages"),
                 *_personal_data(filler), asked("processing.other"))  # fmt: skip


def _measured(filler: Filler, key: str, names: tuple[str, ...]) -> Iterator[Entry]:
    """Yield what the stages of these names dropped, if the run has one."""
    used = sorted({stage["stage"] for stage in filler.facts.value("stages") if stage["stage"] in names})
    if used:
        number = dropped_by(filler.facts, [f"{name}/" for name in used])
        words = f"{number:,} documents dropped by {', '.join(used)}"
        yield Entry(f"{key}.measured", "Measured in the run", COMPUTED, words, origins=filler.origins_of("dropped"))
        lines = tuple(
            f"{stage['stage']}.{name} = {json.dumps(value)[:SETTING_CHARS]}"
            for stage in filler.facts.value("stages")
            if stage["stage"] in used
            for name, value in sorted(stage["settings"].items())
            if value not in (None, [], {}, "")
        )
        yield filler.computed(f"{key}.settings", "Settings of these stages", lines or "none", "stages")


def _personal_data(filler: Filler) -> Iterator[Entry]:
    found = filler.facts.facts.get("personal_data")
    if found is not None:
        rows = [(kind, f"{number:,}") for kind, number in sorted(found.value.items())]
        label = "Personal data that was replaced, by type"
        yield filler.table("personal_data", label, ("type", "values"), rows, "personal_data")
