"""Charts, drawings and the printable report, as plain functions. No Streamlit."""
