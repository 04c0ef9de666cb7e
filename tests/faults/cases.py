"""The faults, and the tests that guard against each; the guards, and the tests that turn red without them.

`tests/conftest.py` marks these tests `fault` and writes their numbers into pytest's results; `tests/faults/report.py`
makes docs/reliability.md of such results. A name in here that is no test fails test_cases.py.
"""

from dataclasses import dataclass

FAULTS = "tests/faults/"
ALLOC, FORMING = f"{FAULTS}test_alloc_faults.py", f"{FAULTS}test_forming_faults.py"
HEAP, OP, SIGNAL = (f"{FAULTS}test_{name}_faults.py" for name in ("heap", "op", "signal"))
IN_TURN, GUARDS, MANY = (f"{FAULTS}test_{name}.py" for name in ("faults_in_turn", "guards", "many_calls"))
PROTOCOL, BLOCKS, RESULTS = (
    f"tests/fused/test_{name}.py" for name in ("protocol", "gather_scatter_ops", "results")
)
LIFECYCLE, SIGNALS, GPU_HEAP, BOOTSTRAP = (
    f"tests/pyrocshmem/test_{name}.py" for name in ("lifecycle", "signal", "gpu_heap", "bootstrap")
)
WORKSPACE, GEMM, SCHEDULES = (
    f"tests/stream_k/test_{name}.py" for name in ("workspace", "gemm", "gemm_schedules")
)
HARNESS, LITMUS = "tests/compile/test_harness.py", "tests/litmus/test_litmus.py"


@dataclass(frozen=True)
class Fault:
    """number: of the case. what: happens. then: what must follow. tests: `path::function`. gpu: not shown on a CPU."""

    number: int
    what: str
    then: str
    tests: tuple[str, ...]
    gpu: bool = False


@dataclass(frozen=True)
class Guard:
    """name. without: what goes wrong when it is taken out. red: tests that then fail. controls: tests that take it out
    and assert just that."""

    name: str
    without: str
    red: tuple[str, ...]
    controls: tuple[str, ...]


def _in(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}::test_{name}" for name in names)


