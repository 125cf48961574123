"""English prose from the docstrings and text files of the installed Python packages, as clean paragraphs and sentences.

Nothing is imported or executed. Docstrings are matched as triple-quoted literals: a regular expression reads 200 MB of
sources in 2 s where `ast.parse` needs 50 s, and `is_prose` rejects other literals. Every paragraph is used once.
"""

import os
import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError

FIRST_PACKAGES = ("networkx", "numpy", "matplotlib", "pandas", "scipy", "pyspark", "sympy", "torch")
"""Packages with the most prose, read before the standard library and everything else."""
SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "testing",
    "__pycache__",
    "_vendor",
    "lib2to3",
    "penstock.egg-info",
}
DOCUMENTS = (".md", ".rst", "METADATA", "LICENSE", "LICENSE.txt")
SHINGLE_WORDS = 5
MAX_SEEN = 0.2
"""Maximum share of a paragraph's 5-word shingles that occur in earlier paragraphs, so that no page is a near copy."""

LITERAL = re.compile(r'("""|\'\'\')(.*?)\1', re.DOTALL)
WORD = re.compile(r"\w+")
LIST_ITEM = re.compile(r"(?:[-*•+]|\d{1,2}[.)]|\[\d+\]) +")
FIELD = re.compile(r":[a-z]+(?: [^:]*)?: +|[a-z_]\w*(?: \([^)]*\))?: +(?=[A-Z])")
SKIPPED_BLOCKS = (">>>", "..", "$", "%", "@")
"""Prefixes of lines that start a block without prose, up to the next blank line: examples, directives, commands."""
SKIPPED_LINES = ("|", "+-", "==", "--", "~~", "^^", "#", "<")
"""Prefixes of single lines without prose: tables, underlines, headings."""
MARKUP = (
    (re.compile(r":[a-z:]+:`[~!]?\.?([^`<]+?)(?: *<[^`>]*>)?`"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`<]+?)(?: *<[^`>]*>)?`_{0,2}"), r"\1"),
    (re.compile(r"!?\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r" ?\[[\w.]+\]_?"), ""),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"\*([^*\s][^*]*)\*"), r"\1"),
)
MARKED = re.compile(r"[`*\[]")
NO_WORD = re.compile(r"\d+|[^\w\s'-]")
ODD = re.compile(r"[\\{}<>|=_@#$^~*`\[\]/+%&\x00-\x1f\ufffd]")
REJECTED = re.compile(
    r"://|www\.|@|\{|\.\.\.|…|javascript|lorem ipsum|terms of use|privacy policy|cookie|todo|fixme|deprecated",
    re.IGNORECASE,
)
COMMON_WORDS = frozenset(
    ["the", "be", "to", "of", "and", "that", "have", "with", "a", "an", "is", "are", "in", "for", "if"]
)


@dataclass(frozen=True)
class Passage:
    """The paragraphs of prose in one file, in order, and their topic."""

    topic: str
    paragraphs: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """Total length of the paragraphs [code points]."""
        return sum(map(len, self.paragraphs))


def collect_passages(num_chars: int) -> list[Passage]:
    """Return passages of at least `num_chars` code points in total, or all passages if there is less text.

    Paragraphs that resemble an earlier one are omitted.
    """
    passages: list[Passage] = []
    seen: set[int] = set()
    for topic, path in _files():
        if num_chars <= 0:
            break
        text = path.read_text("utf-8", "replace")
        literals = [match[2] for match in LITERAL.finditer(text)] if path.suffix == ".py" else [text]
        candidates = (p for literal in literals if len(literal) > 80 for p in paragraphs(literal))
        new = tuple(p for p in candidates if _is_new(p, seen))
        if new:
            passages.append(Passage(topic, new))
            num_chars -= passages[-1].num_chars
    return passages


def vocabulary(passages: list[Passage]) -> list[str]:
    """Return the lower-case words that occur three times or more in the passages, most frequent first."""
    words = re.compile(r"\b[a-z]+\b")
    counts = Counter(word for passage in passages for p in passage.paragraphs for word in words.findall(p))
    return sorted((word for word, count in counts.items() if count >= 3), key=lambda word: (-counts[word], word))


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a documentation text, with reST, numpydoc or Markdown markup removed."""
    lines: list[str] = []
    indent, skipping = 0, False
    for number, line in enumerate([*text.expandtabs().splitlines(), ""]):
        bare = line.lstrip()
        depth = len(line) - len(bare)
        item = LIST_ITEM.match(bare) if bare[:1] in "-*•+[0123456789" else None
        starts = item or (FIELD.match(bare) if ": " in bare else None)
        skipping = bool(bare) and (skipping or bare.startswith(SKIPPED_BLOCKS))
        is_text = not skipping and not bare.startswith(SKIPPED_LINES) and bool(bare)
        # The first line of a docstring follows the quotes, so its indentation is meaningless.
        if lines and (not is_text or starts or (depth != indent and number > 1)):
            candidate = _sentence(" ".join(lines))
            if is_prose(candidate):
                yield candidate
            lines = []
        if is_text:
            if starts:
                depth += item.end() if item else 0
                bare = bare[starts.end() :]
            lines.append(bare)
            indent = depth


def is_prose(paragraph: str) -> bool:
    """Return True if a paragraph is English prose: whole sentences, few symbols, words of usual length."""
    if not 45 <= len(paragraph) <= 1500 or not paragraph[0].isupper() or paragraph[-1] not in ".?!":
        return False
    words = paragraph.split(" ")
    if len(words) < 8 or not 3.2 <= len(paragraph) / len(words) - 1 <= 7.5 or max(map(len, words)) > 36:
        return False
    if len(ODD.findall(paragraph)) > len(paragraph) * 0.015 or REJECTED.search(paragraph):
        return False
    # Gopher requires a letter in 80 % of the words, where symbols and numbers count as words.
    if len(NO_WORD.findall(paragraph)) > 0.2 * len(words) or COMMON_WORDS.isdisjoint(words):
        return False
    return sum(map(str.isupper, paragraph)) <= 0.09 * len(paragraph)


def _sentence(text: str) -> str:
    """Return a paragraph without markup. The result is empty if the paragraph is short or starts in lower case.

    A full stop is added if the text has at least ten words and ends in a letter or digit.
    """
    if len(text) < 45 or text[0].islower():
        return ""
    for pattern, replacement in MARKUP if MARKED.search(text) else ():
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(" :")
    return text + "." if text[-1:].isalnum() and text.count(" ") >= 9 else text


def _is_new(paragraph: str, seen: set[int]) -> bool:
    """Return True if few shingles of the paragraph are in `seen`. In this case, add the shingles to `seen`."""
    words = WORD.findall(paragraph.lower())
    # CRC-32, since Python's hash of a string differs between processes; a collision only loses a paragraph.
    shingles = [
        zlib.crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode("utf-8", "replace"))
        for i in range(len(words) - SHINGLE_WORDS + 1)
    ]
    new = set(shingles).difference(seen)
    if len(new) < (1 - MAX_SEEN) * len(shingles):
        return False
    seen.update(new)
    return True


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (topic, file) of every installed source or text file, in an order that depends only on the packages."""
    library, packages = (Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib"))
    names = sorted(entry.name for entry in packages.iterdir())
    first = [name for name in FIRST_PACKAGES if name in names]
    rest = [name for name in names if name not in first]
    roots = [packages / name for name in first] + [library] + [packages / name for name in rest]
    for root in roots:
        for path in [root] if root.is_file() else _walk(root):
            if path.suffix == ".py" or path.name.endswith(DOCUMENTS):
                yield _topic(path.relative_to(packages if packages in path.parents else library)), path


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names))


