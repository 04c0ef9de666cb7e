"""A package, so that ranks which a test starts can import the test's module as `tests.<folder>.<module>`."""
