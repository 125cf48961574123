"""Shared fixtures: one Spark session for the whole test run, and the real data beside the project, if it is there."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def spark():
    """One local session with retries, as an embedded run has it.

    Its JVM compiles once and quickly: of these small runs half of the JVM's time is the optimising compiler's.
    """
    from jobs.session import SparkConfig, open_session

    quick = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    config = SparkConfig(master="local[2,4]", driver_memory="1g", shuffle_partitions=4, settings=quick)
    session = open_session(config, "tests")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped where a clone does not have it."""
    if not SHARED.is_dir():
        pytest.skip(f"the real data is not beside the project ({SHARED.name} is missing)")
    return SHARED
