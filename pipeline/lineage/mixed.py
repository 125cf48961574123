"""The mix that a plan follows, in a lineage: behind the dataset that it was measured on, before the plan."""

from pipeline.lineage.data import Walk
from pipeline.lineage.graph import Node
from schemas.mix import parse_mix


def add_mix(walk: Walk, digest: str, at: str | None) -> str:
    """Add the mix of a digest as it is kept beside the plan, which was written at `at`; returns its key."""
    run, place = walk.run, f"train/mix-{digest[:12]}.toml"
    found = run.sha256(place) if run.exists(place) else "no file"
    if found != digest:
        key = walk.growing.add(Node(place, "mix", "mix", digest, {}, at))
        walk.growing.broken(key, f"{place}: promised {digest[:12]}, found {found[:12]}; restore the file")
        return key
    mix = parse_mix(run.read_bytes(place), place)
    known = {manifest.digest: walk.nodes[version] for version, manifest in walk.manifests.items()}
    notes = [f"measured in the run of plan {mix.plan[:12]}, by {mix.reference}"]
    if mix.dataset not in known:
        notes.append(f"measured on dataset {mix.dataset[:12]}")
    notes.append(", ".join(f"{name} {part.share:.4g}" for name, part in mix.sources.items()))
    node = Node(place, "mix", "mix", digest, {"sources": len(mix.sources)}, at, notes=tuple(notes))
    return walk.growing.add(node, *([known[mix.dataset]] if mix.dataset in known else []))
