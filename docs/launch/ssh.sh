#!/usr/bin/env bash
# One process per host over plain ssh: HOSTS="a b c" REPO=/path CONFIG=configs/x.yaml docs/launch/ssh.sh [--key value ...]
# The repository and the run directory lie at the same path on every host (a shared file system for the run directory).
set -euo pipefail
: "${HOSTS:?the hosts, process 0 first, parted by spaces}" "${REPO:?path of the repository on every host}"
: "${CONFIG:?path of the configuration, relative to REPO}"
PORT=${PORT:-8476}
# GPU=1 sets what docs/launch.md says of GPUs.
gpu=
if [ -n "${GPU:-}" ]; then
  gpu="XLA_CLIENT_MEM_FRACTION=0.9 XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"
  gpu="$gpu CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=1 NCCL_DEBUG=WARN"
fi
read -r -a hosts <<<"$HOSTS"

words=$(printf '%q ' "$CONFIG" --resume auto "$@")
pids=()
# The first to end with an error takes the connections of the others along.
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for index in "${!hosts[@]}"; do
  ssh -tt -o BatchMode=yes "${hosts[$index]}" "cd $(printf '%q' "$REPO") && \
    JAX_COORDINATOR_ADDRESS=${hosts[0]}:$PORT JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$index $gpu \
    exec python -m grpo_roc_jax.train $words" </dev/null &
  pids+=("$!")
done
for _ in "${pids[@]}"; do
  wait -n
done
