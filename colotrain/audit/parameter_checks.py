"""Checks of the parameters: those that train, and those that do not."""

from __future__ import annotations

from colotrain.audit.evidence import Evidence, RankEvidence, sketches
from colotrain.audit.ratios import norm
from colotrain.audit.verdicts import Verdict, named, ok, unknown, wrong


def parameters(evidence: Evidence) -> Verdict:
    """Compare the model's parameters with the optimizers', and look for idle ones."""
    name, own = "parameters", evidence.first
    if not own.members:
        return unknown(name, "no step was looked into")
    last = own.members[-1]
    if not last.trainable and not last.frozen:
        return unknown(name, "no module whose parameters are known ran")
    if last.copies and last.missing:
        why = f"the optimizer has {last.foreign} parameters that the script gives gradients to"
        return unknown(name, f"{why}: copies?", last.made_at)
    if last.foreign and last.missing:
        text = f"the optimizer has {last.foreign} parameters of another model: "
        return wrong(name, f"{text}{named(last.missing)} are in none", last.made_at)
    if last.missing:
        text = f"trainable and in no optimizer: {named(last.missing)}"
        return wrong(name, text, last.made_at)
    if last.twice:
        return wrong(name, f"twice in optimizers: {named(last.twice)}", last.made_at)
    if idle := idle_parameters(own):
        text = f"{len(idle)} trainable parameters never got a gradient: {named(idle)}"
        return wrong(name, text, own.steps[0].backward_at)
    if still := unmoved_parameters(own):
        text = f"have gradients and never change: {named(still)}"
        return wrong(name, text, own.steps[0].site)
    text = f"{len(last.trainable)} trainable, {len(last.frozen)} frozen"
    if last.apart:
        why = f"{text}; no optimizer has any of a model whose parameters get gradients, too: "
        return unknown(name, f"{why}{named(last.apart)}", last.made_at)
    if last.shared and own.num_optimizers > 1:
        why = f"{text}; several optimizers have {named(last.shared)}"
        return unknown(name, why, last.made_at)
    if not last.complete:
        return unknown(name, f"{text}; the engine's optimizer has copies, not the parameters")
    if last.foreign:
        return unknown(name, f"{text}; {last.foreign} of the optimizer are in no module that ran")
    return ok(name, text)


def idle_parameters(rank: RankEvidence) -> list[str]:
    """Trainable parameters without a gradient in every step that was looked into."""
    reached = {n for _, d in rank.steps_with_details() for n in (*d.gradient, *(d.declared or ()))}
    every = [member.trainable for member in rank.members]
    return [name for name in every[0] if all(name in m for m in every) and name not in reached]


def unmoved_parameters(rank: RankEvidence) -> list[str]:
    """Parameters that no step changed, though each had a gradient and a learning rate."""
    moved, pushed = set(), set()
    for _, details in rank.steps_with_details():
        if details.lr:
            moved |= {n for n, v in sketches(details.change).items() if any(v)}
            found = sketches(details.gradient).items()
            pushed |= {n for n, v in found if any(v) and n not in details.at_rest}
    return sorted(pushed - moved) if moved else []


def frozen(evidence: Evidence) -> Verdict:
    """Look for frozen parameters that a step changes."""
    name = "frozen"
    members = evidence.first.members
    if not any(member.frozen for member in members):
        return ok(name, "no parameter is frozen")
    for (step, details), member in zip(evidence.first.steps_with_details(), members, strict=False):
        changed = [
            n
            for n, value in sketches(details.change).items()
            if n in member.frozen and norm({n: value})
        ]
        if changed:
            text = f"changed by the step though frozen: {named(changed)}"
            return wrong(name, text, step.site, step=step.step)
    return ok(
        name, f"{max(len(member.frozen) for member in members)} frozen parameters are unchanged"
    )
