"""Open What if, for the address `what-if`."""

from __future__ import annotations

import streamlit as st

st.switch_page("explorer/pages/whatif.py", query_params=st.query_params.to_dict())
