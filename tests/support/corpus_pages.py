"""A small archive of made pages for the recipes of published corpora: each has one property that a rule acts on."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.tiny_archive import record


def words_of(text: str) -> Sequence[str]:
    """The words of a text."""
    return text.split()


NOUNS = words_of("""
    captain gardener neighbour teacher surgeon baker musician pilot lawyer guide nurse librarian student engineer
    clock footpath letter harvest map oak coin bicycle cake roof timetable honey organ boat flood ski wall stamp
    market station shore street bridge forest mill river bay hall storm bell fair voyage snow kitchen lantern
    orchard valley island museum painting farmer village winter candle carpet hammer journal kettle ladder meadow
    notebook orchestra parcel quarry ribbon shepherd theatre umbrella violin window yard
""")
ADJECTIVES = words_of("""
    old patient young retired broken narrow quiet northern unfinished silver leaking early wooden honest tired
    curious careful famous distant gentle heavy hidden humble large modest nervous ordinary proud rusty simple
    small strange sturdy tall warm weary yellow bright calm dusty
""")
VERBS = words_of("""
    repaired described measured forgot painted carried admired sold remembered discovered photographed returned
    borrowed cleaned crossed decorated delivered explained followed guarded inspected inherited mentioned noticed
    offered opened polished praised recognised rescued searched sketched studied visited
""")
PLACES = words_of("""
    near behind under beside across above beyond inside around below
""")
TIMES = words_of("""
    before after during despite since without
""")
REASONS = (
    *("nobody complained about it", "the evening was cold", "there was little choice", "children needed rest"),
    *("everyone was grateful", "the family laughed", "a newspaper reported it", "that ended their quarrel"),
    *("rain had fallen for weeks", "prices were rising", "old habits rarely change", "trains ran late again"),
    *("few people believed him", "she had promised it", "winter came suddenly"),
)
GERMAN_NOUNS = words_of("""
    Lehrer Schlüssel Fahrräder Brüder Gärten Schiffe Berge Inseln Bücher Lampen Straßen Wälder Städte Kinder
    Nachbarn Vögel Wolken Teller Stühle Karten Bilder Häuser Mauern Brücken Felder Flüsse Ärzte Maler Bauern
    Händler
""")
GERMAN_ADJECTIVES = words_of("""
    alten jungen kleinen großen stillen dunklen hellen roten müden fremden kalten langen
""")
GERMAN_VERBS = words_of("""
    suchten fanden kauften malten zeigten sahen brauchten vergaßen liebten besuchten öffneten
""")
GERMAN_PLACES = words_of("""
    hinter neben über unter vor zwischen
