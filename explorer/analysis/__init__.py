"""Quantities that the pages derive from results. No Streamlit."""
