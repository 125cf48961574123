"""The house rules as tests: sizes, docstrings, who may import what, and what no file may hold.

A rule is a function of parsed files that returns one line for each breach; nothing is imported. Every rule is shown
to fire on a small example and to stay quiet on its neighbour before it is held against the tree.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "pipeline", "jobs", "train", "penstock")

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 100
RUN_LOOPS = {("pipeline/run.py", "run_steps"), ("train/pretrain/loop.py", "pretrain")}
MAX_PARAMETERS = 6
MAX_DEPTH = 17
"""Files in the longest chain of imports."""
SMALL_FILE_LINES = 80

SPARK_MODULES = (
    "pipeline.run",
    "pipeline.engine.spark",
    "pipeline.engine.materialize",
    "pipeline.engine.tasks",
    "pipeline.dedup",
    "pipeline.tokens.dataset",
    "pipeline.tokens.train_tokenizer",
    "pipeline.templates.step",
    "pipeline.inspect.whatif",
    "pipeline.perplexity.kneser_ney",
    "pipeline.register.spark_reader",
    "jobs.spark_session",
    "jobs.workers",
)
WHO_MAY_IMPORT = {"pyspark": SPARK_MODULES, "torch": ("train",)}
"""A name is that of the module or, once it has grown into a folder, of everything below it."""
WITHOUT_TORCH = (
    "train.config",
    "train.data.document_index",
    "train.data.heldout",
    "train.data.order",
    "train.data.packed_rows",
    "train.data.packing",
    "train.data.permutation",
    "train.data.shards",
    "train.data.stages",
    "train.data.verify",
    "train.dataset_history",
    "train.eval.paired",
    "train.export.megatron",
    "train.mix.measured",
    "train.mix.suggest",
    "train.model.shape",
    "train.monitor.events",
    "train.monitor.guard",
    "train.monitor.log_files",
    "train.monitor.metrics",
    "train.monitor.progress",
    "train.optim.schedule",
    "train.parallel.layout",
    "train.parallel.memory",
    "train.plan.text",
    "train.plan.figures",
    "train.plan.text",
    "train.plan.make_plan",
    "train.plan.plan",
    "train.plan.rules",
    "train.plan.search.search",
    "train.takedown_replay",
    "train.trace",
)
"""What a plan, a dry run, a trace and an export of data take: sizes, declarations, orders, journals."""
SEES = {
    "schemas": ("schemas",),
    "pipeline": ("schemas", "pipeline"),
    "jobs": ("schemas", "pipeline", "jobs", "train"),
    "train": ("schemas", "train"),
    "penstock": ("schemas", "pipeline", "jobs", "train", "penstock"),
}
LAZY = "penstock"
"""The public package imports each part at its first use, so its chains of imports and its functions are exempt."""
SEES_OF_ROOM: dict[str, Callable[[str], bool]] = {
    "pipeline.engine": lambda target: within(target, ("pipeline.engine",)),
    "train.parallel": lambda target: not within(target, ("train.plan", "train.pretrain")),
    "train.pretrain": lambda target: not within(target, ("train.plan",)) or target == "train.plan.plan",
}
"""Modules of its own half that a room may import."""
ALONE = {
    "jobs.cli": "the command line",
    "jobs.class_archive": "a program",
    "jobs.exit_codes": "imported by the command line when a verb runs",
    "jobs.run_stage": "a program",
    "jobs.workers": "programs",
    "jobs.verbs": "a file for each verb, found by name",
    "pipeline.engine.watcher": "a program",
    "pipeline.membership.check_proof": "a program that needs the standard library only",
    "pipeline.minhash": "a file for each signature family, with one interface",
    "pipeline.quality": "a file for each rule set, with one interface",
    "pipeline.takedown.erased": "records beside a certificate, for their check alone",
    "pipeline.takedown.planted": "files beside a certificate, which its check alone does not know",
    "pipeline.steps.requirements": "settings of rooms that do not import each other",
    "train.launch": "a program that replaces torchrun",
    "train.optim": "a file for each update rule, found by its row in OPTIMIZERS",
    "train.parallel.this_machine": "a program that imports torch, for a command that does not",
    "train.replay_check": "a program",
    "train.start": "a program that runs another one",
    "train.export": "a program for each format",
    "pipeline.report.personal_data": "a section of the report, with its own figures",
}
"""Files that may be small and have one importer or none, with the reason."""
REGISTRIES = ("pipeline.stages", "pipeline.sources.formats")
"""Lists of stages and of source formats: a file that one of them imports may be small."""
OF_SINGLE_CHARACTERS = (
    *("schemas.normalization", "pipeline.minhash.shingles", "pipeline.extract.math_symbols", "pipeline.pii.candidates"),
)
"""Modules that may call `unicodedata.normalize`."""
READS_ENVIRONMENT = ("jobs.spark_session", "train.parallel.ranks", "schemas.storage")
"""Modules that read or set environment variables."""
HEAVY = {
    "boto3",
    "botocore",
    "catboost",
    "cryptography",
    "datasketch",
    "fasttext",
    "ftfy",
    "icu4py",
    "kenlm",
    "lm_eval",
    "matplotlib",
    "phonenumbers",
    "presidio_analyzer",
    "py7zr",
    "pyiceberg",
    "pyspark",
    "rich",
    "safetensors",
    "scipy",
    "sentencepiece",
    "spacy",
    "tensorboard",
    "tokenizers",
    "torch",
    "torchao",
    "trafilatura",
    "wandb",
}
"""Libraries that are slow to load or that only some recipes need."""

RUNS_CODE = {
    **dict.fromkeys(("cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "yaml"), ()),
    "pickle": ("pipeline.engine.tasks",),
    "xml": ("pipeline.sources.books.books", "pipeline.sources.wiki.mediawiki"),
    "tarfile": ("pipeline.urls.lists",),
    "exec": ("pipeline.recipe_stages",),
    **dict.fromkeys(("eval", "os.popen", "os.system", "torch.load", "torch.jit.load", "torch.hub.load"), ()),
    **dict.fromkeys(("allow_pickle=True", "shell=True", "weights_only=False", "trust_remote_code=True"), ()),
}
"""Libraries, calls and arguments that run code of a file or expand its entities, and the modules that may use them.

