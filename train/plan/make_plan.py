"""Make a plan: size the model and the run from a dataset's token counts.

N is the number of all parameters, a tied embedding counted once: the 20 tokens per parameter were measured on such
counts (Hoffmann et al. 2022, Table A9 includes the embedding), and Pearce and Song 2024, arXiv 2406.12907, trace the
disagreement of Kaplan et al. to leaving it out. Rules that were fitted without embeddings get N without them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from schemas.errors import ConfigError
from schemas.origin import ModelOrigin
from schemas.storage import Store
from schemas.tokens import Dataset
from train.checkpoint.folder import list_checkpoints, rule_of_weights
from train.config.plan import PlanConfig
from train.config.recipe import resolve_recipe
from train.config.settings import Settings
from train.config.train import PACK_CHUNKS, TrainConfig, parse_window
from train.data.order import SampleOrder, open_streams, samples_of_epochs, stage_counts, tokens_by_source
from train.data.packing import Packing, open_packings, write_packing
from train.data.permutation import RowOrder
from train.data.stages import NO_SKIPS, StagePlan, resolve_stages, row_length, skip_path, stage_lengths
from train.model.declared import code_digest, function_of
from train.model.freeze import frozen_names
from train.model.shape import (
    ModelShape,
    OwnShape,
    active_parameters,
    choose_shape,
    flops_per_token,
    num_parameters,
    parameter_sizes,
)
from train.parallel.devices import peak_of
from train.plan import rules
from train.plan.advice import (
    advice,
    costly_padding,
    heldout_read_before,
    tombstones,
    unread_copies,
    unusual_proportions,
)
from train.plan.figures import MAX_WARMUP, DatasetOffer, figures_of_plan, memory_needed
from train.plan.origin import open_origin, sizing_of
from train.plan.plan import Plan, check_parametrization, check_settings_used, check_windows, stored_plan
from train.plan.target import SHAPED, check_size_reached, flops_bought, read_own_law, target_of, tokens_of_shape


def make_plan(run: Store, dataset: Dataset, settings: Settings, trained: Store | None = None) -> Plan:
    """Return the plan for a dataset. Write the index of packed rows to `run` if it is required and missing.

    `trained`: the run whose checkpoints the plan continues; None = `run`. Raises ConfigError if settings contradict
    each other, or if the dataset is too small for them.
    """
    _check_documents(dataset)
    settings, sized_by, weights = _resolved(trained or run, dataset, settings)
    vocab_size = weights.shape.vocab_size if weights else dataset.tokenizer.vocab_size
    sizing, train, optim = sized_by.plan, settings.train, settings.optim
    for seq_len in stage_lengths(train):
        row_length(train, seq_len)  # fails early if a row has more spans than sentinels
    packing = write_packing(run, dataset, train)
    streams = open_streams(dataset, train, open_packings(run, dataset, train))
    counts = stage_counts(streams, train, copies := dataset.copies)
    offer = _offered((dataset, vocab_size), streams, counts[0], sized_by, packing)
    target = offer.target
    shape = weights.shape if weights else sized_shape(target.params, vocab_size, sized_by)
    check_size_reached(target, sizing, shape)
    _check_positions(shape, train)
    _check_frozen(shape, train, sizing.model)
    num_params = num_parameters(shape)
    tokens = tokens_of_shape(target, sizing, shape, offer.most_samples * train.seq_len)
    body_flops = flops_per_token(shape, train.seq_len, logits=False)
    sequences = rules.deepseek_batch(body_flops * tokens) / train.seq_len
    batch = train.global_batch or _power_of_two(sequences, offer.most_samples)
    if not train.epochs:  # whole steps, and at most as many as the data allows
        steps = max(1, min(round(tokens / (batch * train.seq_len)), offer.most_samples // batch))
        tokens = steps * batch * train.seq_len
    stages = resolve_stages(train, counts, batch, int(tokens))
    if not train.epochs:
        _check_epochs(streams, stages, sizing.max_epochs, copies)
    _check_memory(shape, settings, stages)
    total = sum(stage.num_tokens for stage in stages)
    first = stages[0].global_batch * stages[0].seq_len
    by_size = min(MAX_WARMUP, math.ceil(active_parameters(shape) / first), stages[-1].end // 10)
    rate = optim.learning_rate or rate_of_rule(sizing, body_flops * total)
    sized = Plan(
        dataset=dataset.digest,
        tokenizer=dataset.tokenizer.sha256,
        order=SampleOrder(streams, stages, NO_SKIPS, train.seed).digest,
        shape=shape,
        num_params=num_params,
        stages=stages,
        warmup_steps=by_size if optim.warmup_steps is None else optim.warmup_steps,
        learning_rate=rate,
        flops_per_token=flops_per_token(shape, row_length(train, stages[0].seq_len)),
        settings=settings,
        initial_weights=rule_of_weights(trained or run),
        origin=weights.origin if weights else None,
        figures=[],
    )
    figures = figures_of_plan(dataset, sized, offer, body_flops * total)
    sentences = (
        *advice(sized, offer.target, offer.unique),
        *(*unread_copies(dataset, streams), *tombstones(dataset)),
        *costly_padding(sized, offer.packed),
        *(*unusual_proportions(sized), *heldout_read_before(sized)),
    )
    return sized.model_copy(update={"figures": figures, "advice": sentences})


def rate_of_rule(sizing: PlanConfig, compute: float) -> float:
    """Return the peak learning rate of a plan whose recipe sets none; `compute`: FLOPs without embeddings.

    It is that of the rule times the factor in the fitted law, or with muP the rate in the law. Raises ConfigError if
    muP has no such rate.
    """
    own = sizing.own_law
    if sizing.parametrization != "mup":
        return float(f"{rules.deepseek_learning_rate(compute) * (own.rate_factor if own else 1):.3g}")
    if own is None or own.rate is None or own.mup_base_width != sizing.mup_base_width:
        got = "no law" if own is None else f"a law with rate {own.rate} at the base width {own.mup_base_width}"
        raise ConfigError(
            f"plan.parametrization = mup: expected a learning rate that was found at the base width "
            f"{sizing.mup_base_width}, got {got}. Set optim.learning_rate, or plan.law_file to a law of `penstock "
            "ladder` with the same plan.parametrization and plan.mup_base_width."
        )
    return own.rate


ANY_VOCABULARY = 512
"""A vocabulary with which to check whether `[plan]` allows any shape; its size does not matter."""


class _Weights(NamedTuple):
    """The weights that a run begins from."""

    origin: ModelOrigin
    shape: ModelShape
    """The shape of the model that begins from them, which is its shape in every respect."""


def _resolved(run: Store, dataset: Dataset, settings: Settings) -> tuple[Settings, Settings, _Weights | None]:
    """Return the settings with the values of their law file and recipe, and how the model is sized.

    That is the settings with the shape of the weights to begin from, and these weights; None = random weights. Raises
    ConfigError if settings do not fit.
    """
    if not list_checkpoints(run):  # else its training continues as it began
        _check_effects(settings)
    settings = settings.model_copy(update={"plan": read_own_law(settings.plan)}).with_pack_chunks(PACK_CHUNKS)
    _check_given_epochs(settings)
    if not settings.train.init_from:
        resolved = resolve_recipe(settings)
        check_windows(resolved)
        return resolved, resolved, None
    if settings.plan.model:
        raise ConfigError(
            f"train.init_from: expected a transformer of Penstock, got plan.model = {settings.plan.model}. Remove one "
            "of the two settings."
        )
    weights = _open_weights(run, dataset, settings.train.init_from)
    # The shape is that of the weights, so a recipe only sets the optimizer.
    sized_by = resolve_recipe(settings.model_copy(update={"plan": sizing_of(weights.shape, settings.plan)}))
    check_windows(sized_by)
    check_parametrization(sized_by)
    return settings.model_copy(update={"optim": sized_by.optim}), sized_by, weights


def problems_without_data(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with the settings of a training run whose dataset is not made yet."""
    checks = (_check_effects, _check_sizing, _check_given_epochs, _check_rows, _check_texts)
    for check in (*checks, lambda own: check_settings_used(own, None)):
        try:
            check(settings)
        except ConfigError as error:
            yield str(error)
    path = settings.train.init_from
    if path and not Path(path).exists():
        yield f"train.init_from: expected a folder, got {path}, which does not exist. Set it to a folder with weights."


