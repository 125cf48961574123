# The torch half: Python, torch and the trainer. No Java and no Spark: the halves meet only in schemas/.
# Built from the root of the repository: docker build --file docker/train.Dockerfile --tag penstock-train:0.1.0 .

FROM python:3.11.14-slim-bookworm

# The dependencies first, in the versions of constraints.txt: they change less often than the code.
WORKDIR /app
COPY constraints.txt setup.cfg pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt '.[train,fp8,s3]'

# Only these two: an import of the other half would fail here.
COPY schemas ./schemas
COPY train ./train
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 10001 penstock \
    && install --directory --owner penstock --group penstock /data
USER 10001:10001
WORKDIR /data
CMD ["python", "-m", "train.pretrain", "--help"]
