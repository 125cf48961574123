#!/usr/bin/env bash
# From archives to a small model and back: run.sh 'crawl/*.warc.gz' out
set -euo pipefail
archives=${1:?usage: run.sh ARCHIVES OUT} out=${2:?usage: run.sh ARCHIVES OUT}
here=$(dirname "${BASH_SOURCE[0]}")
steps=${STEPS:-200}
every=$(((steps + 3) / 4))

penstock run "$here/recipe.toml" --out "$out" --set source.paths="[\"$archives\"]"
penstock show "$out" --where 'drop_stage = quality' --limit 2
penstock whatif "$out" --set quality.min_words=30
penstock train "$out" --set train.steps="$steps" --set train.eval_every="$every" --set checkpoint.every="$every"
penstock trace "$out" --step "$steps" --brief
penstock export "$out" --format huggingface --out "$out/llama"
penstock report "$out"
