"""Streamlit components of the dashboard."""
