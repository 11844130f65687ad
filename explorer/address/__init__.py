"""The state that the address of a page keeps: settings, pins, edits. No Streamlit."""
