"""Reader of the Arrow IPC files of a run, which validates each record batch before anything reads its values.

Digests only show that a file is the one that was written. A file of a stranger may have offsets that lead out of its
buffers, and reading such a value reads any memory of the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from schemas.errors import ContractError


class ArrowFile:
    """An Arrow IPC file that is open for reading."""

    def __init__(self, file: Any, where: str = ""):
        """`file`: an open file or a path. `where`: its name in errors, which are then ContractErrors.

        Without `where`, errors are those of pyarrow: pa.ArrowInvalid and OSError.
        """
        self._where = where
        with self._reading():
            self._reader = pa.ipc.open_file(file)
        self.schema: pa.Schema = self._reader.schema
        self.num_record_batches: int = self._reader.num_record_batches

    def get_batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch with valid values."""
        with self._reading():
            return validated(self._reader.get_batch(number))

    def read_all(self) -> pa.Table:
        """Return all record batches as a table."""
        return pa.Table.from_batches(map(self.get_batch, range(self.num_record_batches)), self.schema)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowInvalid) as error:
            if not self._where:
                raise
            raise ContractError(
                f"{self._where}: expected a readable Arrow file, got an error: {str(error).rstrip('.')}. Restore the "
                "file from a backup."
            ) from error


def validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch. Raises pa.ArrowInvalid if one of its values is not valid."""
    batch.validate(full=True)
    return batch
