#!/bin/bash
# The keys and values of Megatron-LM's example of 175 billion parameters.
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
GPT_MODEL_ARGS=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} --save $CHECKPOINT_PATH
