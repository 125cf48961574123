"""Names: candidates and windows, the places of names, pipelines by language, and recall of real pipelines."""

import shutil
from pathlib import Path

import pytest

from pipeline.models import ModelsConfig, ensure_model
from pipeline.pii.name_text import as_usually_written, even_lines, even_text
from pipeline.pii.name_windows import MAX_SEARCHED, WEIGHTS, features, find_candidates, find_windows
from pipeline.pii.names import NO_NAMES, WINDOWS_CHARS, NameFinder, Names, is_covered
from pipeline.pii.stage import PiiConfig, make_pii, model_files
from schemas.errors import ConfigError

spacy = pytest.importorskip("spacy")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("We met Anna Smith and Dr. J. Doe.", ["We", "Anna Smith", "Dr", "J. Doe"]),
        ("Vincent van Gogh, Leonardo da Vinci", ["Vincent van Gogh", "Leonardo da Vinci"]),
        ("an old man. Old Anna Smith slept", ["Anna Smith"]),  # `old` is a common word of the text
        ("Jean-Paul O’Neill", ["Jean-Paul O’Neill"]),
        ("mail Anna.Smith@example.com x@Anna.com", []),
        ("Мария Иванова и Ёжик", ["Мария Иванова", "Ёжик"]),
        ("no names here", []),
        ("Anna Smith, Anna Smith", ["Anna Smith"]),
    ],
)
def test_candidates(text: str, names: list[str]) -> None:
    found = find_candidates(text).found
    assert [own.text for own in found] == names
    assert all(text[own.start : own.end] == own.text for own in found)


def test_words_of_addresses_are_not_common_words() -> None:
    assert find_candidates("smith@example.com www.smith.com a smith-x but smith. Smith").small_words == {"but", "smith"}
    assert find_candidates("smith@example.com www.smith.com").small_words == frozenset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so Mr Anna Smith said", {"words3", "title", "speech"}),
        ("so Anna Smith is", {"words2", "word_before", "first_name", "first_name_of_several", "speech"}),
        ("so Smith Zz is zz now", {"words2", "word_before", "seen_small", "speech"}),
        ("so Zz D now", {"words2", "word_before", "short_end", "word_after"}),
        ("Zzyx", {"words1", "sentence_start"}),
        ("by Zzyx, and", {"words1", "author", "comma"}),
        ("at Yale University now", {"words2", "word_before", "thing", "word_after"}),
        ("at ZZYX QQ; ZZYX QQ", {"words2", "word_before", "capitals", "repeated"}),
        ("of J. Zz", {"words2", "word_before", "initial"}),
    ],
)
def test_features(text: str, expected: set[str]) -> None:
    candidates = find_candidates(text)
    assert {*features(text, candidates.found[0], candidates.small_words)} == expected
    assert expected <= {*WEIGHTS}


def test_windows_are_the_best_candidates_with_a_word_on_each_side() -> None:
    text = (
        "Today is fine.\nThe old teacher Anna Smith said it to Bob Jones, who left. Smith agreed with Yale University."
    )
    assert find_windows(text, 2).texts == ["to Bob Jones, who", "teacher Anna Smith said"]
    assert find_windows(text, 1).texts == ["to Bob Jones, who"]
    assert "Smith" not in [words.strip() for words in find_windows(text, 99).texts]  # the last name of a better one


def test_scripts_without_capitals() -> None:
    assert find_windows("昨天王小明先生在北京说话。王小明先生走了", 9).texts == ["昨天王小明先生在北京说话。王小明先"]
    assert find_windows("今天天气很好。", 9).texts == ["今天天气很好。"]
    assert find_windows("no capitals but 漢", 9).texts == ["no capitals but 漢"]
    assert find_windows("سطر أول\n\nسطر ثان\nثالث", 2).texts == ["سطر أول", "سطر ثان"]
    assert find_windows("", 2).texts == []


