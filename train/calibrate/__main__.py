"""The command `python -m train.calibrate FILE.json`: measure this machine and write its device profile."""

import argparse
import sys
from pathlib import Path

from schemas.errors import PenstockError
from schemas.logs import print_error, printable_output
from train.calibrate.measure import calibrate


@printable_output()
def main() -> int:
    """Run the command and return the exit code: 0, or 2 for an error that the user can fix."""
    parser = argparse.ArgumentParser(prog="penstock calibrate", description="measure this machine as a device")
    parser.add_argument("profile", type=Path, help="FILE.json to write; its path then names the device")
    parser.add_argument("--ranks", type=int, help="ranks that measure together; default: one for each GPU, else two")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank; default: as many as in a run")
    options = parser.parse_args()
    try:
        calibrate(options.profile, options.ranks, options.threads)
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
