"""The model graph as a drawing: scene, layers, overlays. No Streamlit."""
