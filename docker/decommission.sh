#!/bin/sh
# Kubernetes runs this before it stops the container of an executor, for example when a spot machine is taken away.
# SIGPWR makes the executor accept no further tasks and copy its blocks of shuffles to other executors; then it ends by
# itself. Kubernetes sends SIGTERM when this script returns, so it waits for that end. Kubernetes stops waiting at the end of
# the grace period (spark.kubernetes.executor.terminationGracePeriodSeconds).
set -eu

executor=$(pgrep --full "KubernetesExecutorBackend .*--podName ${SPARK_EXECUTOR_POD_NAME}\$") || exit 0
kill -s PWR "$executor"
while kill -0 "$executor" 2>/dev/null; do
    sleep 1
done
