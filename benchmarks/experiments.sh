#!/bin/bash
# The experiments on a real ViT-Ti and photos, and the leaderboard, one after the other on one GPU.
#   bash benchmarks/experiments.sh REAL OUT [SECONDS-EACH [DEVICE [LIMIT]]]
# REAL holds vit_tiny_patch16_224.safetensors, pets/ and imagenet/. The same call continues.
set -u
real=$1 out=$2 seconds=${3:-225} device=${4:-cuda} few=${5:-}
export PYTHONPATH=src OMP_NUM_THREADS=1 TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
python=${PYTHON:-python3}
vit=(--models vit-ti --weights "vit-ti=$real/vit_tiny_patch16_224.safetensors")
pets=(--data "imagenet-s=pets:$real/pets")
both=(--data "pets:$real/pets" --data "imagenet:$real/imagenet")
one() {  # NAME PART LIMIT WORKERS ...
  local name=$1 part=$2 limit=${few:-$3} workers=$4
  shift 4
  timeout "$seconds" $python -m seecause reproduce "$name" --out "$out/$part" --limit "$limit" \
    --workers "$workers" --device "$device" "$@" >> "$out/$part.log" 2>&1
}
mkdir -p "$out"
one critters/leaderboard leaderboard 128 3
one caap/figure-6 attention 300 1 "${vit[@]}" "${pets[@]}"
one caap/contexts contexts 100 2 "${vit[@]}" "${pets[@]}"
one caap/figure-7 layers 60 2 "${vit[@]}" "${pets[@]}"
one caap/table-1 table 100 3 "${vit[@]}" "${pets[@]}"
one caap/table-2 table 100 1 "${vit[@]}" "${pets[@]}"
one ours/mosaic mosaic 100 3 "${vit[@]}" "${both[@]}"
tail -n 3 "$out"/*.log
