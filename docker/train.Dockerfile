# The torch half: Python, torch and the trainer. No Java and no Spark: the halves meet only in schemas/.
# Built from the root of the repository: docker build --file docker/train.Dockerfile --tag penstock-train:0.1.0 .

# A tag may be moved, a digest may not. `release.yml` looks up the digest of this tag, builds with it and prints it:
#   --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:DIGEST
# Nobody has filled it in here yet, so that a build by hand takes the tag.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE}

# The dependencies first, in the versions and with the hashes of the lock file: they change less often than the code.
WORKDIR /app
COPY constraints.txt setup.cfg pyproject.toml README.md LICENSE ./
COPY locks ./locks
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement locks/build.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --no-build-isolation --requirement locks/train.txt
# torch is pinned by version alone, since its files differ by index.
RUN pip install --no-cache-dir --constraint constraints.txt torch \
    && pip install --no-cache-dir --no-deps --no-build-isolation .

# Only these two: an import of the other half would fail here.
COPY schemas ./schemas
COPY train ./train
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 10001 penstock \
    && install --directory --owner penstock --group penstock /data
USER 10001:10001
WORKDIR /data
CMD ["python", "-m", "train.pretrain", "--help"]
