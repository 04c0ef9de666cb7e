"""Numbers as people read them."""


def format_seconds(seconds: float) -> str:
    """A time with the unit in which it reads well: "12.3 us", "4.56 ms" or "1.23 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
