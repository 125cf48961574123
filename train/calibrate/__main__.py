"""The command `python -m train.calibrate FILE.json`: this machine measured, and its profile written."""

import argparse
import sys
from pathlib import Path

from schemas.errors import PenstockError
from train.calibrate.measure import calibrate


def main() -> int:
    """Returns the exit code: 2 for an error that the user can act on."""
    parser = argparse.ArgumentParser(prog="penstock calibrate", description="measure this machine as a device")
    parser.add_argument("profile", type=Path, help="FILE.json to write, which then is the device's name")
    parser.add_argument("--ranks", type=int, help="ranks that measure together; a rank for each GPU, else two")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank; as many as a run would have")
    options = parser.parse_args()
    try:
        calibrate(options.profile, options.ranks, options.threads)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
