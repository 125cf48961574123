"""The sources that the settings name, and what their numbers mean for documents that rehydration repeats.

With `dedup.rehydration`, the documents that an epoch reads three times have a source of their own, such as `web+x3`.
They are stored once. Settings that name `web` cover it: it has its part of the weight of `web`, or three times its
epochs. A setting may name `web+x3` too, whose number then replaces that of `web`.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.tokens import TRAIN, Dataset, split_copies


def number_of(values: Mapping[str, float], source: str) -> float:
    """Return the number of a source in a setting: its own, or that of the source that covers it. It must have one."""
    return values[source] if source in values else values[split_copies(source)[0]]


def check_sources(where: str, values: Mapping[str, float], sources: Mapping[str, int]) -> None:
    """Raise ConfigError unless the values of a setting name or cover every source; no value at all is valid too."""
    covers = {split_copies(name)[0] for name in sources}
    known = sorted({*sources, *covers})
    problems = [f"{name!r} is no source{suggest_name(name, known)}" for name in values if name not in known]
    problems += [
        f"{name!r} is not named (0 excludes it)"
        for name in sorted(covers)
        if values and any(split_copies(own)[0] == name and own not in values for own in sources) and name not in values
    ]
    if problems:
        raise ConfigError(
            f"{where}: expected the dataset's sources {sorted(covers)}, got {sorted(values)}: "
            f"{'; '.join(problems)}. Set {where} to a number for every source."
        )


def shares_of_weights(
    weights: Mapping[str, float], units: Mapping[str, int], copies: Mapping[str, int]
) -> dict[str, Fraction]:
    """Return the share of each source with a weight above 0, relative to their sum, in the order of `units`.

    `units`: size of one read of each source. A weight that covers several sources is divided in proportion to the size
    of what an epoch reads of them. Without weights, all sources have that proportion.
    """
    sizes = {source: Fraction(size * copies.get(source, 1)) for source, size in units.items()}
    if not weights:
        return sizes
    covered: dict[str, Fraction] = {}
    for source in (source for source in sizes if source not in weights):
        base = split_copies(source)[0]
        covered[base] = covered.get(base, Fraction(0)) + sizes[source]
    # A source that its own name covers is alone, unless others lack a weight of their own.
    for source in (source for source in sizes if source in covered and source in weights):
        covered[source] += sizes[source]
    shares = {}
    for source, size in sizes.items():
        base = source if source in weights else split_copies(source)[0]
        part = size / covered[base] if base in covered else 1
        shares[source] = Fraction(str(weights[base])) * part
    return {source: share for source, share in shares.items() if share > 0}


def reads_of_epochs(
    epochs: Mapping[str, float], sources: Sequence[str], copies: Mapping[str, int]
) -> dict[str, Fraction]:
    """Return how often a run with these epochs reads each source that it reads at all."""
    reads = {
        source: Fraction(str(number_of(epochs, source))) * (1 if source in epochs else copies.get(source, 1))
        for source in sources
    }
    return {source: times for source, times in reads.items() if times > 0}


def weights_of_epochs(epochs: Mapping[str, float], dataset: Dataset) -> dict[str, float]:
    """Return the weights that give the sources of a dataset the same shares as `train.epochs`.

    Raises ConfigError if the epochs do not name the sources of the dataset.
    """
    tokens = dataset.num_tokens(TRAIN)
    check_sources("train.epochs", epochs, tokens)
    reads = reads_of_epochs(epochs, sorted(tokens), dataset.copies)
    weights = dict.fromkeys(epochs, 0.0)
    for source, times in reads.items():
        weights[source if source in epochs else split_copies(source)[0]] += float(times * tokens[source])
    return weights
