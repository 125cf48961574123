"""The metrics of a run for Weights & Biases, written by a thread of their own, so that no step waits for the network.

The id of the W&B run is kept in the run folder: a resumed run continues it. Steps that a resume or a rewind computes
again are logged again, so the x-axis is the value `optimizer_step`, which may go back, and not W&B's own step.
"""

import json
import queue
import secrets
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from schemas.errors import ConfigError, ContractError
from schemas.logs import LOGGER
from schemas.secrets import secret_of
from schemas.storage import Store
from train.config.settings import Settings
from train.config.train import TrainConfig

WANDB_NAME = "train/wandb.json"
"""The file with the id of the W&B run."""
STEP = "optimizer_step"
MAX_WAITING = 10_000
"""Steps that may wait to be logged; more are dropped, with a warning."""
CLOSE_SECONDS = 60.0
"""Longest time that the end of a run waits for W&B [s]."""


def check_wandb(config: TrainConfig) -> None:
    """Raise ConfigError if the settings need the package wandb, and it is not installed."""
    if config.wandb and find_spec("wandb") is None:
        raise ConfigError(
            f"train.wandb: expected the package wandb for project {config.wandb!r}, got none. Install penstock[wandb], "
            'or set train.wandb="".'
        )


def wandb_id(run: Store) -> str:
    """Return the id of the W&B run of a run folder; a new one is stored. Raises ContractError for a damaged file."""
    if not run.exists(WANDB_NAME):
        run.write_atomic(WANDB_NAME, json.dumps({"id": secrets.token_hex(4)}).encode())
    stored = run.read_json(WANDB_NAME)
    name = stored.get("id") if isinstance(stored, dict) else None
    if not isinstance(name, str) or not name.isalnum():
        raise ContractError(
            f"{run.uri}/{WANDB_NAME}: expected the id of a W&B run, got {name!r}. Remove the file, and a new W&B run "
            "is started."
        )
    return name


def shown_settings(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the explicitly set values by section, without those that may hold a key or a password."""
    return {
        section: {name: value for name, value in values.items() if secret_of(name, str(value)) is None}
        for section, values in settings.to_json().items()
    }


class WandbLog:
    """The W&B run of a training run; `close` after use. It never raises, and never waits, until it is closed."""

    def __init__(self, run: Store, settings: Settings):
        self._config, self._settings = settings.train, shown_settings(settings)
        self._folder, self._id = run.path("train"), wandb_id(run)
        self._steps: queue.Queue[Mapping[str, float] | None] = queue.Queue(MAX_WAITING)
        self._dropped = False
        self._thread = threading.Thread(target=self._write_all, name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the values of a step."""
        try:
            self._steps.put_nowait({STEP: step, **values})
        except queue.Full:
            if not self._dropped:
                LOGGER.warning(f"penstock: W&B: {MAX_WAITING:,} steps wait; later ones are dropped")
            self._dropped = True

    def close(self) -> None:
        """Write what waits, and end the W&B run; give up after CLOSE_SECONDS."""
        try:
            self._steps.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return LOGGER.warning("penstock: W&B: the last steps could not be written")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            LOGGER.warning("penstock: W&B: the last steps could not be written in time")
        return None

    def _write_all(self) -> None:
        try:
            self._log_steps()
        except Exception as error:
            # Whatever the package or the network does, training continues, and metrics.jsonl has the figures.
            LOGGER.warning(f"penstock: W&B: no more figures until the run is started again: {error}")
            while self._steps.get() is not None:
                pass

    def _log_steps(self) -> None:
        import wandb

        config = self._config
        # Only our figures: no output of the terminal, code, list of packages or command line.
        options = wandb.Settings(
            **{"console": "off", "silent": True, "disable_git": True, "save_code": False},
            **{"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False},
        )
        logged = wandb.init(
            **{"project": config.wandb, "entity": config.wandb_entity or None, "name": config.wandb_name or None},
            **{"mode": config.wandb_mode, "dir": self._folder, "id": self._id, "resume": "allow"},
            **{"config": self._settings, "allow_val_change": True, "settings": options},
        )
        try:
            logged.define_metric(STEP)
            logged.define_metric("*", step_metric=STEP)
            while (values := self._steps.get()) is not None:
                logged.log(dict(values))
        finally:
            logged.finish()