@pytest.mark.parametrize(
    "unit",
    [
        "A",
        "Aa ",
        "A. ",
        "Aa de la ",
        "A'",
        "A-a",
        "王",
        "王说",
        "a",
        "Aa\n",
        "É",
        "A\u0301 ",
        ". ",
        "Aa-",
        "AA ",
        "A-",
        " \n",
        "Anna ",
    ],
)
def test_the_time_of_hostile_texts_is_linear(unit: str) -> None:
    import time

    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        started = time.thread_time()
        find_windows(as_usually_written(even_lines(text[:MAX_SEARCHED])), 16)
        even_text(text[:MAX_SEARCHED])
        return time.thread_time() - started

    small, large = min(seconds(MAX_SEARCHED // 10) for _ in range(3)), seconds(1_000_000)
    assert large < 100 * max(small, 0.002)  # 1 MB is searched up to MAX_SEARCHED: ten times as much


def test_places_of_names() -> None:
    names = Names({"Anna Smith": "person", "Smith": "person", "Paris": "location", "王小明": "person"})
    text = "Smith, Smithson, Paris; Anna Smith. 在王小明家 Anna Smit"
    assert [(text[start:end], kind) for start, end, kind, _ in names.find(text)] == [
        ("王小明", "person"), ("Smith", "person"), ("Paris", "location"), ("Anna Smith", "person"), ("Smith", "person"),
    ]  # fmt: skip
    assert NO_NAMES.find(text) == []


BLANKS = ("\u00a0", "\u2009", "\u202f", "\u3000", "  ", "\t", "\n", " \n  ", "\u00a0\n")


@pytest.mark.parametrize("blank", BLANKS)
def test_any_blank_or_a_line_break_is_between_the_words_of_a_name(blank: str) -> None:
    names = Names({"Anna Smith": "person"})
    text = f"so  Anna{blank}Smith said it,\u00a0\nand Anna{blank}Smith left"
    places = [(start, end) for start, end, *_ in names.find(text)]
    assert [text[start:end] for start, end in places] == [f"Anna{blank}Smith"] * 2
    assert "so Anna Smith said it" in as_usually_written(even_lines(text))


def test_a_paragraph_ends_a_name() -> None:
    assert Names({"Anna Smith": "person"}).find("Anna\n\nSmith, Anna \n\n Smith") == []
    assert even_lines("Home\nAbout\nAnna\n\nSmith") == "Home\nAbout\nAnna\n\nSmith"


def test_letters_of_another_script_are_beside_a_name() -> None:
    names = Names({"Anna Smith": "person", "Smith": "person"})
    for text in ("昨日Anna Smithが話した", "وAnna Smithو", "กAnna Smithก", "김Anna Smith은"):
        assert [text[start:end] for start, end, *_ in names.find(text)] == ["Anna Smith", "Smith"]
    assert names.find("Annan Smithson, xAnna Smiths, ÉSmith Smith́") == []
    assert [own.text for own in find_candidates("昨日Anna Smithが話した").found] == ["Anna Smith"]
    assert as_usually_written("昨日Anna Smithが話した") == "昨日 Anna Smith が話した"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("BY JOHN SMITH", "by John Smith"),
        ("THE TEACHER ANNA VAN DYKE SAID WE WILL NOT GO", "the teacher Anna van Dyke said we will not go"),
        ("JEAN-PAUL O’NEILL J. DOE", "Jean-Paul O’Neill j. doe"),
        ("so\nZBIGNIEW KOWALSKI\nleft", "so\nZbigniew Kowalski\nleft"),
        ("so ZBIGNIEW KOWALSKI left", "so ZBIGNIEW KOWALSKI left"),  # no known first name, and no line of its own
        ("PRIVACY POLICY\nNASA and FBI CIA", "PRIVACY POLICY\nNASA and FBI CIA"),
        ("Jean DUPONT, Yale NEWS", "Jean Dupont, Yale NEWS"),
        ("JOHN SMITH@example.com", "JOHN SMITH@example.com"),
    ],
)
def test_names_in_capitals_get_small_letters(text: str, written: str) -> None:
    assert as_usually_written(text) == written


def test_languages_with_a_model() -> None:
    assert is_covered("en", {"en": "a"})
    assert not is_covered("de", {"en": "a"})
    assert not is_covered(None, {"en": "a"})
    assert is_covered(None, {"*": "a"})


