"""The choice of a plan's layout: the fastest one for the devices of `[cluster]`, or for those that a run starts on."""

import json
import math
from collections.abc import Iterator, Sequence

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.checkpoint.folder import settings_at_start
from train.config.layout import MICRO_BATCH, LayoutConfig
from train.config.settings import Settings, load_settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape, OwnShape
from train.parallel.devices import Cluster, RunDevices, cluster_of, known_device
from train.parallel.layout import axes_problem
from train.parallel.metadata import metadata_advice
from train.plan.figures import MEMORY, memory_rows, update_memory_figures
from train.plan.make_plan import make_plan
from train.plan.plan import LayoutOffer, Plan, check_document_mask
from train.plan.rules import Row, SourcedFigure, figures_of
from train.plan.search.search import SearchResult, axes_as_settings, search
from train.plan.target import NEAR, hours_of

SEARCHED = "cost model, predicted"
HOUR = 3600.0
AXES = ("replicate", "shard", "context", "tensor", "pipeline")
"""Settings of `[layout]` that are sizes of mesh axes."""


def choose_layout(plan: Plan) -> tuple[Plan, SearchResult | None]:
    """Return the plan in its fastest layout, and the result of the layout search.

    Settings of `[layout]` in the recipe are kept. The new plan has no automatic settings. If `cluster.device` is not
    set, the plan is unchanged and the result is None. Raises ConfigError if no layout fits.
    """
    cluster = cluster_of(plan.settings)
    if cluster is None:
        return plan, None
    if isinstance(plan.shape, OwnShape):
        line = (
            f"No layout was searched for, because the times of {plan.shape.model} are unknown: set [layout] yourself."
        )
        return plan.model_copy(update={"advice": (*plan.advice, line)}), None
    device = cluster.device
    check_document_mask(plan.shape, plan.settings, device.kind)
    result = search(plan.shape, plan.settings, plan.stages, cluster)
    if not result.best:
        rejected = result.refused.items()
        reasons = "; ".join(f"{count:,} {reason}, such as {example}" for reason, (count, example) in rejected)
        if not reasons:  # the sizes in the recipe rule out every layout before one is tried
            layout = plan.settings.layout
            sizes = ", ".join(f"{axis} = {getattr(layout, axis)}" for axis in AXES if axis in layout.model_fields_set)
            raise ConfigError(
                f"layout: expected axis sizes that together divide {cluster.world_size} devices ({cluster}), got "
                f"{sizes}. Remove one of these settings, so that the layout search chooses it."
            )
        raise ConfigError(
            f"cluster: expected a layout for {cluster} that this run fits into, got none among "
            f"{result.searched:,} layouts{_usual(plan)}: {reasons}. Raise cluster.gpus or cluster.nodes, or lower "
            "plan.params or the budget."
        )
    offers = tuple(
        LayoutOffer(
            layout=candidate.layout_settings(),
            step_seconds=candidate.step_seconds,
            tokens_per_second=candidate.tokens_per_second,
            mfu=candidate.mfu,
            memory=candidate.memory.peak,
        )
        for candidate in result.best
    )
    raw = plan.settings.with_precisions_for(device.kind, device.capability).to_json()
    chosen = raw | {"layout": raw.get("layout", {}) | offers[0].layout}
    settings = load_settings(chosen, [], "the fastest layout")
    # The earlier estimates are for the previous layout and for the world sizes of plan.world_sizes.
    figures = [figure for figure in plan.figures if not figure.name.startswith(f"{MEMORY}.")]
    memory = memory_rows(result.best[0].memory, cluster.world_size, cluster.device.name)
    figures += [*figures_of(memory), *_figures(plan, offers[0], cluster)]
    fixed = costs_of_fixed(plan.shape, plan.settings, plan.stages, cluster, offers[0].step_seconds)
    large = metadata_advice(plan.shape, settings, cluster.world_size)
    sentences = (*plan.advice, *_over_hours(plan, offers[0], cluster), *fixed, *large)
    changes = {"settings": settings, "layouts": offers, "figures": figures, "advice": sentences}
    return plan.model_copy(update=changes), result


def _usual(plan: Plan) -> str:
    """Return a text on the number of devices in a node if no setting gives it."""
    named = plan.settings.cluster
    return f"; cluster.gpus is not set, so a node has as many as is usual for {named.device}" if not named.gpus else ""


def _over_hours(plan: Plan, offer: LayoutOffer, cluster: Cluster) -> Iterator[str]:
    """Yield a sentence if the run takes more or fewer device hours than its budget."""
    named, sizing = plan.settings.cluster, plan.settings.plan
    given, taken = hours_of(sizing, named), plan.steps * offer.step_seconds / HOUR * cluster.world_size
    if given is None or sizing.inference_tokens is not None or 1 / NEAR <= taken / given <= NEAR:
        return
    yield (
        f"The run was sized for {given:,.4g} hours of a device at cluster.mfu = {named.mfu:g}, and the layout that was "
        f"found takes {taken:,.4g}, at {offer.mfu:.3f}: with --set cluster.mfu={offer.mfu:.3f} it is sized for what "
        "they buy."
    )


