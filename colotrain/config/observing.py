"""Whom a run tells, and which steps it traces: checks of the settings, and their plans."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from colotrain.config.schema import Config, Profile
from colotrain.errors import Problem
from colotrain.records import same_fields
from colotrain.spec.observing import VARIABLE, Notify, NotifyPlan, ProfilePlan

HIGHEST_PORT = 65535


def check_observing(settings: Config) -> Iterator[Problem]:
    yield from _check_command(settings.observe.notify)
    yield from _check_url(settings.observe.notify)
    port = settings.observe.metrics_port
    if port is not None and port > HIGHEST_PORT:
        expected = f"a port, from 1 to {HIGHEST_PORT}"
        yield Problem(key="observe.metrics_port", value=port, expected=expected)
    steps, ranks = settings.train.profile.steps, settings.train.profile.ranks
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        expected = "the first and the last step, counted from 1"
        fix = "write train.profile.steps=[10,12]"
        yield Problem(key="train.profile.steps", value=steps, expected=expected, fix=fix)
    if steps and (not ranks or min(ranks) < 0):
        expected, fix = "at least one rank, counted from 0", "write train.profile.ranks=[0]"
        yield Problem(key="train.profile.ranks", value=ranks, expected=expected, fix=fix)


def check_traced_ranks(profile: Profile, world_size: int) -> Iterator[Problem]:
    """Yield a problem if a rank that is to be traced does not exist."""
    if profile.steps and max(profile.ranks, default=0) >= world_size:
        expected, key = f"ranks from 0 to {world_size - 1}", "train.profile.ranks"
        yield Problem(key=key, value=profile.ranks, expected=expected, fix="lower them")


def notify_plan(notify: Notify) -> NotifyPlan | None:
    if notify.command is None and notify.url is None:
        return None
    return NotifyPlan(**same_fields(notify, Notify) | {"command": tuple(_words(notify))})


def profile_plan(profile: Profile) -> ProfilePlan | None:
    if not profile.steps:
        return None
    first, last = profile.steps
    return ProfilePlan(first=first, last=last, ranks=tuple(sorted(set(profile.ranks))))


def _words(notify: Notify) -> list[str]:
    """Return the words of the command; raise `ValueError` where a quotation does not end."""
    command = notify.command
    if isinstance(command, str):
        return [command] if notify.shell else shlex.split(command)
    return list(command or [])


def _check_command(notify: Notify) -> Iterator[Problem]:
    key, command = "observe.notify.command", notify.command
    if command is None:
        if notify.shell:
            expected, fix = "a command for the shell to run", "set observe.notify.command"
            yield Problem(key=key, value="null", expected=expected, fix=fix)
        return
    if notify.shell and not isinstance(command, str):
        fix = "write it as one text, or set observe.notify.shell=false"
        yield Problem(key=key, expected="one text, which a shell runs", fix=fix)
        return
    try:
        words = _words(notify)
    except ValueError as error:
        yield Problem(key=key, expected=f"words ({error})", fix="close the quotation")
        return
    if not words or not words[0].strip():
        yield Problem(key=key, expected="a program and its arguments", fix="name the program")
    yield from _check_references(key, " ".join(words) if not notify.shell else "")


def _check_url(notify: Notify) -> Iterator[Problem]:
    """Yield a problem of a URL that would be written to files; its value is not shown."""
    key, url = "observe.notify.url", notify.url
    if url is None:
        return
    if not VARIABLE.search(url):
        yield Problem(
            key=key,
            expected="a reference to an environment variable, for the URL of a webhook is a secret "
            "and this one would be written to the run's files",
            fix=f"export NAME=URL, and write '{key}=${{oc.env:NAME}}'",
        )
    yield from _check_references(key, url)


def _check_references(key: str, text: str) -> Iterator[Problem]:
    if "${" in VARIABLE.sub("", text):
        expected = "no other references beside ${oc.env:NAME}"
        yield Problem(key=key, expected=expected, fix="write their values")
