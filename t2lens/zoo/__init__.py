"""Bundled trained models and how they were trained."""
