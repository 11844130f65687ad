#!/bin/bash
# The values that Megatron-LM's examples/sc21/run_table_1.sh has for this size.
TP=8
PP=2
MBS=4
GBS=1536
NLS=48
HS=8192
NAH=64
DDP=local
MEGATRON_EXTRA_PARAMS="--recompute-method uniform"
torchrun --nproc_per_node 8 --nnodes 64 pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    --micro-batch-size ${MBS} --global-batch-size ${GBS} --DDP-impl ${DDP} \
    --num-layers ${NLS} --hidden-size ${HS} --num-attention-heads ${NAH} \
    --seq-length 2048 --max-position-embeddings 2048 --fp16 ${MEGATRON_EXTRA_PARAMS}
