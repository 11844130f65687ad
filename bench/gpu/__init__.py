"""One rank of real plans at full size on one GPU: its steps, memory and kernels, ours and the stock ways.

    python -m bench.gpu                    # at most ten minutes on a machine with a GPU: no network, stock torch and transformers
    python -m bench.gpu --dry              # the same jobs with tiny models, on the CPU too: does everything work?
    python -m bench.gpu --only t5 vit      # some cases alone
    python -m bench.gpu --table            # docs/HARDWARE.md and the rows of the page "Measured", from all rows; no GPU

A plan of n ranks runs as rank 0 of a fake process group of n: all compute, casts, copies, allocations and the optimizer are real,
collectives move nothing. So a row says what a rank computes and holds, and nothing of the network. One rank: nccl.

cases       which plans, and what else runs beside them; `plans/` are made before, by `python -m bench.gpu --plans`
__main__    runs the jobs one after the other, each in a process of its own, and writes their rows
rank        one job
setups      the model of a plan under `apply`, under FSDP2, under parallelize_module
kernels     kernels of a profiled step, by kind
loop        the exported script for ten steps, on the GPU and on the CPU
page        docs/HARDWARE.md
"""
