"""The script of a job: the same text for the same section, and no value gets out of its quotes."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from colotrain.config.checks import check
from colotrain.config.schema import Config, Model
from colotrain.config.schema_cluster import Cluster
from colotrain.errors import UsageError
from colotrain.schedulers.job import Job
from colotrain.schedulers.slurm import quote, render
from colotrain.schedulers.slurm_settings import Slurm

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[1] / "golden"
JOB = Job(
    name="llm-1b",
    nodes=4,
    runs=("/data/runs/llm-1b",),
    logs="/data/runs/llm-1b/logs",
    cwd="/data",
    python="/env/bin/python",
)
ARRAY = Job(
    name="four",
    nodes=1,
    runs=tuple(f"/data/runs/four-{i}" for i in range(4)),
    logs="/data/runs/four/logs",
    cwd="/data/runs/four/code",
    python="/env/bin/python",
    is_array=True,
    max_parallel=2,
)
TABLE = {
    "plain": (JOB, Slurm()),
    "gpus": (
        JOB,
        Slurm(
            partition="gpu,long",
            account="proj",
            qos="high",
            time="1-12:00:00",
            gpus_per_node="h100:8",
            cpus_per_task=64,
            memory="0",
            extra={"exclusive": True, "switches": 1, "nice": None, "oversubscribe": False},
        ),
    ),
    "all": (
        JOB,
        Slurm(
            gres="gpu:8",
            exclude="n[01-03],n7",
            nodelist="n[10-20]",
            dependency="afterok:1234",
            constraint="a100&ib",
            reservation="week 7",
            mail_user="someone@example.org",
            mail_type="END,FAIL",
            comment='the "last" one: 100% of C:\\ # not a comment',
            setup=["module purge", "module load cuda/12.8", "export NCCL_DEBUG=WARN"],
            container=["apptainer", "exec", "--nv", "my image.sif"],
            warn_s=300,
            max_requeues=20,
        ),
    ),
    "array": (ARRAY, Slurm(partition="main", time=30)),
}
NASTY = [
    "$(touch HURT)",
    "`touch HURT`",
    "'; touch HURT; '",
    '"; touch HURT; "',
    "a b",
    "\\",
    "\\'\"",
    "#",
    " # x",
    "$HOME",
    "*",
    "~",
    "--help",
    "-",
    "!!",
    "%j%A",
    "é∂中",
    "&& touch HURT",
    "a=b",
    "{x,y}",
    "(",
]


@pytest.mark.parametrize("name", TABLE)
def test_the_text_of_a_script(name: str) -> None:
    """Compare with `tests/unit/golden/NAME.sbatch`, and read a change before it is accepted."""
    assert render(*TABLE[name]) == (GOLDEN / f"{name}.sbatch").read_text("utf-8")


@pytest.mark.parametrize("name", TABLE)
def test_bash_can_read_a_script(name: str) -> None:
    subprocess.run(["bash", "-n"], input=render(*TABLE[name]), text=True, check=True, timeout=10)


def hostile() -> list[str]:
    """Names made of what is special to a shell or to sbatch."""
    draw = random.Random(0)
    pieces = [*NASTY, "a", "7", "_", "/", ".", ","]
    return NASTY + ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(200)]


def as_sbatch_reads(line: str) -> list[str]:
    """The words of an `#SBATCH` line: quotes group, a backslash takes the next as it is.

    After src/common/slurm_opt and sbatch's reader of scripts: a `#` that begins a word ends it all.
    """
    words, word, inside, begun = [], "", "", False
    characters = iter(line)
    for c in characters:
        if c == "\\":
            word, begun = word + next(characters, ""), True
        elif inside:
            inside, word = ("", word) if c == inside else (inside, word + c)
        elif c in "\"'":
            inside, begun = c, True
        elif c.isspace():
            words, word, begun = ([*words, word], "", False) if begun else (words, word, begun)
        elif c == "#" and not begun:
            break
        else:
            word, begun = word + c, True
    return [*words, word] if begun else words


def test_no_flag_gets_out_of_its_quotes() -> None:
    for text in hostile():
        assert as_sbatch_reads(f"--comment={quote(text)}") == [f"--comment={text}"]


def test_no_word_of_shell_gets_out_of_its_quotes(tmp_path: Path) -> None:
    """bash reads the settings of a script back, and touches nothing on the way."""
    for chunk in (hostile()[i : i + 20] for i in range(0, 200, 20)):
        runs = tuple(f"/runs/{text}" for text in chunk)
        job = Job(name="x", nodes=1, runs=runs, logs="/l", cwd=str(tmp_path), python=chunk[0])
        text = render(job, Slurm(container=chunk)).partition("\nrun=")[0]
        text += '\nprintf \'%s\\0\' "${runs[@]}" "${command[@]}"'
        done = subprocess.run(
            ["bash"], input=text.encode(), capture_output=True, cwd=tmp_path, timeout=20
        )
        assert done.returncode == 0, done.stderr
        found = done.stdout.decode().split("\0")[:-1]
        assert found == [*runs, *chunk, chunk[0], "-m", "colotrain", "node", "--trust-code"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\nb", "a\r", "a\x00b", "a\x1b[0m", "a\u2028b"])
def test_a_value_on_two_lines_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot stand in a job's script"):
        quote(text)
    for section in (Slurm(comment=text), Slurm(setup=[text]), Slurm(extra={"x": text})):
        settings = Config(model=Model(target="a.b:c"), cluster=Cluster(slurm=section))
        found = [p for p in check(settings, is_whole=True) if p.key.startswith("cluster.slurm")]
        assert [p.expected for p in found] == ["text on one line, without control characters"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (Slurm(time="tomorrow"), "cluster.slurm.time"),
        (Slurm(gres="gpu:1", gpus_per_node=1), "cluster.slurm.gres"),
        (Slurm(extra={"a; b": 1}), "cluster.slurm.extra.a; b"),
        (Slurm(extra={"nodes": 1}), "cluster.slurm.extra.nodes"),
        (Slurm(extra={"mem": "1G"}), "cluster.slurm.extra.mem"),
        (Slurm(extra={"x": [1]}), "cluster.slurm.extra.x"),
        (Slurm(comment=""), "cluster.slurm.comment"),
        (Slurm(warn_s=0), "cluster.slurm.warn_s"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(section: Slurm, key: str) -> None:
    settings = Config(model=Model(target="a.b:c"), cluster=Cluster(slurm=section))
    assert key in [problem.key for problem in check(settings, is_whole=True)]


def test_the_script_for_hand_writers_waits_and_queues_again_as_rendered_ones() -> None:
    """scripts/colotrain.sbatch has the same lines from the trap on, but for what it starts."""
    by_hand = (ROOT / "scripts" / "colotrain.sbatch").read_text("utf-8")
    rendered = render(*TABLE["plain"])
    for part in ("warned=\nwarn()", "until wait $!", 'if [ $rc -ne 75 ] && [ -z "$warned" ]'):
        assert part in by_hand
        assert part in rendered
    tail = rendered.partition("until wait $!")[2]
    assert by_hand.endswith(tail)
    bash = shutil.which("bash") or "bash"
    subprocess.run([bash, "-n"], input=by_hand, text=True, check=True, timeout=10)


def test_the_script_for_hand_writers_says_outside_of_slurm_how_it_is_used(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "colotrain.sbatch"
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/bin"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"submit it: sbatch {script}\n"
    assert not list(tmp_path.iterdir())
