"""The data steps of a run as an Airflow DAG: one spark-submit job for each step.

A step that is complete is skipped and an interrupted one resumes, so tasks may be retried and cleared at any time. A
step that is not listed here, such as `templates`, is built by the task of the next one that needs it.
"""

import subprocess
from datetime import UTC, datetime

from airflow.exceptions import AirflowFailException
from airflow.sdk import chain, dag, task

STEPS = ("documents", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens")
SUBMIT = ("spark-submit", "--master", "spark://master:7077", "--properties-file", "conf/snapshot.conf")
ARGUMENTS = ("web", "--out", "s3://corpus/run", "--set", "source.crawl=CC-MAIN-2024-10", "--set", "source.files=100")
EXPLAINED_ERROR = 2
"""Exit code of an error that a retry does not mend, such as a wrong setting."""


@task(retries=3)
def run_step(step: str) -> None:
    """Run one step of the recipe."""
    code = subprocess.run([*SUBMIT, "jobs/run_stage.py", step, *ARGUMENTS], check=False).returncode
    if code == EXPLAINED_ERROR:
        raise AirflowFailException(f"{step}: see the log for the error")
    if code:
        raise RuntimeError(f"{step}: exit code {code}")


@dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def penstock() -> None:
    """One task for each step, one after another."""
    chain(*(run_step.override(task_id=step)(step) for step in STEPS))


penstock()
