"""Where pages of before have gone: their links open the page that shows the same now."""

from __future__ import annotations

import streamlit as st

PATH = (st.context.url or "").partition("?")[0].rstrip("/").rpartition("/")[2]
NOW = "compare" if PATH == "topology" else "overview"

st.switch_page(f"explorer/pages/{NOW}.py", query_params=st.query_params.to_dict())
