"""What stands in the address of a page: settings, pins, edits. No Streamlit."""
