"""Tests of schemas/mix.py: a mix is read back as it was written, and an invalid file is rejected by name."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.mix import Mix, SourceMix, mix_toml, read_mix


def mix(**shares: float) -> Mix:
    sources = {
        name.replace("_", "+"): SourceMix(
            share=share, repeat=2.5, why='a "quoted"\nreason \x7f', evidence={"loss": 3.25}
        )
        for name, share in shares.items()
    }
    return Mix(dataset="ab" * 32, plan="cd" * 32, reference="the fitted law", sources=sources)


def test_a_mix_is_read_back_equal(tmp_path: Path) -> None:
    written = mix(web_head=0.75, books=0.25)
    path = tmp_path / "mix.toml"
    path.write_text(mix_toml(written), encoding="utf-8")
    assert read_mix(str(path)) == written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "expected a readable file, got an error: No such file"),
        ("format = 1\nsources", "expected a valid mix.toml, got an error"),
        (mix_toml(mix(web=0.5)), "got 0.5"),
        (mix_toml(mix(web=1.0)).replace("format = 1", "format = 7"), "got 7"),
        (mix_toml(mix(web=1.0)).replace("keep = 1.0", "keep = 0.0"), "keep"),
        (mix_toml(mix(web=1.0)).replace("keep = 1.0", "weigh = 1.0"), "weigh"),
    ],
)
def test_an_invalid_mix_is_rejected(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "mix.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        read_mix(str(path))


def test_sources_are_those_of_the_dataset() -> None:
    single = mix(web_head=1.0)
    assert single.of({"web+head"}, "mix").keys() == {"web+head"}
    with pytest.raises(ConfigError, match=r"'web\+head' .did you mean 'web'"):
        single.of({"web"}, "mix")
    with pytest.raises(ConfigError, match="no books"):
        single.of({"web+head", "books"}, "mix")
