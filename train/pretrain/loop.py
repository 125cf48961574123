"""The training loop, which turns a run folder into a trained model; to resume, run the same command again.

Start it with `torchrun --nproc-per-node 2 -m train.pretrain RUN --set train.steps=500`, or with plain `python -m` for a
single process. Step k is the k-th update, computed from batch k - 1 of the order; step-000020 is the checkpoint after
20 updates. The result does not depend on how rows, layers, matrices and sequences are split over ranks.
"""

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from shlex import quote

import torch

from schemas.errors import ContractError
from schemas.logs import show
from schemas.storage import Store
from train.checkpoint.folder import CheckpointMetadata
from train.monitor.events import Interrupted
from train.monitor.guard import Verdict
from train.monitor.metrics import TrainManifest, last_metrics, write_train_manifest
from train.monitor.profiler import StepProfiler
from train.optim.schedule import learning_rate
from train.parallel.ranks import Interruption, Ranks
from train.pretrain.run import LaunchedStep, TrainingRun
from train.pretrain.setup import TrainingSetup, describe, prepare


def pretrain(setup: TrainingSetup, ranks: Ranks) -> int:
    """Train to the end of the run, or to SIGTERM or SIGINT, and write a last checkpoint.

    Return the exit code: 128 + SIGINT after SIGINT, else 0.
    """
    torch.set_num_threads(setup.layout.threads)
    settings, plan = setup.settings, setup.plan
    every, eval_every = settings.checkpoint.every, settings.train.eval_every
    by_sigterm = False
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        run = TrainingRun(setup, ranks, stack, lambda: interruption.received)
        profile = stack.enter_context(StepProfiler(setup.work.local, setup.window))
        if settings.checkpoint.first and setup.checkpoint is None:
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
            run.poll_saves()
            if saves and not ended and step < plan.steps:
                run.save()
        run.feed.drop()
        run.settle()
        if run.saved < run.step:
            run.save()
        checkpoint = run.finish_saves()
        if run.step < plan.steps and not ended:
            if interruption.is_orphaned:
                run.record.print_line("the process that started this rank has ended")
            return report_interruption(run, checkpoint, signal.SIGTERM if by_sigterm else signal.SIGINT)
    ranks.on_first(lambda: print(write_end(setup, checkpoint, run.step), flush=True))
    return 0


def report_interruption(run: TrainingRun, checkpoint: CheckpointMetadata | None, received: signal.Signals) -> int:
    """Log and print that a signal stopped the run; return the exit code."""
    name = checkpoint.name if checkpoint else None
    run.record.log_events(Interrupted(step=run.step, signal=received.name, checkpoint=name))
    # After SIGINT, the command that was interrupted prints this itself.
    hint = "; the same command resumes from it" if received == signal.SIGTERM and checkpoint else ""
    run.record.print_line(
        f"stopped after step {run.step} of {run.setup.plan.steps}; {name or 'no checkpoint'} is kept{hint}"
    )
    return 0 if received == signal.SIGTERM else 128 + received


def write_end(setup: TrainingSetup, checkpoint: CheckpointMetadata | None, step: int) -> str:
    """Write the manifest of a completed run; return the closing message.

    Raises ContractError if the checkpoint of the last step is missing.
    """
    last = last_metrics(setup.work.local, step)
    if checkpoint is None or checkpoint.step != step:
        raise ContractError(
            f"{setup.run.uri}: expected a checkpoint of step {step}, got {checkpoint.name if checkpoint else 'none'}. "
            "Run the same command again."
        )
    manifest = TrainManifest(
        dataset=checkpoint.identity.dataset,
        tokenizer=checkpoint.identity.tokenizer,
        plan=checkpoint.identity.plan,
        skip_list=checkpoint.identity.skip_list,
        steps=step,
        loss=last.loss,
        heldout_loss=last.heldout_loss,
        checkpoint=checkpoint.name,
    )
    write_train_manifest(setup.run, manifest)
    heldout = "" if last.heldout_loss is None else f", held-out loss {last.heldout_loss:.4f}"
    run = setup.run.uri
    return f"trained: {step:,} steps{heldout}; {run}/{checkpoint.name}; try it with `penstock generate {quote(run)}`"


def train(run: Store, overrides: Sequence[str], ranks: Ranks) -> int:
    """Check a run and train it, unless it is already complete.

    Return the exit code of `pretrain`, or 0 for a complete run.
    """
    setup = prepare(run, overrides, ranks)
    ranks.on_first(lambda: show("already trained to the end" if setup.done else describe(setup)))
    return 0 if setup.done else pretrain(setup, ranks)
