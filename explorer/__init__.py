"""The explorer: Streamlit pages that ask `planner_core` for plans and draw them.

`analysis`, `graph` and `figures` are plain functions of plans; only `session`, `components` and `pages` import Streamlit. No
page holds a cost or a rule: what it shows was asked of `planner_core`.
"""
