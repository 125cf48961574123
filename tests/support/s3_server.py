"""A real server of S3 on this machine, by moto, for the tests of object stores."""

import os
from collections.abc import Iterator
from unittest import mock

import pyarrow.fs as pafs
import pytest


def environment(port: int) -> dict[str, str]:
    """What leads pyarrow and boto3 to a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of a server of S3 with a bucket `bucket`, which the environment names."""
    reason = "moto[server], a server of S3 for tests, is not installed"
    moto_server = pytest.importorskip("moto.server", reason=reason)
    served = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    port = served.get_host_and_port()[1]
    with mock.patch.dict(os.environ, environment(port)):
        fs, _ = pafs.FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
        fs.create_dir("bucket")
        yield port
    served.stop()
