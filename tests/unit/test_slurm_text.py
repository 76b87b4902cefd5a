"""Parsers of Slurm's output, on recordings of a real Slurm."""

from __future__ import annotations

import time

import pytest

from gpuboard import nodesets
from gpuboard.cluster.snapshot.scheduler_jobs import rule
from gpuboard.model.gpu import GpuStatic
from gpuboard.model.schedule import Grant, Gres, Schedule, SchedulerJob, SchedulerNode
from gpuboard.scheduler.slurm import consistency
from gpuboard.scheduler.slurm.gres import GresError, Resources, resources
from gpuboard.scheduler.slurm.jobs import Piece, Runs, TrueJob, jobs, true_jobs
from gpuboard.scheduler.slurm.nodes import Reservation, nodes, reservations
from gpuboard.scheduler.slurm.records import Unreadable, moment
from tests.slurmtext import held, holding, recorded, recordings, used


def local(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("gpu:8", Resources((Gres("", 8),))),
        ("gpu:h100:8(S:0-1)", Resources((Gres("h100", 8),))),
        ("gpu:h100:4(S:0,2),gpu:a100:4,shard:32(S:0)", Resources((Gres("h100", 4), Gres("a100", 4)), (Gres("", 32),))),
        ("gpu:no_consume:2", Resources((Gres("", 2),))),
        ("gpu:h100:6(IDX:0-1,3-6)", Resources((Gres("h100", 6, (0, 1, 3, 4, 5, 6)),))),
        ("gpu:h100:0(IDX:N/A)", Resources((Gres("h100", 0, ()),))),
        ("gpu:2(IDX:0-1)", Resources((Gres("", 2, (0, 1)),))),
        ("gpu:a100:2(IDX:0,3)", Resources((Gres("a100", 2, (0, 3)),))),
        ("gpu(IDX:0-1)", Resources((Gres("", 2, (0, 1)),))),
        ("gpu:h100(CNT:2)", Resources((Gres("h100", 2),))),
        (
            "gpu:x_1g.10gb:1(IDX:2),gpu:x_3g.40gb:0(IDX:)",
            Resources((Gres("x_1g.10gb", 1, (2,)), Gres("x_3g.40gb", 0, ()))),
        ),
        ("shard:3(IDX:1)", Resources((), (Gres("", 3, (1,)),))),
        ("gpu:2,shard:(null):2(IDX:0-1)", Resources((Gres("", 2),), (Gres("", 2, (0, 1)),))),
        ("shard:h100:3(1/4,0/4,2/4)", Resources((), (Gres("h100", 3, (0, 2)),))),
        ("gpu:h100", Resources((Gres("h100", 1),))),
        ("craynetwork:4,gpu:a100+x:1,mps:a:100", Resources((Gres("a100+x", 1),), (Gres("a", 100),))),
        ("gpu:30(IDX:0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38)", Resources((Gres("", 30),))),  # cut
        ("", Resources()),
        ("(null)", Resources()),
        ("N/A", Resources()),
    ],
)
def test_each_form_of_gres(field: str, found: Resources) -> None:
    assert resources(field) == found


@pytest.mark.parametrize(
    "field",
    [
        "gpu:2,",
        ",gpu:2",
        "gpu:2(IDX:0-1",
        "gpu:a:b:2",
        "gpu:99999999",
        "gpu:2(IDX:1-0)",
        "gpu:2(IDX:3,1)",
        "gpu 2",
        "gpu:2(x)",
        "shard:40(0/80)",
        "shard:h100:4(1/4,0/4,2/4)",
        "shard:5(5/4)",
    ],
)
def test_an_invalid_gres_is_an_error(field: str) -> None:
    with pytest.raises(GresError):
        resources(field)


def test_all_fields_of_a_job() -> None:
    (found,) = [job for job in holding(recorded("base/job-d-oneliner")) if job.number == 17]
    assert found == SchedulerJob(
        id="15_1",
        number=17,
        user="alice",
        uid=1001,
        name="array",
        partition="gpu",
        state="running",
        grants=(Grant("node2", (Gres("h100", 1, (5,)),)),),
        started=local("2026-11-21T07:51:33"),
        until=local("2026-11-21T08:01:33"),
    )


