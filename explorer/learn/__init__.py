"""Learn: tensor parallelism in thirteen short lessons. Pure: values and pictures, no Streamlit."""
