"""Pages of the dashboard; each is a function without arguments."""
