"""Token streams of a Penstock run as files for OLMo-core's `NumpyFSLDataset`: `write_streams("run", Path("npy"))`."""

from pathlib import Path

import penstock
from train.data.shards import OpenShard


def write_streams(run: str, folder: Path) -> dict[str, Path]:
    """Write the training tokens of each source to one memory map, and return source -> path.

    A file has no header; its type is that of `dataset.tokenizer.dtype`. Documents are in shuffled order.
    """
    dataset = penstock.open(run).tokens.dataset.by_sha256()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {source: folder / f"{source}.npy" for source in dataset.num_tokens("train")}
    for source, path in paths.items():
        with path.open("wb") as file:
            for shard in dataset.streams[f"{source}/train"]:
                for view in OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).views:
                    file.write(view.tobytes())
    return paths
