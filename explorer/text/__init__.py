"""Words, units and commands that the pages say. No Streamlit."""
