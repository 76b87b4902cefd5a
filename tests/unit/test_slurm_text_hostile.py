"""No text makes the parsers raise, invents a free GPU, or lets a user forge another's jobs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuboard import nodesets
from gpuboard.cluster.snapshot.scheduler_jobs import alone, by_node, rule
from gpuboard.model.schedule import Schedule, SchedulerJob, SchedulerNode
from gpuboard.scheduler.slurm import consistency
from gpuboard.scheduler.slurm.gres import GresError, resources
from gpuboard.scheduler.slurm.jobs import jobs, true_jobs
from gpuboard.scheduler.slurm.nodes import nodes, reservations
from gpuboard.scheduler.slurm.records import Unreadable
from tests.slurmtext import holding, recorded

PIECES = [
    "JobId=", "NodeName=", "\nJobId=1 JobName=", "\n   ", " ", "\n", "UserId=a(1) GroupId=a(1)", " MinCPUsNode=1",
    "JobState=", " NodeList=", " GRES=", "gpu:8(IDX:0-7)", "gpu:", "(null)", " Gres=", " State=", "[", "]", "node[1-3]",
    ",", "=", "%", "\x00", " GresUsed=gpu:h100:8(IDX:0-7)", " CoresPerSocket=1", "ReservationName=x",
    "0|0|RUNNING|gpu|1|2|node1|root",
]  # fmt: skip
texts = st.one_of(
    st.text(max_size=300), st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join)
)


@given(texts)
def test_no_text_makes_a_parser_raise_anything_but_its_error(text: str) -> None:
    for read in (jobs, nodes, reservations, true_jobs):
        with suppress(Unreadable):
            read(text)
    with suppress(GresError):
        resources(text)
    with suppress(ValueError):
        assert len(nodesets.listed(text)) <= nodesets.NODES_MAX


@pytest.mark.parametrize("text", ["n[0-99999]", "a[0-9999]b[0-9999]", "[0-1]" * 40, "n[1-2]" * 500])
def test_a_short_list_of_very_many_nodes_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"names more than|is not a list"):
        nodesets.listed(text)


# --- no mistake of a cable, a disk or a version invents a free GPU --------------------------------------------------

CASES = ("base", "holes", "hetero", "mig", "states", "shapes", "untyped", "empty")


def free(listed: Mapping[str, SchedulerNode], held: Sequence[SchedulerJob]) -> dict[str, set[int]]:
    """Return the GPUs that count as free for Slurm on each node, by Slurm's indexes."""
    schedule = Schedule(0.0, "", consistency.joined(held, listed, []), tuple(held))
    holders = by_node(schedule)
    found: dict[str, set[int]] = {}
    for node in schedule.nodes.values():
        gpus = alone(node)
        rulings = rule(node, holders.get(node.name, []), gpus, {}).gpus
        said = [rulings.get(gpu.uuid) for gpu in gpus]
        found[node.name] = {
            index
            for index, ruling in enumerate(said)
            if ruling is None or not (ruling.jobs or ruling.hidden or ruling.doubt)
        }
    return found


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Return ``text`` with one piece removed, duplicated or replaced, or truncated."""
    at = draw(st.integers(0, len(text)))
    length = draw(st.integers(0, 20) | st.integers(0, 400))  # less than a record: of two, one would fit seamlessly
    how = draw(st.sampled_from(["gone", "replaced", "doubled", "cut", "more"]))
    if how == "cut":
        return text[:at]
    if how == "doubled":
        return text[: at + length] + text[at:]
    put = (
        ""
        if how == "gone"
        else draw(st.text(max_size=8) | st.sampled_from(["0", "9", ",", "-", ")", "(", "\n", " ", "="]))
    )
    return text[:at] + put + text[at + (length if how != "more" else 0) :]


@settings(max_examples=80)
@given(st.data())
def test_no_damage_to_the_text_about_nodes_invents_a_free_gpu(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    text = recorded(f"{case}/node-d-oneliner")
    held = holding(recorded(f"{case}/job-d-oneliner"))
    listed = nodes(text)
    taken = {name: set(range(len(alone(listed[name])))) - gpus for name, gpus in free(listed, held).items()}
    try:
        after = free(nodes(data.draw(damaged(text))), held)
    except Unreadable:
        return
    assert {name: gpus & taken[name] for name, gpus in after.items() if name in taken and gpus & taken[name]} == {}


@settings(max_examples=80)
@given(st.data())
def test_no_damage_to_the_text_about_jobs_invents_a_free_gpu(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    listed = nodes(recorded(f"{case}/node-d-oneliner"))
    text = recorded(f"{case}/job-d-oneliner")
    before = free(listed, holding(text))
    try:
        after = free(listed, holding(data.draw(damaged(text))))
    except Unreadable:
        return
    assert {name: after[name] - before[name] for name in before} == {name: set() for name in before}


# --- nobody speaks for another --------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job as slurmctld knows it: one GPU of one node, and the owner's texts."""

    number: int
    user: str
    uid: int
    node: str
    index: int
    name: str = "train"
    account: str = "(null)"
    network: str = "(null)"
    command: str = "(null)"
    comment: str = ""
    state: str = "RUNNING"

    def printed(self) -> str:
        """Return the job as `scontrol -o show job -d` of 22.05 prints it."""
        comment = f"Comment={self.comment}  " if self.comment else ""
        return (
            f"JobId={self.number} JobName={self.name} UserId={self.user}({self.uid}) GroupId=users(100) MCS_label=N/A "
            f"Priority=1 Nice=0 Account={self.account} QOS=(null) JobState={self.state} Reason=None Dependency=(null) "
            "Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:01 "
            "TimeLimit=00:10:00 TimeMin=N/A SubmitTime=1 EligibleTime=1 AccrueTime=1 StartTime=1 EndTime=2 "
            "Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=1 Scheduler=Main Partition=gpu "
            f"AllocNode:Sid=login1:1 ReqNodeList=(null) ExcNodeList=(null) NodeList={self.node} BatchHost={self.node} "
            "NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1 Socks/Node=* "
            "NtasksPerN:B:S:C=0:0:*:* CoreSpec=* "
            f"JOB_GRES=gpu:h100:1   Nodes={self.node} CPU_IDs=0 Mem=1 GRES=gpu:h100:1(IDX:{self.index}) MinCPUsNode=1 "
            "MinMemoryCPU=100M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
            f"Licenses=(null) Network={self.network} Command={self.command} WorkDir=/home {comment}StdErr=/dev/null "
            "StdIn=/dev/null StdOut=/dev/null Power= TresPerNode=gres:gpu:1 \n"
        )

    def listed(self) -> str:
        """Return the job as `squeue` prints it."""
        return f"{self.number}|{self.uid}|{self.state}|gpu|1|2|{self.node}|{self.user}\n"


