"""Word lists: what counts as a word on a list, its measure, and the built-in lists of every language."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.term_words import term_words
from pipeline.toxicity.words import (
    LANGUAGES,
    LISTS,
    MEASURES,
    OTHER,
    UNSPACED,
    Occurrences,
    UnspacedWordList,
    WordList,
    read_wordlist,
)
from schemas.errors import ConfigError
from schemas.normalization import normalize
from tests.support.native import needs_native, python_only, tricky_texts

pytestmark = pytest.mark.usefixtures("implementation")
LIST = WordList(
    dict.fromkeys(["damn", "bloody hell", "hell", "half-wit", "s&m", "Scheiße", "🖕", "देखो"], "obscenity")
    | {"damnab*": "hate", "gonna kill you": "threat"}
)
ALL = (*MEASURES, OTHER)
BESIDE = (
    *(
        ("a ", " b"),
        ("", "."),
        ("(", ")"),
        ("“", "”"),
        ("a, ", ","),
        ("#", "!!!"),
        ("_", "_"),
        ("*", "*"),
        ("\n", "\n"),
    ),
    *(("a/", "/b"), ("a—", "—b"), ("a\u00a0", "\u00a0b"), ("'", "'s"), ("😀", "😂"), ("❤️", "👍🏽"), ("🇩🇪", "🇫🇷")),
    *(("→", "←"), ("•", "…"), ("■", "✓"), ("@", "?"), ("[", "]"), ("a:", ";"), ("&", "|"), ("1.", "\t"), ("\n", "\n")),
)
"""What is beside a listed word."""


def counted(found: Occurrences) -> tuple[int, float]:
    return found.total(ALL), found.share(ALL)


@pytest.mark.parametrize(
    ("text", "occurrences", "covered", "words"),
    [
        ("", 0, 0, 1),
        ("a damned fool", 0, 0, 3),
        ("Damn! (DAMN) damn's “damn” _damn_", 5, 5, 6),
        ("bloody hell", 1, 2, 2),
        ("bloody\n  hell, hell", 2, 3, 3),
        ("the bloody hill", 0, 0, 3),
        ("hell bloody", 1, 1, 2),
        ("a half wit and a half-wit", 2, 4, 7),
        ("it's m for me", 0, 0, 5),
        ("S&M here", 1, 2, 3),
        ("SCHEISSE, Scheiße", 2, 2, 2),
        ("so 🖕 there", 1, 1, 3),
        ("देखोगे देखो", 1, 1, 2),
        ("hello shell", 0, 0, 2),
    ],
)
def test_words_are_whole_and_without_case(text: str, occurrences: int, covered: int, words: int) -> None:
    assert counted(LIST.count(text)) == (occurrences, covered / words)


@needs_native
@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            (
                "damn",
                "Hell",
                "bloody ",
                "damnable",
                "kill you ",
                "gonna ",
                "SCHEISSE",
                "\ud800",
                "-",
                "İ",
                "ǰ",
                "🖕",
                "😀",
                "e\u0301",
                "\u0336",
            )
        )
        | tricky_texts
    ).map("".join)
)
def test_the_screen_hides_no_word(text: str) -> None:
    result = LIST.count(text)
    with python_only():
        assert LIST.count(text) == result


@needs_native
def test_the_screen_parts_words_at_every_character_that_does() -> None:
    for code in range(0x20000):
        text = f"x{chr(code)}damn".casefold()
        if not LIST._screen.may_have(text):
            assert b"damn" not in term_words(text)


@pytest.mark.parametrize(
    ("text", "occurrences", "share"),
    [
        ("你这个笨蛋", 1, 2 / 5),
        ("笨 好", 0, 0),
        ("笨 蛋", 1, 2 / 2),  # a gap between two characters of a word is a mask
        ("大笨蛋笨蛋", 2, 5 / 5),
        ("傻B! 傻Bob", 1, 2 / 7),
        ("他damn人 damned", 1, 4 / 12),
        ("你好", 0, 0),
        ("", 0, 0),
    ],
)
def test_languages_without_spaces_match_anywhere(text: str, occurrences: int, share: float) -> None:
    words = UnspacedWordList(dict.fromkeys(["笨蛋", "大笨蛋", "傻B", "damn"], "obscenity"))
    assert counted(words.count(text)) == (occurrences, share)


def test_term_words() -> None:
    assert term_words("don't—stop “now” a_b 3.14 ５，é") == [
        *(b"don", b"t", b"stop", b"now", b"a", b"b", b"3", b"14", "５".encode(), "é".encode()),
    ]
    assert [word.decode() for word in term_words("a😀😀b❤️c→d")] == ["a", "😀", "😀", "b", "❤", "c", "→", "d"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_entry_is_found_beside_any_text(language: str) -> None:
    path = LISTS / f"{language}.txt"
    words = read_wordlist(str(path), language)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    entries = [line for line in lines if line and line[0] not in "#[" and not line.endswith("*")]
    for number, entry in enumerate(entries):
        before, after = BESIDE[number % len(BESIDE)]
        for written in (entry, entry.upper(), entry.title()):
            assert words.count(f"{before}{written}{after}").by_measure, (before, written, after)
        if language != "bn":  # whose vowels have parts that are common letters
            assert words.count(normalize("NFD", f"a {entry} b")).by_measure, entry
        assert words.count("a " + "".join(f"{char}\u0336" for char in entry) + " b").by_measure, entry


def test_measures_and_longer_words() -> None:
    found = LIST.count("Damnable! Damnation; I'm gonna kill you, damn it.")
    assert dict(found.by_measure) == {"hate": 1, "threat": 1, "obscenity": 1}
    assert (found.size, dict(found.covered)) == (9, {"hate": 1, "threat": 3, "obscenity": 1})
    assert (found.total(("threat",)), found.share(("threat", "hate"))) == (1, 4 / 9)


def test_a_list_file_has_comments_sections_and_words(tmp_path: Path) -> None:
    path = tmp_path / "en.txt"
    path.write_text("# a comment\n\nDamn\n[threat]\n  bloody hell \n***\nslay*\n", encoding="utf-8")
    words = read_wordlist(str(path), "en")
    assert dict(words.count("damn bloody hell comment slayer").by_measure) == {OTHER: 1, "threat": 2}
    path.write_text("damn\n", encoding="utf-8")
    assert isinstance(read_wordlist(str(path), "th"), UnspacedWordList)
    path.write_text("# nothing\n***\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"toxicity\.wordlists\.en: expected words, got none in .*en\.txt"):
        read_wordlist(str(path), "en")


@pytest.mark.parametrize(
    ("language", "content", "text"),
    [("ja", "ばか\n", "お前はばかだ"), ("en", "damn\n", "damn"), ("en", "[hate]\ndamn\n", "damn")],
)
def test_a_mark_of_the_encoding_is_no_part_of_a_list(language: str, content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(content, encoding="utf-8")
    expected = read_wordlist(str(path), language).count(text)
    path.write_text(content, encoding="utf-8-sig")
    assert read_wordlist(str(path), language).count(text) == expected
    assert sum(expected.by_measure.values()) == 1


@pytest.mark.parametrize("charset", ["latin-1", "utf-16"])
def test_a_list_in_another_encoding(charset: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("böse\n", encoding=charset)
    with pytest.raises(ConfigError, match=r"toxicity\.wordlists\.de: expected a file of words in UTF-8"):
        read_wordlist(str(path), "de")


@pytest.mark.parametrize(
    ("language", "line", "message"),
    [
        ("en", "[thread]", r"expected a section of hate, .*, got \[thread\] in line 1 of .*Rename the section"),
        ("en", "ab*", "expected one word of at least 3 letters before `.` in a language with spaces, got 'ab.'"),
        ("en", "two words*", "got 'two words.'. Write the whole words"),
        ("zh", "笨蛋笨*", "got '笨蛋笨.'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, language: str, line: str, message: str) -> None:
    path = tmp_path / "list.txt"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_wordlist(str(path), language)


def test_at_least_thirty_languages_have_a_list_of_every_measure() -> None:
    assert len(LANGUAGES) >= 30
    for language in LANGUAGES:
        lines = (LISTS / f"{language}.txt").read_text(encoding="utf-8").splitlines()
        assert [line[1:-1] for line in lines if line.startswith("[")] == sorted(
            MEASURES, key=("obscenity", "sexual", "hate", "threat", "violence").index
        )


@pytest.mark.parametrize("language", LANGUAGES)
def test_built_in_lists_find_their_own_words_only(language: str) -> None:
    path = LISTS / f"{language}.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and line[0] not in "#["]
    assert "Written for Penstock (Apache-2.0)" in lines[0]
    assert 100 <= len(entries) == len({entry.casefold() for entry in entries})
    words = read_wordlist(str(path), language)
    for entry in entries:
        text = f"x {entry.removesuffix('*')}. x" if language not in UNSPACED else f"。{entry}。"
        assert words.count(text).total(ALL) >= 1, entry
    assert words.count("nothing of the kind 没有 нет").total(ALL) == 0


@pytest.mark.parametrize(
    ("language", "text"),
    [
        (
            "ja",
            "パチンコ、ロマンコメディ、支援交付金、かたわら、プロスケーター、デブリ、行きちがい、彼氏ねえ、障害人口",
        ),
        ("zh", "出口交易、室内射击、人群交流、突破处、大奶牛、黑猩猩、今日你好、粉丝儿、支援交通、他人妻子"),
        ("ko", "애널리스트, 3개년, 발암물질, 시발점, 한남동, 등신대, 씹다, 흑돼지, 보슬비, 바퀴벌레, 돌았다"),
        ("pl", "Seks analny i oralny; orgazm; pornografia; masturbacja"),
        ("en", "semen quality, orgasm, masturbation and pornography"),
        ("de", "Sperma, Orgasmus, Masturbation und Pornografie; Prostituierte"),
    ],
)
def test_words_with_a_harmless_meaning_or_inside_others_are_not_listed(language: str, text: str) -> None:
    found = read_wordlist(str(LISTS / f"{language}.txt"), language).count(text)
    assert dict(found.by_measure) == {}


def test_large_lists_on_ordinary_and_on_labelled_text(shared_data: Path) -> None:
    lists = shared_data / "toxicity" / "wordlists" / "ldnoobw"
    english = read_wordlist(str(lists / "en.txt"), "en")
    hits = {True: 0, False: 0}
    total = {True: 0, False: 0}
    with gzip.open(shared_data / "toxicity" / "davidson_en.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            toxic = record["label"] != "neither"
            total[toxic] += 1
            hits[toxic] += english.count(record["text"]).total(ALL) > 0
    assert hits[True] / total[True] >= 0.76
    assert hits[False] / total[False] <= 0.05
    dropped = documents = 0
    with gzip.open(shared_data / "text" / "brown.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            documents += 1
            dropped += english.count(record["text"]).share(ALL) > 0.01
    assert (dropped, documents) == (3, 223)
