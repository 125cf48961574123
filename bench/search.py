"""The layout search measured: its time, predictions beside published speeds, and the order of steps on this machine.

    python -m bench.search [--only speed published order] [--rounds 8] [--threads 1] [--out FILE.json]

The order is that of real steps at 1, 2 and 4 processes after a calibration; a pair of layouts whose steps differ by
less than a tenth is a tie that says nothing.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.published_steps import BEYOND, LLAMA_8B, LLAMA_70B, LLAMA_405B, PUBLISHED, Published
from bench.search_layouts import agreement, kendall, measured, predicted
from tests.support.rank_pool import shared_pool
from train.calibrate.measure import calibrate
from train.config.settings import Settings
from train.parallel.devices import Cluster
from train.plan.search.search import predict, search

BAND = 0.1
GPUS = 8


def speed() -> list[dict[str, Any]]:
    """Seconds of whole searches."""
    found = []
    settings = Settings.model_validate({"train": {"precision": "bf16"}, "layout": {"compile": True}})
    for name, shape, nodes in (("8B", LLAMA_8B, 128), ("70B", LLAMA_70B, 128), ("405B", LLAMA_405B, 128)):
        cluster, begin, used = Cluster.of("h100-sxm", GPUS, nodes), time.perf_counter(), time.process_time()
        result = search(shape, settings, (8192, 1024), cluster)
        wall, cpu = time.perf_counter() - begin, time.process_time() - used
        print(f"{name} on {cluster.world_size} GPUs: {wall:.2f} s, {cpu:.2f} CPU s, {result.searched:,} layouts")
        found.append({"model": name, "gpus": cluster.world_size, "seconds": wall, "cpu": cpu})
    return found


def published() -> list[dict[str, Any]]:
    """Predictions for layouts that others have timed."""
    found, ratios = [], []
    print("tokens/s of a GPU: predicted, published, and their ratio")
    for each in (*PUBLISHED, *BEYOND):
        ours = predicted_speed(each)
        print(f"  {each.name:<42} {ours:8,.0f} {each.speed:8,.0f} {ours / each.speed:5.2f}")
        found.append({"name": each.name, "predicted": ours, "published": each.speed})
        ratios += [ours / each.speed] if each in PUBLISHED else []
    mean = math.exp(statistics.mean(math.log(ratio) for ratio in ratios))
    print(f"  geometric mean {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    return found


def predicted_speed(each: Published) -> float:
    """Tokens/s of a GPU."""
    sections = {"train": {"precision": "bf16"}, "layout": {"data": "zero3", "compile": False} | each.layout}
    cluster = Cluster.of(each.device, GPUS, each.nodes)
    found = predict(each.shape, Settings.model_validate(sections), (each.seq_len, each.rows), cluster)
    return found.tokens_per_second / cluster.world_size


def order(rounds: int, threads: int) -> list[dict[str, Any]]:
    """Steps predicted and measured on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        device = calibrate(Path(folder) / "here.json", 2, threads)
    found = []
    for ranks in (1, 2, 4):
        expected = {name: each.step_seconds for name, each in predicted(device, ranks).items()}
        seconds = shared_pool().play(ranks, measured, rounds)[0]
        share, pairs = agreement(list(expected.values()), [seconds[name] for name in expected], BAND)
        tau = kendall(list(expected.values()), [seconds[name] for name in expected])
        print(f"{ranks} process(es): {share:.0%} of {pairs} pairs in the order predicted, Kendall's tau {tau:.2f}")
        for name in sorted(expected, key=expected.__getitem__):
            print(f"  {name:<26} {1e3 * expected[name]:8.1f} ms predicted {1e3 * seconds[name]:8.1f} ms measured")
        found.append(
            {"ranks": ranks, "share": share, "pairs": pairs, "tau": tau, "measured": seconds, "predicted": expected}
        )
    return found


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("speed", "published", "order"))
    parser.add_argument("--rounds", type=int, default=8, help="steps of each layout, of which the quickest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sections = {"speed": speed, "published": published, "order": lambda: order(options.rounds, options.threads)}
    found = {name: section() for name, section in sections.items() if name in (options.only or sections)}
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
