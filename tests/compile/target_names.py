"""The names of the targets, importable where Triton must not be imported yet."""

TARGETS = ("sm_90", "gfx942", "gfx950")
