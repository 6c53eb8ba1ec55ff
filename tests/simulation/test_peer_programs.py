"""Programs of PyTorch's own schedules, read from its files and built by our families."""

import csv
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from stagewright.schedule import (
    BUILDERS,
    Kind,
    Placement,
    Program,
    build,
    insert_communication,
    insert_gathers,
    insert_reductions,
    read_torch_csv,
    verify,
    write_torch_csv,
)
from stagewright.schedule.placement import loop, wave
from stagewright.schedule.torch_csv import read_torch_action
from stagewright.simulation import Contention, StageCosts, simulate

DATA = Path(__file__).parents[2] / "validation" / "data" / "pytorch_schedules"
OURS = {
    "GPipe": ("gpipe", {}),
    "1F1B": ("1f1b", {}),
    "Interleaved1F1B": ("interleaved-1f1b", {}),
    "LoopedBFS": ("breadth-first", {"last_first": True}),
    "InterleavedZeroBubble": ("interleaved-zb", {}),
    "ZBVZeroBubble": ("zb-v", {}),
    "DualPipeV": ("dualpipe-v", {"overlap": True}),
}


def rows(name):
    with open(DATA / name) as file:
        return list(csv.DictReader(file))


def ours(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Program:
    family, options = OURS[name]
    takes_chunks = "num_chunks" in inspect.signature(BUILDERS[family]).parameters
    return build(family, num_ranks, num_microbatches, num_chunks if takes_chunks else None, **options)


def size(row):
    return tuple(int(row[key]) for key in ("pp", "n_microbatches", "stages_per_rank"))


INDEX = rows("index.csv")
LISTED = [row for row in INDEX if row["status"].startswith("ok")]


def test_the_index_has_all_its_rows():
    assert len(INDEX) == 132
    assert len(LISTED) + 3 == len(INDEX)


@pytest.mark.parametrize("name", sorted(row["csv"] for row in LISTED if row["csv"]))
def test_a_file_of_pytorch_is_written_as_it_was_read(name):
    text = (DATA / name).read_text()
    cells = [[cell for cell in line.split(",") if cell] for line in text.splitlines()]
    assert [line.split(",") for line in write_torch_csv(read_torch_csv(text)).splitlines()] == cells


@pytest.mark.parametrize("row", LISTED, ids=lambda row: "-".join([row["schedule"], *map(str, size(row))]))
def test_listed_programs_take_the_listed_time_and_memory(row):
    program = verify(ours(row["schedule"], *size(row)))
    if row["csv"]:
        assert read_torch_csv((DATA / row["csv"]).read_text(), program.name) == program
    assert ";".join(f"{s}:{r}" for s, r in enumerate(program.placement.rank_of_stage)) == row["stage_to_rank"]
    costs = StageCosts.uniform(program.num_stages, saved_bytes=1)
    timeline = simulate(program, costs)
    assert timeline.makespan_s == float(row["makespan_F1_B2_I1_W1_comm0"])
    assert round(timeline.bubble_fraction, 5) == float(row["bubble_fraction_comm0"])
    assert "/".join(str(int(peak)) for peak in timeline.peak_bytes) == row["peak_live_activations_per_rank"]
    lowered = insert_communication(program)
    for each in (program, lowered):
        with_transfers = simulate(each, costs, 0.5, contention=Contention.NONE)
        assert with_transfers.makespan_s >= float(row["makespan_F1_B2_I1_W1_comm0p5"])
        if each is program:
            assert with_transfers.makespan_s == float(row["makespan_F1_B2_I1_W1_comm0p5"])
    assert sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in lowered) == int(
        row["n_send_ops_all_ranks"]
    )


@pytest.mark.parametrize("row", [row for row in INDEX if row not in LISTED], ids=lambda row: row["schedule"])
def test_what_pytorch_rejects_runs(row):
    verify(insert_communication(ours(row["schedule"], *size(row))))


