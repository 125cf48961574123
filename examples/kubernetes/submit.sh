#!/usr/bin/env bash
# Runs the data steps on a crawl of Common Crawl: submit.sh API-SERVER IMAGE CRAWL RUN, such as
#   submit.sh https://10.0.0.1:6443 registry.example.com/penstock-spark:0.1.0 CC-MAIN-2024-10 s3://corpus/run
# Words after these four are further arguments of the job, such as --set source.files=100.
set -euo pipefail

server=$1 image=$2 crawl=$3 run=$4
shift 4
folder=$(dirname "$0")

settings=(
    spark.executor.instances=250
    spark.kubernetes.namespace=penstock
    spark.kubernetes.container.image="$image"
    spark.kubernetes.authenticate.driver.serviceAccountName=penstock

    # Spot machines: an executor gets this time to hand over its blocks of shuffles. It cannot be longer than the notice
    # that the platform gives.
    spark.kubernetes.executor.podTemplateFile="$folder/executor_pod.yaml"
    spark.kubernetes.executor.terminationGracePeriodSeconds=110s

    # Shuffle files and temporary files lie on the disk of the machine, and not in the container's own layer.
    spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1.mount.path=/local/1
    spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1.mount.readOnly=false
    spark.executorEnv.TMPDIR=/local/1

    # Keys are read from the secret by the machine that starts a container, so they are in no setting of Spark.
    spark.kubernetes.driver.secretKeyRef.AWS_ACCESS_KEY_ID=penstock-s3:AWS_ACCESS_KEY_ID
    spark.kubernetes.driver.secretKeyRef.AWS_SECRET_ACCESS_KEY=penstock-s3:AWS_SECRET_ACCESS_KEY
    spark.kubernetes.executor.secretKeyRef.AWS_ACCESS_KEY_ID=penstock-s3:AWS_ACCESS_KEY_ID
    spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY=penstock-s3:AWS_SECRET_ACCESS_KEY
    # The driver passes the region to its executors.
    spark.kubernetes.driverEnv.AWS_DEFAULT_REGION=us-east-1
)

exec spark-submit --master "k8s://$server" --deploy-mode cluster --name penstock \
    --properties-file "$folder/../../conf/snapshot.conf" "${settings[@]/#/--conf=}" \
    local:///app/jobs/run_all.py web --out "$run" --set "source.crawl=$crawl" "$@"