CASES = (
    Fault(
        1,
        "a peer is killed in the middle of an op",
        "survivors raise PeerTimeout with its facts within the budget + 2 s; nothing stays in /dev/shm; they go on "
        "with a new heap; the next job works",
        _in(IN_TURN, "case_1_a_peer_is_killed_in_the_middle_of_an_op")
        + _in(HEAP, "case_1_a_killed_peer_is_named_in_time_and_leaves_nothing")
        + _in(
            SIGNAL,
            "the_wait_ends_in_time_and_names_what_it_waited_for",
            "a_peer_that_waits_is_told_at_once",
            "a_peer_that_waits_for_nothing_is_told",
            "nothing_is_written_after_a_wait_that_gave_up",
            "the_first_record_stands",
        ),
    ),
    Fault(
        2,
        "a peer is stopped, later resumed",
        "the same; the late rank sees the abort, raises, writes nothing; the same heap recovers",
        _in(IN_TURN, "case_2_a_peer_is_stopped_and_resumed")
        + _in(f"{FAULTS}test_late_ranks.py", "a_late_rank_sees_the_abort_and_writes_nothing"),
    ),
    Fault(
        3,
        "a peer is late by 0.8 of the budget",
        "succeeds, bits equal to the undelayed call",
        _in(IN_TURN, "case_3_a_peer_that_is_late_changes_nothing"),
    ),
    Fault(
        4,
        "one rank raises before its call",
        "the others raise PeerAborted with its message in under 1 s",
        _in(IN_TURN, "case_4_a_rank_raises_before_its_call")
        + _in(HEAP, "case_4_a_rank_that_raises_before_its_call")
        + _in(LIFECYCLE, "peers_in_a_vote_hear_of_a_fault_in_under_a_second"),
    ),
    Fault(
        5,
        "shapes or dtypes differ between ranks",
        "CallMismatch on all, listing each rank's call; outputs untouched",
        _in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks", "heaps_of_different_sizes")
        + _in(OP, "ranks_that_disagree")
        + _in(BLOCKS, "ranks_that_disagree_are_told"),
    ),
    Fault(
        6,
        "calls in a different order, or with a different configuration",
        "CallMismatch on all, listing each rank's call; outputs untouched",
        _in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks") + _in(OP, "ranks_that_disagree"),
    ),
    Fault(
        7,
        "call after call, changing data, nothing zeroed, the epoch started just under 2^31 and 2^32",
        "exact every time",
        _in(MANY, "cases_7_and_27_many_calls_with_random_delays_across_both_wraps")
        + _in(PROTOCOL, "epochs_wrap_around", "a_late_rank")
        + _in(SIGNALS, "epochs_wrap"),
    ),
    Fault(
        8,
        "a fast rank one call ahead, its peer stalled between flag and read",
        "exact",
        _in(PROTOCOL, "a_stalled_reader", "a_rank_that_is_a_call_ahead", "slow_flags")
        + _in(PROTOCOL, "messages_of_a_rank_that_is_a_call_ahead"),
    ),
    Fault(
        9,
        "workspace too small for the block size asked",
        "ValueError before launch",
        _in(OP, "places_that_are_too_small") + _in(WORKSPACE, "too_small"),
    ),
    Fault(
        10,
        "CUDA graphs of one, two and three calls, 50 replays, inputs changed in place, eager calls between",
        "exact; allocating under capture raises and leaves the heap usable",
        _in(MANY, "case_10_graphs_of_one_two_and_three_calls")
        + _in(BLOCKS, "replayed_in_a_graph")
        + _in(WORKSPACE, "does_not_grow_under_capture", "replayed_in_a_graph")
        + _in(GPU_HEAP, "capture_refuses_allocation_and_leaves_the_heap_usable"),
        gpu=True,
    ),
    Fault(
        11,
        "two streams, or two threads, on one workspace, with a sleep planted",
        "serialised, or WorkspaceBusy; never wrong",
        _in(WORKSPACE, "busy") + _in(MANY, "case_11_two_streams_on_one_workspace"),
    ),
    Fault(
        12,
        "data, then flag, between every pair of ranks in both directions",
        "no stale read",
        _in(LITMUS, "no_stale_read", "who_has_met_misses_nothing"),
    ),
    Fault(
        13,
        "a grid larger than what is resident; multiprocessors taken for 78, 132, 304",
        "finishes, or is refused with both numbers",
        _in(OP, "more_programs_than_are_resident")
        + _in(SIGNALS, "a_chain_longer_than_what_is_resident_ends")
        + _in(SCHEDULES, "one_tile_for_all_programs"),
    ),
    Fault(
        14,
        "heap exhausted on one rank",
        "HeapOutOfMemory (requested, free, largest) on all; no rank keeps a piece",
        _in(HEAP, "case_14_exhausted_on_one_rank", "case_14_exhausted_by_fragments")
        + _in(OP, "places_that_are_too_small"),
    ),
    Fault(
        15,
        "double free, interior or foreign pointer, use after free",
        "ValueError; in debug mode freed memory reads as NaN",
        _in(HEAP, "case_15_bad_frees"),
    ),
    Fault(
        16,
        "a tensor not on the heap, on another device, a peer out of range, a global rank for a subgroup",
        "ValueError before launch",
        _in(HEAP, "case_16_views_that_can_not_be") + _in(OP, "wrong_calls") + _in(BLOCKS, "wrong_calls"),
    ),
    Fault(
        17,
        "handle of a part, truncated, damaged, of a dead process, of something else",
        "an error when the heap forms that names the cause; nothing else is mapped; files mode 0600",
        _in(
            FORMING,
            "case_17_bad_handles_are_errors_that_name_the_cause",
            "case_17_only_the_user_may_open_a_heap_and_only_while_it_forms",
        )
        + _in(
            ALLOC,
            "handle_of_a_part_of_an_allocation",
            "truncated_handle",
            "handle_of_a_killed_process",
            "handle_of_a_process_that_ended_well",
            "another_file_under_the_same_name_is_not_mapped",
            "a_file_that_others_may_use_is_not_mapped",
        )
        + _in(f"{FAULTS}test_security.py", "a_peer_s_size_is_checked_before_it_is_used"),
    ),
    Fault(
        18,
        "M, N or K of 0; M < ranks; prime sizes; transposed, strided, stride-0, misaligned inputs",
        "right (K = 0 gives zeros), or ValueError; every element outside untouched",
        _in(RESULTS, "three_ranks", "two_ranks", "four_ranks", "one_rank")
        + _in(BLOCKS, "three_ranks", "two_ranks", "four_ranks")
        + _in(GEMM, "shapes", "sizes_of_zero", "layouts", "outputs")
        + _in(OP, "wrong_calls"),
    ),
    Fault(
        19,
        "M x N, or an offset, beyond 2^31",
        "right, or ValueError",
        _in(OP, "strides_beyond_2_31", "an_output_beyond_2_31")
        + _in("tests/pyrocshmem/test_allocator.py", "offsets_beyond_31_bits"),
    ),
    Fault(
        20,
        "NaN, infinity, -0.0, denormals on one rank",
        "the same elements as the reference on every rank; no hang",
        _in(OP, "special_values_on_one_rank") + _in(GEMM, "special_values"),
    ),
    Fault(
        21,
        "mixed or unsupported dtypes",
        "TypeError with the list of allowed ones",
        _in(OP, "wrong_calls") + _in(BLOCKS, "wrong_calls") + _in(GEMM, "wrong_dtypes"),
    ),
    Fault(
        22,
        "20 runs, all ranks",
        "bitwise equal",
        _in(RESULTS, "20_calls") + _in(BLOCKS, "20_calls") + _in(SCHEDULES, "same_bits_in_20_runs"),
    ),
    Fault(
        23,
        "a rank missing when the group forms; out of memory on one",
        "InitTimeout naming the missing ranks in time",
        _in(FORMING, "case_23_a_missing_rank_is_named", "case_23_out_of_memory")
        + _in(BOOTSTRAP, "missing_ranks_are_named"),
    ),
    Fault(
        24,
        "close twice, close while peers wait, exit without closing, fork after init",
        "harmless, or an error; no leak",
        _in(FORMING, "case_24_close_while_peers_wait")
        + _in(
            LIFECYCLE,
            "close_gives_the_memory_back_once_no_tensor_uses_it",
            "a_fork_can_not_use_the_heap_nor_harm_it",
            "a_program_that_ends_without_closing_tells_its_peers",
            "exit_with_live_tensors_leaves_nothing",
        ),
    ),
    Fault(
        25,
        "the C library not built, allocation fails",
        "the build command in the message; MemoryError; the process lives",
        _in(ALLOC, "library_not_built", "library_damaged", "more_memory_than_there_is")
        + _in(ALLOC, "no_file_may_grow", "no_address_space", "no_gpu_runtime"),
    ),
    Fault(
        26,
        "two heaps, overlapping subgroups, ops on both at once",
        "independent; flags never collide",
        _in(FORMING, "case_26_overlapping_groups_and_two_heaps_of_one_group")
        + _in(PROTOCOL, "two_workspaces_and_two_heaps", "subgroups_and_a_mesh"),
    ),
    Fault(
        27,
        "ranks delayed at random, call after call (10,000 on GPUs, 200 on a CPU)",
        "exact",
        _in(MANY, "cases_7_and_27_many_calls_with_random_delays_across_both_wraps"),
    ),
    Fault(
        28,
        "a second job on the same machine at the same time",
        "independent; names don't collide",
        _in(FORMING, "case_28_two_jobs_at_the_same_time"),
    ),
)

