#!/bin/bash
# The values that Megatron-LM's examples/sc21/run_table_1.sh has for this size.
TP=8
PP=4
MBS=2
GBS=1792
NLS=60
HS=10240
NAH=80
DDP=local
MEGATRON_EXTRA_PARAMS="--recompute-method uniform --num-layers-per-virtual-pipeline-stage 5"
torchrun --nproc_per_node 8 --nnodes 128 pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    --micro-batch-size ${MBS} --global-batch-size ${GBS} --DDP-impl ${DDP} \
    --num-layers ${NLS} --hidden-size ${HS} --num-attention-heads ${NAH} \
    --seq-length 2048 --max-position-embeddings 2048 --fp16 ${MEGATRON_EXTRA_PARAMS}