@pytest.mark.parametrize(
    "row", rows("upstream_test_grid.csv"), ids=lambda row: "-".join(list(row.values())[:3])
)
def test_sizes_of_the_upstream_tests(row):
    chunks, microbatches, num_ranks = (int(row[key]) for key in ("stages_per_rank", "n_microbatches", "pp"))
    for name in row["used_for"].split(";"):
        if name.strip() in OURS:
            program = verify(ours(name.strip(), num_ranks, microbatches, chunks))
            if program.num_actions < 10_000:
                verify(insert_communication(program))


@pytest.mark.parametrize(
    "row", rows("upstream_stage_to_rank.csv"), ids=lambda row: f"{row['style']}-{row['pp']}"
)
def test_upstream_placements(row):
    num_ranks, num_stages = int(row["pp"]), int(row["num_stages"])
    placement = {"loop": loop, "v": wave}[row["style"]](num_ranks, num_stages // num_ranks)
    assert list(placement.rank_of_stage) == [int(rank) for rank in row["stage_to_rank"].split()]


CASES = rows("upstream_lowering_cases.csv")


def case(name: str, kind: str) -> Program:
    """The program of one upstream case; its split backwards are written as B and W there."""
    found = [row for row in CASES if row["case"] == name and row["kind"] == kind]
    ranks = tuple(tuple(read_torch_action(t) for t in row["sequence"].split() if t != "-") for row in found)
    if any(action.kind is Kind.W for actions in ranks for action in actions):
        ranks = tuple(tuple(_as_input_grad(action) for action in actions) for actions in ranks)
    holders = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    placement = Placement(tuple(holders[stage] for stage in sorted(holders)))
    num_microbatches = 1 + max(action.microbatch or 0 for actions in ranks for action in actions)
    return Program(name, placement, num_microbatches, ranks)


def _as_input_grad(action):
    return type(action)(Kind.I, action.stage, action.microbatch) if action.kind is Kind.B else action


@pytest.mark.parametrize("name", ["simple_2_rank_2_stage", "v_2_rank_4_stage"])
def test_upstream_lowering(name):
    compute, expected = case(name, "compute"), case(name, "compute_comms_expected")
    lowered = verify(insert_communication(compute))
    assert Counter(lowered) == Counter(expected)
    assert verify(expected).compute_only() == lowered.compute_only()
    _at_least_as_early(lowered, expected)


def test_upstream_interleaved_zero_bubble():
    texts = [(DATA / f"upstream_zb1p_2rank_2stagep_{kind}.csv").read_text() for kind in ("compute", "comms")]
    compute, expected = (read_torch_csv(text) for text in texts)
    # An input gradient directly before its weight gradient is one full backward there.
    merged = Program.from_text(re.sub(r"(\d+)I(\d+) \1W\2\b", r"\1B\2", compute.to_text()))
    assert verify(expected).compute_only() == merged
    lowered = verify(insert_communication(merged))
    assert Counter(lowered) == Counter(expected)
    _at_least_as_early(lowered, expected)


def _at_least_as_early(lowered: Program, expected: Program) -> None:
    costs = StageCosts.uniform(lowered.num_stages)
    for transfer_s in (0.0, 0.5, 1.0):
        assert (
            simulate(lowered, costs, transfer_s).makespan_s
            <= simulate(expected, costs, transfer_s).makespan_s
        )


@pytest.mark.parametrize("name", ["unshard_reshard_1stage", "unshard_reshard_2stage"])
def test_upstream_gathers(name):
    assert insert_gathers(case(name, "input")).ranks == case(name, "expected").ranks


@pytest.mark.parametrize("name", ["reduce_grad_1stage", "reduce_grad_2stage"])
def test_upstream_reductions(name):
    assert insert_reductions(case(name, "input")).ranks == case(name, "expected").ranks


def test_upstream_dualpipe_v():
    upstream = read_torch_csv((DATA / "upstream_dualpipev_4rank_10mb.csv").read_text(), "dualpipe-v")
    assert upstream == build("dualpipe-v", 4, 10, overlap=True)