def test_each_shape_of_job_has_its_gpus() -> None:
    pieces = jobs(recorded("shapes/job-d-oneliner"))
    found = [piece.job for piece in pieces if piece.job is not None]
    assert {job.id: (job.number, job.name, job.state, held(job)) for job in found} == {
        "7": (7, "suspended", "suspended", {"node1": {0}}),
        "8_0": (14, "array", "running", {"node1": {1}}),
        "8_1": (15, "array", "running", {"node1": {2}}),
        "9+0": (9, "het", "running", {"node2": {0}}),
        "9+1": (10, "het", "running", {"node3": {0, 1}}),
        "12": (12, "merged", "running", {"node2": {3, 4}, "node3": {2, 3}}),
    }
    assert {job.id: (job.started, job.until) for job in found if job.number in {7, 12}} == {
        "7": (1795282522.0, 1795283122.0),
        "12": (1795282523.0, None),  # no limit
    }
    assert [piece for piece in pieces if piece.job is None] == [
        Piece(11, "11"),
        Piece(13, "13", runs=Runs(0, "node3")),
        Piece(8, "8_2-3%2"),
    ]


def test_a_job_in_its_prolog_is_configuring_and_runs_nowhere_yet() -> None:
    text = recorded("shapes/job-d-oneliner").replace("JobState=RUNNING Reason=None", "JobState=RUNNING Reason=Prolog")
    pieces = {piece.number: piece for piece in jobs(text)}
    (merged, visiting) = pieces[12].job, pieces[13]
    assert merged is not None
    assert (merged.state, held(merged)) == ("configuring", {"node2": {3, 4}, "node3": {2, 3}})
    assert visiting == Piece(13, "13")


def test_visited_nodes_are_those_of_running_jobs_without_gpus() -> None:
    pieces = jobs(recorded("shapes/job-d-oneliner"))
    held = [piece.job for piece in pieces if piece.job is not None]
    assert consistency.visited(pieces, held, {}, 0) == {"node3": (13,)}
    assert consistency.visited(pieces, held, {}, 4711) == {}
    # what squeue says counts alone where it was asked
    more = TrueJob(0, "root", "running", "gpu", None, None, ("node1", "node3"))
    truth = {12: more, 13: more._replace(state="completed"), 14: more._replace(uid=4711)}
    assert consistency.visited(pieces, held, truth, 0) == {"node1": (12,)}


def test_jobs_of_untyped_gpus_and_of_shards() -> None:
    assert {job.number: job.grants for job in holding(recorded("untyped/job-d-oneliner"))} == {
        1: (Grant("node1", (), (Gres("", 3, (0,)),)),),
        2: (Grant("node1", (), (Gres("", 2, (1,)),)),),
        3: (Grant("node1", (Gres("", 2, (0, 1)),)),),
        4: (Grant("node2", (Gres("", 3, (0, 1, 2)),)), Grant("node3", (Gres("", 3, (0, 1, 2)),))),
    }


def test_equal_nodes_that_slurm_has_merged_are_separated() -> None:
    (job,) = [job for job in holding(recorded("holes/job-d-oneliner")) if job.number == 8]
    assert held(job) == {"node2": {0, 1, 2, 3}, "node3": {0, 1, 2, 3}}


def test_a_completing_job_is_shown_where_it_ran() -> None:
    text = recorded("shapes/job-d-oneliner").replace("JobState=CANCELLED", "JobState=COMPLETING")
    (job,) = [job for job in holding(text) if job.number == 11]
    assert (job.state, job.grants) == ("completing", (Grant("node2"),))


@pytest.mark.parametrize(
    "name", [name for name in recordings("job-d") if name.replace("-d", "-d-oneliner") in recordings("*")]
)
def test_both_output_formats_give_the_same_jobs(name: str) -> None:
    assert jobs(recorded(name)) == jobs(recorded(name.replace("-d", "-d-oneliner")))


@pytest.mark.parametrize(
    "name", [name for name in recordings("node-d") if name.replace("-d", "-d-oneliner") in recordings("*")]
)
def test_both_output_formats_give_the_same_nodes(name: str) -> None:
    assert nodes(recorded(name)) == nodes(recorded(name.replace("-d", "-d-oneliner")))


# Beside shards Slurm itself had given GPUs away twice.
@pytest.mark.parametrize(
    "name", [n for n in recordings("node-d-oneliner") if not n.startswith(("untyped", "reserved"))]
)
def test_jobs_and_nodes_of_one_moment_fit(name: str) -> None:
    pieces = jobs(recorded(name.replace("node", "job")))
    listed = nodes(recorded(name))
    assert consistency.contradictions(pieces, listed) == []
    claims: dict[str, set[int]] = {node: set() for node in listed}
    for job in holding(recorded(name.replace("node", "job"))):
        for node, indexes in held(job).items():
            claims[node] |= indexes
    assert claims == {node.name: used(node) for node in listed.values()}


