"""Charts and drawings, as plain functions. No Streamlit."""
