"""The model graph as a drawing: scene, layout, overlays. No Streamlit."""
