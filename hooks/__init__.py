"""Hook points, the hooked root module and the activation cache; importable only as `t2lens.hooks`.

This is the lowest layer: it knows torch and transformer_lens and nothing else of t2lens.
"""

if __name__ != "t2lens.hooks":
    # Imported under two names, this package would exist twice, with two unrelated HookPoint classes.
    raise ImportError("import this package as 't2lens.hooks', not as 'hooks'")

import warnings

with warnings.catch_warnings():  # tqdm's advice to install widgets, in every notebook that imports t2lens
    warnings.filterwarnings("ignore", message="IProgress not found")
    import transformer_lens as _  # noqa: F401

from .cache import ActivationCache as ActivationCache
from .cache import load_cache as load_cache
from .depth import DepthStack as DepthStack
from .describe import HookRow as HookRow
from .describe import HookTable as HookTable
from .names import resolve_names as resolve_names
from .plain_sum import NotAdditiveError as NotAdditiveError
from .point import HookPoint as HookPoint
from .root import HookedRoot as HookedRoot