REPLACED_BY_STAGES = (
    ("train", "global_batch", "global_batch"),
    ("train", "weights", "weights"),
    ("optim", "learning_rate", "learning_rate"),
    ("optim", "schedule", "learning_rate"),
)
"""Settings without effect if each training stage has its own: section, name, and the setting of a stage."""


def _check_effects(settings: Settings) -> None:
    """Raise ConfigError if a setting of a new plan would be ignored; stored plans may have such settings."""
    sizing, stages, problems = settings.plan, settings.train.stages, []
    for section, name, own in REPLACED_BY_STAGES:
        given = name in getattr(settings, section).model_fields_set
        if name == "learning_rate" and sizing.parametrization == "mup":
            continue  # it is the rate that was found at the base width, which muP requires
        if given and stages and all(getattr(stage, own) is not None for stage in stages):
            problems.append(
                f"{section}.{name}: expected a stage without its own {own}, got train.stages that all have one. Remove "
                f"{section}.{name}, or {own} of a stage."
            )
    if sizing.rope_scaling != "none" and sizing.rope_factor == 1:
        problems.append(
            f"plan.rope_scaling = {sizing.rope_scaling}: expected a plan.rope_factor above 1, got 1, which changes no "
            "position. Set plan.rope_factor, or remove plan.rope_scaling."
        )
    if sizing.inference_tokens is not None and all(getattr(sizing, name) is not None for name in SHAPED):
        problems.append(
            "plan.inference_tokens: expected a size that the plan chooses, got one that "
            f"{' and '.join(f'plan.{name}' for name in SHAPED)} decide. Remove plan.inference_tokens, or one of these."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _check_sizing(settings: Settings) -> None:
    """Raise ConfigError if the model could be sized for no dataset."""
    resolved = resolve_recipe(settings.model_copy(update={"plan": read_own_law(settings.plan)}))
    sizing = resolved.plan
    flops_bought(resolved, peak_of(resolved))
    check_windows(resolved)
    if sizing.model:
        function_of(sizing.model)
    if not settings.train.init_from:  # otherwise the weights decide the shape
        shape = choose_shape(sizing.params or float(sizing.min_params), ANY_VOCABULARY, sizing)
        _check_frozen(_as_deep_as_named(shape, sizing, settings.train.freeze), settings.train, sizing.model)
    if resolved.optim.learning_rate is None:
        rate_of_rule(sizing, 1.0)


def _as_deep_as_named(shape: ModelShape, sizing: PlanConfig, patterns: Sequence[str]) -> ModelShape:
    """Return the shape with every layer that the patterns of `train.freeze` name, if the plan chooses their number."""
    if sizing.num_layers is not None:
        return shape
    named = (int(number) + 1 for pattern in patterns for number in re.findall(r"[0-9]{1,4}", pattern))
    return shape.model_copy(update={"num_layers": max(shape.num_layers, *named, 1)})


def _check_texts(settings: Settings) -> None:
    """Raise ConfigError if settings of `[train]` that are texts cannot be understood."""
    parse_window(settings.train.profile, None if settings.train.stages else settings.train.steps)
    if settings.train.skip_file:
        skip_path(settings.train.skip_file)


def _check_rows(settings: Settings) -> None:
    """Raise ConfigError if a row has more spans than sentinels."""
    for seq_len in stage_lengths(settings.train):
        row_length(settings.train, seq_len)


def _open_weights(run: Store, dataset: Dataset, path: str) -> _Weights:
    """Return the weights at the path `train.init_from`, or those in the plan of a run that no longer needs the path.

    Raises ConfigError or ContractError as `open_origin` does.
    """
    if not Path(path).exists() and list_checkpoints(run):  # the newest checkpoint has what became of the weights
        plan = stored_plan(run)
        began = plan is not None and plan.settings.train.init_from == path
        if plan is not None and began and plan.origin is not None and not isinstance(plan.shape, OwnShape):
            return _Weights(plan.origin, plan.shape)
    return _Weights(*open_origin(path, dataset))


def _offered(
    data: tuple[Dataset, int],
    streams: Mapping[str, RowOrder],
    counts: Mapping[str, int],
    settings: Settings,
    packing: Packing | None,
) -> DatasetOffer:
    (dataset, vocab_size), train, sizing = data, settings.train, settings.plan
    copies = dataset.copies
    samples = {source: stream.num_units // stream.width(train.seq_len) for source, stream in streams.items()}
    block, passes = sum(counts.values()), Fraction(str(sizing.max_epochs))
    once = {name: number * copies.get(name, 1) for name, number in samples.items()}
    most = max(1, min(int(passes * once[name] * block / count) for name, count in counts.items()))
    if train.epochs:
        most = sum(samples_of_epochs(streams, train, train.seq_len, copies).values())
    unique = sum(once.values()) * train.seq_len
    length = row_length(train, train.seq_len)
    target = target_of(settings, vocab_size, unique, most * train.seq_len, peak_of(settings), length)
    return DatasetOffer(samples, most, target, train.seq_len, packing.sources if packing else ())


def _check_frozen(shape: ModelShape, train: TrainConfig, model: str) -> None:
    """Raise ConfigError if a pattern of `train.freeze` matches no parameter; `model`: the setting `plan.model`."""
    if train.freeze and model:
        raise ConfigError(
            f"train.freeze: expected a transformer of Penstock, got plan.model = {model}. Remove train.freeze."
        )
    frozen_names(parameter_sizes(shape), train.freeze)


def _check_documents(dataset: Dataset) -> None:
    """Raise ConfigError if the dataset has no document."""
    if not dataset.manifest.content.counts.rows_kept:
        raise ConfigError(
            f"{dataset.folder.uri}: expected at least one document to train on, got 0. Run `penstock report` to see "
            "which rules dropped the documents, then loosen those rules in the recipe and run `penstock run` again."
        )


def _check_positions(shape: ModelShape, train: TrainConfig) -> None:
    """Raise ConfigError if a row of the run has more positions than a model with learned positions."""
    # Held-out rows have the length of train.seq_len in every stage.
    lengths = [*stage_lengths(train), *([train.seq_len] if train.eval_every else [])]
    longest = max(row_length(train, seq_len) for seq_len in lengths)
    if shape.positions == "learned" and longest > shape.max_positions:
        raise ConfigError(
            f"train.seq_len: expected rows of at most plan.max_positions = {shape.max_positions} tokens, got {longest}."
            " Lower train.seq_len, or raise plan.max_positions."
        )


def _power_of_two(sequences: float, most: int) -> int:
    """Return the power of two nearest to `sequences` by ratio, or `most` if `most` is smaller."""
    # Batches of such a size can be divided evenly among ranks.
    return max(1, min(1 << max(0, round(math.log2(sequences))), most))


def _check_given_epochs(settings: Settings) -> None:
    """Raise ConfigError if `train.epochs` exceeds `plan.max_epochs`, or if another setting chooses the tokens too."""
    epochs, sizing = settings.train.epochs, settings.plan
    over = [f"{source} {times:g} times" for source, times in epochs.items() if times > sizing.max_epochs]
    if over:
        raise ConfigError(
            f"train.epochs: expected at most plan.max_epochs = {sizing.max_epochs:g} passes over a source, got "
            f"{', '.join(over)}. Lower train.epochs, or raise plan.max_epochs."
        )
    if epochs and sizing.inference_tokens is not None:
        raise ConfigError(
            "train.epochs: expected one setting that decides the number of training tokens, got "
            f"plan.inference_tokens = {sizing.inference_tokens:g} too. Remove train.epochs or plan.inference_tokens."
        )


def _check_epochs(
    streams: Mapping[str, RowOrder], stages: tuple[StagePlan, ...], max_epochs: float, copies: Mapping[str, int]
) -> None:
    """Raise ConfigError if a source is read in more than `max_epochs` epochs, each of which has all of its copies."""
    drawn = tokens_by_source(stages)
    lengths = {
        source: stream.num_units * stages[0].seq_len // stream.width(stages[0].seq_len)
        for source, stream in streams.items()
    }
    over = [
        f"{source} {drawn[source] / lengths[source]:.4g} times"
        for source in drawn
        if drawn[source] > Fraction(str(max_epochs)) * lengths[source] * copies.get(source, 1)
    ]
    if over:
        raise ConfigError(
            f"train.steps, train.stages, train.weights: expected at most plan.max_epochs = {max_epochs:g} passes over "
            f"a source, got {', '.join(over)}. Lower train.steps, change train.weights, or raise plan.max_epochs."
        )


def _check_memory(shape: ModelShape, settings: Settings, stages: tuple[StagePlan, ...]) -> None:
    """Check that the run fits into `plan.device_memory`.

    The check is for the largest of `plan.world_sizes` that works with the layout and the global batch. Raises
    ConfigError if the run does not fit, or if none of `plan.world_sizes` works.
    """
    limit = settings.plan.device_memory
    if limit is None or settings.cluster.device:  # the layout search applies the limit itself
        return
    sizes = sorted(settings.plan.world_sizes, reverse=True)
    needs = ((size, memory_needed(shape, settings, stages, size)) for size in sizes)
    ranks, need = next(((size, need) for size, need in needs if need is not None), (0, None))
    if need is None:
        raise ConfigError(
            "plan.world_sizes: expected a number of ranks that works with the [layout] settings and the global batch "
            f"size, got {sizes[::-1]}, so plan.device_memory cannot be checked. Add the number of ranks of the run to "
            "plan.world_sizes."
        )
    if need.peak > limit:
        parts = ", ".join(f"{name} {size:,}" for name, size in need.at_peak.items() if size)
        raise ConfigError(
            f"layout: expected at most plan.device_memory = {limit:,} bytes on each rank, got {need.peak:,} on each "
            f"of {ranks} ranks ({parts}). Lower layout.micro_batch, recompute activations "
            '(layout.activation_checkpointing = "full"), or split the model (layout.tensor, layout.pipeline).'
        )


# A model of the user decides itself how many parameters it has. Its proposal, the shape of a dense transformer, is made
# larger or smaller until the parameters that compute one token are those that the plan asks for. torch and the module
# of the model are imported only if `plan.model` is set.

COUNTER = "train.model.count_own:count_model"
"""The function that counts a model; its module imports torch, which a plan of the transformer does without."""
ROUNDS, CLOSE = 8, 0.01
"""Maximum number of proposals, and the relative error in the number of parameters that ends the search."""


def sized_shape(num_params: float, vocab_size: int, settings: Settings) -> ModelShape:
    """Return the shape of the model with about `num_params` parameters that compute one token.

    Raises ConfigError if no shape has the values set in `[plan]`, or if `plan.model` names no usable model.
    """
    sizing, train = settings.plan, settings.train
    shape = choose_shape(num_params, vocab_size, sizing)
    if not sizing.model:
        return shape
    function = function_of(sizing.model)
    draft: dict[str, Any] = {"model": function, "options": sizing.model_options, "code": code_digest(function)}
    lengths = {
        length for seq_len in (train.seq_len, *stage_lengths(train)) for length in (seq_len, row_length(train, seq_len))
    }
    draft["max_positions"] = max(lengths)
    count: Callable[[OwnShape, Sequence[int], bool], OwnShape] = resolve_name(COUNTER)
    best, asked = None, num_params
    for _ in range(ROUNDS):
        proposal = OwnShape.model_validate(shape.model_dump() | draft)
        counted = count(proposal, sorted(lengths), train.objective != "mlm")
        actual = active_parameters(counted)
        if best is None or abs(actual / num_params - 1) < abs(active_parameters(best) / num_params - 1):
            best = counted
        if abs(actual / num_params - 1) <= CLOSE:
            break
        asked *= num_params / actual
        again = choose_shape(max(asked, 1.0), vocab_size, sizing)
        if again == shape:  # the recipe sets the shape, or no other is nearer
            break
        shape = again
    if best is None:
        raise RuntimeError(f"plan.model: expected at least one proposal in {ROUNDS} rounds, got none. Report this.")
    return best