The two readers of XML refuse or never see declarations of entities; `recipe_stages` runs the functions of a recipe;
`engine.tasks` pickles the tasks that the driver sends to its workers, in no file; `urls.lists`
reads members of the archives of a recipe in memory, and extracts none to a folder."""

VAGUE_NAMES = {"base", "common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
MACHINE_PATHS = re.compile(r"(?<![\w./~})-])/(?:(?:work|root)\b|home/\w|opt/(?!spark/conf\b|decom\.sh\b)\w)")
"""Two paths below /opt are no machine's: Spark's Kubernetes scheduler has them in the containers that it starts."""
WORKPLACE = re.compile(r"\bissues? (?:\d+\b|show\b)|\bbrief\.md\b|\bshared/(?:design|style|facts|hooks)\b")


@dataclass(frozen=True)
class Module:
    """One source file, by its path from the root."""

    path: str
    text: str

    @property
    def name(self) -> str:
        """The dotted name; a package has the name of its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file; empty if it does not parse, which is a breach of its own."""
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])

    @cached_property
    def imports(self) -> list[tuple[int, str, bool]]:
        """(line, dotted target, whether inside a function) of every import; `from a import b` gives `a.b`."""
        inside = {id(node) for function in functions(self) for node in ast.walk(function)}
        return [
            (node.lineno, target, id(node) in inside)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
            for target in self._targets(node)
        ]

    def _targets(self, node: ast.Import | ast.ImportFrom | ast.Call) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.Call):
            by_name = name_of(node.func) in {"__import__", "import_module", "importlib.import_module"}
            return [str(argument.value) for argument in node.args[:by_name] if isinstance(argument, ast.Constant)]
        parts = [*self.name.split("."), *(["__init__"] if self.path.endswith("/__init__.py") else [])]
        stem = [*(parts[: -node.level] if node.level else []), *([node.module] if node.module else [])]
        return [".".join([*stem, alias.name]) for alias in node.names]


Modules = list[Module]
Rule = Callable[[Modules], list[str]]


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones included."""
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def name_of(node: ast.expr | None) -> str:
    """The dotted name of an expression such as `os.environ`; empty if it is none."""
    if isinstance(node, ast.Attribute):
        stem = name_of(node.value)
        return f"{stem}.{node.attr}" if stem else ""
    return node.id if isinstance(node, ast.Name) else ""


