"""Work outside the page's own run: exports, uploads, kept results. No Streamlit."""
