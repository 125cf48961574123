"""A program beside each worker, which writes down on which record the worker ended.

It imports little, so that it is small: another program writes the note. Its arguments are the process id of the worker,
two open files, and the maximum wall-clock time of a record [s]. The first file holds the number of the record that is
being processed; 0: none. The second one is empty unless the worker has ended by a signal that it raised itself. Each
line of standard input is the program that writes a note on the current part, as a JSON array of arguments to which the
number of the record is added.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 30.0
"""Time between looks at a worker that sends nothing [s]."""


READING, KILLED = 1 << 62, 1 << 61
"""The bit that marks the number of a record that was being read, and the bit beside it that the watcher sets if another
process has ended the worker. Below them are the number of earlier notes on the record (5 bits), the number of the
record (36 bits), and a count of the reads of its file (20 bits), by which the watcher sees progress."""


def main(worker: int, files: tuple[int, int], max_seconds: float) -> None:
    """Watch a worker until it has ended."""
    shared, fault = files
    data, command = b"", []
    earlier, since = 0, time.monotonic()
    while True:
        if select.select([0], [], [], min(POLL_SECONDS, max_seconds))[0]:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, data = (data + read).split(b"\n")
            if lines:
                command = json.loads(lines[-1])
        number = current_record(shared)
        if number != earlier:
            earlier, since = number, time.monotonic()
        elif number and time.monotonic() - since > max_seconds:
            subprocess.run([*command, str(number)], check=False)  # the worker ends whether or not a note is written
            os.kill(worker, signal.SIGKILL)
            return
    number = current_record(shared)
    if number & READING and not os.fstat(fault).st_size:
        number |= KILLED
    if number and command:
        os.execv(command[0], [*command, str(number)])


def current_record(shared: int) -> int:
    """Return the number of the record that the worker is processing; 0: none."""
    return int.from_bytes(os.pread(shared, 8, 0), sys.byteorder)
