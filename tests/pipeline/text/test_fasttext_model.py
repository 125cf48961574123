"""Predictions by the native module: bit for bit those of the package `fasttext`, of models of all kinds."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models import ModelsConfig, ensure_model
from pipeline.text.fasttext_model import FastTextModel, PackageModel, load_model, probability_of
from schemas.errors import ContractError
from tests.support.native import needs_native, python_only

pytestmark = needs_native
WORDS = [
    "river",
    "wide",
    "calm",
    "the",
    "a",
    "fool",
    "中文",
    "Wörter",
    "слово",
    "e\u0301",
    "\U0001f600",
    "re-use",
    "3.5",
]
KINDS: dict[str, dict[str, Any]] = {
    "hierarchical": {"loss": "hs", "minn": 2, "maxn": 4, "bucket": 3_000},
    "softmax": {"loss": "softmax"},
    "pairs": {"loss": "softmax", "wordNgrams": 3, "bucket": 2_000},
    "subwords": {"loss": "softmax", "minn": 0, "maxn": 3, "bucket": 500, "wordNgrams": 2},
    "one vs all": {"loss": "ova", "wordNgrams": 2, "bucket": 1_000},
    "negative": {"loss": "ns", "minn": 1, "maxn": 2, "bucket": 700},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "codes": {"qnorm": False, "dsub": 2},
    "norms": {"qnorm": True, "dsub": 3},
    "output": {"qnorm": True, "dsub": 2, "qout": True},
    "pruned": {"qnorm": True, "cutoff": 300, "retrain": False, "dsub": 2},
}


def examples(rng: random.Random) -> str:
    names = [*(f"l{number}" for number in range(300)), "é"]
    rows = [f"__label__{rng.choice(names)} {' '.join(rng.choices(WORDS, k=rng.randrange(9)))}" for _ in range(3_000)]
    rows += [f"__label__{name} {name * 2} word{number}" for number, name in enumerate(names)]
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module", params=[*KINDS, *QUANTIZED])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    import fasttext

    folder = tmp_path_factory.mktemp("models")
    (folder / "train.txt").write_text(examples(random.Random(request.param)), encoding="utf-8")
    settings = KINDS.get(request.param, KINDS["hierarchical" if request.param == "pruned" else "subwords"])
    model = fasttext.train_supervised(str(folder / "train.txt"), dim=20, epoch=2, thread=20, verbose=0, **settings)
    if request.param in QUANTIZED:
        model.quantize(str(folder / "train.txt"), thread=1, verbose=0, **QUANTIZED[request.param])
    model.save_model(str(folder / "model.bin"))
    return str(folder / "model.bin")


@pytest.fixture(scope="module")
def models(path: str) -> tuple[FastTextModel, FastTextModel]:
    return load_model(path), PackageModel(path)


LINES = st.lists(
    st.sampled_from(
        [
            *WORDS,
            "x__label__y",
            " ",
            "  ",
            "\0",
            "\t",
            "\r",
            "\v",
            "\f",
            "\xa0",
            "\u2028",
            "</s>",
            "<s>",
            "__label__",
            "__label__l1",
        ]
    )
    | st.characters(exclude_categories=["Cs"], exclude_characters="\n"),
    max_size=40,
).map("".join)


@given(st.lists(LINES, max_size=5), st.sampled_from([0, 1, 2, 5, 999]))
def test_predictions_are_those_of_the_package(
    models: tuple[FastTextModel, FastTextModel], lines: list[str], most: int
) -> None:
    own, package = models
    assert own.predict(lines, most) == package.predict(lines, most)


def test_labels_are_those_of_the_package(models: tuple[FastTextModel, FastTextModel]) -> None:
    own, package = models
    assert sorted(own.labels()) == sorted(package.labels())
    assert "__label__é" in own.labels()


@pytest.fixture(scope="module")
def language_models() -> tuple[FastTextModel, FastTextModel]:
    path = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    return load_model(path), PackageModel(path)


@given(st.lists(LINES, max_size=5), st.sampled_from([0, 1, 5]))
def test_languages_are_those_of_the_package(
    language_models: tuple[FastTextModel, FastTextModel], lines: list[str], most: int
) -> None:
    own, package = language_models
    assert own.predict(lines, most) == package.predict(lines, most)


def test_a_line_with_a_line_end_is_refused(models: tuple[FastTextModel, FastTextModel]) -> None:
    for model in models:
        with pytest.raises(ValueError, match="one line"):
            model.predict(["a\nb"], 1)


def test_without_the_native_module_the_package_is_used(path: str) -> None:
    with python_only():
        assert isinstance(load_model(path), PackageModel)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_models_are_refused_or_predict(path: str, seed: int, tmp_path: Path) -> None:
    """No damage ends the process, nor is it an error of another kind; `.ci/sanitize` also finds reads out of bounds."""
    rng = random.Random(seed)
    data = bytearray(Path(path).read_bytes())
    for _ in range(rng.randrange(1, 6)):
        place = rng.choice([rng.randrange(100), rng.randrange(12_000), rng.randrange(len(data))])
        data[place : place + 4] = struct.pack("<i", rng.choice([-1, 0, 1, 2**31 - 1, rng.getrandbits(31)]))
    if seed % 3 == 0:
        del data[rng.randrange(len(data)) :]
    (tmp_path / "model.bin").write_bytes(data)
    try:
        model = load_model(str(tmp_path / "model.bin"))
        model.predict([" ".join(WORDS), ""], 0)
    except (ValueError, RuntimeError, MemoryError):
        return


@pytest.mark.parametrize("size", [0, 3, 8, 60, 90, 2_000])
def test_a_model_that_ends_early_is_refused(path: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(Path(path).read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.bin is not a supervised fastText model: "):
        load_model(str(tmp_path / "model.bin"))


def test_a_model_of_words_is_refused(tmp_path: Path) -> None:
    import fasttext

    (tmp_path / "train.txt").write_text("a b c d e f g\n" * 50, encoding="utf-8")
    model = fasttext.train_unsupervised(str(tmp_path / "train.txt"), dim=10, epoch=1, thread=1, minCount=1, verbose=0)
    model.save_model(str(tmp_path / "model.bin"))
    with pytest.raises(ValueError, match="it is a model of words, which has no labels"):
        load_model(str(tmp_path / "model.bin"))


class Broken:
    def labels(self) -> list[str]:
        return ["__label__a"]

    def predict(self, lines: Any, most: int, /) -> list[list[tuple[str, float]]]:
        return [[("__label__a", float("nan"))] for _ in lines]


def test_a_model_of_nan_stops_before_the_first_text() -> None:
    with pytest.raises(ContractError, match="MODEL: expected a probability, got nan"):
        probability_of(Broken(), "__label__a", "MODEL")
    assert probability_of(Broken(), "__label__b", "MODEL")("text") == 0.0
