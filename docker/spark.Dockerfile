# The Spark half: Python, a Java runtime and the stages. No torch: the halves meet only in schemas/.
# Built from the root of the repository: docker build --file docker/spark.Dockerfile --tag penstock-spark:0.1.0 .

# A tag may be moved, a digest may not. `release.yml` looks up the digest of this tag, builds with it and prints it:
#   --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:DIGEST
# Nobody has filled it in here yet, so that a build by hand takes the tag.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build

# fasttext comes as source only; the compiler stays behind in this stage.
# Debian removes superseded versions from its archive, so a pinned one would stop building; the release is pinned above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /venv
ENV PATH=/venv/bin:$PATH

# The dependencies first, in the versions and with the hashes of the lock file: they change less often than the code.
WORKDIR /build
COPY constraints.txt setup.cfg pyproject.toml README.md LICENSE ./
COPY locks ./locks
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement locks/build.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --no-build-isolation --requirement locks/spark.txt

COPY schemas ./schemas
COPY pipeline ./pipeline
COPY jobs ./jobs
COPY train ./train
COPY penstock ./penstock
# It declares the native modules, which the compiler of this stage builds.
COPY setup.py ./
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && cd / && python -c "from pipeline.extract import native; native.loaded(); from pipeline.text import native; native.loaded()"


FROM ${PYTHON_IMAGE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 penstock \
    && install --directory --owner penstock --group penstock /data

COPY --from=build /venv /venv
# spark-submit takes the path of a file; the packages themselves lie in /venv, for the workers too.
COPY jobs/run_all.py /app/jobs/run_all.py
COPY jobs/run_stage.py /app/jobs/run_stage.py
COPY jobs/cli.py /app/jobs/cli.py
COPY conf /app/conf
COPY jobs/recipes /app/jobs/recipes
# Spark on Kubernetes starts containers with the words `driver …` or `executor`; other words are executed as a command.
COPY docker/entrypoint.py /app/entrypoint.py
# The default of spark.kubernetes.decommission.script.
COPY docker/decommission.sh /opt/decom.sh
ENV PATH=/venv/bin:$PATH PYSPARK_PYTHON=/venv/bin/python PYTHONUNBUFFERED=1

USER 10001:10001
WORKDIR /data
# tini waits for processes whose parent has ended, such as workers of a killed process, which a JVM does not. With -s it
# does so also where it is not the first process of the container.
ENTRYPOINT ["tini", "-s", "--", "/app/entrypoint.py"]
CMD ["penstock", "--help"]
