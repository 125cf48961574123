"""Bench of perplexity: `python -m bench.perplexity MODEL.lm TEXTS.jsonl[.gz]… [--kenlm MODEL.arpa PIECES]`.

Prints megabytes of text a second of one core's CPU time, normalisation and SentencePiece included, best of three
rounds; with --kenlm the same texts through the kenlm package, in turns with ours.
"""

import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.perplexity.model import KenlmModel, open_model
from pipeline.perplexity.stage import PerplexityConfig, make_perplexity, measure

ROUNDS = 3


def read_texts(paths: list[str]) -> list[str]:
    """The field `text` of every line."""
    texts = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else Path(path).open() as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of a call [s]."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--kenlm", nargs=2, metavar=("ARPA", "PIECES"))
    arguments = parser.parse_args()
    texts = read_texts(arguments.texts)
    megabytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6
    open_model(arguments.model, None)
    stage = make_perplexity(PerplexityConfig(scorer="ngram", models={"en": "en"}), {"lm_en": arguments.model})
    rounds: dict[str, Callable[[], Any]] = {
        "the stage": lambda: [stage({"language": "en", "_body": text}) for text in texts]
    }
    if arguments.kenlm:
        kenlm = KenlmModel(*arguments.kenlm)
        rounds["kenlm package"] = lambda: [measure(kenlm, text) for text in texts]
    times = {name: [] for name in rounds}
    for _ in range(ROUNDS):
        for name, work in rounds.items():
            times[name].append(seconds(work))
    print(f"{len(texts)} texts, {megabytes:.1f} MB")
    for name, found in times.items():
        print(f"{name:<14} {megabytes / min(found):.2f} MB/s")


if __name__ == "__main__":
    main()
