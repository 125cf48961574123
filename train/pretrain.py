"""The training loop: from a run folder to a trained model; to resume, run the same command again.

Start it with `torchrun --nproc-per-node 2 -m train.pretrain RUN --set train.steps=500`, or with plain `python -m` for a
single process. Step k is the k-th update; it is made from batch k - 1 of the order, and step-000020 is the
checkpoint after 20 updates. Rows are split over ranks and micro-batches in any way, uneven ones included, without a
change to the mathematics: the loss is the sum over all targets divided by their number in the global batch.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext

import torch

from schemas.errors import PenstockError
from schemas.storage import Store
from train.checkpoint import Note, keep_newest, read_state, standing_notes, training_state, write_checkpoint
from train.metrics import MetricsLog, Progress, StepMetrics, TrainManifest, last_metrics, write_train_manifest
from train.model import Transformer
from train.optim import gradient_norm, learning_rate, make_optimizer, non_finite, set_step, update
from train.parallel import (
    Part,
    accumulate_gradient,
    count_targets,
    measure_loss,
    micro_batches,
    rows_of_rank,
    set_initial_weights,
    sharded_model,
)
from train.prepare import Setup, describe, prepare
from train.ranks import FirstRankFailed, Interruption, Ranks, open_ranks


def build(setup: Setup, ranks: Ranks) -> tuple[Transformer, torch.optim.AdamW]:
    """The sharded model and its optimiser, as the checkpoint left them or as they begin."""
    model = sharded_model(setup.plan.shape, setup.config, ranks)
    optimizer = make_optimizer(model, setup.config)
    if setup.note is None:
        set_initial_weights(model, setup.config.seed)
    else:
        read_state(setup.run, setup.note, training_state(model, optimizer), ranks)
        set_step(optimizer, setup.note.step)
    return model, optimizer


def heldout_parts(setup: Setup, ranks: Ranks) -> list[Part]:
    """This rank's part of the held-out sequences; none if they are never looked at, or there are none."""
    config = setup.config
    sequences = setup.batches.heldout(config.eval_sequences) if config.eval_every else setup.batches.heldout(0)
    mine = rows_of_rank(len(sequences), ranks)
    return micro_batches(sequences[mine.start : mine.stop], len(sequences), config.micro_batch, ranks, setup.never)


def save(
    setup: Setup, step: int, model: Transformer, optimizer: torch.optim.AdamW, ranks: Ranks, log: MetricsLog | None
) -> Note:
    """Write the checkpoint of this step and drop those it makes too many; returns its note."""
    if log is not None:
        log.sync()
    note = Note(step=step, identity=setup.identity, layout=setup.layout, files={})
    note = write_checkpoint(setup.run, note, training_state(model, optimizer), ranks)
    ranks.on_first(lambda: keep_newest(setup.run, setup.config.keep_checkpoints))
    return note


def pretrain(setup: Setup, ranks: Ranks) -> int:
    """Train up to the plan's last step; returns 0, or 128 + the signal's number when asked to stop before."""
    plan, config, note = setup.plan, setup.config, setup.note
    torch.set_num_threads(setup.layout.threads)
    model, optimizer = build(setup, ranks)
    step = saved = note.step if note else 0
    rows = rows_of_rank(plan.global_batch, ranks)
    heldout = heldout_parts(setup, ranks)
    peak_rate = config.peak_flops and config.peak_flops * ranks.world_size / plan.flops_per_token
    interruption, progress = Interruption(), Progress(plan.steps, step, config.log_every, peak_rate)
    with interruption, closing(MetricsLog(setup.run, step)) if ranks.rank == 0 else nullcontext() as log:
        while step < plan.steps:
            began = time.monotonic()
            batch = setup.batches.batch(step, rows)
            data_seconds = time.monotonic() - began
            parts = micro_batches(batch, plan.global_batch, config.micro_batch, ranks, setup.never)
            tokens, stop = ranks.total(count_targets(parts), interruption.signal)
            if stop:
                break
            (losses,) = ranks.total(accumulate_gradient(model, parts, max(tokens, 1)))
            loss, norm = losses / max(tokens, 1), gradient_norm(model)
            if error := non_finite(step + 1, loss=loss, gradient_norm=norm.item()):
                ranks.refuse(error)
            step += 1
            rate = learning_rate(step, plan, config.final_lr_share)
            update(model, optimizer, norm, config.clip_norm, rate)
            seconds = time.monotonic() - began
            last = step == plan.steps
            due = heldout and (last or step % config.eval_every == 0)
            heldout_loss = measure_loss(model, heldout, ranks) if due else None
            if error := non_finite(step, heldout_loss=heldout_loss):
                ranks.refuse(error)
            if log is not None:
                record = StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=norm.item(),
                    learning_rate=rate,
                    tokens=int(tokens),
                    tokens_per_second=tokens / seconds,
                    data_seconds=data_seconds,
                    heldout_loss=heldout_loss,
                )
                log.write(record)
                progress.show(record)
            if last or (config.checkpoint_every and step % config.checkpoint_every == 0):
                note = save(setup, step, model, optimizer, ranks, log)
                saved = step
        if saved < step:
            note = save(setup, step, model, optimizer, ranks, log)
    if step < plan.steps:
        standing = note.name if note else "no checkpoint"
        ranks.on_first(lambda: print(f"stopped after step {step} of {plan.steps}; {standing} stands"))
        return 128 + (interruption.signal or signal.SIGTERM)
    ranks.on_first(lambda: conclude(setup))
    return 0


def conclude(setup: Setup) -> None:
    """Write the manifest of a run that has reached its last step."""
    note, last = standing_notes(setup.run)[-1], last_metrics(setup.run, setup.plan.steps)
    manifest = TrainManifest(
        dataset=setup.identity.dataset,
        tokenizer=setup.identity.tokenizer,
        plan=setup.identity.plan,
        skip_list=setup.identity.skip_list,
        steps=last.step,
        loss=last.loss,
        heldout_loss=last.heldout_loss,
        checkpoint=note.name,
    )
    write_train_manifest(setup.run, manifest)


def train(run: Store, overrides: Sequence[str], ranks: Ranks) -> int:
    """Check, train or go on training, and conclude a run; returns the exit code of `pretrain`."""
    setup = prepare(run, overrides, ranks)
    done = setup.note is not None and setup.note.step == setup.plan.steps
    ranks.on_first(lambda: print("already trained to the last step" if done else describe(setup), flush=True))
    if not done:
        return pretrain(setup, ranks)
    ranks.on_first(lambda: conclude(setup))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and train; returns the exit code, 2 for an error the user can act on."""
    parser = argparse.ArgumentParser(prog="train.pretrain", description="Train on the token dataset of a run folder.")
    # On Python 3.11 torchrun takes `--run` for its own `--run-path` and refuses it, so the folder may also stand alone.
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("run", nargs="?", default=argparse.SUPPRESS, metavar="RUN", help="run folder with the tokens")
    folder.add_argument("--run", dest="run", default=argparse.SUPPRESS, metavar="RUN", help="the same")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="train.KEY=VALUE")
    arguments = parser.parse_args(argv)
    with open_ranks() as ranks:
        try:
            return train(Store(arguments.run), arguments.overrides, ranks)
        except FirstRankFailed:
            return 2
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("penstock: stopped at once; the last complete checkpoint stands", file=sys.stderr)
            return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
