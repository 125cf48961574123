"""The layout that a plan is trained in, where devices are named: the fastest that fits, and those behind it."""

from collections.abc import Iterator

from schemas.errors import ConfigError
from train.config.settings import Settings, load_settings
from train.plan.advice import NEAR
from train.plan.checks import check_blocks
from train.plan.figures import MEMORY, rows_of_memory
from train.plan.freed import costs_of_fixed
from train.plan.plan import LayoutOffer, Plan
from train.plan.rules import Figure, Row, figures_of
from train.plan.search.compute import computed_in
from train.plan.search.devices import Cluster, device_of
from train.plan.search.result import Found
from train.plan.search.search import search
from train.plan.target import hours_of

SEARCHED = "cost model, predicted"
HOUR = 3600.0
AXES = ("replicate", "shard", "context", "tensor", "pipeline")
"""Settings of `[layout]` that are sizes of the mesh."""


def cluster_of(settings: Settings) -> Cluster | None:
    """The cluster that `[cluster]` names; None = none. Raises ConfigError with the nearest names if it is not known."""
    named = settings.cluster
    return Cluster.of(named.device, named.gpus, named.nodes) if named.device else None


def peak_of(settings: Settings) -> float | None:
    """What an MFU is a share of [FLOP/s], the dense bf16 peak of a GPU; None = no device is named, and no peak either.

    Raises ConfigError if the device does not compute in the run's precision.
    """
    if not settings.cluster.device:
        return settings.train.peak_flops
    device = device_of(settings.cluster.device)
    precision = computed_in(settings.formats_for(device.kind, device.capability))
    if precision not in device.peak_flops:
        raise ConfigError(
            f"train.precision: promised one that {device.name} computes in ({', '.join(device.peak_flops)}), found "
            f"{precision}; take another"
        )
    return device.utilisation_peak(precision)


def choose_layout(plan: Plan) -> tuple[Plan, Found | None]:
    """The plan in its fastest layout, and what was found; as it was, and None, if no devices are named.

    What `[layout]` sets is kept; a sentence says what it costs. Nothing automatic is left in the plan then. Raises
    ConfigError if no layout fits.
    """
    cluster = cluster_of(plan.settings)
    if cluster is None:
        return plan, None
    device = cluster.device
    check_blocks(plan.shape, plan.settings, device.kind)
    found = search(plan.shape, plan.settings, plan.stages, cluster)
    if not found.best:
        told = found.refused.items()
        reasons = "; ".join(f"{count:,} {reason}, such as {example}" for reason, (count, example) in told)
        if not reasons:  # no way was left to look at
            layout = plan.settings.layout
            sizes = ", ".join(f"{axis} = {getattr(layout, axis)}" for axis in AXES if axis in layout.model_fields_set)
            raise ConfigError(
                f"layout: promised sizes that divide {cluster.world_size} devices ({cluster}) between them, found "
                f"{sizes}; correct them, or leave some to the search"
            )
        raise ConfigError(
            f"cluster: promised a layout of {cluster} that this run fits into, found none of {found.searched:,}: "
            f"{reasons}; name more devices, or plan a smaller model"
        )
    offers = tuple(
        LayoutOffer(
            layout=one.layout_settings(),
            step_seconds=one.step_seconds,
            tokens_per_second=one.tokens_per_second,
            mfu=one.mfu,
            memory=one.memory.peak,
        )
        for one in found.best
    )
    raw = plan.settings.formats_for(device.kind, device.capability).to_json()
    chosen = raw | {"layout": raw.get("layout", {}) | offers[0].layout}
    settings = load_settings(chosen, [], "the layout that was found")
    # What was estimated is of the layout as it was, for numbers of ranks that nobody named.
    figures = [figure for figure in plan.figures if not figure.name.startswith(f"{MEMORY}.")]
    memory = rows_of_memory(found.best[0].memory, cluster.world_size, cluster.device.name)
    figures += [*figures_of(memory), *_figures(plan, offers[0], cluster)]
    fixed = costs_of_fixed(plan.shape, plan.settings, plan.stages, cluster, offers[0].step_seconds)
    said = (*plan.advice, *_over_hours(plan, offers[0], cluster), *fixed)
    made = {"settings": settings, "layouts": offers, "figures": figures, "advice": said}
    return plan.model_copy(update=made), found


def _over_hours(plan: Plan, offer: LayoutOffer, cluster: Cluster) -> Iterator[str]:
    """Whether the layout takes other hours than those that the run was sized for."""
    named, sizing = plan.settings.cluster, plan.settings.plan
    given, taken = hours_of(sizing, named), plan.steps * offer.step_seconds / HOUR * cluster.world_size
    if given is None or sizing.inference_tokens is not None or 1 / NEAR <= taken / given <= NEAR:
        return
    yield (
        f"The run was sized for {given:,.4g} hours of a device at cluster.mfu = {named.mfu:g}, and the layout that was "
        f"found takes {taken:,.4g}, at {offer.mfu:.3f}: with --set cluster.mfu={offer.mfu:.3f} it is sized for what "
        "they buy."
    )


def _figures(plan: Plan, offer: LayoutOffer, cluster: Cluster) -> list[Figure]:
    hours = plan.steps * offer.step_seconds / HOUR
    rows: list[Row] = [
        ("devices", cluster.world_size, "", f"{cluster.device.name}, {cluster.nodes} nodes", "recipe"),
        ("step_seconds", offer.step_seconds, "s", "compute, memory, links and pipeline of a step", SEARCHED),
        ("tokens_per_second", offer.tokens_per_second, "tokens/s", "B · L / step_seconds", SEARCHED),
        ("mfu", offer.mfu, "", "flops_per_token · tokens/s / (devices · bf16 peak)", SEARCHED),
        ("hours", hours, "h", "steps · step_seconds, no evaluation, no saves", SEARCHED),
        ("gpu_hours", hours * cluster.world_size, "h", "hours · devices", SEARCHED),
    ]
    if price := plan.settings.cluster.usd_per_gpu_hour:
        rows.append(("usd", hours * cluster.world_size * price, "USD", "gpu_hours · usd_per_gpu_hour", SEARCHED))
    return figures_of(rows)