def node_text(name: str, used: set[int], *, typed: bool) -> str:
    """Return a node of four GPUs as `scontrol -o show node -d` of 22.05 prints it."""
    indexes = ",".join(map(str, sorted(used))) or "N/A"
    kind, numbers = (":h100", f"(IDX:{indexes})") if typed else ("", "")
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1 Gres=gpu{kind}:4 GresDrain=N/A "
        f"GresUsed=gpu{kind}:{len(used)}{numbers} NodeAddr={name} NodeHostName={name} Boards=1 State=MIXED "
        "ThreadsPerCore=1 Partitions=gpu  BootTime=1\n"
    )


def faked(number: int, uid: int, node: str, index: int, name: str) -> str:
    """Return a forged record."""
    users = {0: "root", 1001: "alice", 1002: "bob"}
    return Job(number, users[uid], uid, node, index, name).printed().rstrip("\n")


fakes = st.builds(
    faked,
    number=st.sampled_from([1, 2, 3, 4, 99]),
    uid=st.sampled_from([0, 1001, 1002]),
    node=st.sampled_from(["node1", "node2", "node3"]),
    index=st.integers(0, 3),
    name=st.sampled_from(["x", "train"]),
)
cuts = st.builds(lambda text, a, b: text[a : len(text) - b], fakes, st.integers(0, 900), st.integers(0, 900))
hostile = st.lists(
    fakes | cuts | st.sampled_from(["\n", " ", "  ", "x", *PIECES]) | st.builds(lambda text: "\n" + text, fakes | cuts),
    max_size=5,
).map("".join)


@st.composite
def clusters(draw: st.DrawFn) -> list[Job]:
    """Jobs of three users; the texts of alice's jobs are her attack."""
    places = draw(st.permutations([("node1", 0), ("node1", 1), ("node1", 2), ("node2", 0), ("node2", 3)]))
    people = [("alice", 1001), ("bob", 1002), ("root", 0), ("alice", 1001)]
    found = [
        Job(number, user, uid, node, index)
        for number, ((user, uid), (node, index)) in enumerate(zip(people, places, strict=False), 1)
    ]
    for job in found:
        if job.user == "alice":
            for name in ("name", "account", "network", "command", "comment"):
                setattr(job, name, draw(hostile) if draw(st.booleans()) else getattr(job, name))
    return draw(st.permutations(found))