def test_with_private_data_more_gpus_are_in_use_than_visible_jobs_hold() -> None:
    text = recorded("private/alice-job-d")
    listed = nodes(recorded("private/alice-node-d"))
    assert {job.number: held(job) for job in holding(text)} == {2: {"node1": {3, 4}}}
    assert used(listed["node1"]) == {0, 1, 2, 3, 4}
    assert consistency.contradictions(jobs(text), listed) == []


def test_all_fields_of_a_node() -> None:
    assert nodes(recorded("hetero/node-d-oneliner"))["node2"] == SchedulerNode(
        name="node2",
        hostname="node2",
        address="127.0.0.1",
        state="mixed",
        gpus=(Gres("h100", 4), Gres("a100", 4)),
        used=(Gres("h100", 2, (0, 1)), Gres("a100", 3, (4, 5, 6))),
        partitions=("gpu",),
    )


def test_states_and_reasons_of_nodes() -> None:
    found = nodes(recorded("states/node-d-oneliner"))
    assert {node.name: (node.state, node.reason) for node in found.values()} == {
        "node1": ("mixed", ""),
        "node2": ("mixed+drain", "bad NVLink on GPU 3 (root, 2026-11-21 08:29)"),
        "node3": ("idle+drain", "ecc errors, ticket #42 (root, 2026-11-21 08:29)"),
        "node4": ("down", "power supply (root, 2026-11-21 08:29)"),
        "node5": ("idle+fail", "flaky (root, 2026-11-21 08:29)"),
        "node6": ("idle+maintenance+reserved", ""),
        "node7": ("mixed+reserved", ""),
        "node8": ("mixed", ""),
    }
    assert consistency.is_reserved(found)


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("IDLE*", "idle+not_responding"),
        ("IDLE*+DRAIN", "idle+not_responding+drain"),
        ("DOWN+NOT_RESPONDING", "down+not_responding"),
        ("IDLE+CLOUD+POWERED_DOWN", "idle+cloud+powered_down"),
        ("IDLE~", "idle+powered_down"),
        ("MIXED$", "mixed+maintenance"),
        ("IDLE-", "idle+planned"),
    ],
)
def test_suffixes_of_a_state_are_flags(printed: str, state: str) -> None:
    text = recorded("empty/node-d-oneliner").replace("State=IDLE", f"State={printed}")
    assert {(node.state, node.doubt) for node in nodes(text).values()} == {(state, "")}


def test_times_in_seconds_and_in_local_time() -> None:
    assert moment("1795282522") == 1795282522.0
    assert moment("2026-11-21T08:29:29") == local("2026-11-21T08:29:29")
    assert [moment(text) for text in ("Unknown", "N/A", "None", "(null)", "", "17:10", "9" * 40)] == [None] * 7


def test_only_active_reservations_count() -> None:
    found = [Reservation("maint", ("node6",)), Reservation("course", ("node7",))]
    assert reservations(recorded("states/res-oneliner")) == found
    assert reservations(recorded("states/reservation")) == found
    assert reservations(recorded("empty/res-oneliner")) == []


def test_nodes_get_the_names_of_their_reservations() -> None:
    listed = nodes(recorded("states/node-d-oneliner"))
    found = consistency.joined(
        [], listed, [*reservations(recorded("states/res-oneliner")), Reservation("b", ("node7", "x"))]
    )
    assert {node.name: node.reservation for node in found.values() if node.reservation} == {
        "node6": "maint",
        "node7": "course,b",
    }
    again = consistency.joined([], listed, consistency.reserved_before(Schedule(0.0, "", found), listed))
    assert again == found


def test_a_node_with_its_reservations_name_needs_no_query() -> None:
    text = recorded("states/node-d-oneliner").replace(" CapWatts", " ReservationName=own CapWatts")
    listed = nodes(text)
    assert listed["node6"].reservation == "own"
    assert not consistency.is_reserved(listed)


def test_squeue_lists_owners_and_nodes() -> None:
    found = true_jobs(recorded("shapes/squeue"))
    assert found[12] == TrueJob(0, "root", "running", "gpu", 1795282523.0, None, ("node2", "node3"))
    assert found[8].nodes == ()
    assert true_jobs("") == {}


@pytest.mark.parametrize("name", [*recordings("node"), *recordings("job")])
def test_without_details_no_gpu_is_free(name: str) -> None:
    assert {node.doubt for node in nodes(recorded(name)).values()} == {
        "Slurm does not report which of its GPUs are in use"
    }


