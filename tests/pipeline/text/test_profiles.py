"""Language profiles: the built-in file, a file of one's own, and every way in which one can be wrong."""

from pathlib import Path

import pytest

from pipeline.quality.config import QualityConfig
from pipeline.text.profiles import LanguageProfile, load_profiles, render_profiles
from schemas.errors import ConfigError


def test_the_built_in_profiles() -> None:
    profiles = load_profiles(None)
    assert len(profiles) == 70
    assert "en" not in profiles
    assert profiles["de"].script == "Latn"
    assert {"der", "die", "und", "nicht"} <= profiles["de"].stop_words
    assert (profiles["zh"].script, profiles["ja"].script, profiles["th"].script) == ("Hani", "Jpan", "Thai")
    assert profiles["zh"].limits["min_mean_word_length"] < 2 < profiles["zh"].limits["max_mean_word_length"] < 5
    assert {profile.limits["min_stop_words"] for profile in profiles.values()} == {2.0}
    assert all(8 <= len(profile.stop_words) <= 30 for profile in profiles.values())


def test_every_limit_is_a_threshold_and_every_english_rule_has_one() -> None:
    thresholds = {name for name in QualityConfig.model_fields if name.startswith(("min_", "max_"))}
    english = {"min_mean_word_length", "max_mean_word_length", "min_alpha_words", "min_stop_words", "min_sentences"}
    english |= {"min_terminal_lines", "max_short_lines", "max_dup_line_chars", "max_newline_ratio"}
    for profile in load_profiles(None).values():
        assert english <= profile.limits.keys() <= thresholds


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    made = LanguageProfile("xx", "Latn", frozenset(("a", 'b"')), {"min_words": 30.0, "max_dup_5gram": 0.125})
    path.write_text(render_profiles({"xx": made}, {"xx": ('b"', "a")}, {"xx": 3}, "by hand"))
    assert load_profiles(str(path)) == {"xx": made}
    assert path.read_text().splitlines() == [
        "# Derived from clean reference text: by hand.",
        "",
        "[xx] # 3 documents",
        'script = "Latn"',
        'stop_words = ["b\\"", "a"]',
        "[xx.limits]",
        "min_words = 30",
        "max_dup_5gram = 0.125",
    ]


def test_a_profile_needs_neither_words_nor_limits(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[xx]\nscript = "Latn"\n')
    assert load_profiles(str(path)) == {"xx": LanguageProfile("xx", "Latn", frozenset(), {})}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xx = 3", r"xx: expected a table \[xx\], got 3"),
        ("[xx]", r"xx.script: expected an ISO 15924 code, got None"),
        ('[xx]\nscript = "Latn"\nwords = []', r"xx.words: no such key \(valid: script, stop_words, limits\)"),
        ('[xx]\nscript = "Latn"\nstop_words = ["a", 3]', r"stop_words: expected a list of words, got \['a', 3\]"),
        ('[xx]\nscript = "Latn"\nstop_words = [""]', r"stop_words: expected a list of words"),
        ('[xx]\nscript = "Latn"\nlimits = 3', r"xx.limits: expected a table of numbers, got 3"),
        ('[xx]\nscript = "Latn"\n[xx.limits]\nmin_words = "3"', r"xx.limits.min_words: expected a number, got '3'"),
        ('[xx]\nscript = "Latn"\n[xx.limits]\nmin_words = true', r"expected a number, got True"),
        ('[xx]\nscript = "Latn"\n[xx.limits]\nmax_words = inf', r"expected a number, got inf"),
        ('[xx]\nscript = "Latn"\n[xx.limits]\nwords = 3', r"xx.limits.words: expected the name of a threshold"),
        ("[xx\n", r"expected a TOML file, got "),
        ("[xx]\n[yy]\n", r"xx.script: .*; yy.script: "),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profiles(str(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: expected a TOML file, got .*No such file"):
        load_profiles(str(tmp_path / "none.toml"))
