"""Where pages of before have gone, and what the name in the menu may be written as: these addresses open the page that shows it."""

from __future__ import annotations

import streamlit as st

PATH = (st.context.url or "").partition("?")[0].rstrip("/").rpartition("/")[2]
NOW = {"topology": "compare", "what-if": "whatif"}.get(PATH, "overview")

st.switch_page(f"explorer/pages/{NOW}.py", query_params=st.query_params.to_dict())