def _figures(plan: Plan, offer: LayoutOffer, cluster: Cluster) -> list[SourcedFigure]:
    hours = plan.steps * offer.step_seconds / HOUR
    rows: list[Row] = [
        ("devices", cluster.world_size, "", f"{cluster.device.name}, {cluster.nodes} node(s){_usual(plan)}", "recipe"),
        ("step_seconds", offer.step_seconds, "s", "compute, memory, links and pipeline of a step", SEARCHED),
        ("tokens_per_second", offer.tokens_per_second, "tokens/s", "B · L / step_seconds", SEARCHED),
        ("mfu", offer.mfu, "", "flops_per_token · tokens/s / (devices · bf16 peak)", SEARCHED),
        ("hours", hours, "h", "steps · step_seconds, no evaluation, no saves", SEARCHED),
        ("gpu_hours", hours * cluster.world_size, "h", "hours · devices", SEARCHED),
    ]
    if price := plan.settings.cluster.usd_per_gpu_hour:
        rows.append(("usd", hours * cluster.world_size * price, "USD", "gpu_hours · usd_per_gpu_hour", SEARCHED))
    return figures_of(rows)


# The cost of a setting that a recipe fixes: the step time of the chosen layout, compared with that of the fastest one
# when the search may choose the setting.

FREED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train", ("precision",)),
    ("layout", ("compile",)),
    ("layout", ("micro_batch",)),
    ("layout", ("activation_checkpointing", "activation_budget")),
    ("layout", ("offload", "offload_dir", "offload_weights_dir")),
)
"""(Section, settings) to compare with a search that chooses these settings; the advice names the first setting."""
MIN_REPORTED_SHARE = 0.01
"""Smallest slowdown, as a share of the step time, that the advice mentions."""


def costs_of_fixed(
    shape: ModelShape, settings: Settings, run: Sequence[StagePlan], cluster: Cluster, step_seconds: float
) -> Iterator[str]:
    """Yield a sentence for each setting of the recipe that makes a step slower than the search could."""
    for section, names in FREED:
        freed = without_settings(settings, section, names)
        if freed is None:
            continue
        best = search(shape, freed, run, cluster, top=1).best
        share = step_seconds / best[0].step_seconds - 1 if best else 0.0
        if share >= MIN_REPORTED_SHARE:
            value = json.dumps(getattr(getattr(settings, section), names[0]))
            yield (
                f"{section}.{names[0]} = {value} costs {100 * share:.0f} %: {step_seconds:.3g} s a step in place of "
                f"{best[0].step_seconds:.3g} s; leave it out."
            )


def without_settings(settings: Settings, section: str, names: Sequence[str]) -> Settings | None:
    """Return a copy of the settings in which `names` of `section` are not set; None if the recipe sets none."""
    current = getattr(settings, section)
    if not current.model_fields_set & set(names):
        return None
    remaining = type(current).model_validate(current.model_dump(exclude_unset=True, exclude=set(names)))
    return settings.model_copy(update={section: remaining})


# A run resolves the automatic settings of its plan for the devices that it starts on.


def plan_for_devices(run: Store, overrides: Sequence[str], here: RunDevices) -> tuple[Plan, list[str]]:
    """Return the plan of a run for the devices that it starts on, and the warnings of `resolve_plan`.

    `overrides`: settings as `section.key=value`. Raises ConfigError or ContractError as `make_plan` and `resolve_plan`
    do.
    """
    dataset = open_dataset(run)
    return resolve_plan(make_plan(run, dataset, settings_at_start(run, dataset, overrides, here)), here)


def resolve_plan(plan: Plan, here: RunDevices) -> tuple[Plan, list[str]]:
    """Return the plan with every automatic setting resolved, and a list of warnings to print.

    On a CUDA device, an unset micro-batch size is searched for. If none is found, the list has one warning. Raises
    ConfigError if the device cannot train with these settings.
    """
    settings = plan.settings.with_precisions_for(here.kind, here.capability)
    check_document_mask(plan.shape, settings, here.kind)
    lines = []
    if settings.layout.micro_batch is None and here.kind == "cuda":
        layout = _fastest_layout(plan, settings, here)
        if layout is None and isinstance(plan.shape, OwnShape):
            lines.append(
                f"{here}: the times of {plan.shape.model} are unknown, so micro-batches have {MICRO_BATCH} rows. Set "
                "layout.micro_batch to another number."
            )
        elif layout is None:
            lines.append(
                f"{here}: expected a device with a known profile and memory for a micro-batch, got none; micro-batches "
                f"have {MICRO_BATCH} rows. Measure the device with `penstock calibrate FILE.json`, and set "
                "cluster.device to that file."
            )
        settings = settings.model_copy(update={"layout": layout or settings.layout})
    settings = settings.for_device(here.kind, here.capability)
    if not axes_problem(settings.layout, here.ranks):  # otherwise the run is refused, with the reason
        lines += metadata_advice(plan.shape, settings, here.ranks)
    return update_memory_figures(plan.model_copy(update={"settings": settings})), lines


def _fastest_layout(plan: Plan, settings: Settings, here: RunDevices) -> LayoutConfig | None:
    """Return the layout with the fastest micro-batch size and recomputation mode that fit into memory.

    None = the device is unknown, or nothing fits.
    """
    device = known_device(settings, here)
    if device is None or isinstance(plan.shape, OwnShape):
        return None
    local = math.gcd(here.local_ranks, here.ranks)
    layout = settings.layout
    given = axes_as_settings(layout) | layout.model_dump(exclude_unset=True)
    fixed = settings.model_copy(update={"layout": LayoutConfig.model_validate(given)})
    best = search(plan.shape, fixed, plan.stages, Cluster(device, local, here.ranks // local), top=1).best
    if not best:
        return None
    fastest = best[0].layout
    chosen = {"micro_batch": fastest.micro_batch, "activation_checkpointing": fastest.activation_checkpointing}
    return layout.model_copy(update=chosen)
