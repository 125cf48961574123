"""Hand-made contents of `progress.json`, as a running command writes them; shared by the tests of the live page."""

import json
from datetime import UTC, datetime
from typing import Any


def step(name: str, state: str, **values: Any) -> dict[str, Any]:
    """Return the entry of one step; it takes 2 s so far and has 6 s left."""
    entry: dict[str, Any] = {"name": name, "state": state, "what": f"{name} work", "rows": 0, "bytes": 0, "parts": 0}
    entry |= {"total_bytes": None, "total_parts": None, "seconds": 2.0, "rate": 5.0, "seconds_left": 6.0}
    return entry | {"kept": None, "dropped": None} | values


def progress(steps: list[dict[str, Any]], **values: Any) -> bytes:
    """Return the file of a command that runs these steps and was updated now."""
    now = datetime.now(UTC).isoformat()
    content = {"format": 1, "command": "penstock run own.toml --out run", "pid": 1, "host": "here", "started": now}
    content |= {"updated": now, "state": "running", "message": None, "steps": steps}
    return json.dumps(content | values).encode()
