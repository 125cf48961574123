"""The training loop: from a run folder to a trained model; to resume, run the same command again.

Start it with `torchrun --nproc-per-node 2 -m train.pretrain RUN --set train.steps=500`, or with plain `python -m` for a
single process. Step k is the k-th update; it is made from batch k - 1 of the order, and step-000020 is the
checkpoint after 20 updates. How rows, layers, matrices and sequences are split over ranks is not in the mathematics.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from schemas.errors import ContractError
from schemas.storage import Store
from train.checkpoint.note import Note
from train.optim.schedule import learning_rate
from train.pretrain.prepare import Setup, describe, prepare
from train.pretrain.record import step_metrics
from train.pretrain.running import Run
from train.ranks import Interruption, Ranks
from train.watch.events import Interrupted, Stopped
from train.watch.guard import Verdict, why_stopped
from train.watch.metrics import TrainManifest, finite, last_metrics, write_train_manifest
from train.watch.profiling import Profile


def pretrain(setup: Setup, ranks: Ranks) -> int:
    """Train up to the run's end; returns 0, or 128 + SIGINT if a user broke it off. SIGTERM: a checkpoint, and 0."""
    torch.set_num_threads(setup.layout.threads)
    settings, plan = setup.settings, setup.plan
    every, eval_every = settings.checkpoint.every, settings.train.eval_every
    asked: list[float] = []
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        run = Run(setup, ranks, stack)
        profile = stack.enter_context(Profile(setup.run, setup.window))
        if settings.checkpoint.first and setup.note is None:
            run.save()
        ended = run.record.ended
        while run.step < plan.steps and not ended:
            step, began = run.step + 1, time.perf_counter()
            run.record.begin_step(step)
            with profile.step(step):
                rows, waited = run.rows.take(run.step)
                speaks = run.learner.model.mesh.speaks
                targets, *asked = ranks.total(rows.num_targets if speaks else 0, *interruption.asked)
                if any(asked):
                    break
                stage = run.batches.order.stage_of(run.step)
                measured = run.learner.compute(step, rows, stage.global_batch, targets)
                scale = run.learner.loss_scale.scale if run.learner.loss_scale else None
                verdict = run.record.judge(step, measured, scale)
                documents = run.look_into(step, rows) if run.record.saw_spike else []
                if verdict is Verdict.STOP:
                    error = why_stopped(run.record.guard, settings.guard, step)
                    run.record.tell(Stopped(step=step, reason=str(error)))
                    ranks.refuse(error)
                if verdict is Verdict.SPIKE and settings.guard.rewinds:
                    run.rewind(documents)
                    continue
                rate = learning_rate(step, plan.course, settings.optim, run.record.heldout)
                run.learner.skip() if verdict is Verdict.SKIP else run.learner.update(rate, measured)
            values: dict[str, Any] = {"step": step, "learning_rate": rate, "data_seconds": waited, "loss_scale": scale}
            values |= {"step_seconds": time.perf_counter() - began, "skipped": verdict is Verdict.SKIP}
            record = step_metrics(setup, run.batches, run.learner, measured, values)
            run.step = step
            if eval_every and (step % eval_every == 0 or step == plan.steps):
                loss, heldout = run.measure_heldout()
                record = record.model_copy(update={"heldout_loss": finite(loss), "heldout": heldout})
                ended = loss is not None and run.record.measured_heldout(step, loss)
            run.record.write(record)
            run.look_after_saves()
            if every and step % every == 0 and not ended and step < plan.steps:
                run.save()
        if run.saved < run.step:
            run.save()
        note = run.finish_saves()
        if run.step < plan.steps and not ended:
            return interrupted(run, note, signal.SIGTERM if asked[0] else signal.SIGINT)
    ranks.on_first(lambda: print(conclude(setup, note, run.step), flush=True))
    return 0


def interrupted(run: Run, note: Note | None, asked: signal.Signals) -> int:
    """Tell of a run that was asked to stop; returns the exit code."""
    standing = note.name if note else None
    run.record.tell(Interrupted(step=run.step, signal=asked.name, checkpoint=standing))
    run.record.say(f"stopped after step {run.step} of {run.setup.plan.steps}; {standing or 'no checkpoint'} stands")
    return 0 if asked == signal.SIGTERM else 128 + asked


def conclude(setup: Setup, note: Note | None, step: int) -> str:
    """Write the manifest of a run at its end; returns what to say. Raises ContractError if no checkpoint stands."""
    last = last_metrics(setup.run, step)
    if note is None or note.step != step:
        raise ContractError(
            f"{setup.run.uri}: promised a checkpoint of step {step}, found {note.name if note else 'none'}; start again"
        )
    manifest = TrainManifest(
        dataset=note.identity.dataset,
        tokenizer=note.identity.tokenizer,
        plan=note.identity.plan,
        skip_list=note.identity.skip_list,
        steps=step,
        loss=last.loss,
        heldout_loss=last.heldout_loss,
        checkpoint=note.name,
    )
    write_train_manifest(setup.run, manifest)
    heldout = "" if last.heldout_loss is None else f", held-out loss {last.heldout_loss:.4f}"
    run = setup.run.uri
    return f"trained: {step:,} steps{heldout}; {run}/{note.name}; try it with `penstock generate {run}`"


def train(run: Store, overrides: Sequence[str], ranks: Ranks) -> int:
    """Check, train or go on training, and conclude a run; returns the exit code of `pretrain`."""
    setup = prepare(run, overrides, ranks)
    ranks.on_first(lambda: print("already trained to the end" if setup.done else describe(setup), flush=True))
    return 0 if setup.done else pretrain(setup, ranks)
