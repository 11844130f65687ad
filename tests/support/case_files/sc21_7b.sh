#!/bin/bash
# The values that Megatron-LM's examples/sc21/run_table_1.sh has for this size.
TP=4
PP=1
MBS=16
GBS=512
NLS=36
HS=4096
NAH=32
DDP=torch
MEGATRON_EXTRA_PARAMS="--recompute-method uniform"
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    --micro-batch-size ${MBS} --global-batch-size ${GBS} --DDP-impl ${DDP} \
    --num-layers ${NLS} --hidden-size ${HS} --num-attention-heads ${NAH} \
    --seq-length 2048 --max-position-embeddings 2048 --fp16 ${MEGATRON_EXTRA_PARAMS}
