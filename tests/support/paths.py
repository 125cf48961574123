"""Where the project and the real data are, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
