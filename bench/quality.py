"""How well classifiers, importance weights and quality rules tell good text: AUC, calibration, agreement with people.

    python -m bench.quality [DATA] [PEERS] [--splits 3]

Prints Markdown. DATA and PEERS: the folders of real data and of datatrove's decisions, beside the project by default.
Held-out figures are means over splits that follow from seeds; people's labels are never trained on but where it says
so. Intervals are percentiles of 1,000 bootstrap samples of the documents.
"""

import argparse
import bz2
import gzip
import html
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.classifier.importance import IMPORTANCE, ImportanceConfig
from pipeline.classifier.linear import Examples, LinearModel, fit_weights, new_vocabulary, word_keys_of
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.engine.rules import columns_of, evaluate_checks
from pipeline.fit.classifier import TrainClassifierConfig, auc, confusion, kappa, ratio, train_classifier
from pipeline.fit.importance import TrainImportanceConfig, train_importance
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import QUALITY
from schemas.ids import shuffle_key
from schemas.tables import DOCUMENTS

SHARED = Path(__file__).parents[2] / "shared"
REFERENCE = ("brown", "speeches", "gutenberg", "ud_english_docs", "abc_news")
DIALECTS = ("datatrove", "dclm", "dolma", "redpajama")
FOLDS = 5
Texts = list[str]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def wikipedia(path: Path) -> Texts:
    """Articles of a dump, roughly as plain text: no templates, tables, references, files or redirects."""
    dump = bz2.decompress(path.read_bytes()).decode("utf-8")
    articles = []
    for found in re.findall(r"<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        text = html.unescape(html.unescape(found))
        text = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->|<math.*?</math>|<[^>]*>", " ", text, flags=re.DOTALL)
        for _ in range(5):
            text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}|\[\[(?:File|Image|Category):[^\[\]]*\]\]", " ", text)
            text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
        text = re.sub(r"'{2,}|={2,}|\[https?:\S+|\]", "", text)
        if not found.startswith("#REDIRECT") and len(text) > 1000:
            articles.append(text)
    return articles


