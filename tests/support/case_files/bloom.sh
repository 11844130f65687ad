#!/bin/bash
# The keys and values of BLOOM's run on 48 nodes of 8 A100 (Megatron-DeepSpeed).
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
TP_SIZE=4
PP_SIZE=12
MICRO_BATCH_SIZE=2  # 1 in the first steps
GLOBAL_BATCH_SIZE=2048
NHIDDEN=14336
SEQ_LEN=2048
GPT_ARGS=" \
    --num-layers 70 --hidden-size $NHIDDEN --num-attention-heads 112 \
    --seq-length $SEQ_LEN --max-position-embeddings $SEQ_LEN \
    --micro-batch-size $MICRO_BATCH_SIZE --global-batch-size $GLOBAL_BATCH_SIZE \
    --rampup-batch-size 192 16 9_765_625 \
    --bf16 --checkpoint-activations --pad-vocab-size-to 250880 \
    "
ZERO_STAGE=0
DEEPSPEED_ARGS=" --deepspeed --zero-stage ${ZERO_STAGE} --deepspeed-activation-checkpointing "
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
export CMD=" pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE $GPT_ARGS $DEEPSPEED_ARGS "
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
