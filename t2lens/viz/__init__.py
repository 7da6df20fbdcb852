"""Pictures of traces: numpy and xarray in, figures, pages and text out. No torch."""