def pipeline_of(folder: Path, name: str, **labels: str) -> str:
    """A zip file with a pipeline that gives each text its label."""
    pipeline = spacy.blank("en")
    patterns = [{"label": label, "pattern": text.replace("_", " ")} for text, label in labels.items()]
    pipeline.add_pipe("entity_ruler").add_patterns(patterns)
    (folder / name / "inner").mkdir(parents=True)
    pipeline.to_disk(folder / name / "inner" / "pipeline-1.0")
    return shutil.make_archive(str(folder / name), "zip", folder / name)


@pytest.mark.parametrize("whole", [False, True])
def test_each_language_has_its_model(tmp_path: Path, whole: bool) -> None:
    english = pipeline_of(tmp_path, "en", Ana_Lopez="PERSON", Example_Corp="ORG", Paris="GPE")
    other = pipeline_of(tmp_path, "xx", Eva_Braun="PER", Example_Corp="ORG")
    config = PiiConfig(
        types=(), ner_models={"en": english, "*": other}, ner_types=("person", "location"), ner_whole_texts=whole
    )
    assert model_files(config) == {"ner.en": english, "ner.*": other}
    replace = make_pii(config, model_files(config))

    def cleaned(language: str | None) -> tuple[str, str, dict[str, int]]:
        text = "We met Ana Lopez, Eva Braun and Example Corp in Paris. Lopez left."
        row = {"text": text, "title": "On Ana Lopez", "url": "", "language": language, "meta": '{"by":"Eva Braun"}'}
        assert replace(row) is None
        assert "_names_kept" not in row
        return row["text"], row["meta"], row["pii_counts"]

    assert cleaned("en") == (
        "We met <PERSON>, Eva Braun and Example Corp in <LOCATION>. <PERSON> left.",
        '{"by":"Eva Braun"}',
        {"location": 1, "person": 3},
    )
    expected = "We met Ana Lopez, <PERSON> and Example Corp in Paris. Lopez left.", '{"by":"<PERSON>"}', {"person": 2}
    assert cleaned("fr") == cleaned(None) == expected


@pytest.mark.parametrize(
    "name",
    [
        *(f"Ana{blank}Lopez" for blank in BLANKS),
        "ANA LOPEZ",
        "ANA\u00a0LOPEZ",
        "ANA\nLOPEZ",
        "Ana LOPEZ",
        "王Ana Lopez王",
    ],
)
def test_a_name_in_an_unusual_form_is_replaced(tmp_path: Path, name: str) -> None:
    config = PiiConfig(types=(), ner_models={"en": pipeline_of(tmp_path, "en", Ana_Lopez="PERSON")})
    row = {"text": f"We met {name} today. {name} left.", "title": name, "url": None, "language": "en"}
    make_pii(config, model_files(config))(row)
    assert row["pii_counts"] == {"person": 3}
    assert row["text"].replace("王", "") == "We met <PERSON> today. <PERSON> left."


@pytest.mark.parametrize(
    "form",
    [
        *("_{}_", "*{}*", "**{}**", "|{}|", "{}\u00b9", "{}\u00b2,", "{}\u00b9\u00b2", "{}\u2020", "{}[1]", "\u2022{}"),
        *(
            "\U0001f600{}\U0001f600",
            "\u2192{}",
            "({})",
            "\u201c{}\u201d",
            "\u00ab{}\u00bb",
            "{}'s",
            "{}\u2019s",
            "#{}",
            "{}\u2122",
            "12,{},x",
            "\U0001f1e9\U0001f1ea{}",
            "~{}",
        ),
    ],
)
@pytest.mark.parametrize("name", ["Ana Lopez", "ANA LOPEZ"])
def test_a_name_beside_signs_is_replaced(tmp_path: Path, name: str, form: str) -> None:
    config = PiiConfig(types=(), ner_models={"en": pipeline_of(tmp_path, "en", Ana_Lopez="PERSON")})
    row = {"text": f"We met {form.format(name)} today.", "title": None, "url": None, "language": "en"}
    make_pii(config, model_files(config))(row)
    assert row["text"] == f"We met {form.format('<PERSON>')} today."


