"""A server of the part of the Kubernetes API that Spark uses, which runs pods as processes of this machine.

The objects that Spark posts are kept as they are. The container of a pod is started as a kubelet does it: with its
words, variables and mounted files, by the entry point of the image. Its folders are below one folder here, so a path
such as /opt/spark/conf is replaced by that of the folder wherever it appears. All pods have the address 127.0.0.1.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.paths import ROOT

Item = dict[str, Any]
ADDRESS = "127.0.0.1"
PATH = re.compile(r"/apis?/(?:[\w.]+/)?v1/namespaces/(?P<space>[\w-]+)/(?P<kind>\w+)(?:/(?P<name>[\w.-]+))?")
END_SECONDS = 60
"""Time for a container to end after SIGTERM."""


@dataclass
class Container:
    """The process of a pod."""

    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path


@dataclass
class TinyKubernetes:
    """The objects of a namespace, and the processes of its pods."""

    folder: Path
    image: Mapping[str, str]
    """Environment variables of every container, which an image would have."""
    paths: Mapping[str, str]
    """Folders of the image, and where they are on this machine."""
    secrets: Mapping[str, Mapping[str, str]]
    """Values of the secrets by their name and key."""
    namespace: str = "penstock"
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    """Objects that exist, by plural kind and name."""
    posted: list[tuple[str, Item]] = field(default_factory=list)
    """Plural kind and content of every object in the order of creation, also of deleted ones."""
    requests: set[tuple[str, str, str]] = field(default_factory=set)
    """(sender, verb, plural kind) of every request; the sender is the token that it authenticates with."""
    containers: dict[str, Container] = field(default_factory=dict)
    """The process of every pod by its name, also of deleted pods."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: threading.Event = field(default_factory=threading.Event)

    def create(self, kind: str, item: Item) -> Item:
        """Keep a new object, and start the container of a pod."""
        with self.lock:
            metadata = item["metadata"]
            if "generateName" in metadata:
                metadata["name"] = f"{metadata.pop('generateName')}{len(self.posted)}"
            metadata |= {"namespace": self.namespace, "uid": f"uid-{len(self.posted)}"}
            metadata |= {"resourceVersion": str(len(self.posted) + 1)}
            metadata["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.items[kind, metadata["name"]] = item
            self.posted.append((kind, json.loads(json.dumps(item))))
            if kind == "services":
                self._write_hosts()
            if kind == "pods":
                item["status"] = {"phase": "Pending"}
            self._start_pods()
            return item

    def _write_hosts(self) -> None:
        """Write the names of services to a file for the option jdk.net.hosts.file of a JVM."""
        names = [f"{name}.{self.namespace}.svc" for kind, name in self.items if kind == "services"]
        lines = [f"{ADDRESS} {name}\n" for name in ("localhost", os.uname().nodename, *names)]
        self.hosts.write_text("".join(lines))

    @property
    def hosts(self) -> Path:
        """The file with the names of services."""
        return self.folder / "hosts"

    def _start_pods(self) -> None:
        """Start the pods whose config maps exist: those of a driver are created after it."""
        for (kind, name), item in self.items.items():
            if kind == "pods" and name not in self.containers and self._has_volumes(item):
                self._start(item)

    def _has_volumes(self, pod: Item) -> bool:
        names = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        return all(("configmaps", name) in self.items for name in names)

    def _start(self, pod: Item) -> None:
        """Start the container of a pod. Its environment is that of the image and of the pod, and nothing else."""
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        place = self.folder / name
        work = place / "work"
        work.mkdir(parents=True)
        mounted = {mount["mountPath"]: str(place) + mount["mountPath"] for mount in container["volumeMounts"]}
        moved = {**self.paths, **mounted}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            self._mount(volumes[mount["name"]], Path(moved[mount["mountPath"]]), moved)
        values = {each["name"]: self._value(each, pod) for each in container["env"]}
        environment = {**self.image, **{key: relocated(value, moved) for key, value in values.items()}}
        words = [relocated(word, moved) for word in container["args"]]
        log = place / "log"
        with open(log, "wb") as stream:
            command = [sys.executable, str(ROOT / "docker" / "entrypoint.py"), *words]
            process = subprocess.Popen(command, cwd=work, env=environment, stdout=stream, stderr=stream)
        self.containers[name] = Container(process, environment, log)
        pod["status"] = {"phase": "Running", "podIP": ADDRESS, "conditions": [{"type": "Ready", "status": "True"}]}

    def _mount(self, volume: Item, place: Path, moved: Mapping[str, str]) -> None:
        """Make the folder of a volume: an empty one, or one with the files of a config map."""
        place.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            data = self.items["configmaps", volume["configMap"]["name"]].get("data", {})
            for item in volume["configMap"].get("items") or [{"key": key, "path": key} for key in data]:
                (place / item["path"]).write_text(relocated(data[item["key"]], moved))

    def _value(self, variable: Item, pod: Item) -> str:
        """Return the value of a variable of a container."""
        match variable.get("valueFrom"):
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return ADDRESS
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return str(pod["metadata"]["name"])
            case {"secretKeyRef": {"name": name, "key": key}}:
                return self.secrets[name][key]
            case None:
                return str(variable.get("value") or "")
        raise ValueError(f"{variable['name']}: expected a field of the pod, got {variable['valueFrom']}")

    def observe(self) -> None:
        """Note which containers have ended."""
        with self.lock:
            for name, container in self.containers.items():
                code, pod = container.process.poll(), self.items.get(("pods", name))
                if code is not None and pod is not None:
                    pod["status"]["phase"] = "Failed" if code else "Succeeded"

    def delete(self, kind: str, name: str) -> None:
        """Remove an object. The container of a pod gets SIGTERM."""
        with self.lock:
            self.items.pop((kind, name), None)
        if kind == "pods" and name in self.containers:
            self.containers[name].process.terminate()

    def decommission(self, name: str) -> int:
        """Run the script of a pod that is about to be stopped in its container, and return the exit code."""
        (pod,) = (item for kind, item in self.posted if kind == "pods" and item["metadata"]["name"] == name)
        assert pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["/opt/decom.sh"]
        script, environment = str(ROOT / "docker" / "decommission.sh"), self.containers[name].environment
        return subprocess.run([script], env=environment, check=False, timeout=END_SECONDS).returncode

    def names(self, kind: str, selector: str = "") -> list[str]:
        """Return the names of the objects of a kind whose labels agree with a selector of `=` and `!=`."""
        parts = [part.replace("!=", "=!").partition("=") for part in selector.split(",") if part]
        with self.lock:
            labels = {
                name: item["metadata"].get("labels", {}) for (each, name), item in self.items.items() if each == kind
            }
        return [name for name, own in labels.items() if all(fits(own.get(key), value) for key, _, value in parts)]

    def end(self) -> None:
        """End all containers and watches."""
        self.ended.set()
        for container in self.containers.values():
            container.process.terminate()
        for container in self.containers.values():
            try:
                container.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                container.process.kill()


def fits(value: str | None, wanted: str) -> bool:
    """Return True if a label has the value that a selector names, or not the value after `!`."""
    return value != wanted[1:] if wanted.startswith("!") else value == wanted


def relocated(text: str, moved: Mapping[str, str]) -> str:
    """Return a text with the paths of mounted folders replaced."""
    pattern = "|".join(re.escape(path) for path in sorted(moved, key=len, reverse=True))
    return re.sub(pattern, lambda hit: moved[hit[0]], text) if moved else text


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    kubernetes: TinyKubernetes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with an object or a list. A watch gets no events: Spark also asks for lists at intervals."""
        kind, name, query = self._target("get")
        self.kubernetes.observe()
        with self.kubernetes.lock:
            if name is not None:
                item = self.kubernetes.items.get((kind, name))
                self._answer(200 if item else 404, item or {"kind": "Status", "status": "Failure", "code": 404})
                return
            selected = self.kubernetes.names(kind, query.get("labelSelector", [""])[0])
            if (only := query.get("fieldSelector")) and only[0].startswith("metadata.name="):
                selected = [each for each in selected if each == only[0].removeprefix("metadata.name=")]
            items = [self.kubernetes.items[kind, each] for each in selected]
        if "watch" in query:
            self._watch()
            return
        self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})

    def _watch(self) -> None:
        """Keep a watch open. One by a web socket is rejected, after which Spark's client asks for one by HTTP."""
        if "Upgrade" in self.headers:
            self._answer(503, {"kind": "Status", "status": "Failure", "code": 503})
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.kubernetes.ended.wait()
        self.close_connection = True

    def do_POST(self) -> None:
        """Create an object."""
        kind, _, _ = self._target("create")
        self._answer(201, self.kubernetes.create(kind, self._body()))

    def do_PUT(self) -> None:
        """Replace an object; its status is kept."""
        kind, name, _ = self._target("update")
        self._change(kind, name, self._body())

    def do_PATCH(self) -> None:
        """Merge the metadata of a change into an object, or create the object: Spark applies its services like this."""
        kind, name, query = self._target("patch")
        change = self._body()
        if "force" in query and (kind, name) not in self.kubernetes.items:
            self._answer(201, self.kubernetes.create(kind, change))
            return
        self._change(kind, name, change if isinstance(change, dict) else {})

    def _change(self, kind: str, name: str | None, change: Item) -> None:
        with self.kubernetes.lock:
            item = self.kubernetes.items.get((kind, name or ""))
            if item is None:
                self._answer(404, {"kind": "Status", "status": "Failure", "code": 404})
                return
            item["metadata"] |= change.get("metadata", {})
            self._answer(200, item)

    def do_DELETE(self) -> None:
        """Delete an object, or all that a selector names."""
        kind, name, query = self._target("delete")
        self._body()
        names = self.kubernetes.names(kind, query.get("labelSelector", [""])[0]) if name is None else [name]
        for each in names:
            self.kubernetes.delete(kind, each)
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _target(self, verb: str) -> tuple[str, str | None, dict[str, list[str]]]:
        """Return the kind, name and query of a request, and note its verb."""
        address = urlsplit(self.path)
        found, query = PATH.fullmatch(address.path), parse_qs(address.query)
        if found is None:
            self._answer(404, {"kind": "Status", "status": "Failure", "code": 404})
            raise ConnectionAbortedError(self.path)
        if found["name"] is None:
            verb = {"get": "watch" if "watch" in query else "list", "delete": "deletecollection"}.get(verb, verb)
        sender = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.kubernetes.requests.add((sender, verb, found["kind"]))
        return found["kind"], found["name"], query

    def _body(self) -> Any:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(text) if text else {}

    def _answer(self, code: int, item: Item) -> None:
        text = json.dumps(item).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""


@contextmanager
def tiny_kubernetes(kubernetes: TinyKubernetes) -> Iterator[str]:
    """Serve objects in a block; yields the address. The containers are ended with it."""
    server = ThreadingHTTPServer((ADDRESS, 0), type("BoundHandler", (Handler,), {"kubernetes": kubernetes}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{ADDRESS}:{server.server_port}"
    finally:
        kubernetes.end()
        server.shutdown()
        server.server_close()
