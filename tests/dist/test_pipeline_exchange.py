"""Stages of one host exchange through shared memory, and an end to every wait for one."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colotrain.engine.comms.groups import Groups
from colotrain.engine.pipeline.exchange import Exchange, make_links
from colotrain.lost_peers import PEER_LOST_MESSAGES, PeerLost
from colotrain.spec.axes import DP_SHARD, PP, Ranks
from tests.dist.test_transport import WITHIN_S, _refuse, run, world

SHAPES = ((3, 5), (), (0, 4), (64, 33), (200, 100))
"""The last is larger than planned, and goes through the process group."""
MOST_BYTES = 8 * 64 * 33


def connected(lacking: int | None = None) -> Exchange:
    """Three stages; those with the rank `lacking` have no memory to share."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == lacking:
            patch.setattr(os, "pidfd_open", _refuse)
        links = make_links([(0, 1), (1, 2)], MOST_BYTES, Groups(Ranks({PP: 3, DP_SHARD: 1}), "cpu"))
    pairs = ((0, 1), (1, 2))
    own = {pair[0] for pair in pairs if dist.get_rank() in pair and lacking not in pair}
    assert links.keys() == own
    return Exchange(world(), dist.new_group(range(3)), links)


def passes_on(rank: int, lacking: int | None) -> None:
    """Three stages, by 1F1B, double what they get: tensors of any size keep their order."""
    random.seed(0)
    torch.manual_seed(0)
    exchange, ahead = connected(lacking), 2 - rank
    sizes = [random.choice(SHAPES) for _ in range(40)]
    dtypes = [random.choice((torch.float32, torch.bfloat16, torch.float64)) for _ in sizes]
    told = [torch.randn(s).to(d) for s, d in zip(sizes, dtypes, strict=True)]
    begun: list[torch.Tensor] = []
    done = 0
    for index, value in enumerate(told):
        own = value
        if rank and index == 0:
            time.sleep(0.3)  # the stage before is ahead as far as it may
        if rank:
            own = exchange.receive_activations(value)
            assert torch.equal(own, value * 2**rank)
        if rank < 2:
            sent = (own.T.contiguous() * 2).T  # not contiguous
            exchange.send_activations(sent)
            if lacking is None:  # what it was has been copied
                sent.fill_(7.0)
        begun.append(own)
        while len(begun) > (ahead if index < len(told) - 1 else 0):
            oldest = begun.pop(0)
            gradient = told[done] + 1
            if rank < 2:
                gradient = exchange.receive_gradient(oldest)
                assert torch.equal(gradient, told[done] + 1)
            if rank:
                exchange.send_gradient(gradient)
            done += 1
    exchange.finish()
    assert done == len(told)
    small = [v for v in told if v.nbytes <= MOST_BYTES]
    assert 0 < len(small) < len(told)
    for link in exchange.links.values():  # none on the rank `lacking`
        assert (link.num_sent, link.num_received) == (len(small),) * 2


@pytest.mark.parametrize("lacking", [None, 2])
def test_stages_get_what_the_others_sent_in_its_order(lacking: int | None) -> None:
    run(passes_on, 3, lacking)


def loses_its_neighbour(rank: int, folder: Path, kills: bool) -> None:
    exchange = connected()
    for link in exchange.links.values():
        link.memory.timeout_s = 20.0 if kills else 1.0
    value, started = torch.zeros(100), time.time()
    try:
        for index in range(1_000_000):
            if rank == 1 and index == 50:
                if kills:
                    (folder / "killed").write_text(str(time.time()))
                    os._exit(9)
                time.sleep(60)
            if rank == 0:
                exchange.send_activations(value)
            if rank == 1:
                exchange.send_activations(exchange.receive_activations(value))
            if rank == 2:
                exchange.receive_activations(value)
    except PeerLost as error:
        assert time.time() - started < 60
        (folder / f"error{rank}").write_text(f"{time.time()} {error}")
    os._exit(0)


@pytest.mark.parametrize("kills", [True, False])
def test_a_stage_that_is_gone_or_hangs_is_named_by_those_that_send_and_receive(
    kills: bool, tmp_path: Path
) -> None:
    context = run(loses_its_neighbour, 3, tmp_path, kills, join=False)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("error*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    for process in context.processes:
        process.join(0.2 if process is context.processes[1] else 10)
        process.kill()
    for rank in (0, 2):
        at, text = (tmp_path / f"error{rank}").read_text().split(" ", 1)
        assert any(mark in text for mark in PEER_LOST_MESSAGES)
        assert text.endswith("the exchange with stage 1")
        assert "rank 1" in text
        if kills:
            assert float(at) - float((tmp_path / "killed").read_text()) < WITHIN_S
        else:
            assert "Timed out waiting 1 s" in text