def within(name: str, stems: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the stems or lies below one."""
    return any(name == stem or name.startswith(f"{stem}.") for stem in stems)


def library(target: str) -> str:
    """The top-level name of an import target; the bridge to the JVM counts as Spark."""
    return target.partition(".")[0].replace("py4j", "pyspark")


def graph(modules: Modules) -> dict[str, set[str]]:
    """The modules of ours that each module imports, wherever in the file the import is."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for _, target, _ in module.imports:
            while target and target not in names:
                target = target.rpartition(".")[0]
            edges[module.name] |= {target} - {"", module.name}
    return edges


# ---------------------------------------------------------------------------------------------------------- the rules


def parses(modules: Modules) -> list[str]:
    """Every file is Python."""
    found = []
    for module in modules:
        try:
            ast.parse(module.text)
        except SyntaxError as error:
            found.append(f"{module.path}:{error.lineno}: does not parse: {error.msg}")
    return found


def file_length(modules: Modules) -> list[str]:
    """A file that outgrows the limit becomes a folder of its own name."""
    lengths = ((module.path, len(module.text.splitlines())) for module in modules)
    return [f"{path}:1: {lines} lines, limit {MAX_FILE_LINES}" for path, lines in lengths if lines > MAX_FILE_LINES]


def function_length(modules: Modules) -> list[str]:
    """A function fits on a screen; the two run loops may take more."""
    found = []
    for module in modules:
        for node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_LOOP_LINES if (module.path, node.name) in RUN_LOOPS else MAX_FUNCTION_LINES
            if lines > limit:
                found.append(f"{module.path}:{node.lineno}: {node.name} has {lines} lines, limit {limit}")
    return found


def parameters(modules: Modules) -> list[str]:
    """More parameters than the limit are a config."""
    found = []
    for module in modules:
        for node in functions(module):
            args = node.args
            names = [a.arg for a in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg) if a]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MAX_PARAMETERS:
                found.append(f"{module.path}:{node.lineno}: {node.name} has {count} parameters, limit {MAX_PARAMETERS}")
    return found


def docstrings(modules: Modules) -> list[str]:
    """A module begins with one line that says what it is; only an empty `__init__.py` needs none."""
    found = []
    for module in modules:
        lines = (ast.get_docstring(module.tree) or "").splitlines()
        if module.path.endswith("/__init__.py") and not module.text.strip():
            continue
        if not lines:
            found.append(f"{module.path}:1: no docstring")
        elif not lines[0].endswith(".") or any(lines[1:2]):
            found.append(f"{module.path}:1: the first line is not one sentence with a full stop: {lines[0]!r}")
    return found


def library_imports(modules: Modules) -> list[str]:
    """The engines appear in the few modules that are named for them."""
    found = []
    for module in modules:
        for line, target, _ in module.imports:
            allowed = WHO_MAY_IMPORT.get(library(target), (module.name,))
            if not within(module.name, allowed) or (library(target) == "torch" and within(module.name, WITHOUT_TORCH)):
                found.append(f"{module.path}:{line}: imports {target}, which only {', '.join(allowed)} may")
    return found


def package_direction(modules: Modules) -> list[str]:
    """The halves meet only in schemas/."""
    return [
        f"{module.path}:{line}: imports {target}, sees only {', '.join(SEES[module.package])}"
        for module in modules
        for line, target, _ in module.imports
        if library(target) in PACKAGES and library(target) not in SEES[module.package]
    ]


def rooms(modules: Modules) -> list[str]:
    """The engine knows no stage, parallel/ no planner, and the trainer reads the plan but imports no planner."""
    edges = graph(modules)
    found = []
    for module in modules:
        for stem, allowed in SEES_OF_ROOM.items():
            if within(module.name, (stem,)):
                package = stem.partition(".")[0]
                others = [target for target in sorted(edges[module.name]) if target.partition(".")[0] == package]
                hits = [target for target in others if not allowed(target)]
                found += [f"{module.path}:1: imports {target}, which {stem} may not" for target in hits]
    return found


def small_files(modules: Modules) -> list[str]:
    """A small file has two importers, or is of a kind that needs none; any other belongs to its importer."""
    edges = graph(modules)
    importers = {name: [other for other, targets in edges.items() if name in targets] for name in edges}
    found = []
    for module in modules:
        lines = len(module.text.splitlines())
        alone = module.path.endswith(("/__init__.py", "/__main__.py")) or within(module.name, tuple(ALONE))
        alone = alone or not set(REGISTRIES).isdisjoint(importers[module.name])
        if lines < SMALL_FILE_LINES and len(importers[module.name]) < 2 and not alone:
            found.append(f"{module.path}:1: {lines} lines, imported by {' '.join(importers[module.name]) or 'none'}")
    return found


def torch_free(modules: Modules) -> list[str]:
    """The commands, and what they use of train/, start without torch: no chain of imports leads to it."""
    edges = graph(modules)
    needs = {module.name for module in modules for _, target, _ in module.imports if library(target) == "torch"}
    found = []
    for module in modules:
        if module.package == LAZY:
            continue  # tests/penstock imports it in a process of its own
        if module.package != "train" or within(module.name, WITHOUT_TORCH):
            chains = [chain for chain in shortest_chains(module.name, edges) if chain[-1] in needs]
            found += [f"{module.path}:1: reaches torch: {' -> '.join(chain)}" for chain in chains[:1]]
    return found