@pytest.mark.parametrize(
    ("old", "new", "doubt"),
    [
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:h100:2(IDX:0-", "cannot be read"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:h100:9(IDX:0-8)", "GPUs in use that it does not have"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:h100:2(IDX:7-8)", "GPUs in use that it does not have"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:a100:2(IDX:0-1)", "not report the use of all its GPUs"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=", "which of its GPUs are in use"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=(null)", "which of its GPUs are in use"),
        (" GresUsed=gpu:h100:2(IDX:0-1)", "", "which of its GPUs are in use"),
        (" Gres=gpu:h100:8", " Gres=gpu:h100:x:8", "cannot be read"),
        (" Gres=gpu:h100:8", " Gres=", "cannot be read"),
        (" Gres=gpu:h100:8", " Gres=(null)", "GPUs in use that it does not have"),
        ("State=MIXED ", "State=MI\u00c4ED ", "unknown state"),
    ],
)
def test_a_partly_unreadable_node_is_doubtful(old: str, new: str, doubt: str) -> None:
    text = recorded("states/node-d-oneliner")
    assert old in text
    assert doubt in nodes(text.replace(old, new, 1))["node1"].doubt


@pytest.mark.parametrize("text", ["", "\n", "No jobs", "slurm_load_jobs error: x", "x\nJobId=1 JobName=x", " "])
def test_an_invalid_list_of_jobs_is_an_error(text: str) -> None:
    with pytest.raises(Unreadable):
        jobs(text)


@pytest.mark.parametrize("text", ["", "\n", "No nodes", "x\nNodeName=x", "NodeName=node1 Arch=x86_64\n"])
def test_an_invalid_list_of_nodes_is_an_error(text: str) -> None:
    with pytest.raises(Unreadable):
        nodes(text)


def test_truncated_output_is_an_error() -> None:
    text = recorded("base/job-d-oneliner")
    for cut in (len(text) - 1, len(text) // 2, 20):
        with pytest.raises(Unreadable):
            jobs(text[:cut])
    text = recorded("base/node-d-oneliner")
    for cut in (len(text) - 1, len(text) // 2, 20):
        with pytest.raises(Unreadable):
            nodes(text[:cut])


def test_no_jobs_is_an_answer() -> None:
    assert jobs(recorded("empty/job-d-oneliner")) == []


def test_a_node_listed_twice_is_an_error() -> None:
    line = recorded("empty/node-d-oneliner").splitlines(keepends=True)[0]
    with pytest.raises(Unreadable, match="twice"):
        nodes(line + line)


def test_a_node_that_only_a_job_names_is_doubtful() -> None:
    found = holding(recorded("states/job-d-oneliner"))
    listed = nodes(recorded("states/node-d-oneliner"))
    del listed["node2"]
    joined = consistency.joined(found, listed, [])
    assert (joined["node2"].state, joined["node2"].doubt) == (
        "unknown",
        "job 2 runs there, but Slurm does not list the node",
    )


@pytest.mark.parametrize("shards", ["40(0/80)", "h100:4(1/16,2/16)", "0(1/32)", "33(33/32)"])
def test_a_node_whose_shards_contradict_their_parts_is_unknown(shards: str) -> None:
    text = recorded("untyped/node-d-oneliner").replace("shard:32", "shard:80").replace("shard:(null):2(IDX:0-1)", "{}")
    one = nodes(text.replace("{}", f"shard:{shards}"))["node1"]
    assert "shards" in one.doubt
    gpus = [GpuStatic(index=k, uuid=f"GPU-{k}", name="H100", pci_bus_id="", minor=k) for k in range(8)]
    assert {bool(ruling.doubt) for ruling in rule(one, [], gpus, {}).gpus.values()} == {True}
    sound = nodes(text.replace("{}", "shard:3(1/16,2/16,0/48)"))["node1"]
    assert (sound.doubt, sound.used_shards[0].indexes) == ("", (0, 1))


def test_hidden_shards_make_a_node_doubtful() -> None:
    text = recorded("untyped/node-d-oneliner").replace("shard:(null):2(IDX:0-1)", "shard:5")
    found = holding(recorded("untyped/job-d-oneliner"))
    assert consistency.joined(found, nodes(text), [])["node1"].doubt == ""
    assert "shards of its GPUs" in consistency.joined([], nodes(text), [])["node1"].doubt


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a-b[3-3].c", ["a-b3.c"]),
        ("node[1,3-4],x7", ["node1", "node3", "node4", "x7"]),
        ("rack[0-1]node[1-2]", ["rack0node1", "rack0node2", "rack1node1", "rack1node2"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert sorted(nodesets.listed(text)) == names
    assert sorted(nodesets.expand(text)) == names


@pytest.mark.parametrize("text", ["", "@all", "a b", "n[1", "n]", "n[3-1]", "n[a-b]", "n,", "a!b", "n*", "n[1-99999]"])
def test_invalid_lists_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of nodes|more than"):
        nodesets.listed(text)