""")
SPAM = ("cheap", "casino", "login", "deal", "click", "bonus", "discount", "offer", "free", "winner")
BAD_WORD = "bastard"
EMAIL = "maria.keller@mailhost-kontor.net"


def sentence(rng: random.Random) -> str:
    """An English sentence of 10 to 16 words, of which no five in a row are fixed."""
    who, what, place, time = (f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(4))
    verb, why = rng.choice(VERBS), rng.choice(REASONS)
    text = rng.choice(
        (
            f"the {who} {verb} a {what} {rng.choice(PLACES)} the {place}, because {why}",
            f"{rng.choice(TIMES)} the {time}, a {who} {verb} the {what} and {why}",
            f"{why}, although the {who} had {verb} every {what} {rng.choice(PLACES)} this {place}",
            f"when a {who} {verb} that {what}, {why} {rng.choice(TIMES)} our {time}",
        )
    )
    return f"{text[0].upper()}{text[1:]}."


def paragraphs(seed: str, count: int = 4, sentences: int = 5) -> list[str]:
    """Paragraphs of English prose; another seed gives others."""
    rng = random.Random(seed)
    return [" ".join(sentence(rng) for _ in range(sentences)) for _ in range(count)]


def shuffled(seed: str) -> list[str]:
    """Paragraphs of the same words in no order, each with its full stop."""
    rng = random.Random(seed)
    out = []
    for paragraph in paragraphs(seed):
        words = paragraph.replace(".", "").replace(",", "").lower().split()
        rng.shuffle(words)
        lines = [" ".join(words[start : start + 14]) for start in range(0, len(words), 14)]
        out.append(" ".join(f"{line[0].upper()}{line[1:]}." for line in lines))
    return out


def spam(seed: str) -> list[str]:
    """Paragraphs of prose in which every other word advertises."""
    rng = random.Random(seed)
    return [" ".join(f"{word} {rng.choice(SPAM)}" for word in text.split()) + "." for text in paragraphs(seed)]


def german(seed: str) -> list[str]:
    """Paragraphs of German prose."""
    rng = random.Random(seed)

    def made() -> str:
        who, what, place = (f"{rng.choice(GERMAN_ADJECTIVES)} {rng.choice(GERMAN_NOUNS)}" for _ in range(3))
        verb, where = rng.choice(GERMAN_VERBS), rng.choice(GERMAN_PLACES)
        text = rng.choice(
            (
                f"die {who} {verb} viele {what}, aber nicht {where} jenen {place}",
                f"{where} den {place} {verb} alle {who} und manche {what}",
                f"weil sie {what} {verb}, blieben einige {who} lange {where} ihren {place}",
            )
        )
        return f"{text[0].upper()}{text[1:]}."

    return [" ".join(made() for _ in range(4)) for _ in range(4)]


EVALUATION_ITEM = " ".join(paragraphs("evaluation", 1, 6))
"""An item of an evaluation set."""
PASSAGE = " ".join(paragraphs("passage", 1, 5))
"""A passage of more than 50 words that two pages have."""
LINE = "Please read the rules of the reading room before you ask a question about opening hours on public holidays."
"""A line that three pages have."""
GOOD = tuple(f"good-{number}" for number in range(10))


def pages() -> Mapping[str, Sequence[str]]:
    """The paragraphs of every page by name."""
    near = [text.replace("the", "this", 1) if number == 3 else text for number, text in enumerate(paragraphs("good-1"))]
    made = {name: paragraphs(name) for name in GOOD}
    return made | {
        "copy": made["good-0"],
        "near": near,
        "second capture": paragraphs("second capture"),
        "passage-1": [*paragraphs("passage-1", 2), PASSAGE, *paragraphs("passage-1 end", 2)],
        "passage-2": [*paragraphs("passage-2", 3), PASSAGE],
        "line-1": [LINE, *paragraphs("line-1")],
        "line-2": [*paragraphs("line-2"), LINE],
        "contaminated": [*paragraphs("contaminated"), EVALUATION_ITEM],
        "test set": [EVALUATION_ITEM],
        "short": ["The museum is open on Sunday mornings. It is free."],
        "swear": [
            f"{paragraphs('swear', 1)[0]} He called him a {BAD_WORD} in front of the whole town.",
            *paragraphs("swear 2"),
        ],
        "brace": [*paragraphs("brace"), "The function returns {value} when the gate of the lock is closed."],
        "repeats": [text for text in paragraphs("repeats", 8, 1) for _ in range(6)],
        "email": [*paragraphs("email"), f"Letters to the society are welcome at {EMAIL} before the end of May."],
        "headline": ["Opening hours and prices", *paragraphs("headline")],
        "shuffled": shuffled("shuffled"),
        "spam": spam("spam"),
        "german-0": german("german-0"),
        "german-1": german("german-1"),
    }


def url_of(name: str) -> str:
    """The URL of a page; that of a second capture is the URL of the page `good-2`."""
    return f"https://www.valley-news.example/{'good-2' if name == 'second capture' else name.replace(' ', '-')}"


def write_archive(path: Path) -> Path:
    """Write a WARC file of all pages, in their order, a second between two captures."""
    records = []
    for number, (name, texts) in enumerate(pages().items()):
        body = "".join(f"<p>{text}</p>\n" for text in texts)
        head = f"<!DOCTYPE html><html><head><title>{name}</title></head>"
        html = f"{head}<body><main><article>\n{body}</article></main></body></html>"
        block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html.encode("utf-8")
        date = f"2024-03-01T00:{number // 60:02}:{number % 60:02}Z"
        records.append(record(block, WARC_Target_URI=url_of(name), WARC_Date=date))
    path.write_bytes(b"".join(records))
    return path
