"""Learn: parallel training in short lessons. Pure: values and pictures, no Streamlit."""
