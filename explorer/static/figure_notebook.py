"""The template of a notebook (see `explorer.text.notebook`): `# %%` begins a cell, MODEL and OPTIONS are replaced."""

# %% [markdown]
# # The plans of this page, from the library
# `pip install` Shardscope and plotly, then run both cells. Change OPTIONS as you like: they are those of `shardscope.plan`.

# %%
from typing import Any

import plotly.graph_objects as go

import planner_core as shardscope

MODEL = "llama-3-8b"
OPTIONS: Any = {"cluster": "2x8-h100"}
result = shardscope.plan(MODEL, **OPTIONS)
for plan in result.plans:
    print(
        f"{plan.name:32} {plan.cost.step_time_s:9.4f} s {plan.cost.memory_bytes['peak'] / 2**30:8.2f} GiB  fits: {plan.fits}"
    )

# %%
GIB = 2**30
plans = go.Figure(layout={"xaxis_title": "step time, ms", "yaxis_title": "memory per GPU, GiB"})
plans.add_scatter(
    x=[plan.cost.step_time_s * 1e3 for plan in result.plans],
    y=[plan.cost.memory_bytes["peak"] / GIB for plan in result.plans],
    text=[plan.name for plan in result.plans],
    mode="markers+text",
    textposition="top center",
)
plans.show()
for found in result.candidates:
    title = {"text": f"every candidate of {found.block}"}
    block = go.Figure(
        layout={"title": title, "xaxis_title": "communication per step, ms", "yaxis_title": "memory per GPU, GiB"}
    )
    block.add_scattergl(x=found.model_comm_s * 1e3, y=found.model_memory_bytes / GIB, mode="markers")
    block.show()
