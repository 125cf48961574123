"""Token streams of a Penstock run as files for OLMo-core's `NumpyFSLDataset`: `write_streams("run", Path("npy"))`."""

from pathlib import Path

from schemas.storage import Store
from schemas.tokens import TRAIN, open_dataset
from train.data.shards import OpenShard


def write_streams(run: str, folder: Path) -> dict[str, Path]:
    """Write the training tokens of each source to one memory map, and return source -> path.

    A file has no header; its type is `open_dataset(Store(run)).tokenizer.dtype`. Documents are in shuffled order.
    """
    dataset = open_dataset(Store(run))
    folder.mkdir(parents=True, exist_ok=True)
    paths = {source: folder / f"{source}.npy" for source in dataset.num_tokens(TRAIN)}
    for source, path in paths.items():
        with path.open("wb") as file:
            for shard in dataset.streams[f"{source}/{TRAIN}"]:
                for view in OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).views:
                    file.write(view.tobytes())
    return paths