def shortest_chains(name: str, edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """A shortest chain of imports to every module that a module reaches, itself first."""
    queue, seen = [[name]], {name}
    for chain in queue:
        yield chain
        new = sorted(edges[chain[-1]] - seen)
        seen.update(new)
        queue += [[*chain, target] for target in new]


def cycles(modules: Modules) -> list[str]:
    """No module reaches itself, not even by an import inside a function."""
    edges, path_of = graph(modules), {module.name: module.path for module in modules}
    found, done = [], set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            loop = [*trail[trail.index(name) :], name]
            found.append(f"{path_of[name]}:1: cycle {' -> '.join(loop)}")
        elif name not in done:
            for target in sorted(edges[name]):
                walk(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        walk(name, [])
    return found


def depth(modules: Modules) -> list[str]:
    """The longest chain of imports, counted per file, is bounded."""
    edges = graph([module for module in modules if module.package != LAZY])
    chains: dict[str, list[str]] = {}

    def longest(name: str, above: frozenset[str]) -> list[str]:
        if name not in chains:
            below = [longest(target, above | {name}) for target in sorted(edges[name] - above)]
            chains[name] = [name, *max(below, key=len, default=[])]
        return chains[name]

    path_of = {module.name: module.path for module in modules}
    deepest = max((longest(name, frozenset([name])) for name in sorted(edges)), key=len, default=[])
    if len(deepest) <= MAX_DEPTH:
        return []
    return [f"{path_of[deepest[0]]}:1: depth {len(deepest)}, limit {MAX_DEPTH}: {' -> '.join(deepest)}"]


def local_imports(modules: Modules) -> list[str]:
    """Inside a function only a heavy library is imported."""
    return [
        f"{module.path}:{line}: imports {target} inside a function, which only heavy libraries may be"
        for module in modules
        for line, target, local in module.imports
        if local and target.partition(".")[0] not in HEAVY and module.package != LAZY
    ]


def asserts(modules: Modules) -> list[str]:
    """`assert` vanishes under -O: data and settings are checked by errors that say what to do."""
    nodes = ((module, node) for module in modules for node in ast.walk(module.tree))
    return [f"{module.path}:{node.lineno}: assert" for module, node in nodes if isinstance(node, ast.Assert)]


def environment(modules: Modules) -> list[str]:
    """A run is its recipe. The session sets which Python Spark's workers are; a rank reads its place on its machine.

    A store reads the one credential that pyarrow does not read itself.
    """
    variables = re.compile(r"os\.(environb?|getenvb?|putenv|unsetenv)")
    found = []
    for module in modules:
        uses = [(node.lineno, name_of(node)) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
        uses += [(line, target) for line, target, _ in module.imports]
        hits = [
            f"{module.path}:{line}: {name} outside jobs/spark_session.py"
            for line, name in uses
            if variables.fullmatch(name)
        ]
        found += hits if module.name not in READS_ENVIRONMENT else []
    return found


def linear_normal_forms(modules: Modules) -> list[str]:
    """Python's own normal forms take time quadratic in a run of combining marks; those of single characters do not."""
    return [
        f"{module.path}:{node.lineno}: unicodedata.normalize of a text: use schemas.normalization.normalize"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and name_of(node.func) == "unicodedata.normalize"
        if module.name not in OF_SINGLE_CHARACTERS
    ]


def shown_commands(modules: Modules) -> list[str]:
    """A command in a message can be copied into a shell, also if the path of a run has a blank."""
    command = re.compile(r"`penstock [^`\n]*?\{(?!quote\(|shlex\.)[^{}`\n]*\b(?:uri|run|path|out|place|other)\}")
    return [
        f"{module.path}:{number}: a path in a command without quote()"
        for module in modules
        for number, line in enumerate(module.text.splitlines(), 1)
        if command.search(line)
    ]


def standard_error(modules: Modules) -> list[str]:
    """What is no result is a record of `schemas.logs`, so that a line has its time, level, run, step and part."""
    return [
        f"{module.path}:{node.lineno}: prints to standard error, where lines are records of schemas.logs"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg == "file" and name_of(node.value) == "sys.stderr"
        if module.name != "schemas.logs"
    ]


def swallowed(modules: Modules) -> list[str]:
    """An exception is handled by name, or passed on; silence is never the answer."""
    broad = {"Exception", "BaseException"}
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                caught = [name_of(kind) for kind in kinds if kind is None or name_of(kind) in broad]
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                silent = node.type is None or all(_does_nothing(statement) for statement in node.body)
                if caught and silent and not raises:
                    found.append(
                        f"{module.path}:{node.lineno}: {' '.join(['except', *filter(None, caught)])} in silence"
                    )
            elif isinstance(node, ast.Call) and name_of(node.func).endswith("suppress"):
                hits = [name_of(argument) for argument in node.args if name_of(argument) in broad]
                found += [f"{module.path}:{node.lineno}: suppress {name} in silence" for name in hits]
    return found


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr | ast.Return) and isinstance(statement.value, ast.Constant | None)
    return constant or isinstance(statement, ast.Pass | ast.Continue | ast.Break)


def foreign_code(modules: Modules) -> list[str]:
    """No file of a stranger runs code: what could do so is used in the named modules only."""
    found = []
    for module in modules:
        uses = [(line, library(target)) for line, target, _ in module.imports if library(target) in RUNS_CODE]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                words = (f"{word.arg}={getattr(word.value, 'value', '')}" for word in node.keywords)
                uses += [(node.lineno, use) for use in (name_of(node.func), *words) if use in RUNS_CODE]
        found += [
            f"{module.path}:{line}: {use}, which may run code of a file"
            for line, use in uses
            if not within(module.name, RUNS_CODE[use])
        ]
    return found


def names(modules: Modules) -> list[str]:
    """A name says what a thing is; spark-submit puts jobs/ first on the path, so a job file shadows its namesakes."""
    found = [f"{module.path}:1: vague name" for module in modules if VAGUE_NAMES & set(module.name.split("."))]
    for module in modules:
        folder, _, stem = module.name.rpartition(".")
        if folder == "jobs" and stem in {*sys.stdlib_module_names, *PACKAGES, *HEAVY}:
            found.append(f"{module.path}:1: shadows the package {stem} under spark-submit")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and re.search(r"^_?Base[A-Z]|Base$|Manager$", node.name):
                found.append(f"{module.path}:{node.lineno}: vague name {node.name}")
    return found


def unfinished(modules: Modules) -> list[str]:
    """No stubs and no promises."""
    mark = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
    lines = (
        (module.path, number, line) for module in modules for number, line in enumerate(module.text.splitlines(), 1)
    )
    return [f"{path}:{number}: {hit.group()}" for path, number, line in lines if (hit := mark.search(line))]


# --------------------------------------------------------------------------- each rule on both sides of its threshold


def function(lines: int, name: str = "work") -> str:
    """The source of a function of so many lines."""
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def chain(length: int) -> dict[str, str]:
    """Modules a0 -> a1 -> ... of so many imports."""
    files = {f"pipeline/a{i}.py": f"import pipeline.a{i + 1}" for i in range(length)}
    return files | {f"pipeline/a{length}.py": ""}


ONLY_SPARK = f"which only {', '.join(SPARK_MODULES)} may"

RULES: list[tuple[Rule, dict[str, str], dict[str, str], list[str]]] = [
    (
        foreign_code,
        {
            "pipeline/recipe_stages.py": "exec(compile(source, file, 'exec'))",
            "pipeline/sources/wiki/mediawiki.py": "from xml.parsers import expat",
            "train/a.py": "model.eval()\nnp.load(path, allow_pickle=False)\nimport copyreg",
        },
        {
            "train/a.py": "def f():\n    import pickle",
            "train/b.py": "torch.load(path)",
            "jobs/a.py": "subprocess.run(text, shell=True)\neval(text)\nimport yaml",
            "pipeline/a.py": "import xml.etree.ElementTree",
        },
        [
            "train/a.py:2: pickle, which may run code of a file",
            "train/b.py:1: torch.load, which may run code of a file",
            "jobs/a.py:3: yaml, which may run code of a file",
            "jobs/a.py:1: shell=True, which may run code of a file",
            "jobs/a.py:2: eval, which may run code of a file",
            "pipeline/a.py:1: xml, which may run code of a file",
        ],
    ),
    (
        linear_normal_forms,
        {
            "pipeline/minhash/shingles.py": "import unicodedata\nx = unicodedata.normalize('NFD', 'a')",
            "pipeline/a.py": "from schemas.normalization import normalize\nx = normalize('NFC', text)",
        },
        {"pipeline/a.py": "import unicodedata\nx = unicodedata.normalize('NFC', text)"},
        ["pipeline/a.py:2: unicodedata.normalize of a text: use schemas.normalization.normalize"],
    ),
    (
        shown_commands,
        {"train/a.py": "x = f'run `penstock train {quote(run.uri)} --step {step}` in {run.uri}'"},
        {"train/a.py": "x = f'run `penstock train {run.uri}`'\ny = f'`penstock plan --law {path}`'"},
        [f"train/a.py:{line}: a path in a command without quote()" for line in (1, 2)],
    ),
    (parses, {"train/a.py": "x = 1"}, {"train/a.py": "x = 1\nx ="}, ["train/a.py:2: does not parse: invalid syntax"]),
    (
        file_length,
        {"train/a.py": "x = 1\n" * 600},
        {"train/a.py": "x = 1\n" * 601},
        ["train/a.py:1: 601 lines, limit 600"],
    ),
    (
        function_length,
        {"train/a.py": function(60), "train/pretrain/loop.py": function(100, "pretrain")},
        {"train/a.py": "\n" + function(61), "train/pretrain/loop.py": function(101, "pretrain") + function(61)},
        [
            "train/a.py:2: work has 61 lines, limit 60",
            "train/pretrain/loop.py:1: pretrain has 101 lines, limit 100",
            "train/pretrain/loop.py:102: work has 61 lines, limit 60",
        ],
    ),
    (
        parameters,
        {"train/a.py": "class A:\n    def f(self, a, b, c, /, d, *, e, **f): ..."},
        {"train/a.py": "def f(a, b, c, d, *e, f, g): ..."},
        ["train/a.py:1: f has 7 parameters, limit 6"],
    ),
    (
        docstrings,
        {"train/a.py": '"""One."""\nx = 1', "train/__init__.py": "", "jobs/a.py": '"""One.\n\nMore\n"""'},
        {"train/a.py": "x = 1", "jobs/__init__.py": "x = 1", "train/b.py": '"""One"""', "train/c.py": '"""Two.\n2."""'},
        [
            "train/a.py:1: no docstring",
            "jobs/__init__.py:1: no docstring",
            "train/b.py:1: the first line is not one sentence with a full stop: 'One'",
            "train/c.py:1: the first line is not one sentence with a full stop: 'Two.'",
        ],
    ),
    (
        library_imports,
        {"pipeline/dedup/near.py": "from pyspark.sql import functions", "train/model.py": "import torch.nn"},
        {
            "pipeline/extract/extract.py": "def f():\n    from pyspark import sql",
            "jobs/runner.py": "import py4j",
            "train/trace.py": "import torch",
            "schemas/a.py": 'import_module("torch")',
        },
        [
            f"pipeline/extract/extract.py:2: imports pyspark.sql, {ONLY_SPARK}",
            f"jobs/runner.py:1: imports py4j, {ONLY_SPARK}",
            "train/trace.py:1: imports torch, which only train may",
            "schemas/a.py:1: imports torch, which only train may",
        ],
    ),
    (
        package_direction,
        {
            "jobs/cli.py": "import pipeline.run, train.plan",
            "train/a.py": "from schemas import ids",
            "pipeline/b.py": "",
        },
        {
            "schemas/a.py": "import train.plan",
            "pipeline/a.py": "import jobs",
            "train/a.py": "from pipeline.engine.stage import Row",
        },
        [
            "schemas/a.py:1: imports train.plan, sees only schemas",
            "pipeline/a.py:1: imports jobs, sees only schemas, pipeline",
            "train/a.py:1: imports pipeline.engine.stage.Row, sees only schemas, train",
        ],
    ),
    (
        rooms,
        {
            "pipeline/engine/a.py": "import pipeline.engine.b, schemas.c",
            "pipeline/engine/b.py": "",
            "schemas/c.py": "",
            "train/pretrain/a.py": "import train.plan.plan",
            "train/plan/plan.py": "",
        },
        {
            "pipeline/engine/a.py": "import pipeline.b",
            "pipeline/b.py": "",
            "train/parallel/a.py": "import train.plan.plan",
            "train/plan/plan.py": "",
            "train/pretrain/a.py": "from train.plan.search.b import x",
            "train/plan/search/b.py": "",
        },
        [
            "pipeline/engine/a.py:1: imports pipeline.b, which pipeline.engine may not",
            "train/parallel/a.py:1: imports train.plan.plan, which train.parallel may not",
            "train/pretrain/a.py:1: imports train.plan.search.b, which train.pretrain may not",
        ],
    ),
    (
        small_files,
        {
            "train/a.py": "import train.b, train.c",
            "train/b.py": "x = 1\n" * 80 + "import train.c",
            "train/c.py": "",
            "jobs/verbs/d.py": "import train.a",
            "jobs/verbs/e.py": "import train.a",
            "pipeline/stages.py": "import pipeline.f\n" * 80,
            "pipeline/f.py": "",
        },
        {"jobs/cli.py": "import train.b", "train/b.py": "x = 1\n" * 79, "train/c.py": ""},
        ["train/b.py:1: 79 lines, imported by jobs.cli", "train/c.py:1: 0 lines, imported by none"],
    ),
    (
        torch_free,
        {"jobs/cli.py": "from train import trace", "train/trace.py": "import train.a", "train/a.py": ""},
        {
            **{
                "jobs/cli.py": "from train import b",
                "train/trace.py": "import train.b",
                "train/c.py": "import train.b",
            },
            **{"train/b.py": "import train.a", "train/a.py": "import torch"},
        },
        [
            "jobs/cli.py:1: reaches torch: jobs.cli -> train.b -> train.a",
            "train/trace.py:1: reaches torch: train.trace -> train.b -> train.a",
        ],
    ),
    (
        cycles,
        {"train/a.py": "import train.b, train.c", "train/b.py": "import train.c", "train/c.py": ""},
        {"train/a.py": "from train import b", "train/b.py": "def f():\n    from .a import x"},
        ["train/a.py:1: cycle train.a -> train.b -> train.a"],
    ),
    (
        depth,
        chain(MAX_DEPTH - 1),
        chain(MAX_DEPTH),
        [
            f"pipeline/a0.py:1: depth {MAX_DEPTH + 1}, limit {MAX_DEPTH}: "
            + " -> ".join(f"pipeline.a{i}" for i in range(MAX_DEPTH + 1))
        ],
    ),
    (
        local_imports,
        {"train/a.py": "import os\ndef f():\n    import matplotlib.pyplot"},
        {"train/a.py": "def f():\n    import os"},
        ["train/a.py:2: imports os inside a function, which only heavy libraries may be"],
    ),
    (asserts, {"train/a.py": "x = 'assert'"}, {"train/a.py": "\nassert x"}, ["train/a.py:2: assert"]),
    (
        environment,
        {"jobs/spark_session.py": "import os\nos.environ['A'] = '1'", "jobs/a.py": "import os\nos.path"},
        {"train/a.py": "import os\nos.environ.get('A')", "train/b.py": "from os import getenv"},
        [
            "train/a.py:2: os.environ outside jobs/spark_session.py",
            "train/b.py:1: os.getenv outside jobs/spark_session.py",
        ],
    ),
    (
        standard_error,
        {"schemas/logs.py": "print(1, file=sys.stderr)", "train/a.py": "print(1, file=lines)\nLOGGER.info(1)"},
        {"train/a.py": "\nprint(1, flush=True, file=sys.stderr)"},
        ["train/a.py:2: prints to standard error, where lines are records of schemas.logs"],
    ),
    (
        swallowed,
        {
            "train/a.py": "try: f()\nexcept ValueError: pass\nexcept Exception as e:\n    raise X from e",
            "train/b.py": "try: f()\nexcept Exception as e:\n    row = Drop(str(e))",
        },
        {
            "train/a.py": "try: f()\nexcept Exception: pass",
            "train/b.py": "def g():\n    try: f()\n    except (A, Exception): return None",
            "train/c.py": "try: f()\nexcept: log()",
            "train/d.py": "with contextlib.suppress(Exception): f()",
        },
        [
            "train/a.py:2: except Exception in silence",
            "train/b.py:3: except Exception in silence",
            "train/c.py:2: except in silence",
            "train/d.py:1: suppress Exception in silence",
        ],
    ),
    (
        names,
        {"jobs/run_all.py": "class Basement: ...", "pipeline/sources/csv.py": ""},
        {"jobs/pipeline.py": "", "jobs/trace.py": "", "train/utils.py": "class BaseModel: ...\nclass TaskManager: ..."},
        [
            "train/utils.py:1: vague name",
            "jobs/pipeline.py:1: shadows the package pipeline under spark-submit",
            "jobs/trace.py:1: shadows the package trace under spark-submit",
            "train/utils.py:1: vague name BaseModel",
            "train/utils.py:2: vague name TaskManager",
        ],
    ),
    (
        unfinished,
        {"train/a.py": "TODOS = 1"},
        {"train/a.py": "x = 1\nraise NotImplementedError"},
        ["train/a.py:2: NotImplementedError"],
    ),
]


@cache
def the_tree() -> Modules:
    """The modules of the four packages."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def test_every_module_that_a_rule_names_exists() -> None:
    names = {module.name for module in the_tree()}
    assert [
        name for name in (*SPARK_MODULES, *WITHOUT_TORCH, *SEES_OF_ROOM, *ALONE, *REGISTRIES) if name not in names
    ] == []
    defined = {(module.path, node.name) for module in the_tree() for node in functions(module)}
    assert defined >= RUN_LOOPS


@pytest.mark.parametrize("rule", [rule for rule, *_ in RULES], ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    modules = the_tree()
    assert {module.package for module in modules} == set(PACKAGES)
    assert not (found := rule(modules)), f"{rule.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "quiet", "firing", "expected"), RULES, ids=[rule.__name__ for rule, *_ in RULES])
def test_the_rule_itself(rule: Rule, quiet: dict[str, str], firing: dict[str, str], expected: list[str]) -> None:
    assert rule([Module(path, text) for path, text in quiet.items()]) == []
    assert rule([Module(path, text) for path, text in firing.items()]) == expected


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("train/a.py", "import os.path, json", ["os.path", "json"]),
        ("train/a.py", "from .b import c\nfrom . import d", ["train.b.c", "train.d"]),
        (
            "pipeline/dedup/__init__.py",
            "from .near import x\nfrom ..stage import Row",
            ["pipeline.dedup.near.x", "pipeline.stage.Row"],
        ),
        ("pipeline/dedup/a.py", "from ..stage import Row", ["pipeline.stage.Row"]),
        ("train/a.py", "__import__('torch.nn')\nimport_module(name)", ["torch.nn"]),
    ],
)
def test_imports(path: str, source: str, expected: list[str]) -> None:
    assert [target for _, target, _ in Module(path, source).imports] == expected


# ------------------------------------------------------------------------------------------------ pages and other files


def test_the_files_that_the_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[gr]*/*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`((?:tests|bench|examples)/[\w/]+(?:\.py|/))(?=[` ])", text))
    assert len(named) > 80
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def places(text: str) -> list[str]:
    """Lines of a file that name this machine or the place where the file was written."""
    own = [path for path in (f"{ROOT}/", f"{Path.home()}/") if path.count("/") > 2]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        hits = [hit.group() for pattern in (MACHINE_PATHS, WORKPLACE) if (hit := pattern.search(line))]
        found += [f"{number}: {hit}" for hit in (*hits, *(path for path in own if path in line))]
    return found


def test_no_file_names_this_machine() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in data[:8192]:
            found += [f"{name}:{place}" for place in places(data.decode("utf-8", "replace"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/opt/spark/conf/spark.properties /opt/decom.sh", []),
        ("href='/home' and https://example.org/opt/x ~/work ../work a/root", []),
        ("the network's frameworks, and/or workers", []),
        ("open('/" + "work/main')", ["1: /" + "work"]),
        ("x\n/" + "home/me", ["2: /" + "home/m"]),
        ("see issue" + " 2", ["1: issue" + " 2"]),
    ],
)
def test_places(text: str, expected: list[str]) -> None:
    assert places(text) == expected


def test_the_root_itself_is_a_place() -> None:
    assert f"1: {ROOT}/" in places(f"open('{ROOT}/setup.cfg')")


# ------------------------------------------------------------------------------------------------------- the Makefile


def requirements(tmp_path: Path, java: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make requirements` on a machine whose `java -version` prints this."""
    (tmp_path / "java").write_text(f"#!/bin/sh\necho '{java}' >&2\n")
    (tmp_path / "java").chmod(0o755)
    outer = {"JAVA_HOME", "CXX", "MAKEFLAGS", "MAKELEVEL", "PYTHON"}
    env = {name: value for name, value in os.environ.items() if name not in outer} | variables
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        ["make", "-s", "requirements"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("version", ["17", "21.0.2"])
def test_make_accepts_java(tmp_path: Path, version: str) -> None:
    done = requirements(tmp_path, f'openjdk version "{version}" 2025-01-01', PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_make_refuses_an_old_java(tmp_path: Path) -> None:
    done = requirements(tmp_path, 'openjdk version "16.0.2" 2021-07-20', PYTHON=sys.executable)
    assert done.returncode != 0
    assert "  - Java 17 or 21 (found: 16)\n" in done.stdout
    assert "apt-get install openjdk-17-jre-headless\n" in done.stdout


def test_make_names_all_that_lacks_and_starts_nothing(tmp_path: Path) -> None:
    done = requirements(tmp_path, 'java version "1.8.0_292"', CXX="no-such-compiler", PYTHON="no-such-python")
    assert done.returncode != 0
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "Nothing was installed. This machine lacks:",
        "- Python 3.11 or newer, venv and headers (found: none; PYTHON= names another)",
        "- Java 17 or 21 (found: 1)",
        "- a C++ compiler, for fasttext and the native module (tried: no-such-compiler)",
        "Install it, then call make again:",
        "Debian, Ubuntu:  apt-get install python3 python3-venv python3-dev openjdk-17-jre-headless g++",
        "Fedora:          dnf install python3 python3-devel java-21-openjdk-headless gcc-c++",
        "Homebrew:        brew install python@3.11 openjdk@17 gcc",
    ]


def test_make_help_lists_the_verbs() -> None:
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    verbs = (
        "help setup demo test check coverage versions bench bench-extraction fit-main-text lint docs wheel report lock "
        "audit sbom clean"
    )
    assert listed == verbs.split()