def looked(
    cluster: list[Job], *, typed: bool, tell: bool
) -> tuple[dict[str, SchedulerNode], list[SchedulerJob], list[str]]:
    """Return the result of a query cycle for a cluster's output; ``tell``: squeue answers."""
    used: dict[str, set[int]] = {"node1": set(), "node2": set(), "node3": set()}
    for job in cluster:
        used[job.node].add(job.index)
    listed = nodes("".join(node_text(name, of, typed=typed) for name, of in used.items()))
    pieces = jobs("".join(job.printed() for job in cluster))
    notes = consistency.contradictions(pieces, listed)
    held = [piece.job for piece in pieces if piece.job is not None]
    if notes and tell:
        held, notes = consistency.corrected(pieces, true_jobs("".join(job.listed() for job in cluster)), listed)
    return listed, held, notes


@settings(max_examples=80, deadline=None)
@given(clusters(), st.booleans())
def test_no_user_can_forge_anothers_jobs(cluster: list[Job], typed: bool) -> None:
    listed, held, _ = looked(cluster, typed=typed, tell=True)
    said = {
        (job.uid, grant.node, i) for job in held for grant in job.grants for g in grant.gpus for i in g.indexes or ()
    }
    others = {(job.uid, job.node, job.index) for job in cluster if job.user != "alice"}
    assert {claim for claim in said if claim[0] != 1001} <= others
    # of herself she may say what she likes, as long as it is no one else's: the number of a job, and where Slurm tells
    # nothing but how many GPUs of a node are used, which one of them is hers
    hers = {(node, index) for uid, node, index in said if uid == 1001}
    assert not hers & {(node, index) for _, node, index in others}
    assert {node for node, _ in hers} <= {job.node for job in cluster if job.user == "alice"}
    assert {(job.number, job.uid) for job in held if job.uid != 1001} == {(2, 1002), (3, 0)}
    now = free(listed, held)
    assert {(node, index) for _, node, index in others if index in now[node]} == set()
    if typed:
        truth: dict[str, set[int]] = {name: set(range(4)) for name in listed}
        for job in cluster:
            truth[job.node].discard(job.index)
        assert now == truth


@settings(max_examples=80, deadline=None)
@given(clusters(), st.booleans())
def test_without_squeue_no_gpu_in_use_is_free(cluster: list[Job], typed: bool) -> None:
    listed, held, _ = looked(cluster, typed=typed, tell=False)
    now = free(listed, held)
    for job in cluster:
        assert job.index not in now[job.node]


FAKE = Job(99, "bob", 1002, "node1", 3).printed().rstrip("\n")
TAIL = FAKE.partition(" UserId=")[2]


@pytest.mark.parametrize("where", ["name", "account", "network", "command", "comment"])
@pytest.mark.parametrize(
    "text",
    [
        "x JobState=PENDING",
        f"x UserId={TAIL}",
        f"x\n{FAKE}",
        f"x UserId={TAIL}\nJobId=98 JobName=y",
        f"x\n{FAKE}\nJobId=1 JobName=y",
        "x\nJobId=99 JobName=y",
        "x GRES=gpu:h100:4(IDX:0-3) MinCPUsNode=1",
    ],
)
def test_texts_that_imitate_slurm(where: str, text: str) -> None:
    cluster = [Job(1, "alice", 1001, "node1", 0), Job(2, "bob", 1002, "node1", 1), Job(3, "root", 0, "node2", 0)]
    setattr(cluster[0], where, text)
    listed, held, _ = looked(cluster, typed=True, tell=True)
    assert free(listed, held) == {"node1": {2, 3}, "node2": {1, 2, 3}, "node3": {0, 1, 2, 3}}
    assert [(job.number, job.user) for job in held if job.uid != 1001] == [(2, "bob"), (3, "root")]
    assert {job.user for job in held} <= {"alice", "bob", "root"}


@pytest.mark.parametrize(("uid", "index"), [(1001, 1), (1002, 0), (1002, 1), (1001, 3)])
def test_a_name_that_ends_its_own_record_early_gains_nothing(uid: int, index: int) -> None:
    """The first of alice's two lines is forged, with any owner and GPU; the second is true except for its number."""
    invented = faked(1, uid, "node1", index, "x").partition("JobName=")[2]
    alice = Job(1, "alice", 1001, "node1", 0, name=f"{invented}\nJobId=99 JobName=y")
    cluster = [alice, Job(2, "bob", 1002, "node1", 1), Job(3, "root", 0, "node2", 0)]
    _, held, notes = looked(cluster, typed=True, tell=True)
    claims = {job.number: (job.user, [g.indexes for grant in job.grants for g in grant.gpus]) for job in held}
    assert (claims[2], claims[3]) == (("bob", [(1,)]), ("root", [(0,)]))
    assert claims[1] in [("alice", []), ("alice", [(0,)])]
    assert notes[0] == "the text of one of these jobs imitates Slurm's output: 1 of alice"


