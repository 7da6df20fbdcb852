"""A package, so that tests/hooks/ and tests/apps/ are never importable as plain `hooks` and `apps`."""
