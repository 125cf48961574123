"""Proxies: small training runs on the dataset of another run, each in a folder of its own, to learn something from.

A proxy is a run folder like any other: `penstock trace`, `generate` or `verify` work on it. What was trained to its end
stands, so the same command goes on where one was broken off.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.recipe import stored_recipe
from jobs.spark_session import worker_environment
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RUN_NAME
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach
from train.checkpoint.identity import identify
from train.checkpoint.metadata import Identity
from train.config.settings import settings_of
from train.data.skips import NO_SKIPS
from train.monitor.metrics import MANIFEST_NAME, TrainManifest, read_train_manifest
from train.plan.make_plan import make_plan
from train.plan.plan import PLAN_NAME, Plan, read_plan, write_plan

TABLES = ("tokens", "tokenizer")
"""Tables of another run that a proxy stands on."""


@dataclass(frozen=True)
class Proxy:
    """A run that is planned, and trained if `done`."""

    run: Store
    plan: Plan

    @property
    def done(self) -> bool:
        """Whether it was trained to its end."""
        return self.run.exists(MANIFEST_NAME)


def plan_proxy(parent: Store, folder: Store, overrides: Sequence[str]) -> Proxy:
    """The run `folder` on the dataset of `parent`, planned with overrides of its recipe (`plan.params=1e6`).

    Raises ConfigError if the folder holds a run with another dataset or another plan.
    """
    if not folder.exists(RUN_NAME):
        attach(folder, parent, TABLES)
    dataset = open_dataset(folder)
    if dataset.digest != open_dataset(parent).digest:
        raise ConfigError(
            f"{folder.uri}: promised a run on dataset {open_dataset(parent).digest[:12]}, found {dataset.digest[:12]}; "
            "remove the folder"
        )
    settings = settings_of(stored_recipe(folder, overrides))
    if folder.exists(PLAN_NAME):  # a proxy that was trained has its number formats from the device
        settings = settings.with_formats_of(read_plan(folder).settings.content())
    plan = make_plan(folder, dataset, settings)
    if not folder.exists(PLAN_NAME):
        write_plan(folder, plan)
    elif decided(dataset, read_plan(folder)) != decided(dataset, plan):
        raise ConfigError(f"{folder.uri}: promised a run with these settings, found another; remove the folder")
    return Proxy(folder, plan)


def decided(dataset: Dataset, plan: Plan) -> Identity:
    """What decides the weights of a proxy."""
    return identify(dataset, plan, NO_SKIPS)


def train_proxy(proxy: Proxy, ranks: int = 1) -> TrainManifest:
    """Train a proxy to its end in processes of its own, or go on; one that is done is not trained again.

    Its lines go to `train.log` in its folder, which is local. Raises ContractError with the last of them if it fails.
    """
    if not proxy.done:
        command, environment = ["train.pretrain", proxy.run.uri], worker_environment()
        if ranks > 1:
            command = ["train.launch", "--standalone", "--nproc-per-node", str(ranks), "-m", *command]
            environment = {"OMP_NUM_THREADS": "1"} | environment
        log = proxy.run.path("train.log")
        with open(log, "ab") as lines:
            child = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=lines, stderr=lines)
            code = _waited(child)
        if code or not proxy.done:
            with open(log, encoding="utf-8", errors="replace") as told:
                last = "\n".join(told.read().splitlines()[-5:])
            raise ContractError(f"{proxy.run.uri}: promised a trained proxy, its process ended with {code}:\n{last}")
    return read_train_manifest(proxy.run)


def _waited(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, which does not outlive this process: it is asked to end where this one is."""
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            child.terminate()
            child.wait()
