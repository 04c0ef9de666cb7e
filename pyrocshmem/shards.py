"""Who holds which rows or columns: the blocks of `torch.tensor_split`."""


def shard_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """[begin, end) of `size` items that `rank` holds: equal shares, the first `size % world_size` one longer.

    Example: 131 items on 3 ranks are (0, 44), (44, 88), (88, 131).
    """
    # torch.compile has no divmod of sizes that it traces.
    base, extra = size // world_size, size % world_size
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)
