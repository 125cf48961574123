"""Names and texts that look like secrets, and those that do not."""

import pytest

from schemas.config import Section, build_recipe
from schemas.errors import ConfigError
from schemas.overrides import load_recipe
from schemas.secrets import is_secret_name, secret_in, secret_of, shown_value, without_secrets
from schemas.storage import Store

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
    "https://0123456789abcdef@example.com/simple",
    "https://user%3Ahunter2@example.com/a.warc.gz",
    "https://b.example/a#access_token=0f",
    "https://b.example/a?%73ig=abc",
    "https://b.example/a?b=c&auth=0f",
    "https://b.example/a?jwt=0f",
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
    "abfs://c@acc.dfs.core.windows.net/x?client_id=1&client_secret=a&tenant_id=2",
    "abfs://c@acc.dfs.core.windows.net/x?sas_token=sv%3D1%26sig%3Da",
    "s3://bucket/x?session_token=a",
    "s3://bucket/x?aws_secret_access_key=a",
    "s3://bucket/x?region=eu&sse_customer_key=a",
    "gs://bucket/x?json_credentials=a",
    "https://b.example/a?refreshToken=a",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "the token is ghp_abcdefghijklmnopqrstuvwxyz0123456789",
]
HARMLESS_TEXTS = [
    "https://example.com/@user/a?mail=a@b#auth",
    "abfs://container@account.dfs.core.windows.net/100%",
    "crawl/*.warc.gz",
    "s3://bucket/crawl/*.warc.gz",
    "https://example.com/a?page=2&signal=3&tokens=5&design=a&secretary=b&key=c&client_id=1",
    "hf_hub and ghp_short",
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


@pytest.mark.parametrize("text", ["nothing.here", "spark.path", "="])
def test_an_override_in_the_wrong_form_is_not_quoted_with_its_secret(text: str) -> None:
    for override in (f"client_secret={text}", f"spark=s3://b/x?client_secret={text}"):
        with pytest.raises(
            ConfigError, match=r"expected section\.key=value, got a text that is not shown, .* Write it as"
        ) as raised:
            load_recipe({}, [override], {"spark": Spark}, "r.toml")
        assert f"secret={text}" not in str(raised.value)


def test_an_address_with_a_secret_is_refused_and_not_quoted() -> None:
    for address in ("abfs://c@acc.dfs.core.windows.net/x?client_secret=SEKRET", "s3://b/x?session_token=SEKRET"):
        with pytest.raises(
            ConfigError, match="expected no secrets in a URI, got an address with a signature"
        ) as raised:
            Store(address)
        assert "SEKRET" not in str(raised.value)


def test_words_of_a_message_that_may_be_secret_are_replaced() -> None:
    hidden = "<not shown, because it may hold a secret>"
    for word in ("a.client_secret=x", "--set=spark.hadoop.fs.s3a.secret.key=x", 'a=["s3://b/x?session_token=x"]'):
        assert without_secrets(f"unrecognized: --set {word} y") == f"unrecognized: --set {hidden} y"
    for word in ("tokens.seed=3", "--set=tokenizer.model=x", "plan.tokens_per_parameter=20", "a=b"):
        assert without_secrets(f"unrecognized: {word} y") == f"unrecognized: {word} y"
