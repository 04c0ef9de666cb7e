"""Benchmarks of every op beside its peers: `python -m pyrocshmem bench --help`.

`shapes` says what is measured, `providers` by whom, `measure` takes the samples, `check` holds the timed outputs
to float64, `records` writes them; `tables` and `plots` read the records.
"""

if __name__ != "pyrocshmem.benchmarks":
    raise ImportError(
        "this is pyrocshmem.benchmarks: import it by that name, since modules of two names would be two modules"
    )