def test_underscores_and_digits_of_words_stay() -> None:
    text = "a_Name my_Paul x_y Chapter1 Foo.Bar_baz [1] x2"
    assert as_usually_written(text) == text


def test_a_longer_document_has_more_windows(tmp_path: Path) -> None:
    path = pipeline_of(tmp_path, "en", Ana_Lopez="PERSON", Eva_Braun="PERSON")
    finder = NameFinder({"en": path}, ("person",), 1)
    text = "so Ana Lopez met the old Eva Braun here"
    long = finder.names_of([text + " and so on" * (2 * WINDOWS_CHARS // 10)], "en")
    assert {"Ana Lopez", "Eva Braun"} <= {*long.types}
    assert not {"Ana Lopez", "Eva Braun"} <= {*finder.names_of([text], "en").types}


def test_a_document_without_a_model_keeps_its_names_and_is_marked(tmp_path: Path) -> None:
    config = PiiConfig(types=(), ner_models={"en": pipeline_of(tmp_path, "en", Ana_Lopez="PERSON")})
    row = {"text": "Ana Lopez", "title": None, "url": None, "language": "de"}
    make_pii(config, model_files(config))(row)
    assert (row["text"], row["pii_counts"], row["_names_kept"]) == ("Ana Lopez", {}, True)


def test_an_address_inside_a_name_is_replaced_with_it(tmp_path: Path) -> None:
    config = PiiConfig(
        types=("email",), ner_models={"*": pipeline_of(tmp_path, "x", **{"Anna x@example.com": "PERSON"})},
        ner_whole_texts=True,
    )  # fmt: skip
    row = {"text": "Anna x@example.com", "title": None, "url": None, "language": None}
    make_pii(config, model_files(config))(row)
    assert row["text"] == "<EMAIL>"


@pytest.mark.parametrize("whole", [False, True])
def test_names_anywhere_in_a_long_document_are_found(tmp_path: Path, whole: bool) -> None:
    config = PiiConfig(
        types=(), ner_models={"en": pipeline_of(tmp_path, "en", Ana_Lopez="PERSON")}, ner_whole_texts=whole
    )
    text = "the river is wide and calm. " * (MAX_SEARCHED // 20) + "We met Ana Lopez."
    row = {"text": text, "title": None, "url": None, "language": "en"}
    make_pii(config, model_files(config))(row)
    assert row["text"].endswith("We met <PERSON>.")


def test_a_file_without_a_usable_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = shutil.make_archive(str(tmp_path / "empty"), "zip", tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"got no config\.cfg in .*empty\.zip"):
        NameFinder({"en": empty}, ("person",), 16)
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    (tmp_path / "plain").mkdir()
    pipeline.to_disk(tmp_path / "plain" / "p")
    plain = shutil.make_archive(str(tmp_path / "plain"), "zip", tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"expected a pipeline that recognizes names, got \['sentencizer'\]"):
        NameFinder({"en": plain}, ("person",), 16)


@pytest.mark.parametrize(
    ("model", "language", "text", "expected"),
    [
        (
            "ner-en", "en", "The committee heard Margaret Hamilton on Monday. Later Hamilton told John Kerry to wait.",
            "The committee heard <PERSON> on Monday. Later <PERSON> told <PERSON> to wait.",
        ),
        (
            "ner-fr", "fr", "Hier, le ministre a reçu Jacques Dupont à Paris. Selon Dupont, tout va bien.",
            "Hier, le ministre a reçu <PERSON> à Paris. Selon <PERSON>, tout va bien.",
        ),
    ],
)  # fmt: skip
def test_real_pipelines(model: str, language: str, text: str, expected: str) -> None:
    try:
        path = ensure_model(model, ModelsConfig(offline=True)).path
    except ConfigError:
        pytest.skip(f"the model is not in the model store: penstock models fetch {model}")
    config = PiiConfig(types=(), ner_models={language: str(path)})
    row = {"text": text, "title": None, "url": None, "language": language}
    make_pii(config, model_files(config))(row)
    assert row["text"] == expected
