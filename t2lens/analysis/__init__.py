"""Numbers computed from traces and models: what pictures, tables and files show."""
