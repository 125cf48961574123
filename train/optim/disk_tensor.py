"""Tensors in files: weights and optimizer states that neither the device nor the host's memory needs to hold."""

import mmap
import os
import tempfile
from pathlib import Path

import torch

from schemas.errors import ConfigError


class DiskTensor:
    """A file without a name that holds a tensor. The file ends with this process, however it ends."""

    def __init__(self, folder: Path, shape: torch.Size, dtype: torch.dtype, setting: str):
        """Create a file of zeros in a folder.

        Raises ConfigError, which names the setting of the folder, if it has no space or cannot be written.
        """
        size = max(shape.numel() * dtype.itemsize, mmap.PAGESIZE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                # Without its blocks a file grows during training, where a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"{setting}: expected a folder with space for {size:,} more bytes, got {folder}: {error}. Set "
                f"{setting} to a folder on a disk with enough space."
            ) from error
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=shape.numel()).view(shape)

    def read_ahead(self) -> None:
        """Let the operating system read the file into its cache."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Remove the file's pages from the memory of this process; the operating system writes what has changed."""
        self._map.madvise(mmap.MADV_DONTNEED)
