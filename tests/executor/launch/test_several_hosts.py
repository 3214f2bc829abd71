"""Runs of several hosts: two network namespaces of this machine with a wire between them, and a torchrun in each."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from host_pairs import require_namespaces, run_two_hosts
from tiny_jobs import job

from meshwise.executor.launch.launcher import ExecutionError
from meshwise.executor.launch.run import VERIFY, build_verification_job
from meshwise.executor.launch.several_hosts import Hosts, Rendezvous, prepare_hosts, read_run, require_processes
from meshwise.executor.recording.rank_files import Place, describe_lost_host, heartbeat_file


def test_two_hosts_compute_what_one_process_computes(tmp_path: Path) -> None:
    require_namespaces()
    run = replace(job(precision="fp32", data=2, timeout=200.0), steps=2, dump=False, profile=True)
    jobs = [(run, tmp_path), (build_verification_job(run), tmp_path / VERIFY)]
    script = prepare_hosts(jobs, Hosts.from_ranks(2, 1, Rendezvous("a", 29517)))
    done = run_two_hosts(script)
    assert done.returncode == 0, Path(f"{script}.a.log").read_text()[-2000:]
    found, measured = read_run(tmp_path)
    assert found == run
    assert len(measured.losses) == 2
    assert measured.verification is not None and measured.verification.equal
    places = [json.loads((tmp_path / f"rank-{rank}.place").read_text()) for rank in range(2)]
    assert places == [{"host": "a", "address": "10.77.0.1"}, {"host": "b", "address": "10.77.0.2"}]


def test_lost_host_is_named(tmp_path: Path) -> None:
    require_namespaces()
    run = replace(job(data=2, timeout=200.0), steps=100_000)
    script = prepare_hosts([(run, tmp_path)], Hosts.from_ranks(2, 1, Rendezvous("a", 29517)))
    assert run_two_hosts(script, tmp_path / "rank-1.jsonl").returncode != 0
    named = "rank 0 on host a failed first: "
    gone = "host b (10.77.0.2), which has the rank 1, closed its connection"
    [line] = {each for each in Path(f"{script}.a.log").read_text().splitlines() if each.startswith(named)}
    assert line.endswith(gone) and "(at step " in line
    with pytest.raises(ExecutionError, match=r"rank 0 on host a failed first: .*host b"):
        read_run(tmp_path)


def test_run_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder of a run has a job\.json"):
        read_run(tmp_path)
    prepare_hosts([(job(data=2), tmp_path)], Hosts.from_ranks(2, 1, Rendezvous("elsewhere.invalid")))
    with pytest.raises(
        ExecutionError, match=r"no rank has begun; run `sh .*host\.sh NUMBER` on each host, then collect"
    ):
        read_run(tmp_path)
    heartbeat_file(tmp_path, 1).write_bytes(b"3 step 1, forward 0F0")
    with pytest.raises(ExecutionError, match="rank 0 has not finished; it is at start"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "processes", "words"),
    [
        (4, 5, "at least as many ranks, met 5 processes of 4 ranks; nearest: 4"),
        (6, 4, "the ranks divide into hosts, met 4 processes of 6 ranks; nearest: 3"),
        (7, 6, "nearest: 1"),
    ],
)
def test_processes_that_no_hosts_have(ranks: int, processes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        require_processes(ranks, processes)


def test_hosts_times_processes_are_the_ranks() -> None:
    for ranks in range(1, 30):
        for processes in (size for size in range(1, ranks + 1) if ranks % size == 0):
            hosts = Hosts.from_ranks(ranks, processes, Rendezvous("a"))
            assert hosts.nodes * hosts.processes == ranks


def test_busy_port_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"the port is free on 127\.0\.0\.1, met {port}, which is busy; nearest: "
        ):
            Rendezvous("127.0.0.1", port).require_free()
        Rendezvous("192.0.2.1", port).require_free()  # another machine (RFC 5737: nobody's)
    Rendezvous("127.0.0.1", port).require_free()


@pytest.mark.parametrize(
    "text", ["", ":1", "a:b", "a:1:2", "a b:1", "a;rm:1", "-a:1", "a:0", "a:65536", "[::1", "$(x):1"]
)
def test_no_rendezvous(text: str) -> None:
    with pytest.raises(ValueError, match="rendezvous: "):
        Rendezvous.parse(text)


def test_peer_without_a_place_is_not_named() -> None:
    assert describe_lost_host({0: Place("a", "10.0.0.1")}, "Read error [10.0.0.9]:1: Connection reset by peer") == ""
