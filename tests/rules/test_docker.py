"""The images and the compose file, linted as far as can be without an engine.

What is parsed here is read from the files as they are: the names an image installs are compared with setup.cfg and
with what the modules in it import, and every path named must exist in the repository.
"""

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

DOCKER = ROOT / "docker"
LOCKS = ROOT / "locks"
IMAGES = ("spark", "train")
COPIED = {"spark": ("schemas", "pipeline", "jobs", "train", "penstock"), "train": ("schemas", "train")}
RUNS = {"spark": ("schemas", "pipeline", "jobs", "penstock"), "train": ("schemas", "train")}
"""The packages of ours in each image, and those whose code runs there; of train/ Spark's image only needs the plan."""

INSTRUCTIONS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "USER",
    "WORKDIR",
}
"""Those in use or of use here; ADD is not one of them, since it also unpacks and downloads."""
SECRET = re.compile(r"(?i)passw(or)?d|secret|api_?key|access_?key|private_?key|credential|auth_?token")
IMPORT_NAMES = {
    "boto3": {"boto3", "botocore"},
    "presidio-analyzer": {"presidio_analyzer"},
    "pydantic": {"annotated_types", "pydantic", "pydantic_core"},
    "pyspark": {"py4j", "pyspark"},
}
TORCH_SIDE = {"torch", "tensorboard", "safetensors"}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continuation lines joined."""

    line: int
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Its arguments; of a RUN, the words of all its commands."""
        return shlex.split(self.rest)


