#!/usr/bin/env bash
# A TPU slice through gcloud: creates it, installs on every host, starts the same command on every host.
#   NAME=run1 ZONE=us-east5-a TYPE=v5p-128 BUCKET=gs://bucket CONFIG=configs/x.yaml docs/launch/tpu_vm.sh
# The pod says who is who, so no address is given. Checkpoints go to a bucket mounted on every host.
set -euo pipefail
: "${NAME:?name of the slice}" "${ZONE:?zone}" "${TYPE:?accelerator type}" "${BUCKET:?bucket}" "${CONFIG:?configuration}"
VERSION=${VERSION:-v2-alpha-tpuv5}
REPOSITORY=${REPOSITORY:?address of the git repository}

on_all() {
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "$1"
}

gcloud compute tpus tpu-vm create "$NAME" --zone "$ZONE" --accelerator-type "$TYPE" --version "$VERSION"
on_all "git clone $REPOSITORY grpo_roc_jax && cd grpo_roc_jax && python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'"
on_all "mkdir -p runs && gcsfuse --implicit-dirs ${BUCKET#gs://} runs"
on_all "cd grpo_roc_jax && .venv/bin/python -m grpo_roc_jax.train $CONFIG --run_dir ../runs/$NAME --resume auto"