def write_texts(path: Path, texts: Texts) -> str:
    """The texts as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(shown, row)) + " |" for row in cells) + "\n"


def shown(value: Any) -> str:
    """A cell."""
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def interval(figure: Callable[[np.ndarray, np.ndarray], float], scores: np.ndarray, labels: np.ndarray) -> str:
    """A figure with its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    draws = []
    while len(draws) < 1000:
        taken = random.integers(0, len(labels), len(labels))
        if 0 < labels[taken].sum() < len(labels):
            draws.append(figure(scores[taken], labels[taken]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{figure(scores, labels):.3f} ({low:.3f}–{high:.3f})"


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear"},
    "fastText": {"kind": "fasttext"},
    "fastText, 25 epochs": {"kind": "fasttext", "epochs": 25},
}


def held_out(tasks: dict[str, tuple[str, str]], folder: Path, splits: int) -> tuple[str, dict[str, str]]:
    """The table of held-out figures, and the models of the first split of every task and kind."""
    rows, models = [], {}
    for task, (good, bad) in tasks.items():
        for kind, settings in KINDS.items():
            found, seconds = [], 0.0
            for seed in range(splits):
                name = re.sub(r"\W+", "-", f"{task} {kind} {seed}")
                config = TrainClassifierConfig.model_validate(
                    {"positives": {"files": [good]}, "negatives": {"files": [bad]}, "heldout_share": 0.2}
                    | {"seed": seed, "name": name, **settings}
                )
                manifest = train_classifier(config, str(folder / "models"))
                found.append(manifest["content"]["heldout"])
                seconds += manifest["run"]["wall_seconds"]
                if not seed:
                    models[f"{kind}: {task}"] = str(folder / "models" / manifest["content"]["model"]["file"])
            aucs = [one["auc"] for one in found]
            half = [one["thresholds"]["0.5"] for one in found]
            rows.append(
                [task, kind, f"{np.mean(aucs):.4f} ({min(aucs):.4f}–{max(aucs):.4f})"]
                + [float(np.mean([one[name] for one in half])) for name in ("precision", "recall")]
                + [float(np.mean([one[name] for one in found])) for name in ("brier", "expected_calibration_error")]
                + [f"{seconds / splits:.1f}"]
            )
    header = ["good / bad", "kind", "AUC (range)", "precision", "recall", "Brier", "ECE", "training [s]"]
    return table(header, rows), models


def scores_of(model: str, texts: Texts) -> tuple[np.ndarray, float]:
    """The stage's scores, and its CPU time [ms a text], the fastest of five."""
    classify = CLASSIFIER.make(ClassifierConfig(models={"m": model}), {"m": model})
    return timed(lambda row: classify(row), lambda row: row["classifier_scores"]["m"], texts)


def weights_of(model: str, texts: Texts) -> tuple[np.ndarray, float]:
    """The importance stage's weights per word, and its time."""
    weigh = IMPORTANCE.make(ImportanceConfig(models={"m": model}), {"m": model})
    return timed(lambda row: weigh(row), lambda row: row["importance"]["m"], texts)


def timed(work: Callable[[Any], Any], value: Callable[[Any], float], texts: Texts) -> tuple[np.ndarray, float]:
    """Values and CPU time [ms a text], the fastest of five."""
    best = float("inf")
    for _ in range(5):
        rows: list[Any] = [{"_body": text} for text in texts]
        started = time.process_time()
        for row in rows:
            work(row)
        best = min(best, time.process_time() - started)
    return np.array([value(row) for row in rows]), best / len(texts) * 1e3


def folded_scores(texts: Texts, labels: np.ndarray, l2: float = 1e-4) -> np.ndarray:
    """Scores of linear models that are trained on the other folds of the same labels."""
    vocabulary = new_vocabulary()
    keys = [word_keys_of(text, vocabulary) for text in texts]
    folds = np.array([shuffle_key(1, text.encode("utf-8", "replace")) % FOLDS for text in texts])
    scores = np.zeros(len(texts))
    for fold in range(FOLDS):
        examples = Examples(1 << 20, 2)
        for place in np.flatnonzero(folds != fold):
            examples.add(keys[place], bool(labels[place]))
        model = LinearModel(fit_weights(examples, l2)[0], 2, 1.0, 0.0)
        for place in np.flatnonzero(folds == fold):
            scores[place] = model.margin(keys[place])
    return scores


def rules_of(dialect: str, texts: Texts) -> dict[str, np.ndarray]:
    """Which texts each rule of a dialect would drop."""
    return rules_of_config(QualityConfig.model_validate({"dialect": dialect}), texts, dialect)


def rules_of_config(config: QualityConfig, texts: Texts, name: str) -> dict[str, np.ndarray]:
    """Which texts any rule of a configuration would drop (first entry), and which each of its rules."""
    measure, checks = QUALITY.make(config, {}), QUALITY.checks(config, {}, {})
    rows: list[Any] = [{"text": text, "language": "en"} for text in texts]
    for row in rows:
        measure(row)
    columns = columns_of(checks)
    schema = pa.schema([DOCUMENTS.field(column) for column in columns])
    batch = pa.RecordBatch.from_pylist([{column: row.get(column) for column in columns} for row in rows], schema)
    broken = evaluate_checks(checks, batch).broken
    found: dict[str, np.ndarray] = {f"**{name}: any rule**": broken.any(axis=0)}
    for check, drops in zip(checks, broken):
        found[f"{name}: {check.reason}"] = found.get(f"{name}: {check.reason}", np.False_) | drops
    return found


def agreement_row(name: str, dropped: np.ndarray, good: np.ndarray) -> list[Any]:
    """How a decision to drop agrees with the labels."""
    counts = confusion(~dropped, good)
    agreed = counts["good_kept"] + counts["bad_dropped"]
    drops = int(dropped.sum())
    caught = ratio(counts["bad_dropped"], int((~good).sum()))
    return [name, drops, agreed / len(good), ratio(counts["bad_dropped"], drops), caught, kappa(~dropped, good)]


def lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Which texts have the lowest scores, so many of them."""
    dropped = np.zeros(len(scores), bool)
    dropped[np.argsort(scores, kind="stable")[:count]] = True
    return dropped


def agreement_tables(scores: dict[str, np.ndarray], texts: Texts, good: np.ndarray, sure: np.ndarray) -> Iterator[str]:
    """How models and rules agree with people: AUC, and the agreement of drops."""
    yield "### AUC on people's labels\n"
    rows = [[name, interval(auc, s, good), interval(auc, s[sure], good[sure])] for name, s in scores.items()]
    yield table(["score", f"all {len(good)}", f"{int(sure.sum())} that judges agreed on"], rows)
    yield "### Drops against people's labels\n"
    num_bad = int((~good).sum())
    yield (
        "Agreement: same as the label. Precision: of the dropped documents those that people call bad. Recall: of "
        f"those that people call bad the dropped. A model drops its {num_bad} lowest, as many as people call bad. "
        "Rules that drop fewer than three documents are left out.\n"
    )
    rows = [agreement_row(name, lowest(s, num_bad), good) for name, s in scores.items()]
    for dialect in DIALECTS:
        found = rules_of(dialect, texts)
        rows += [agreement_row(name, dropped, good) for name, dropped in found.items() if dropped.sum() >= 3]
    yield table(["decides", "drops", "agreement", "precision", "recall", "kappa"], rows)


def sample_rows(models: dict[str, str], quality: Path) -> str:
    """Median scores of sets that are good or bad by their origin."""
    sets = {
        "cc_en_head (CCNet's best bucket)": [row["text"] for row in lines_of(quality / "cc_en_head.jsonl.gz")],
        "datajuicer_mixture (cleaned corpora)": [r["text"] for r in lines_of(quality / "datajuicer_mixture.jsonl.gz")],
        "cs336: cited by Wikipedia": [(quality / "cs336_high_quality_wiki_reference.txt").read_text(encoding="utf-8")],
        "cs336: raw crawl": [(quality / "cs336_low_quality_cc.txt").read_text(encoding="utf-8")],
    }
    rows = [
        [name, len(texts), *(float(np.median(scores_of(path, texts)[0])) for path in models.values())]
        for name, texts in sets.items()
    ]
    return table(["set", "documents", *models], rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, default=SHARED / "data")
    parser.add_argument("peers", nargs="?", type=Path, default=SHARED / "peers")
    parser.add_argument("--splits", type=int, default=3)
    arguments = parser.parse_args()
    data, peers = arguments.data, arguments.peers
    inputs, outputs = (lines_of(peers / f"filters_{end}.jsonl.gz") for end in ("in", "out"))
    verdict = {row["id"]: row["chained"] for row in outputs}
    dropped = [row["text"] for row in inputs if verdict[row["id"]]]
    kept = [row["text"] for row in inputs if not verdict[row["id"]]]
    reference = [row["text"] for name in REFERENCE for row in lines_of(data / "text" / f"{name}.jsonl.gz")]
    articles = wikipedia(data / "sources" / "wikipedia" / "enwiki-pages-articles-part0.xml.bz2")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sets = {
            "reference": reference,
            "wikipedia": articles,
            "kept": kept,
            "dropped": dropped,
            "crawl": kept + dropped,
        }
        files = {name: write_texts(folder / f"{name}.jsonl", texts) for name, texts in sets.items()}
        tasks = {
            f"reference text ({len(reference)}) / dropped crawl ({len(dropped)})": (
                files["reference"],
                files["dropped"],
            ),
            f"Wikipedia ({len(articles)}) / random crawl ({len(inputs)})": (files["wikipedia"], files["crawl"]),
            f"kept crawl ({len(kept)}) / dropped crawl ({len(dropped)})": (files["kept"], files["dropped"]),
        }
        print(f"### Held-out figures, {arguments.splits} splits of 20 % by hash\n")
        held, models = held_out(tasks, folder, arguments.splits)
        print(held, flush=True)
        config = {"target": {"files": [files["reference"]]}, "raw": {"files": [files["crawl"]]}}
        train_importance(TrainImportanceConfig.model_validate(config), str(folder / "models"))
        human = lines_of(data / "quality" / "dclm_human.jsonl.gz")
        texts = [row["text"] for row in human]
        good, sure = (np.array([bool(row[name]) for row in human]) for name in ("label", "unanimous"))
        pages = [text for text in kept + dropped if 3500 < len(text) < 5200]
        scores, times = {}, []
        for name, path in models.items():
            scores[name] = scores_of(path, texts)[0]
            times.append([name, scores_of(path, pages)[1]])
        weights = str(folder / "models" / "target.arrow")
        scores["importance: reference text against crawl, per word"] = weights_of(weights, texts)[0]
        times.append(["importance, one target", weights_of(weights, pages)[1]])
        scores[f"linear, trained on these labels, {FOLDS} folds"] = folded_scores(texts, good)
        print(
            f"### Scoring, CPU ms a document ({len(pages)} pages of {np.mean(list(map(len, pages))):.0f} characters)\n"
        )
        print(table(["model", "ms"], times), flush=True)
        for text in agreement_tables(scores, texts, good, sure):
            print(text, flush=True)
        print("### Median scores of further sets\n")
        print(sample_rows({name: path for name, path in models.items() if name.startswith("linear")}, data / "quality"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
