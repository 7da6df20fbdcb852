"""Hook points, named capture and activation caches: the lowest layer, importable as ``t2lens.hooks`` only."""

# From the root of a checkout the folder is also visible as plain `hooks`; imported under both names,
# every class would exist twice.
if __name__ != "t2lens.hooks":
    raise ImportError("import this package as 't2lens.hooks', not 'hooks'")
