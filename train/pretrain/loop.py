"""The training loop: from a run folder to a trained model; to resume, run the same command again.

Start it with `torchrun --nproc-per-node 2 -m train.pretrain RUN --set train.steps=500`, or with plain `python -m` for a
single process. Step k is the k-th update; it is made from batch k - 1 of the order, and step-000020 is the
checkpoint after 20 updates. How rows, layers, matrices and sequences are split over ranks is not in the mathematics.
"""

import signal
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from schemas.errors import ContractError
from schemas.storage import Store
from train.checkpoint.metadata import CheckpointMetadata
from train.monitor.events import Interrupted
from train.monitor.guard import Verdict
from train.monitor.metrics import TrainManifest, last_metrics, write_train_manifest
from train.monitor.profiler import StepProfiler
from train.optim.schedule import learning_rate
from train.parallel.ranks import Interruption, Ranks
from train.pretrain.run import LaunchedStep, TrainingRun
from train.pretrain.setup import TrainingSetup, describe, prepare


def pretrain(setup: TrainingSetup, ranks: Ranks) -> int:
    """Train up to the run's end; returns 0, or 128 + SIGINT if a user broke it off. SIGTERM: a checkpoint, and 0."""
    torch.set_num_threads(setup.layout.threads)
    settings, plan = setup.settings, setup.plan
    every, eval_every = settings.checkpoint.every, settings.train.eval_every
    by_sigterm = False
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        run = TrainingRun(setup, ranks, stack, lambda: interruption.asked)
        profile = stack.enter_context(StepProfiler(setup.run, setup.window))
        if settings.checkpoint.first and setup.note is None:
            run.save()
        ended = run.record.ended
        while run.step < plan.steps and not ended:
            step = run.step + 1
            run.begin_step()
            with profile.step(step):
                fed = run.feed.take(run.step)
                if fed.stops:
                    by_sigterm = fed.by_sigterm
                    break
                stage = run.batches.order.stage_of(run.step)
                scale = run.learner.loss_scale.scale if run.learner.loss_scale else None
                measured = run.learner.compute(step, fed.rows, stage.global_batch, fed.num_targets)
                made = LaunchedStep(step, fed.rows, measured, scale)
                if step < plan.steps:
                    run.feed.request(step)
                if not run.defers:
                    documents = run.judge(made)
                    if made.verdict is Verdict.SPIKE and settings.guard.rewinds:
                        run.rewind(documents)
                        continue
                made.rate = learning_rate(step, plan.course, settings.optim, run.record.heldout)
                run.learner.update(made.rate, measured)
            run.launched(made)
            saves = every and step % every == 0
            if eval_every and (step % eval_every == 0 or step == plan.steps):
                ended = run.evaluate()
            elif saves or not run.defers:
                run.settle()
            run.look_after_saves()
            if saves and not ended and step < plan.steps:
                run.save()
        run.feed.drop()
        run.settle()
        if run.saved < run.step:
            run.save()
        note = run.finish_saves()
        if run.step < plan.steps and not ended:
            return report_interruption(run, note, signal.SIGTERM if by_sigterm else signal.SIGINT)
    ranks.on_first(lambda: print(write_end(setup, note, run.step), flush=True))
    return 0


def report_interruption(run: TrainingRun, note: CheckpointMetadata | None, asked: signal.Signals) -> int:
    """Tell of a run that was asked to stop; returns the exit code."""
    standing = note.name if note else None
    run.record.tell(Interrupted(step=run.step, signal=asked.name, checkpoint=standing))
    run.record.say(f"stopped after step {run.step} of {run.setup.plan.steps}; {standing or 'no checkpoint'} stands")
    return 0 if asked == signal.SIGTERM else 128 + asked


def write_end(setup: TrainingSetup, note: CheckpointMetadata | None, step: int) -> str:
    """Write the manifest of a run at its end; returns what to say. Raises ContractError if no checkpoint stands."""
    last = last_metrics(setup.run, step)
    if note is None or note.step != step:
        raise ContractError(
            f"{setup.run.uri}: expected a checkpoint of step {step}, got {note.name if note else 'none'}. Start again."
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
