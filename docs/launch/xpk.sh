#!/usr/bin/env bash
# A job on a GKE cluster of TPUs through XPK; a restarted job goes on from its checkpoint.
#   CLUSTER=c ZONE=us-east5-a TYPE=v5p-128 IMAGE=registry/image:tag CONFIG=configs/x.yaml docs/launch/xpk.sh
set -euo pipefail
: "${CLUSTER:?cluster}" "${ZONE:?zone}" "${TYPE:?TPU type}" "${IMAGE:?image with the package}" "${CONFIG:?configuration}"
NAME=${NAME:-grpo-roc-jax}
RUN_DIR=${RUN_DIR:?a directory that all hosts share, such as a mounted bucket}

xpk workload create --cluster "$CLUSTER" --zone "$ZONE" --workload "$NAME" --tpu-type "$TYPE" \
  --docker-image "$IMAGE" --max-restarts 10 \
  --command "python -m grpo_roc_jax.train $CONFIG --run_dir $RUN_DIR --resume auto"
