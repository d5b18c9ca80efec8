"""What Prometheus is told is what the events say, in its own format."""

from __future__ import annotations

import dataclasses
import http.client
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from colotrain.events.fold import fold
from colotrain.events.view import RunView
from colotrain.show.metrics import METRICS, MOST_CLIENTS, Counts, MetricsServer, State, render
from colotrain.spec.plan import RunPlan
from tests.following import free_port
from tests.unit.events.test_view import launcher, plan_of, restarted_run, step, worker

MIB = 1 << 20
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\S+)')
EVENTS = [
    launcher("launch", 1.0, world_size=2),
    *(worker("started", 2.0, rank=rank, world_size=2, step=0) for rank in (0, 1)),
    step(1, tokens=64.0, compute_s=0.2, reduce_s=0.1, optimizer_s=0.05),
    step(1, rank=1, rss=70 * MIB, peak=80 * MIB),
    step(2, tokens=64.0, compute_s=0.2, loss=math.nan),
    launcher("restart", 200.0, cause="killed"),
]


def plan_with(port: int | None) -> RunPlan:
    plan = plan_of()
    return dataclasses.replace(plan, observe=dataclasses.replace(plan.observe, metrics_port=port))


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()


def parse(text: str) -> dict[str, float]:
    """Sample → value. Every metric's help and type come once, directly before its samples."""
    values: dict[str, float] = {}
    current, seen = "", []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            seen.append(current)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2:] == [current, line.split(" ")[3]]
            assert line.split(" ")[3] in ("gauge", "counter", "summary")
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1].removesuffix("_sum").removesuffix("_count") == current
            values[line.rpartition(" ")[0]] = float(found[3])
    assert len(seen) == len(set(seen))
    return values


def served() -> str:
    port = free_port()
    with MetricsServer(plan_with(port)) as server:
        assert server.take(EVENTS, fold(EVENTS, max_steps=10)) == []
        return scrape(port)


def test_a_scrape_has_what_the_events_say() -> None:
    values = parse(served())
    assert values["colotrain_step"] == 2
    assert math.isnan(values["colotrain_loss"])
    assert values["colotrain_gradient_norm"] == 0.5
    assert values['colotrain_tokens_total{unit="tokens"}'] == 128
    assert values["colotrain_step_seconds_sum"] == 1.0
    assert values["colotrain_step_seconds_count"] == 2
    assert values['colotrain_step_part_seconds_total{part="compute"}'] == pytest.approx(0.4)
    assert values['colotrain_memory_resident_bytes{rank="1"}'] == 70 * MIB
    assert values['colotrain_memory_peak_bytes{rank="0"}'] == 100 * MIB
    assert values["colotrain_restarts_total"] == 1
    assert values['colotrain_run_status{status="starting"}'] == 1
    assert values['colotrain_rank_step{rank="1"}'] == 1
    assert "colotrain_validation_loss" not in values  # not known yet


def test_the_official_parser_reads_it_and_finds_the_conventions_kept() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {found.name: found for found in parser.text_string_to_metric_families(served())}
    assert len(families) >= 12
    assert families["colotrain_tokens"].type == "counter"  # the parser takes _total off
    assert families["colotrain_step_seconds"].type == "summary"
    assert all(found.documentation for found in families.values())


def test_names_follow_the_conventions() -> None:
    for name, kind, about, _ in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert about.endswith(".")


def test_repeated_steps_count_and_the_step_goes_back() -> None:
    events = [event for file in restarted_run() for event in file]
    with MetricsServer(plan_with(free_port())) as server:
        server.take(events, fold(events, max_steps=10))
        counts = server._state.counts
    steps = [e for e in events if e.kind == "step" and e.rank == 0]
    assert counts.steps == len(steps) > len({e.fields["step"] for e in steps})


def test_hostile_names_are_quoted() -> None:
    plan = dataclasses.replace(plan_of(), name='a"b\\c\nd')
    text = render(State(plan, RunView(), Counts()))
    (line,) = [line for line in text.splitlines() if line.startswith("colotrain_run_info")]
    assert r'run="a\"b\\c\nd"' in line
    parse(text)


def test_only_its_own_path_is_answered_and_nothing_is_left_open() -> None:
    port = free_port()
    with MetricsServer(plan_with(port)):
        parse(scrape(port))  # before there is any event
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(port, "/")
        with socket.create_connection(("127.0.0.1", port)) as mute:
            parse(scrape(port))
            mute.sendall(b"\x00\xff nonsense\r\n\r\n")
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_idle_connections_take_a_bounded_number_of_threads() -> None:
    port, before = free_port(), threading.active_count()
    with MetricsServer(plan_with(port)):
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        with pytest.raises((OSError, http.client.HTTPException)):
            scrape(port)
        assert threading.active_count() <= before + 1 + MOST_CLIENTS
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 10
        while threading.active_count() > before + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        parse(scrape(port))


def test_a_port_that_is_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with MetricsServer(plan_with(port)) as server:
            (note,) = server.take([], RunView())
            assert server.take([], RunView()) == []
    expected = f"warning: observe.metrics_port={port}: Address already in use; no metrics"
    assert note.fields["text"] == expected


def test_without_a_port_nothing_listens() -> None:
    with MetricsServer(plan_with(None)) as server:
        assert server._server is None
