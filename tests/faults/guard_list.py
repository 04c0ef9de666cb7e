"""The guards: the tests that turn red without each, and those that take it out. (`cases.py` has the faults.)"""

from dataclasses import dataclass

from tests.faults.cases import (
    BOOTSTRAP,
    CASES,
    CLOSED,
    GUARDS,
    HARNESS,
    HEAP,
    HOSTS,
    IN_TURN,
    LATE,
    LITMUS,
    OP,
    ORDER,
    PROTOCOL,
    RECOVERY,
    SECRET,
    SIGNAL,
    SIGNALS,
    VOTE_MODEL,
    tests_in,
)

OVER_HOSTS = "tests/hosts/test_ops.py"
SENT_TILES, POLLS = "tests/fused/test_sent_tiles.py", "tests/compile/test_polls.py"
MANY_TENSORS, NORM_PROTOCOL = (
    f"tests/collectives/test_{name}.py" for name in ("many_calls", "rms_norm_protocol")
)


@dataclass(frozen=True)
class Guard:
    """name. without: what goes wrong when it is taken out. red: tests that then fail. controls: tests that take it out
    and assert just that."""

    name: str
    without: str
    red: tuple[str, ...]
    controls: tuple[str, ...]


GUARD_LIST = (
    Guard(
        "barrier before a release",
        "a flag is raised while other threads' stores are under way",
        tests_in("tests/compile/test_kernels.py", "kernel") + tests_in(LITMUS, "no_stale_read"),
        tests_in(HARNESS, "missing_barrier_in_publish_is_found")
        + tests_in(SIGNALS, "flag_before_data_is_found")
        + tests_in(LITMUS, "a_guard_that_is_left_out_is_missed"),
    ),
    Guard(
        "drain of asynchronous stores",
        "a flag is raised before TMA stores, or a wave's stores on AMD, have landed",
        tests_in("tests/compile/test_kernels.py", "kernel"),
        tests_in(HARNESS, "release_rule", "gcn_needs_every_wave_to_drain"),
    ),
    Guard(
        "meeting of ranks",
        "a rank goes on before the last has come",
        tests_in(SIGNALS, "nobody_goes_on_before_the_last_has_come")
        + tests_in(PROTOCOL, "a_rank_that_is_a_call_ahead"),
        tests_in(SIGNALS, "without_meeting_a_rank_goes_on_too_early")
        + tests_in(PROTOCOL, "a_push_before_the_peer_has_entered_is_caught"),
    ),
    Guard(
        "epoch",
        "a flag of the call before passes for a fresh one",
        tests_in(PROTOCOL, "a_late_rank") + tests_in(SIGNALS, "epochs_wrap"),
        tests_in(PROTOCOL, "a_constant_epoch_is_caught") + tests_in(SIGNALS, "constant_epoch_is_found"),
    ),
    Guard(
        "two slots",
        "what a peer still reads is overwritten",
        tests_in(PROTOCOL, "a_stalled_reader", "messages_of_a_rank_that_is_a_call_ahead"),
        tests_in(PROTOCOL, "a_single_slot_is_caught", "messages_of_a_rank_that_is_a_call_ahead"),
    ),
    Guard(
        "emptying of what was taken",
        "messages of the call before last pass for today's",
        tests_in(PROTOCOL, "messages_of_a_rank_that_is_a_call_ahead")
        + tests_in(MANY_TENSORS, "many_calls_with_random_delays"),
        tests_in(PROTOCOL, "messages_of_a_rank_that_is_a_call_ahead")
        + tests_in(MANY_TENSORS, "many_calls_with_random_delays"),
    ),
    Guard(
        "number of the call in a note",
        "squares of an earlier call pass for today's",
        tests_in(NORM_PROTOCOL, "late_ranks"),
        tests_in(NORM_PROTOCOL, "without_a_guard_late_ranks_are_noticed"),
    ),
    Guard(
        "wait for the peers' partials",
        "a sum is made of what a peer has yet to send, or sent in the call before",
        tests_in(PROTOCOL, "partials_that_come_late", "no_sums_of_partials_that_were_given_up"),
        tests_in(PROTOCOL, "sums_that_do_not_wait_are_caught", "no_sums_of_partials_that_were_given_up"),
    ),
    Guard(
        "no message of a sum that lacks something",
        "a peer that comes late takes it for whole, and nothing tells its host",
        tests_in(LATE, "a_late_rank_sees_the_abort_and_writes_nothing"),
        tests_in(LATE, "a_late_rank_takes_sums_that_lack_something"),
    ),
    Guard(
        "a look at the abort word behind messages of tiles",
        "a rank that is late between two kernels takes data of two calls for one",
        tests_in(SENT_TILES, "a_rank_that_is_late_between_the_two_kernels"),
        tests_in(SENT_TILES, "a_rank_that_is_late_between_the_two_kernels"),
    ),
    Guard(
        "abort watch",
        "a rank waits its whole budget for one that has given up",
        tests_in(SIGNAL, "a_peer_that_waits_is_told_at_once")
        + tests_in(IN_TURN, "case_4_a_rank_raises_before_its_call")
        + tests_in(POLLS, "polls"),
        tests_in(GUARDS, "case_1_without_the_abort_watch_peers_wait_on")
        + tests_in(POLLS, "an_endless_poll_is_found"),
    ),
    Guard(
        "vote",
        "ranks' heaps drift apart",
        tests_in(HEAP, "cases_5_and_6_different_calls_are_listed_on_all_ranks"),
        tests_in(GUARDS, "cases_5_and_6_without_the_vote_heaps_drift_apart"),
    ),
    Guard(
        "a tombstone before a rank leaves a vote",
        "one rank has the result of a vote of which another reports an abort or a time-out",
        tests_in(BOOTSTRAP, "a_complete_vote_reports_no_abort")
        + tests_in(BOOTSTRAP, "a_rank_that_comes_as_time_runs_out_has_come_for_all"),
        tests_in(VOTE_MODEL, "control"),
    ),
    Guard(
        "signed records",
        "what a stranger writes into the store counts as a rank's word",
        tests_in(SECRET, "what_a_stranger_writes_is_an_error_on_all_ranks"),
        tests_in(SECRET, "control_without_a_secret_a_stranger_s_word_counts"),
    ),
    Guard(
        "a farewell for waits alone",
        "a peer that closes its heap ends calls that lack nothing of it",
        tests_in(CLOSED, "calls_that_a_peer_has_made_end_well_after_it_has_closed"),
        tests_in(CLOSED, "a_peer_that_closes_must_not_tell_those_that_wait_for_nothing_of_it"),
    ),
    Guard(
        "ledger of calls",
        "calls that are planned, made in another order, give wrong results",
        tests_in(ORDER, "case_6_planned_calls_in_another_order"),
        tests_in(ORDER, "without_the_ledger_nobody_notices"),
    ),
    Guard(
        "fingerprint of a call",
        "ranks run different calls into each other and get different results",
        tests_in(OP, "ranks_that_disagree"),
        tests_in(GUARDS, "cases_5_and_6_without_the_fingerprint_results_differ"),
    ),
    Guard(
        "counting anew after a fault",
        "ranks that are a call apart don't find together",
        tests_in(IN_TURN, "case_4_a_rank_raises_before_its_call"),
        tests_in(RECOVERY, "calls_must_be_counted_anew"),
    ),
    Guard(
        "blocks between hosts after their calls were compared",
        "gloo ends the process to which more bytes come than it asked for",
        tests_in(HOSTS, "hosts_make_different_calls"),
        tests_in(HOSTS, "without_the_comparison_a_process_ends"),
    ),
    Guard(
        "wait for blocks of other hosts",
        "sums are made of what has not arrived",
        tests_in(OVER_HOSTS, "two_hosts_of_two", "three_hosts_of_one"),
        tests_in(OVER_HOSTS, "without_the_wait_results_are_wrong"),
    ),
)


def properties_of(test: str) -> list[tuple[str, str]]:
    """("case" or "guard", number or name) of a test, which is named `path::function`, without parameters."""
    found = [("case", str(case.number)) for case in CASES if test in case.tests]
    return found + [("guard", guard.name) for guard in GUARD_LIST if test in guard.controls]
