"""`penstock browse`: a local page to search the documents of a run, read and compare them, and try other limits."""

import argparse
import errno
import webbrowser
from functools import partial

from jobs.arguments import Command, add_run, whole
from jobs.recipe import deciding_models, stored_recipe
from pipeline.browse.rows import BrowsedRun, RunRules, open_browsed_run
from pipeline.browse.server import BrowseServer
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.stages import CHECKED, checked_stages, declared_reasons
from schemas.errors import ConfigError
from schemas.manifest import current_tables, read_run
from schemas.versions import open_run_to_read

GROUP = "inspect"
VERBS = {
    "browse": "Serve a local page to look at the data. It searches, shows and compares documents, and tries other "
    "limits.",
}
MAX_PORT = 65535


def add_browse_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `browse` except the run."""
    parser.add_argument(
        "--port", type=whole, default=0, metavar="N", help="port of 127.0.0.1; default 0 chooses a free one"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address only, and open no browser")


def browse_command(arguments: argparse.Namespace) -> int:
    """Print the address of a page on a run and serve it until Ctrl-C. Raises ConfigError if the port is not free."""
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(f"--port: expected 0 to {MAX_PORT}, got {arguments.port}. Name a valid port.")
    run = open_run_of(arguments.run)
    try:
        server = BrowseServer(run, arguments.port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigError(
            f"--port {arguments.port}: expected a free port, got one that cannot be used: {error.strerror}. "
            "Name another port, or leave out --port."
        ) from error
    with server:
        print(server.url, flush=True)
        if not arguments.no_open:
            open_browser(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"\npenstock: the page of {arguments.run} is no longer served")
    return 0


def open_run_of(address: str) -> BrowsedRun:
    """Open the run that `RUN` or `RUN@<digest>` names, with the rules of all stages."""
    store = open_run_to_read(address)
    declared = declared_reasons({name: table.manifest for name, table in current_tables(store).items()})
    meanings = {f"{stage}/{rule}": meaning for stage, rules in declared.items() for rule, meaning in rules.items()}
    checked = checked_stages(stored_recipe(store, [], trust=False)) if read_run(store).recipe else CHECKED
    rules = RunRules(checked, meanings, partial(stored_recipe, store, trust=False), deciding_models, changed_settings)
    return open_browsed_run(address, store, rules)


def open_browser(url: str) -> None:
    """Open a page in the user's browser; without a graphical one, do nothing, since the address is printed."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # A browser of exactly this class runs in the terminal and would block the server.
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(url)


COMMANDS = {
    "browse": Command((add_run, add_browse_arguments), browse_command, "browse run --port 8642 --no-open"),
}
