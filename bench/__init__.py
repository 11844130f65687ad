"""Measurements that take long or depend on the machine: `python -m bench.NAME`, each writes a page of docs/.

    accuracy      plans run on processes and fake groups of every size, against their predictions   docs/ACCURACY.md
    baselines     every baseline against ours under its own constraints                             docs/BASELINES.md
    coverage      every model type of transformers, from its default config to a plan; `--depth`   docs/TRANSFORMERS.md
    gpu           one rank of real plans at full size on a GPU, ours and the stock ways            docs/HARDWARE.md
    hf_tp_plans   the plans that ship with transformers against ours                                docs/HF_TP_PLANS.md
    pages         the explorer in a browser: loads, clicks, layout shift, memory over a day         docs/PAGES.md
    published     step times of published training runs against their predictions, and bands        docs/PUBLISHED.md
                  (and their peak memory, docs/PUBLISHED_MEMORY.md)
    runtime       a step under a plan beside DDP, FSDP2 and parallelize_module on gloo ranks         docs/RUNTIME.md
    search        first plans, whole commands, and the search by depth and mesh; beside HiGHS       docs/BENCHMARKS.md
                  (and the step minimised beside the step simulated, docs/SIMULATION.md)

`support/` is what they share; `support/results/` keeps the rows, so that a long run can be stopped and taken up again.
"""
