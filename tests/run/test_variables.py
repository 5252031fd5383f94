"""The variables of launchers: who this process is, or what is missing."""

from __future__ import annotations

import pytest

from paceline.errors import BadArgumentError
from paceline.run.variables import LOOPBACK, Launch, first_node, idle_tasks, local_rank

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
# What a process finds that srun has started as one of eight on two nodes, and what a batch script finds itself.
BATCH = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
STEP = BATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1554841601",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def _read(environ: dict[str, str]) -> Launch:
    launch = Launch.read(environ)
    assert launch is not None
    return launch


def test_local_rank_is_the_rank_where_nothing_else_is_said() -> None:
    assert Launch.read({"PATH": "/bin"}) is None
    with pytest.raises(BadArgumentError, match="LOCAL_RANK set, RANK, WORLD_SIZE"):
        Launch.read({"LOCAL_RANK": "0"})
    assert _read(FULL) == Launch(1, 1, 4, host="10.0.0.1", port=29500)
    assert _read(FULL | {"LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "one"}, "RANK must be an integer of at least 0, got 'one'"),
        ({"RANK": "-1"}, "RANK must be an integer of at least 0, got '-1'"),
        ({"RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be an integer of at least 1, got ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be an integer"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer"),
    ],
)
def test_wrong_variables_are_named(change: dict[str, str], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        Launch.read(FULL | change)


def test_a_launcher_that_serves_the_store_and_starts_ranks_again_is_known() -> None:
    again = _read(FULL | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (again.store_is_served, again.job) == (True, "attempt2")


# -- Slurm ---------------------------------------------------------------------------------------------


def test_a_task_of_srun_joins_the_others_on_the_first_node() -> None:
    found = _read(STEP)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert (found.host, found.host_is_guessed) == ("gpu07", True)
    assert _read(STEP | {"SLURM_PROCID": "0"}).port == found.port
    assert 10_000 <= found.port < 30_000
    assert _read(STEP | {"SLURM_STEP_ID": "1"}).port != found.port


def test_on_one_node_no_name_is_looked_up() -> None:
    found = _read(STEP | {"SLURM_STEP_NUM_NODES": "1"})
    assert (found.host, found.host_is_guessed) == (LOOPBACK, False)


def test_where_the_user_says_ranks_meet_comes_first() -> None:
    found = _read(STEP | MEETING)
    assert (found.host, found.port, found.host_is_guessed) == ("10.0.0.1", 29500, False)


def test_without_a_list_of_nodes_it_is_the_node_that_srun_was_called_on() -> None:
    unknown = {name: value for name, value in STEP.items() if not name.endswith("NODELIST")}
    assert _read(unknown).host == "10.0.0.9"
    del unknown["SLURM_LAUNCH_NODE_IPADDR"]
    with pytest.raises(BadArgumentError, match=r"rank 5 of 8.*Not set: MASTER_ADDR \(the host of rank 0\)\. "):
        Launch.read(unknown)


def test_torchrun_inside_srun_is_asked_and_not_srun() -> None:
    assert _read(STEP | FULL).world_size == 4


def test_a_step_of_one_task_is_a_group_of_one() -> None:
    # An interactive shell on a node, whose job has more tasks, is also such a step.
    assert Launch.read(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_batch_script_without_srun_is_told_so() -> None:
    with pytest.raises(BadArgumentError, match=r"8 tasks \(SLURM_NTASKS\), but.*not started with srun.*`srun python"):
        Launch.read(BATCH)
    assert Launch.read(BATCH | {"SLURM_NTASKS": "1"}) is None
    assert Launch.of(BATCH, rank=0, world_size=1) is None


def test_a_shell_of_salloc_runs_one_rank() -> None:
    shell = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    assert Launch.read(shell) is None
    assert "8 tasks" in idle_tasks(shell)
    assert idle_tasks(shell | {"SLURM_NTASKS": "1"}) == idle_tasks(STEP) == idle_tasks({}) == ""


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3,5-7],m1", "n3"),
        ("n[03-04]", "n03"),
        ("rack[2-3]node[10-19]-ib", "rack2node10-ib"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


# -- MPI -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [MPIRUN, HYDRA | {"PMI_JOBID": "7"}], ids=["open-mpi", "pmi"])
def test_ranks_of_one_host_need_nothing_else(variables: dict[str, str]) -> None:
    found = _read(variables)
    assert (found.rank, found.local_rank, found.world_size, found.host) == (1, 1, 2, LOOPBACK)
    assert found.port


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, r"Open MPI has .* rank 1 of 2, .* MASTER_ADDR \([^)]*\)\. Set"),
        (HYDRA, r"Not set: MASTER_PORT \(a free port of that host\)\. Set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MASTER_ADDR .* and MASTER_PORT "),
        ({"PMI_SIZE": "2"}, "PMI has started this process .PMI_SIZE set., but PMI_RANK not set"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "but OMPI_COMM_WORLD_SIZE not set"),
        ({"SLURM_STEP_ID": "1", "SLURM_NTASKS": "2"}, "but SLURM_PROCID not set"),
        (MPIRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but Open MPI says 2"),
        (STEP | {"RANK": "0"}, "RANK is 0, but Slurm says 5"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "2"}, "rank 2 of 2: ranks count from 0"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK must be an integer"),
    ],
)
def test_what_is_missing_or_wrong_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        Launch.read(variables)


@pytest.mark.parametrize("variables", [MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, HYDRA])
def test_where_ranks_meet_may_be_set(variables: dict[str, str]) -> None:
    found = _read(variables | MEETING)
    assert (found.host, found.port) == ("10.0.0.1", 29500)
    assert found.job != "attempt0"


def test_mpirun_inside_slurm_is_asked_and_not_slurm() -> None:
    assert _read(BATCH | MPIRUN).world_size == 2
    assert _read(BATCH | HYDRA | {"PMI_JOBID": "7"}).world_size == 2
    # srun has started mpirun's helper there, and the helper has started this process.
    assert _read(STEP | MPIRUN).rank == 1
    # Here srun has started this process, and speaks PMI to it.
    assert _read(STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}).host == "gpu07"


def test_one_process_of_mpi_is_a_group_of_one() -> None:
    assert Launch.read({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None


def test_the_local_rank_in_a_group_of_somebody_else() -> None:
    assert local_rank({"LOCAL_RANK": "3"}, 9) == 3
    assert local_rank(STEP, 5) == 1
    assert local_rank(MPIRUN, 9) == 1
    assert local_rank({}, 9) == 9
