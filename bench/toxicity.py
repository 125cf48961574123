"""Word lists and the classifier of toxicity on labelled sets, beside another collection of word lists.

    python -m bench.toxicity DATA

DATA is the folder that the paths in `bench/toxicity.toml` are relative to. A text counts as toxic if it has a listed
word, or if a sentence of it reaches the threshold of the shipped model. The classifier is that of a cross-validation,
trained without the text's fold. DATA/toxicity/wordlists/ldnoobw has the other lists, one file for each language.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.fit.toxicity import TrainingExample, TrainToxicityConfig, out_of_fold, scores
from pipeline.toxicity.model import load_toxicity
from pipeline.toxicity.stage import DEFAULT_MEASURES
from pipeline.toxicity.words import LANGUAGES, LISTS, OTHER, AnyWordList, read_wordlist
from schemas.errors import ConfigError
from schemas.text import text_table

SETTINGS = Path(__file__).with_name("toxicity.toml")
MODEL = Path(__file__).parents[1] / "pipeline" / "toxicity" / "toxic-multi.arrow"
OTHER_LISTS = "toxicity/wordlists/ldnoobw"
Flags = npt.NDArray[np.bool_]


def other_lists(folder: Path) -> dict[str, AnyWordList]:
    """Return the word lists in a folder, by language; a file that cannot be a list is left out."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            found[path.stem] = read_wordlist(str(path), path.stem)
        except ConfigError as error:
            print(f"left out: {error}")
    return found


def has_listed_word(examples: list[TrainingExample], lists: Mapping[str, AnyWordList]) -> Flags:
    """Return whether each text has a word on the list of its language, without words of violence."""
    measures = (*DEFAULT_MEASURES, OTHER)
    found = [
        example.language in lists and lists[example.language].count(example.text).total(measures) > 0
        for example in examples
    ]
    return np.array(found, bool)


def main() -> None:
    """Print F1 of each set and language by each method, and the share of other texts that it takes for toxic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with the labelled sets")
    os.chdir(parser.parse_args().data)
    config = TrainToxicityConfig.model_validate(tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["train_toxicity"])
    examples, probabilities = out_of_fold(config, "toxic")
    known = load_toxicity(str(MODEL), "the shipped model").languages
    thresholds = np.array([known[example.language]["toxic"]["threshold"] for example in examples])
    by_model = probabilities >= thresholds
    own = {language: read_wordlist(str(LISTS / f"{language}.txt"), language) for language in LANGUAGES}
    by_words = has_listed_word(examples, own)
    methods = {
        "other lists": has_listed_word(examples, other_lists(Path(OTHER_LISTS))),
        "word lists": by_words,
        "classifier": by_model,
        "both": by_words | by_model,
    }
    truth = np.array([example.labels[0] == 1 for example in examples])
    places = np.array([f"{config.data[example.origin].origin} {example.language}" for example in examples])
    rows: list[tuple[str, ...]] = [("set", "texts", *(f"{name}, F1 (false)" for name in methods))]
    for place in dict.fromkeys(places.tolist()):
        mine = places == place
        cells = [scores(flags[mine], truth[mine]) for flags in methods.values()]
        shown = [f"{cell['f1'] or 0:.2f} ({1 - (cell['specificity'] or 0):.2f})" for cell in cells]
        rows.append((place, f"{int(mine.sum()):,}", *shown))
    print("\n".join(text_table(rows, "<>")))


if __name__ == "__main__":
    main()