GUARD_LIST = (
    Guard(
        "barrier before a release",
        "a flag is raised while other threads' stores are under way",
        _in("tests/compile/test_kernels.py", "kernel") + _in(LITMUS, "no_stale_read"),
        _in(HARNESS, "missing_barrier_in_publish_is_found")
        + _in(SIGNALS, "flag_before_data_is_found")
        + _in(LITMUS, "a_guard_that_is_left_out_is_missed"),
    ),
    Guard(
        "drain of asynchronous stores",
        "a flag is raised before TMA stores, or a wave's stores on AMD, have landed",
        _in("tests/compile/test_kernels.py", "kernel"),
        _in(HARNESS, "release_rule", "gcn_needs_every_wave_to_drain"),
    ),
    Guard(
        "meeting of ranks",
        "a rank goes on before the last has come",
        _in(SIGNALS, "nobody_goes_on_before_the_last_has_come")
        + _in(PROTOCOL, "a_rank_that_is_a_call_ahead"),
        _in(SIGNALS, "without_meeting_a_rank_goes_on_too_early")
        + _in(PROTOCOL, "a_push_before_the_peer_has_entered_is_caught"),
    ),
    Guard(
        "epoch",
        "a flag of the call before passes for a fresh one",
        _in(PROTOCOL, "a_late_rank") + _in(SIGNALS, "epochs_wrap"),
        _in(PROTOCOL, "a_constant_epoch_is_caught") + _in(SIGNALS, "constant_epoch_is_found"),
    ),
    Guard(
        "two slots, of messages three",
        "what a peer still reads is overwritten",
        _in(PROTOCOL, "a_stalled_reader", "messages_of_a_rank_that_is_a_call_ahead"),
        _in(PROTOCOL, "a_single_slot_is_caught", "messages_of_a_rank_that_is_a_call_ahead"),
    ),
    Guard(
        "wait for the peers' partials",
        "a sum is made of what a peer has yet to send, or sent in the call before",
        _in(PROTOCOL, "partials_that_come_late", "no_sums_of_partials_that_were_given_up"),
        _in(PROTOCOL, "sums_that_do_not_wait_are_caught", "no_sums_of_partials_that_were_given_up"),
    ),
    Guard(
        "no message of a sum that lacks something",
        "a peer that comes late takes it for whole, and nothing tells its host",
        _in(f"{FAULTS}test_late_ranks.py", "a_late_rank_sees_the_abort_and_writes_nothing"),
        _in(f"{FAULTS}test_late_ranks.py", "a_late_rank_takes_sums_that_lack_something"),
    ),
    Guard(
        "abort watch",
        "a rank waits its whole budget for one that has given up",
        _in(SIGNAL, "a_peer_that_waits_is_told_at_once")
        + _in(IN_TURN, "case_4_a_rank_raises_before_its_call"),
        _in(GUARDS, "case_1_without_the_abort_watch_peers_wait_on"),
    ),
    Guard(
        "vote",
        "ranks' heaps drift apart",
        _in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks"),
        _in(GUARDS, "cases_5_and_6_without_the_vote_heaps_drift_apart"),
    ),
    Guard(
        "fingerprint of a call",
        "ranks run different calls into each other and get different results",
        _in(OP, "ranks_that_disagree"),
        _in(GUARDS, "cases_5_and_6_without_the_fingerprint_results_differ"),
    ),
    Guard(
        "counting anew after a fault",
        "ranks that are a call apart don't find together",
        _in(IN_TURN, "case_4_a_rank_raises_before_its_call"),
        _in(f"{FAULTS}test_recovery.py", "calls_must_be_counted_anew"),
    ),
)


def properties_of(test: str) -> list[tuple[str, str]]:
    """("case" or "guard", number or name) of a test, which is named `path::function`, without parameters."""
    found = [("case", str(case.number)) for case in CASES if test in case.tests]
    return found + [("guard", guard.name) for guard in GUARD_LIST if test in guard.controls]
