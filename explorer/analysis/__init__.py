"""What the pages work out of results. No Streamlit."""