def instructions(image: str) -> list[Instruction]:
    """The instructions of `docker/<image>.Dockerfile`."""
    found: list[Instruction] = []
    text, start = "", 0
    for number, line in enumerate((DOCKER / f"{image}.Dockerfile").read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text, start = text + line.strip().removesuffix("\\"), start or number
        if not line.endswith("\\"):
            name, _, rest = text.partition(" ")
            found.append(Instruction(start, name, rest.strip()))
            text, start = "", 0
    assert text == "", f"{image}.Dockerfile ends inside an instruction"
    return found


def commands(image: str) -> list[list[str]]:
    """The words of every command that the image's RUN instructions call, one by one."""
    runs = [item.rest for item in instructions(image) if item.name == "RUN"]
    return [shlex.split(command) for run in runs for command in run.split("&&")]


def packages(image: str, installer: str) -> set[str]:
    """The names that `apt-get install` or `pip install` is called with, in all stages of an image."""
    found: set[str] = set()
    for words in commands(image):
        if words[0] == installer and "install" in words:
            words = [
                word for previous, word in pairwise(words) if previous not in {"--constraint", "-c", "--requirement"}
            ]
            found |= {word for word in words if not word.startswith("-") and word not in {"install", "."}}
    return found


def extras(image: str) -> list[str]:
    """The extras of the project that the lock file of an image has, by the command of `.ci/lock` that makes it."""
    (line,) = re.findall(rf"^compile {image} setup\.cfg (.*) \"\$", (ROOT / ".ci" / "lock").read_text(), re.MULTILINE)
    return [word for word in line.split() if word != "--extra"]


def locked(name: str) -> dict[str, str]:
    """The versions in a lock file by normalised name."""
    lines = re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return {normal(name): version for name, version in lines}


def normal(name: str) -> str:
    """The normalised form of the name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_names(image: str) -> set[str]:
    """The names that `pip install` brings by way of setup.cfg."""
    return declared().union(*map(declared, extras(image)))


def final_stage(image: str) -> list[Instruction]:
    """The instructions of the stage that becomes the image."""
    items = instructions(image)
    start = max(index for index, item in enumerate(items) if item.name == "FROM")
    return items[start:]


def declared(extra: str = "") -> set[str]:
    """The names of setup.cfg's install_requires, or of an extra."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    return {re.split(r"[<>=!~ ;\[]", line)[0] for line in lines.split("\n") if line}


def libraries(image: str) -> set[str]:
    """The libraries that the code run in an image imports, anywhere in a file."""
    found: set[str] = set()
    for path in (path for package in RUNS[image] for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - set(COPIED["spark"])


def fits(pattern: str, path: str) -> bool:
    """Whether a pattern of .dockerignore names a path or a folder above it."""
    pieces = (
        {"**/": "(?:.*/)?", "*": "[^/]*"}.get(piece, re.escape(piece)) for piece in re.split(r"(\*\*/|\*)", pattern)
    )
    expression = re.compile("".join(pieces))
    return any(expression.fullmatch(part.as_posix()) for part in (Path(path), *Path(path).parents) if part.name)


def sent_to_the_builder(path: str) -> bool:
    """Whether .dockerignore lets a path into the build context; the last pattern that fits decides."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    fitting = [pattern for pattern in patterns if fits(pattern.removeprefix("!"), path)]
    return not fitting or fitting[-1].startswith("!")


def compose() -> dict[str, Any]:
    """The compose file, anchors resolved."""
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------------------------------ the Dockerfiles


@pytest.mark.parametrize("image", IMAGES)
def test_instructions_are_known_and_in_order(image: str) -> None:
    names = [item.name for item in instructions(image)]
    assert set(names) <= INSTRUCTIONS
    assert names[:2] == ["ARG", "FROM"]
    assert names[-1] == "CMD"


def test_every_stage_starts_from_the_same_pinned_python() -> None:
    assert {item.words[0] for image in IMAGES for item in instructions(image) if item.name == "FROM"} == {
        "${PYTHON_IMAGE}"
    }
    bases = {item.rest for image in IMAGES for item in instructions(image) if item.name == "ARG"}
    assert len(bases) == 1
    name, _, tag = bases.pop().removeprefix("PYTHON_IMAGE=").partition(":")
    tag, at, digest = tag.partition("@")
    assert not at or re.fullmatch("sha256:[0-9a-f]{64}", digest)
    assert name == "python"
    assert re.fullmatch(r"3\.11\.\d+-slim-\w+", tag), f"tag {tag!r} names no release of Python and Debian"


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_reaches_the_builder(image: str) -> None:
    sources = [
        source
        for item in instructions(image)
        if item.name == "COPY" and not item.rest.startswith("--from=")
        for source in item.words[:-1]
    ]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not sent_to_the_builder(source)] == []
    assert {source for source in sources if (ROOT / source / "__init__.py").exists()} == set(COPIED[image])


def test_the_builder_gets_nothing_else() -> None:
    for path in (
        "demo/run/report.html",
        ".git/config",
        ".venv/bin/python",
        "tests/rules/test_docker.py",
        "train/__pycache__",
    ):
        assert not sent_to_the_builder(path), path
    for path in ("train/config.py", "pipeline/dedup/config.py", "constraints.txt"):
        assert sent_to_the_builder(path), path


def test_stages_copied_from_exist() -> None:
    for image in IMAGES:
        stages = {item.words[2] for item in instructions(image) if item.name == "FROM" and len(item.words) == 3}
        used = {
            word.removeprefix("--from=") for item in instructions(image) if item.name == "COPY" for word in item.words
        }
        assert stages == {word for word in used if word in stages}
        assert all(
            item.words[0].removeprefix("--from=") in stages for item in instructions(image) if "--from=" in item.rest
        )


@pytest.mark.parametrize("image", IMAGES)
def test_the_process_is_not_root_and_nothing_secret_is_baked_in(image: str) -> None:
    users = [item.rest for item in final_stage(image) if item.name == "USER"]
    assert [user for user in users if not re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)] == []
    assert len(users) == 1
    assert [item.line for item in instructions(image) if SECRET.search(item.rest)] == []


def test_both_images_write_the_volume_as_the_same_user() -> None:
    users = {item.rest for image in IMAGES for item in final_stage(image) if item.name == "USER"}
    made = {words[words.index("--uid") + 1] for image in IMAGES for words in commands(image) if words[0] == "useradd"}
    assert users == {f"{made.pop()}:10001"}
    assert made == set()


@pytest.mark.parametrize("image", IMAGES)
def test_installs_leave_no_cache_and_are_pinned(image: str) -> None:
    for words in commands(image):
        if words[0] == "pip":
            assert "--no-cache-dir" in words
            # The lock file with its hashes, our own package, or torch, whose files differ by index.
            kind = words[-1]
            assert kind == "torch" or "--no-deps" in words
            assert kind in {"torch", "."} or "--require-hashes" in words
            assert kind != "torch" or words[words.index("--constraint") + 1] == "constraints.txt"
        if words[0] == "apt-get" and "install" in words:
            assert {"--yes", "--no-install-recommends"} <= set(words)
    runs = [item.rest for item in instructions(image) if item.name == "RUN" and "apt-get install" in item.rest]
    assert [run for run in runs if "rm -rf /var/lib/apt/lists/*" not in run] == []


def test_every_name_installed_is_declared_and_pinned() -> None:
    for image in IMAGES:
        assert packages(image, "pip") == ({"torch"} if image == "train" else set())
        assert installed_names(image) - {"torch"} <= locked(image).keys()
        assert "torch" not in locked(image)


NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))


def test_the_lock_files_are_those_that_are_used() -> None:
    assert {"build", "dev", "fit", "fp8", "harness", "kenlm", "readers", "spark", "tools", "train"} == set(NAMES)
    used = "".join(
        (ROOT / name).read_text()
        for name in ("Makefile", ".ci/run", "docker/spark.Dockerfile", "docker/train.Dockerfile")
    )
    for name in NAMES:
        assert f"locks/{name}.txt" in used or f"locked {name}" in used


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_file_has_a_hash_for_every_file_and_no_place(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=\S)", text.strip())
    assert all(re.match(r"[\w.-]+==\S+", block) for block in blocks)
    hashes = [re.findall(r"--hash=(\w+):([0-9a-f]+)", block) for block in blocks]
    assert all(found and all(kind == "sha256" and len(digest) == 64 for kind, digest in found) for found in hashes)
    assert "://" not in text  # the index is that of the machine
    assert not re.search(r"^(torch==|triton==|nvidia-|cuda-)", text, re.MULTILINE)


def test_the_lock_files_have_the_versions_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pins = {normal(name): version for name, version in (line.split("==") for line in lines)}
    names = [name for name in NAMES if name not in ("build", "tools")]
    for name in names:
        versions = locked(name)
        assert {own: version for own, version in versions.items() if pins.get(own, version) != version} == {}, name
    assert pins.keys() - set().union(*map(locked, names)) == {
        "torch",
        "mwparserfromhell",
    }  # the latter: extra `extractors`
    build = locked("build")
    for name in names:
        assert all(build.get(own, version) == version for own, version in locked(name).items()), name
    assert {"setuptools", "pybind11", "pip"} <= build.keys()  # what builds fasttext
    assert declared("dev") - {"penstock"} <= locked("dev").keys()


def test_workflows_install_with_hashes_only() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        installs = [line for command in commands for line in command.splitlines() if "pip install" in line]
        # The package itself is installed as a user would install it, in the pinned versions.
        assert [
            line for line in installs if "--require-hashes" not in line and "-c checkout/constraints" not in line
        ] == []
        verbs = set(re.findall(r"^make ([a-z-]+)", "\n".join(commands), re.MULTILINE))
        assert verbs <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "make sbom" in (ROOT / ".github/workflows/release.yml").read_text()
    assert {"make audit", "make lock"} <= set(
        re.findall(r"make [a-z]+", (ROOT / ".github/workflows/ci.yml").read_text())
    )


def test_the_spark_image_has_the_data_half() -> None:
    assert extras("spark") == ["data", "formats", "pii", "s3"]
    assert packages("spark", "apt-get") == {"g++", "openjdk-17-jre-headless", "procps", "tini"}
    assert "g++" not in " ".join(item.rest for item in final_stage("spark"))
    assert installed_names("spark").isdisjoint(TORCH_SIDE)


def test_the_train_image_has_neither_java_nor_spark() -> None:
    assert extras("train") == ["train", "fp8", "s3"]
    assert packages("train", "apt-get") == set()
    assert "pyspark" not in installed_names("train")
    assert installed_names("train") >= TORCH_SIDE
    assert "java" not in " ".join(item.rest for item in instructions("train"))


OPTIONAL = {"catboost", "cryptography", "kenlm", "lm_eval", "pyiceberg", "wandb"}
"""Libraries of extras that setup.cfg declares, which a recipe or an option must ask for."""


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_what_its_code_imports(image: str) -> None:
    installed = set().union(*(IMPORT_NAMES.get(name, {name}) for name in installed_names(image)))
    assert libraries(image) - installed - OPTIONAL == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "absent"), [("spark", TORCH_SIDE), ("train", {"pyspark", "py4j", "pipeline", "jobs"})]
)
def test_the_code_of_an_image_loads_without_the_other_half(image: str, absent: set[str]) -> None:
    modules = [
        path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for package in RUNS[image]
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    script = (
        "import importlib, json, sys\n"
        "absent, modules = json.loads(sys.argv[1])\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "for name in modules: importlib.import_module(name)\n"
    )
    argument = json.dumps([sorted(absent), modules])
    done = subprocess.run(
        [sys.executable, "-c", script, argument], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------- the compose file


def test_services_are_built_from_our_dockerfiles() -> None:
    for name, service in compose()["services"].items():
        build = service["build"]
        context = (DOCKER / build["context"]).resolve()
        assert context == ROOT, name
        image = Path(build["dockerfile"]).name.removesuffix(".Dockerfile")
        assert (context / build["dockerfile"]).is_file(), name
        assert re.fullmatch(rf"penstock-{image}:\d+\.\d+\.\d+", service["image"]), name


def test_a_master_two_workers_and_a_trainer() -> None:
    services = compose()["services"]
    assert services["worker"]["deploy"]["replicas"] == 2
    assert services["worker"]["command"][1:3] == ["org.apache.spark.deploy.worker.Worker", "spark://master:7077"]
    assert services["master"]["command"][1:6:2] == ["org.apache.spark.deploy.master.Master", "master", "7077"]
    assert "--master=spark://master:7077" in services["stages"]["command"]
    assert services["train"]["image"].startswith("penstock-train:")
    assert {name for name, service in services.items() if service["image"].startswith("penstock-train:")} == {"train"}


def test_services_wait_for_services_that_exist() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for target, how in service.get("depends_on", {}).items():
            assert target in services, name
            assert how["condition"] in {"service_healthy", "service_started", "service_completed_successfully"}
            assert (how["condition"] == "service_healthy") <= ("healthcheck" in services[target]), name
    waits = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    reached = {"report"}
    while more := set().union(*(waits[name] for name in reached)) - reached:
        reached |= more
    assert reached == set(services), "asking for the report starts them all"


def test_volumes_are_declared_and_shared() -> None:
    document = compose()
    for name, service in document["services"].items():
        sources = {volume.partition(":")[0] for volume in service["volumes"]}
        assert sources == set(document["volumes"]) == {"data"}, name


def test_containers_have_no_privileges_and_no_open_ports() -> None:
    for name, service in compose()["services"].items():
        assert not {"privileged", "network_mode", "cap_add", "user", "environment", "env_file", "pid"} & set(service), (
            name
        )
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    assert not SECRET.search((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


def test_commands_name_files_and_modules_that_exist() -> None:
    copied = {item.words[-1] for item in final_stage("spark") if item.name == "COPY"}
    for name, service in compose()["services"].items():
        command = service["command"]
        for word in command:
            if word.startswith("/app/"):
                assert (ROOT / word.removeprefix("/app/")).is_file(), f"{name}: {word}"
                assert word in copied or str(Path(word).parent) in copied, f"{name}: {word} is not in the image"
        if "-m" in command:
            module = command[command.index("-m") + 1]
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), f"{name}: {module}"
        scripts = [word for word in command if word.startswith("/usr/local/bin/")]
        assert {script.rpartition("/")[2] for script in scripts} <= console_scripts(), name


def console_scripts() -> set[str]:
    """The commands that pip writes to /usr/local/bin of an image."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options.entry_points"]["console_scripts"].strip().splitlines()
    return {line.partition("=")[0].strip() for line in lines}


@pytest.mark.slow
def test_the_command_line_knows_the_verbs_of_the_services() -> None:
    called = [service["command"] for service in compose()["services"].values() if service["command"][0] == "penstock"]
    assert [command[1] for command in called] == ["demo-crawl", "plan", "report"]
    for command in called:
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", command[1], "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [word for word in command if word.startswith("--") and word not in done.stdout] == []


# ------------------------------------------------------------------------------------------ the linters, where they are


def test_hadolint() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    files = [str(DOCKER / f"{image}.Dockerfile") for image in IMAGES]
    done = subprocess.run(["hadolint", "--no-color", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_docker_compose_config() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "--file", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
