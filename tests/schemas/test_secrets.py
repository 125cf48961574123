"""Names and texts that look like secrets, and those that do not."""

import pytest

from schemas.config import Section, build_recipe
from schemas.errors import ConfigError
from schemas.overrides import load_recipe
from schemas.secrets import is_secret_name, secret_in, secret_of, shown_value

SECRET_NAMES = [
    "spark.hadoop.fs.s3a.secret.key",
    "spark.hadoop.fs.s3a.access.key",
    "spark.hadoop.fs.s3a.session.token",
    "spark.hadoop.fs.s3a.bucket.crawl.secret.key",
    "spark.hadoop.fs.s3a.encryption.key",
    "spark.hadoop.fs.s3a.proxy.password",
    "spark.hadoop.fs.azure.account.key.store.blob.core.windows.net",
    "spark.hadoop.fs.azure.sas.container.store.blob.core.windows.net",
    "spark.hadoop.fs.azure.account.oauth2.client.secret",
    "spark.hadoop.fs.gs.auth.service.account.private.key",
    "spark.hadoop.google.cloud.auth.service.account.keystore",
    "spark.authenticate.secret",
    "spark.ssl.keyPassword",
    "spark.ssl.keyStorePassword",
    "spark.ssl.trustStorePassword",
    "spark.executorEnv.AWS_SECRET_ACCESS_KEY",
    "spark.executorEnv.HF_TOKEN",
    "spark.kubernetes.authenticate.driver.oauthToken",
    "spark.hadoop.fs.s3a.ACCESS.KEY",
    "spark.apiKey",
]
HARMLESS_NAMES = [
    "spark.executor.memory",
    "spark.sql.shuffle.partitions",
    "spark.hadoop.fs.s3a.endpoint",
    "spark.hadoop.fs.s3a.aws.credentials.provider",
    "spark.hadoop.hadoop.security.credential.provider.path",
    "spark.authenticate.secret.file",
    "spark.kubernetes.authenticate.driver.oauthTokenFile",
    "spark.kubernetes.driver.secretKeyRef.NAME",
    "spark.kubernetes.executor.secrets.store",
    "spark.hadoop.fs.azure.account.auth.type",
    "spark.ssl.keyStoreType",
    "spark.sql.session.timeZone",
    "spark.keytab",
]
SECRET_TEXTS = [
    "s3://AKIAIOSFODNN7EXAMPLE@bucket/crawl",
    "https://user:hunter2@example.com/a.warc.gz",
    "s3a://key:secret@bucket/crawl",
    "https://b.example/a?X-Amz-Credential=a&X-Amz-Signature=0f",
    "https://b.example/a?sv=2024&sig=abc%3D",
    "https://b.example/a?AWSAccessKeyId=AKIA&Signature=x",
    "https://b.example/a?x=1&access_token=t",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abc==",
    "-Dfile.encoding=UTF-8 -Djavax.net.ssl.trustStorePassword=changeit",
    "-----BEGIN RSA PRIVATE KEY-----",
]
HARMLESS_TEXTS = [
    "crawl/*.warc.gz",
    "s3://bucket/crawl/*.warc.gz",
    "https://example.com/a?page=2&signal=3&tokens=5",
    "jane@example.com",
    "user:name of a@b",
    "-XX:+UseG1GC -Dfile.encoding=UTF-8",
    "AKIA[0-9A-Z]{16}",
    "language = en and gopher_num_words > 50",
]


class Spark(Section):
    """A section with one setting."""

    path: str = ""
    """A text."""
    number: int = 0
    """A number."""


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret(name: str) -> None:
    assert is_secret_name(name)
    assert secret_of(name, "x") == "a key or password"
    assert secret_of(name, "true") is None  # a switch


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_name_of_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_text_with_a_secret_is_refused_in_any_section(text: str) -> None:
    assert secret_in(text) is not None
    assert secret_of("spark.executor.extraJavaOptions", text) is not None
    for raw in ({"spark": {"path": text}}, {"spark": {"other": {"deep": [text]}}}, {"source": [{"paths": [text]}]}):
        with pytest.raises(ConfigError, match="expected no secret in a recipe") as raised:
            build_recipe(raw, {"spark": Spark}, "r.toml")
        assert text not in str(raised.value)
    with pytest.raises(ConfigError, match="nothing was started") as raised:
        load_recipe({}, [f'spark.path="{text}"'], {"spark": Spark}, "r.toml")
    assert text not in str(raised.value)


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_a_text_without_a_secret(text: str) -> None:
    assert secret_in(text) is None
    assert build_recipe({"spark": {"path": text}}, {"spark": Spark}, "r.toml").section("spark", Spark).path == text


def test_a_wrong_value_is_not_quoted_if_it_may_be_a_secret() -> None:
    with pytest.raises(ConfigError) as raised:
        load_recipe({}, ["spark.number={fs.s3a.secret.key=TOPSECRET}"], {"spark": Spark}, "r.toml")
    assert "TOPSECRET" not in str(raised.value)
    assert shown_value("12x") == "'12x'"
