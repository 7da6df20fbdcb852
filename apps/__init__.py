"""The Streamlit dashboard, importable as ``t2lens.apps`` only. Streamlit is imported nowhere else."""

from pathlib import Path

# From the root of a checkout the folder is also visible as plain `apps`; imported under both names,
# every module would exist twice.
if __name__ != "t2lens.apps":
    raise ImportError("import this package as 't2lens.apps', not 'apps'")

__all__ = ["dashboard_file"]


def dashboard_file() -> Path:
    """The script that Streamlit runs: `streamlit run` takes it, `t2lens app` starts it."""
    return Path(__file__).with_name("dashboard.py")
