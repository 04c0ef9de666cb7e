"""The faults, and the tests that guard against each. (`guard_list.py` has the guards.)

`tests/conftest.py` marks these tests `fault` and writes their numbers into pytest's results; `tests/faults/report.py`
makes docs/reliability.md of such results. A name in here that is no test fails test_cases.py.
"""

from dataclasses import dataclass

FAULTS = "tests/faults/"
ALLOC, FORMING = f"{FAULTS}test_alloc_faults.py", f"{FAULTS}test_forming_faults.py"
HEAP, OP, SIGNAL, GROWTH = (f"{FAULTS}test_{name}_faults.py" for name in ("heap", "op", "signal", "growth"))
_OTHERS = ("faults_in_turn", "guards", "many_calls", "late_ranks", "recovery", "call_order")
IN_TURN, GUARDS, MANY, LATE, RECOVERY, ORDER = (f"{FAULTS}test_{name}.py" for name in _OTHERS)
PROTOCOL, BLOCKS, RESULTS = (
    f"tests/fused/test_{name}.py" for name in ("protocol", "gather_scatter_ops", "results")
)
LIFECYCLE, SIGNALS, GPU_HEAP, BOOTSTRAP = (
    f"tests/pyrocshmem/test_{name}.py" for name in ("lifecycle", "signal", "gpu_heap", "bootstrap")
)
WORKSPACE, GEMM, SCHEDULES = (
    f"tests/stream_k/test_{name}.py" for name in ("workspace", "gemm", "gemm_schedules")
)
ALONE, VOTES, SECRET = (f"tests/pyrocshmem/test_{name}.py" for name in ("alone", "votes", "secret"))
VOTE_MODEL, BUSY, KILLS = (
    "tests/model/test_votes.py",
    f"{FAULTS}test_busy_machine.py",
    f"{FAULTS}test_kills.py",
)
ROWS = "tests/fused/test_new_rows.py"
CLOSED, IN_A_ROW = f"{FAULTS}test_closed_peers.py", "tests/stream_k/test_back_to_back.py"
HARNESS, LITMUS = "tests/compile/test_harness.py", "tests/litmus/test_litmus.py"
GPU_ALLOC = "tests/finegrained_alloc/test_gpu.py"
HOSTS, NETWORKS = "tests/hosts/test_faults.py", "tests/hosts/test_namespaces.py"


@dataclass(frozen=True)
class Fault:
    """number: of the case. what: happens. then: what must follow. tests: `path::function`. gpu: not shown on a CPU."""

    number: int
    what: str
    then: str
    tests: tuple[str, ...]
    gpu: bool = False


def tests_in(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}::test_{name}" for name in names)