def test_a_harmless_text_with_line_ends_changes_nothing() -> None:
    job = Job(1, "alice", 1001, "node1", 0, name="two\nlines", comment="a\n  b=c\nJobName=d", command="sh -c 'a\nb'")
    (piece,) = jobs(job.printed())
    assert piece.job is not None
    assert (piece.job.name, piece.job.comment) == ("two lines", "a b=c JobName=d")


def test_control_characters_are_removed() -> None:
    (piece,) = jobs(Job(1, "alice", 1001, "node1", 0, name="\x1b[31mred\u202e", comment="\x07x").printed())
    assert piece.job is not None
    assert (piece.job.name, piece.job.comment) == ("[31mred", "x")


def test_the_victim_of_a_forgery_keeps_the_nodes() -> None:
    liar = Job(2, "alice", 1001, "node1", 1, comment=f"x\n{Job(3, 'root', 0, 'node2', 0).printed()}")
    cluster = [Job(1, "bob", 1002, "node1", 0), liar, Job(4, "bob", 1002, "node1", 2), Job(3, "root", 0, "node2", 0)]
    _, held, notes = looked(cluster, typed=True, tell=True)
    assert [(job.number, job.user, job.grants[0].node, [g.indexes for g in job.grants[0].gpus]) for job in held] == [
        (1, "bob", "node1", [(0,)]),
        (2, "alice", "node1", [(1,)]),
        (3, "root", "node2", []),
        (4, "bob", "node1", [(2,)]),
    ]
    assert notes == [
        "the text of one of these jobs imitates Slurm's output: 2 of alice, 3 of root, 4 of bob",
        "unknown which GPUs are held by job 3",
    ]


def test_another_jobs_number_in_a_text_is_harmless() -> None:
    comment = "see\nJobId=2 \nJobId=2 JobName=x UserId=alice(1001)\nJobId=3 JobName=y"
    liar = Job(1, "alice", 1001, "node1", 0, comment=comment)
    cluster = [liar, Job(2, "bob", 1002, "node1", 1), Job(3, "root", 0, "node2", 0)]
    _, held, notes = looked(cluster, typed=True, tell=True)
    claims = [(job.number, [gres.indexes for gres in job.grants[0].gpus]) for job in held]
    assert claims == [(1, [(0,)]), (2, [(1,)]), (3, [(0,)])]
    assert notes == ["the text of one of these jobs imitates Slurm's output: 1 of alice"]


@pytest.mark.parametrize(
    ("now", "kept"),
    [("RUNNING", [1, 2, 3]), ("COMPLETED", [1, 3]), ("CANCELLED", [1, 3]), ("COMPLETING", [1, 2, 3])],
)
def test_a_job_that_ends_between_two_queries_raises_no_suspicion(now: str, kept: list[int]) -> None:
    cluster = [Job(1, "bob", 1002, "node1", 0), Job(2, "alice", 1001, "node1", 1), Job(3, "root", 0, "node2", 0)]
    pieces = jobs("".join(job.printed() for job in cluster))
    listed = nodes("".join(node_text(name, of, typed=True) for name, of in {"node1": {0}, "node2": {0}}.items()))
    assert consistency.contradictions(pieces, listed) == ["GPU 1 of node1 is held by job 2 but not in use"]
    cluster[1].state = now
    text = "".join(job.listed() for job in cluster)
    held, notes = consistency.corrected(
        pieces, true_jobs(text.replace("node1|alice", "|alice") if now != "RUNNING" else text), listed
    )
    assert ([job.number for job in held], notes) == (kept, [])


def test_a_suspended_job_shares_its_gpus_under_gang_scheduling() -> None:
    cluster = [Job(1, "bob", 1002, "node1", 0, state="SUSPENDED"), Job(2, "alice", 1001, "node1", 0)]
    listed, held, notes = looked(cluster, typed=True, tell=True)
    assert ([(job.number, job.state) for job in held], notes) == ([(1, "suspended"), (2, "running")], [])
    assert free(listed, held)["node1"] == {1, 2, 3}


def test_every_order_of_jobs_gives_the_same() -> None:
    liar = Job(1, "alice", 1001, "node1", 0, command=f"x\n{FAKE}")
    honest = [Job(2, "bob", 1002, "node1", 1), Job(3, "root", 0, "node2", 0)]
    found = {
        tuple((job.number, job.user) for job in looked(list(order), typed=True, tell=True)[1])
        for order in itertools.permutations([liar, *honest])
    }
    assert found == {((1, "alice"), (2, "bob"), (3, "root"))}


@example("\n")
@given(st.text(max_size=50))
def test_any_name_leaves_the_rest_of_the_job_as_it_is(name: str) -> None:
    pieces = jobs(Job(1, "alice", 1001, "node1", 0, name=name).printed())
    for piece in pieces:
        if piece.job is not None:
            assert (piece.job.uid, piece.job.state, piece.job.grants[0].gpus[0].indexes) == (1001, "running", (0,))
