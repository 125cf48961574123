"""The results of tests for planted identifiers beside a certificate: what they say about its removed documents.

The numbers of a file are computed again from its ranks. Who holds the key can repeat the test itself.
"""

from collections.abc import Iterator
from typing import Any

from pipeline.takedown.check_result import CheckResult
from schemas.errors import PenstockError
from schemas.ranks import problems_of, rank_test
from schemas.storage import Store
from schemas.takedown import TAKEDOWNS, Certificate

WRONG = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OSError, RecursionError, PenstockError)
"""Errors of a file that is no result."""


def check_planted(run: Store, certificate: Certificate, checked: CheckResult) -> None:
    """Add a note or a problem to `checked` for each result of a test that lies beside a certificate."""
    for name in results_of(run, certificate.id):
        try:
            result: dict[str, Any] = run.read_json(name)
            problems, note = problems_of(result), describe(result, certificate)
        except WRONG as error:
            problems, note = [f"{type(error).__name__} while it was read"], ""
        if problems:
            checked.problems.append(
                f"{name}: expected the result of `penstock plant-test`, got another one: {problems[0]:.200}. Repeat "
                f"the test with `penstock plant-test --takedown {certificate.id}`, or remove the file."
            )
        else:
            checked.notes.append(f"{name}: {note}")


def results_of(run: Store, identifier: str) -> Iterator[str]:
    """Yield the paths, relative to the run, of the results beside the certificate of a takedown."""
    for name in sorted(run.child(f"{TAKEDOWNS}/{identifier}").walk()):
        if name.startswith("planted-") and name.endswith(".json"):
            yield f"{TAKEDOWNS}/{identifier}/{name}"


def describe(result: dict[str, Any], certificate: Certificate) -> str:
    """Return what a result says about the removed documents of a certificate, on one line."""
    known = {traces.document for traces in certificate.documents}
    ranks = [float(row["rank"]) for row in result["documents"] if row["document"] in known]
    step, own = int(result["checkpoint"]["step"]), rank_test(ranks, int(result["controls"]))
    seal = result["takedowns"].get(certificate.id)
    if seal != certificate.seal:
        raise ValueError("another seal")
    if not own["n"]:
        return f"the checkpoint of step {step} was tested for no planted identifier of a removed document"
    return (
        f"the checkpoint of step {step} was tested for {own['n']:,} planted identifiers of removed documents: "
        f"{own['verdict']}, mean rank {own['mean']:.3f}, {own['low']:.3f} to {own['high']:.3f}, z {own['z']:+.2f}"
    )