CASES = (
    Fault(
        1,
        "a peer is killed in the middle of an op, or while heaps form",
        "survivors raise PeerTimeout with its facts within the budget + 2 s; nothing stays in /dev/shm; they go on "
        "with a new heap; the next job works",
        tests_in(IN_TURN, "case_1_a_peer_is_killed_in_the_middle_of_an_op")
        + tests_in(HEAP, "case_1_a_killed_peer_is_named_in_time_and_leaves_nothing")
        + tests_in(KILLS, "killed_at_random_instants_while_heaps_form")
        + tests_in(GROWTH, "case_1_a_rank_killed_while_the_heap_grows")
        + tests_in(
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
        tests_in(IN_TURN, "case_2_a_peer_is_stopped_and_resumed")
        + tests_in(LATE, "a_late_rank_sees_the_abort_and_writes_nothing"),
    ),
    Fault(
        3,
        "a peer is late by 0.8 of the budget",
        "succeeds, bits equal to the undelayed call",
        tests_in(IN_TURN, "case_3_a_peer_that_is_late_changes_nothing"),
    ),
    Fault(
        4,
        "one rank raises before its call",
        "the others raise PeerAborted with its message in under 1 s",
        tests_in(IN_TURN, "case_4_a_rank_raises_before_its_call")
        + tests_in(HEAP, "case_4_a_rank_that_raises_before_its_call")
        + tests_in(LIFECYCLE, "peers_in_a_vote_hear_of_a_fault_in_under_a_second"),
    ),
    Fault(
        5,
        "shapes or dtypes differ between ranks",
        "CallMismatch on all, listing each rank's call; of new calls the outputs are untouched; of calls that are "
        "known but for their rows it comes at that call or the next, whose results are invalid",
        tests_in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks", "heaps_of_different_sizes")
        + tests_in(OP, "ranks_that_disagree")
        + tests_in(BLOCKS, "ranks_that_disagree_are_told")
        + tests_in(ROWS, "ranks_with_different_rows_hear_of_it")
        + tests_in(ORDER, "rows_are_compared"),
    ),
    Fault(
        6,
        "calls in a different order, or with a different configuration",
        "CallMismatch on all, listing each rank's call; outputs untouched",
        tests_in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks")
        + tests_in(OP, "ranks_that_disagree")
        + tests_in(ORDER, "case_6_planned_calls_in_another_order"),
    ),
    Fault(
        7,
        "1,000 calls (10,000 on GPUs), changing data, nothing zeroed, the epoch started just under 2^31 and 2^32",
        "exact every time",
        tests_in(MANY, "cases_7_and_27_many_calls_with_random_delays_across_both_wraps")
        + tests_in(PROTOCOL, "epochs_wrap_around", "a_late_rank")
        + tests_in(SIGNALS, "epochs_wrap"),
    ),
    Fault(
        8,
        "a fast rank one call ahead, its peer stalled between flag and read",
        "exact",
        tests_in(PROTOCOL, "a_stalled_reader", "a_rank_that_is_a_call_ahead", "slow_flags")
        + tests_in(PROTOCOL, "messages_of_a_rank_that_is_a_call_ahead"),
    ),
    Fault(
        9,
        "workspace too small for the block size asked",
        "ValueError before launch",
        tests_in(OP, "places_that_are_too_small") + tests_in(WORKSPACE, "too_small"),
    ),
    Fault(
        10,
        "CUDA graphs of one, two and three calls, 50 replays, inputs changed in place, eager calls between",
        "exact; allocating under capture raises and leaves the heap usable",
        tests_in(MANY, "case_10_graphs_of_one_two_and_three_calls")
        + tests_in(BLOCKS, "replayed_in_a_graph")
        + tests_in(WORKSPACE, "does_not_grow_under_capture", "replayed_in_a_graph")
        + tests_in(GPU_HEAP, "capture_refuses_allocation_and_leaves_the_heap_usable"),
        gpu=True,
    ),
    Fault(
        11,
        "two streams, or two threads, on one workspace, with a sleep planted",
        "serialised, or WorkspaceBusy; never wrong",
        tests_in(WORKSPACE, "busy") + tests_in(MANY, "case_11_two_streams_on_one_workspace"),
    ),
    Fault(
        12,
        "data, then flag, between every pair of ranks in both directions",
        "no stale read",
        tests_in(LITMUS, "no_stale_read", "who_has_met_misses_nothing"),
    ),
    Fault(
        13,
        "a grid larger than what is resident; multiprocessors taken for 78, 132, 304",
        "finishes, or is refused with both numbers",
        tests_in(OP, "more_programs_than_are_resident")
        + tests_in(SIGNALS, "a_chain_longer_than_what_is_resident_ends")
        + tests_in(SCHEDULES, "one_tile_for_all_programs"),
    ),
    Fault(
        14,
        "heap exhausted on one rank",
        "HeapOutOfMemory (requested, free, largest) on all; no rank keeps a piece",
        tests_in(HEAP, "case_14_exhausted_on_one_rank", "case_14_exhausted_by_fragments")
        + tests_in(OP, "places_that_are_too_small")
        + tests_in(
            GROWTH,
            "case_14_one_rank_has_no_memory_to_grow",
            "case_14_a_full_dev_shm_is_an_error_and_never_a_sigbus",
        ),
    ),
    Fault(
        15,
        "double free, interior or foreign pointer, use after free",
        "ValueError; in debug mode freed memory reads as NaN",
        tests_in(HEAP, "case_15_bad_frees", "case_15_use_after_free"),
    ),
    Fault(
        16,
        "a tensor not on the heap, on another device, a peer out of range, a global rank for a subgroup",
        "ValueError before launch",
        tests_in(HEAP, "case_16_views_that_can_not_be")
        + tests_in(OP, "wrong_calls")
        + tests_in(BLOCKS, "wrong_calls"),
    ),
    Fault(
        17,
        "handle of a part, truncated, damaged, of a dead process, of something else",
        "an error when the heap forms that names the cause; nothing else is mapped; files mode 0600",
        tests_in(
            FORMING,
            "case_17_bad_handles_are_errors_that_name_the_cause",
            "case_17_only_the_user_may_open_a_heap_and_only_while_it_forms",
        )
        + tests_in(GROWTH, "case_17_one_rank_can_not_map_what_a_peer_has_grown_by")
        + tests_in(
            ALLOC,
            "handle_of_a_part_of_an_allocation",
            "truncated_handle",
            "handle_of_a_killed_process",
            "handle_of_a_process_that_ended_well",
            "another_file_under_the_same_descriptor_is_not_mapped",
            "a_file_that_others_may_use_is_not_mapped",
        )
        + tests_in(f"{FAULTS}test_security.py", "a_peer_s_size_is_checked_before_it_is_used")
        + tests_in(GPU_ALLOC, "handle_of_memory_that_is_gone", "pool_memory_can_be_exported"),
    ),
    Fault(
        18,
        "M, N or K of 0; M < ranks; prime sizes; transposed, strided, stride-0, misaligned inputs",
        "right (K = 0 gives zeros), or ValueError; every element outside untouched",
        tests_in(RESULTS, "three_ranks", "two_ranks", "four_ranks", "one_rank")
        + tests_in(BLOCKS, "three_ranks", "two_ranks", "four_ranks")
        + tests_in(GEMM, "shapes", "sizes_of_zero", "layouts", "outputs")
        + tests_in(OP, "wrong_calls"),
    ),
    Fault(
        19,
        "M x N, or an offset, beyond 2^31",
        "right, or ValueError",
        tests_in(OP, "strides_beyond_2_31", "an_output_beyond_2_31", "places_beyond_2_31_of_a_heap")
        + tests_in("tests/pyrocshmem/test_allocator.py", "offsets_beyond_31_bits"),
    ),
    Fault(
        20,
        "NaN, infinity, -0.0, denormals on one rank",
        "the same elements as the reference on every rank; no hang",
        tests_in(OP, "special_values_on_one_rank") + tests_in(GEMM, "special_values"),
    ),
    Fault(
        21,
        "mixed or unsupported dtypes",
        "TypeError with the list of allowed ones",
        tests_in(OP, "wrong_calls") + tests_in(BLOCKS, "wrong_calls") + tests_in(GEMM, "wrong_dtypes"),
    ),
    Fault(
        22,
        "20 runs, all ranks",
        "bitwise equal",
        tests_in(RESULTS, "20_calls")
        + tests_in(BLOCKS, "20_calls")
        + tests_in(SCHEDULES, "same_bits_in_20_runs"),
    ),
    Fault(
        23,
        "a rank missing when the group forms; out of memory on one",
        "InitTimeout naming the missing ranks in time",
        tests_in(FORMING, "case_23_a_missing_rank_is_named", "case_23_out_of_memory")
        + tests_in(BOOTSTRAP, "missing_ranks_are_named"),
    ),
    Fault(
        24,
        "close twice, close while peers wait, exit without closing, fork after init",
        "harmless, or an error; no leak",
        tests_in(FORMING, "case_24_close_while_peers_wait")
        + tests_in(
            CLOSED,
            "a_call_that_a_peer_never_makes_ends_at_once",
            "calls_that_a_peer_has_made_end_well_after_it_has_closed",
        )
        + tests_in(
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
        tests_in(ALLOC, "library_not_built", "library_damaged", "more_memory_than_there_is")
        + tests_in(ALLOC, "no_file_may_grow", "no_address_space", "no_gpu_runtime")
        + tests_in(GPU_ALLOC, "out_of_memory_and_the_process_lives", "pool_out_of_memory"),
    ),
    Fault(
        26,
        "two heaps, overlapping subgroups, ops on both at once",
        "independent; flags never collide",
        tests_in(FORMING, "case_26_overlapping_groups_and_two_heaps_of_one_group")
        + tests_in(PROTOCOL, "two_workspaces_and_two_heaps", "subgroups_and_a_mesh"),
    ),
    Fault(
        27,
        "ranks delayed at random, call after call (10,000 on GPUs, 1,500 on a CPU)",
        "exact",
        tests_in(MANY, "cases_7_and_27_many_calls_with_random_delays_across_both_wraps"),
    ),
    Fault(
        28,
        "a second job on the same machine at the same time",
        "independent; names don't collide",
        tests_in(FORMING, "case_28_two_jobs_at_the_same_time"),
    ),
    Fault(
        29,
        "no process group where there should be one (WORLD_SIZE > 1, or after destroy_process_group)",
        "RuntimeError naming what to call; never a silent computation alone",
        tests_in(
            ALONE,
            "a_rank_without_a_process_group_computes_nothing_alone",
            "nothing_is_computed_alone_once_the_process_group_was_destroyed",
        ),
    ),
    Fault(
        30,
        "a schedule that splits tiles, in back-to-back launches, under dependent launch, beside another kernel",
        "ends; same bits",
        tests_in(
            IN_A_ROW,
            "in_a_row",
            "as_a_graph",
            "beside_other_kernels",
            "finishers_do_not_wait_in_a_chain",
            "the_product_whose_timing_did_not_end",
        ),
    ),
    Fault(
        31,
        "machine loaded twofold, ranks descheduled for seconds",
        "ops pass; only true time-outs raise",
        tests_in(BUSY, "case_31_a_rank_that_is_descheduled_for_seconds", "case_31_beside_two_busy_loops"),
    ),
    Fault(
        32,
        "a rank aborts, or a peer's time runs out, in the moment in which a vote completes",
        "either all ranks have the vote's result and hear of the abort at the next call, or none has",
        tests_in(VOTE_MODEL, "votes_hold", "votes_hold_when_ranks_die_and_time_runs_out")
        + tests_in(
            BOOTSTRAP,
            "a_complete_vote_reports_no_abort",
            "a_rank_that_comes_as_time_runs_out_has_come_for_all",
            "the_first_reason_is_the_one_that_all_hear",
        )
        + tests_in(
            VOTES,
            "all_have_the_result_or_none_when_a_rank_aborts_at_once",
            "all_have_the_result_or_none_when_the_last_comes_as_time_runs_out",
            "recoveries_back_to_back",
        ),
    ),
    Fault(
        33,
        "another process on the host reaches the store's port",
        "with a shared secret it can't join, change a vote, or make a rank map memory; without one it can't make a "
        "rank take another's memory for a peer's",
        tests_in(
            SECRET,
            "what_a_stranger_writes_is_an_error_on_all_ranks",
            "every_vote_abort_farewell_and_ledger_record_of_a_job_is_signed",
            "a_stranger_at_the_store_of_a_job_can_end_it_but_not_speak_for_a_rank",
            "what_was_recorded_of_an_earlier_job_with_the_same_secret_is_worth_nothing",
        )
        + tests_in(BOOTSTRAP, "a_record_that_does_not_parse_is_named")
        + tests_in(
            FORMING,
            "case_33_a_forged_offer_is_an_error_on_all_ranks",
            "case_33_an_offer_of_another_job_is_an_error_on_all_ranks",
        )
        + tests_in(
            GROWTH,
            "case_33_a_forged_offer_of_more_memory",
            "case_33_pieces_of_one_offer_are_not_mapped_in_each_other_s_place",
        ),
    ),
    Fault(
        34,
        "a rank, or all ranks of a host, are killed, late, or raise, while others of their group are on other hosts",
        "PeerTimeout names host and rank within the budget + 2 s, PeerAborted has the reason; late by 0.8 of the "
        "budget is right; after recover calls are right",
        tests_in(
            HOSTS,
            "a_rank_or_a_host_is_killed",
            "a_host_that_has_left",
            "a_late_rank_is_waited_for",
            "a_rank_that_raises_is_heard_on_all_hosts",
            "recovery_after_a_wait_in_vain",
        ),
    ),
    Fault(
        35,
        "a host is cut off the network for 5 s",
        "with a budget of 10 s the right result; with 2 s PeerTimeout, and after recover the right result",
        tests_in(
            NETWORKS,
            "a_network_that_is_gone_for_less_than_the_budget",
            "a_network_that_is_gone_for_longer",
        ),
    ),
    Fault(
        36,
        "hosts make different calls, run other versions, or have other numbers of ranks",
        "CallMismatch with each rank's call, ValueError with both versions or all numbers, on all ranks",
        tests_in(
            HOSTS,
            "hosts_make_different_calls",
            "hosts_of_two_versions",
            "different_numbers_of_ranks",
            "ranks_of_a_host_that_do_not_follow_one_another",
        ),
    ),
)
