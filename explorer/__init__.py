"""The front end: reads results, never searches. Only `state`, the pages and the component import Streamlit."""
