"""The benchmark of what is kept for a backward runs, and its exact optimum is one."""

from __future__ import annotations

import re


def test_the_benchmark_compares_with_all_peers(load, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["saving_in_backward.py", "--quick"])
    load("saving_in_backward").main()
    printed = capsys.readouterr().out
    assert re.search(r"^\| Llama \| 0.5 \| [\d.]+ MiB \| ", printed, re.MULTILINE)
    assert re.search(r"^\| Llama \| full \| [\d.]+ MiB \| ", printed, re.MULTILINE)
    assert printed.count("measured above the limit: 0.") == 2
    assert re.search(r"^\| \*\*all\*\* \| 5 \| 5 \| ", printed, re.MULTILINE)  # all five proved optimal


def test_the_partitioner_at_a_budget_of_one_keeps_what_autograd_keeps_or_less(load) -> None:
    """Run operator by operator, it takes no more than ours that keeps everything, and less with less to keep."""
    ours, theirs = load("saving_in_backward"), load("min_cut")
    model = ours.Model(ours.QUICK["Llama"])
    (joint,) = theirs.joints_of(model.built.module, model.built.inputs, compiles=False)
    peaks = [theirs.peak_bytes(joint, theirs.partition_at(joint, budget)) for budget in (1.0, 0.5)]
    assert peaks[1] < peaks[0] <= model.whole.kept.peak_bytes
    kept = theirs.partition_at(joint, 1.0)
    assert not [node for node in kept.recomputed if str(node.target) == "aten.mm.default"]


def test_the_optimum_of_a_chain_is_known(load) -> None:
    """Operators a, b, c in a row, one byte each, and a backward that uses c, b, a: with three bytes nothing runs again, with
    two the first does, the last to be used."""
    checkmate = load("checkmate")
    operators = tuple(
        checkmate.Operator(seconds, frozenset(reads), frozenset({makes}))
        for seconds, reads, makes in ((1.0, (), 0), (5.0, (0,), 1), (2.0, (1,), 2))
    )
    phases = tuple(checkmate.Phase(frozenset({storage}), 0, 0, 0) for storage in (2, 1, 0))
    alive = [({0}, set()), ({0, 1}, set()), ({1, 2}, {0})]
    in_forward = tuple((frozenset(now), frozenset(made)) for now, made in alive)
    problem = checkmate.Problem((1, 1, 1), operators, phases, in_forward, frozenset())
    assert problem.kept_peak == 3 and checkmate.least_bytes(problem) == 2
    assert checkmate.solve(problem, 3).seconds == 0.0
    two = checkmate.solve(problem, 2)
    assert two.is_proved and [operator for _, operator in two.recomputed] == [0] and two.seconds == 1.0
    assert checkmate.solve(problem, 1) is None