def _topic(path: Path) -> str:
    """Return the path of a file as words, such as `scipy sparse linalg`."""
    words = re.sub(r"-[\d.]+\.dist-info|\.\w+$", "", str(path)).replace("_", " ").replace(os.sep, " ").split()
    return " ".join(dict.fromkeys(word for word in words if word not in ("init", "src", "lib", "core")))


# The stock of English text for pages. Text is used in order, so a page has one topic, and no two pages share more than
# a few words.

MERGED_CHARS = 240
"""Shorter paragraphs are merged with the next one, since web pages seldom have one-line paragraphs [code points]."""
SENTENCE_END = re.compile(r"(?<=[a-z)][.?!]) (?=[A-Z])")
PLAIN = re.compile(r"[A-Z][\w,;:'\"() -]+\w\.")


class Stock:
    """The paragraphs that no page has used yet, with their topics, and the vocabulary of all paragraphs."""

    def __init__(self, passages: list[Passage]):
        self.words = [word for word in vocabulary(passages) if len(word) > 1]
        """Lower-case words, the most frequent first."""
        self.num_chars = sum(passage.num_chars for passage in passages)
        """Length of the unused text [code points]."""
        self._paragraphs = _merged(passages)
        self._sentences: list[str] = []

    def paragraphs(self, min_chars: int, min_count: int = 1) -> tuple[str, list[str]]:
        """Return a topic and unused paragraphs, which count as used afterwards.

        There are at least `min_count` paragraphs, of at least `min_chars` code points in total. The topic is that of
        the first paragraph. Raises ConfigError if too few paragraphs are left.
        """
        topic, selected, size = "", list[str](), 0
        while size < min_chars or len(selected) < min_count:
            entry = next(self._paragraphs, None)
            if entry is None:
                raise ConfigError(
                    "demo-crawl: expected enough documentation in the installed Python packages for all pages, got "
                    "too little. Lower --pages."
                )
            topic = topic or entry[0]
            selected.append(entry[1])
            size += len(entry[1])
            self.num_chars -= len(entry[1])
        return topic, selected

    def distinct(self, num_chars: int, min_words: int = 9, max_words: int = 30) -> list[str]:
        """Return unused sentences of at least `num_chars` code points in total.

        No two of these sentences share three words in a row.
        """
        selected: list[str] = []
        seen: set[tuple[str, ...]] = set()
        while sum(map(len, selected)) < num_chars:
            sentence = self.sentences(1, min_words, max_words)[0]
            words = sentence.lower().rstrip(".").split(" ")
            triples = set(zip(words, words[1:], words[2:]))
            if seen.isdisjoint(triples):
                selected.append(sentence)
                seen |= triples
        return selected

    def sentences(self, count: int, min_words: int = 7, max_words: int = 30) -> list[str]:
        """Return `count` unused sentences of plain words, each with `min_words` to `max_words` words."""
        selected: list[str] = []
        while len(selected) < count:
            fitting = [s for s in self._sentences if min_words <= s.count(" ") + 1 <= max_words]
            fitting = fitting[: count - len(selected)]
            selected += fitting
            self._sentences = [s for s in self._sentences if s not in fitting]
            if len(selected) < count:
                new = SENTENCE_END.split(self.paragraphs(1)[1][0])
                self._sentences = self._sentences[-50:] + [sentence for sentence in new if PLAIN.fullmatch(sentence)]
        return selected


def title_of(topic: str, rng: random.Random) -> str:
    """Return a heading for a page about a topic."""
    title = rng.choice(TITLE_TEMPLATES).format(topic)
    return title[0].upper() + title[1:]


def _merged(passages: list[Passage]) -> Iterator[tuple[str, str]]:
    for passage in passages:
        pending = ""
        for paragraph in passage.paragraphs:
            pending = f"{pending} {paragraph}" if pending else paragraph
            if len(pending) >= MERGED_CHARS:
                yield passage.topic, pending
                pending = ""
        if pending:
            yield passage.topic, pending


TITLE_TEMPLATES = (
    "Notes on {}",
    "A closer look at {}",
    "What to know about {}",
    "{} in practice",
    "Getting along with {}",
    "Questions about {}",
    "How {} behaves",
    "The details of {}",
    "Reading about {}",
    "{} explained",
    "Using {} without surprises",
    "Background to {}",
)
