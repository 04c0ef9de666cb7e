"""Benchmarks of every op beside its peers: `python -m benchmarks --help`.

`shapes` says what is measured, `providers` by whom, `measure` takes the samples, `check` holds the timed outputs
to float64, `records` writes them; `tables` and `plots` read the records.
"""
