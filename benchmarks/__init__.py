"""Benchmarks of every op beside its peers: `python -m pyrocshmem bench --help`.

`shapes` says what is measured, `providers` by whom, `measure` takes the samples, `check` holds the timed outputs
to float64, `records` writes them; `tables`, `documents` and `plots` read the records, `chosen` what a configuration
chose in them. `models` draws shapes, `seeds` says whose seeds are published, `headline` what README shows.
"""

if __name__ != "pyrocshmem.benchmarks":
    raise ImportError(
        "this is pyrocshmem.benchmarks: import it by that name, since modules of two names would be two modules"
    )
