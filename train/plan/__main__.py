"""The command `python -m train.plan RUN`: plan a run for the devices that it starts on, and write the plan to a file.

The trainer runs it if `plan.json` is missing or was made with other settings, so that no rank loads the planner.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from schemas.errors import PenstockError
from schemas.overrides import add_override_options
from schemas.storage import Store
from train.parallel.devices import RunDevices
from train.plan.layouts import plan_for_devices


def main(argv: Sequence[str] | None = None) -> int:
    """Write a JSON file with the plan and the warnings of `plan_for_devices`, or with the error.

    Return the exit code: 0, or 2 for an error that the user can fix.
    """
    parser = argparse.ArgumentParser(prog="train.plan", description="Plan a run for the devices that it starts on.")
    parser.add_argument("run", metavar="RUN", help="run folder with the tokens")
    parser.add_argument("--devices", required=True, help="the devices of the ranks, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    add_override_options(parser)
    arguments = parser.parse_args(argv)
    try:
        here = TypeAdapter(RunDevices).validate_json(arguments.devices)
        plan, lines = plan_for_devices(Store(arguments.run), arguments.overrides, here)
    except PenstockError as error:
        arguments.out.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}), encoding="utf-8")
        return 2
    answer = {"plan": plan.model_dump(mode="json"), "lines": lines}
    arguments.out.write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
