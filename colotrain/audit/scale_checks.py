"""Checks of a step's size: the gradient and the update beside the reference's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from colotrain.audit.compared_steps import AVERAGED, ComparedStep, averages_weights
from colotrain.audit.evidence import Evidence, changed_between_steps, sketches
from colotrain.audit.ratios import CLOSE, Sketch, differs, mean, near, norm, ratio
from colotrain.audit.records import Details
from colotrain.audit.sites import Site
from colotrain.audit.verdicts import Verdict, named, ok, unchecked, unknown, wrong

NAMED_SO = re.compile(r"accum|micro|grad_acc", re.IGNORECASE)
"""A line that divides a loss by such a name does so for accumulation."""
NAMED_SO_IN_LIBRARIES = re.compile(r"accum|micro|grad_acc|\bnormalize\b", re.IGNORECASE)
"""In libraries, that also divide by the number of all tokens of a step."""

SUMMED_AGAIN = "after each backward ranks sum again what they have of earlier micro-batches"
OWN_GRADIENT = "each rank steps with its own gradient"
EXCHANGED_IN_STEP = (
    "ranks step with different gradients and change their weights alike, bit for bit: "
    "the optimizer exchanges gradients within its step"
)
FEW_PERCENT, NEGLIGIBLE = 0.02, 1e-4
"""Relative difference of one parameter's gradient that no rounding explains, and the share of the
whole gradient's norm below which it may."""
NUMBER = re.compile(r"\d+\.?\d*|\.\d+")
SUMS, OWN = ("sum", "summed"), ("none", "summed", "own")
"""Kinds of losses in `Details.counts`: those that are sums, and those the script sums itself."""


def why_not(evidence: Evidence, compared: Sequence[ComparedStep]) -> str:
    """Return why nothing can be compared with a reference; empty if it can."""
    if any(step.in_backward for step in evidence.first.steps):
        return "the optimizer steps within backward, where nothing is compared"
    if not compared:
        return "no step was looked into on all ranks"
    if not evidence.has_all_ranks:
        return f"{len(evidence.ranks)} of {evidence.world_size} ranks were observed"
    if evidence.first.num_optimizers > 1:
        return f"the script has {evidence.first.num_optimizers} optimizers, whose losses may differ"
    reasons = [d.why_not for each in compared for d in each.details if d.why_not]
    if reasons and all(any(d.why_not for d in each.details) for each in compared):
        return reasons[0]
    return ""


def scale_checks(evidence: Evidence, compared: Sequence[ComparedStep]) -> list[Verdict]:
    """Compare the steps that were looked into with their references."""
    if why := why_not(evidence, compared):
        names = ("accumulation", "gradient", "targets")
        own_update = _worst([update(compared, None), *beside_steps(evidence)])
        return [*(unchecked(name, why) for name in names), own_update]
    usable = [each for each in compared if not any(d.why_not for d in each.details)]
    gradient_verdict = _worst([gradient(each) for each in usable])
    if len(usable) > 1 and all(each.held and is_gone(each) for each in usable):
        text = "the script takes all gradients away between backward and step"
        gradient_verdict = wrong("gradient", text, usable[0].step.site, step=usable[0].step.step)
    if gradient_verdict.outcome == "wrong" and averages_weights(evidence, compared):
        gradient_verdict = unchecked("gradient", AVERAGED)
    referenced = next((e for e in reversed(usable) if e.details[0].lr), usable[-1])
    return [
        _worst([*(accumulation(each) for each in usable), *short_steps(evidence, usable[0].usual)]),
        gradient_verdict,
        _worst([targets(each) for each in usable]),
        _worst([update(compared, referenced), *beside_steps(evidence)]),
    ]


def short_steps(evidence: Evidence, usual: int) -> list[Verdict]:
    """Look for steps of fewer micro-batches than the others, whose losses are divided alike."""
    for step in evidence.first.steps:
        if step.micro_batches < usual and step.factor and near(1 / step.factor, usual):
            why = (
                f"step {step.step} has {step.micro_batches} of {usual} micro-batches, and its loss "
            )
            return [unknown("accumulation", f"{why}is divided by {usual}", step.backward_at)]
    return []


def beside_steps(evidence: Evidence) -> list[Verdict]:
    """Look for parameters of the optimizer that the script itself changes, too."""
    own = evidence.first
    changed = changed_between_steps(own, "trainable") if own.num_optimizers == 1 else []
    if not changed or not own.members[0].complete:
        return []
    why = f"the script itself changes {named(changed)} between steps; that may be meant"
    return [unknown("update", why, own.steps[0].site)]


def loss_scale(each: ComparedStep) -> float:
    """Return the scale of a GradScaler on the last micro-batch's loss."""
    factors = each.details[0].factors
    return math.prod(value for value, _, is_scale, _ in factors[-1] if is_scale) if factors else 1.0


def _worst(found: Sequence[Verdict]) -> Verdict:
    order = ("wrong", "not checked", "cannot tell", "ok")
    return min(found, key=lambda verdict: order.index(verdict.outcome))


def gradient(each: ComparedStep) -> Verdict:
    """Compare the gradient with the mean of what was backpropagated."""
    name, number, world = "gradient", each.step.step, each.num_losses
    if any(clip.get("scaled") for clip in each.step.clips):
        return unchecked(name, "it was clipped while a GradScaler's scale was on it (see clipping)")
    if any(0 < clip.get("after", 0) < each.step.backwards for clip in each.step.clips):
        return unchecked(name, "it was clipped between its micro-batches (see clipping)")
    if local_norms(each) is not None:
        return unchecked(name, "each rank clipped by a norm of its own (see clipping)")
    if changed := changed_after_clip(each):
        why = f"the script changes gradients after it clips them: {named(changed)}"
        return unchecked(name, why, each.step.site)
    if each.readers_apart:
        return unchecked(name, "ranks that share parameters have different inputs (see data)")
    found, wanted = each.gradients(), each.reference("declared")
    lost = [n for n in wanted if n not in found and norm({n: wanted[n]})]
    site = each.step.site
    if not found or not norm(found):
        if wanted and not norm(wanted):
            return unknown(name, "all that backward computed is zero", site)
        text = "there is no gradient at the step, though backward computed one"
        if found:
            text = "all gradients are zero at the step, though backward computed others"
        if not each.step.lost:
            return unchecked(name, f"{text}: the script took it away itself", site)
        return wrong(name, text, each.step.lost_at, site, step=number)
    factor, left = ratio(found, wanted)
    if math.isnan(factor):
        return unchecked(name, "what backward computed is not finite", site)
    if each.is_parallel and (text := otherwise(each, found, wanted)):
        return wrong(name, text, site, step=number)
    if left <= CLOSE and not lost:
        if near(factor, 1.0):
            return ok(name, f"{factor:.4f} of the reference, {len(wanted)} parameters")
        if world > 1 and near(factor, world):
            if is_mean_of_targets(each, factor):
                text = f"summed over {world} ranks, of losses divided by the targets of all ranks"
                return ok(name, text)
            text = f"{factor:.2f} of the reference: summed over {world} ranks, not averaged"
            return wrong(name, text, site, step=number)
        text = f"{factor:.4g} of the mean that backward computed, in all parameters"
        if near(factor, loss_scale(each)):
            text += ": a GradScaler's scale is still on it"
        elif world > 1 and near(factor, 1 / world):
            text += f": divided by {world} ranks once more than it should be"
        if each.details[0].by_hand and not (world > 1 and near(factor, 1 / world)):
            return unchecked(name, f"{text}: the script changes gradients after backward", site)
        return wrong(name, text, site, step=number)
    return explained(each, found, factor, left, lost)


def changed_after_clip(each: ComparedStep) -> list[str]:
    """Return parameters whose gradient at the step is no multiple of the one that was clipped."""
    own = each.details[0]
    if own.before_clip is None or any(clip["by"] == "value" for clip in each.step.clips):
        return []
    before, now = sketches(own.before_clip), sketches(own.gradient)
    least, changed = NEGLIGIBLE * norm(before), []
    for name, value in before.items():
        factor, left = ratio({name: now.get(name, [])}, {name: value}) if name in now else (0.0, 0)
        if norm({name: value}) > least and not left < FEW_PERCENT * factor:
            changed.append(name)
    return changed


def is_gone(each: ComparedStep) -> bool:
    """Whether nothing is left of what backward computed."""
    computed = norm(each.reference("declared"))
    return math.isfinite(computed) and computed > 0 and not norm(each.gradients())


def local_norms(each: ComparedStep) -> tuple[list[float], list[str]] | None:
    """Return the ranks' norms at their first clip, and its site, if the norms differ.

    None also where ranks never exchange their gradients: then clipping is not what is wrong.
    """
    clips = [step.clips[0] for step in each.steps if step.clips]
    norms = [clip["norm"] for clip in clips if isinstance(clip["norm"], float)]
    if len(norms) < 2 or max(norms) - min(norms) <= CLOSE * max(norms):
        return None
    if each.is_parallel:
        return norms, clips[0]["site"]
    first, second = (sketches(own.gradient) for own in each.details[:2])
    factor, left = ratio(first, second)
    return (norms, clips[0]["site"]) if left <= CLOSE and near(factor, 1.0) else None


def explained(
    each: ComparedStep, found: dict[str, Sketch], factor: float, left: float, lost: list[str]
) -> Verdict:
    """Name the known fault that explains a gradient which is no multiple of the reference."""
    name, number, site = "gradient", each.step.step, each.step.site
    if each.step.stale:
        return unchecked(name, "gradients of earlier steps are in it (see zeroing)")
    if len(each.details) > 1:
        if each.has_one_update and ratio(each.gradient(1), each.gradient(0))[1] > CLOSE:
            return unchecked(name, EXCHANGED_IN_STEP, each.made_at)
        own = ratio(found, sketches(each.details[0].declared))
        if own[1] <= CLOSE:
            text = f"each rank steps with its own gradient ({own[0]:.2f} of it), not with the mean"
            return wrong(name, text, site, step=number)
        if alone := own_alone(each):
            text = f"{OWN_GRADIENT} of {named(alone)}, not with the mean"
            return wrong(name, text, each.made_at, site, step=number)
        if ratio(each.gradient(1), found)[1] > CLOSE:
            text = "ranks step with different gradients: not all of them are exchanged"
            return wrong(name, text, site, step=number)
    if each.num > 1 and len(each.details) > 1:
        factor_again, left_again = ratio(found, each.reference("again"))
        if left_again <= CLOSE and near(factor_again, len(each.details)):
            return wrong(name, SUMMED_AGAIN, each.step.backward_at, site, step=number)
    if each.num > 1:
        last = ratio(found, each.reference("last"))
        if last[1] <= CLOSE:
            text = f"it is of the last of {each.num} micro-batches alone ({last[0]:.2f} of that)"
            return wrong(name, text, each.step.lost_at, site, step=number)
    if lost:
        text = f"{len(lost)} parameters lost theirs between backward and step: {named(lost)}"
        if not each.step.lost:
            return unchecked(name, f"{text}; the script took them away itself", site)
        return wrong(name, text, each.step.lost_at, site, step=number)
    return unchecked(
        name, f"it differs from the reference ({factor:.3g} of it, {left:.1e} beside), unexplained"
    )


def own_alone(each: ComparedStep) -> list[str]:
    """Return parameters whose gradients are each rank's own, while others are the ranks' mean."""
    wanted = each.reference("declared")
    owns = [(each.gradient(r), sketches(own.declared)) for r, own in enumerate(each.details)]

    def is_own(name: str, rank: int, ranks: list[int]) -> bool:
        (found, own), of_all = owns[rank], wanted.get(each.key(name, ranks))
        if of_all is None or name not in found:
            return False
        return differs(found[name], of_all) > CLOSE >= differs(found[name], own[name])

    return [
        name
        for name in owns[0][1]
        if all(len(ranks) > 1 for ranks in each.parts_of(name))
        and all(is_own(name, rank, ranks) for ranks in each.parts_of(name) for rank in ranks)
    ]


def otherwise(each: ComparedStep, found: dict[str, Sketch], wanted: dict[str, Sketch]) -> str:
    """Return what is wrong with some parameters alone, where ranks share a model by parts."""
    least = NEGLIGIBLE * norm(wanted)
    apart = {
        name: value
        for name, value in wanted.items()
        if name in found
        and norm({name: value}) > least
        and differs(found[name], value) > FEW_PERCENT
    }
    if not apart or len(apart) == len(wanted):
        return ""
    if alone := own_alone(each):
        whose = "the mean" if each.num_losses > 1 else "the sum over ranks that compute one loss"
        return f"{OWN_GRADIENT} of {named(alone)}, not with {whose}"
    again = each.reference("again")
    if all(differs(found[n], again[n]) <= FEW_PERCENT for n in apart):
        return f"{SUMMED_AGAIN} of {named([*apart])}"
    factor, left = ratio(found, apart)
    if left <= FEW_PERCENT:
        text = f"{factor:.2f} of the reference, in {named([*apart])} alone"
        if near(factor, round(factor)):
            return f"{text}: counted {factor:.0f} times"
        return f"{text}: averaged over ranks that have summands of it" if factor < 1 else text
    over_all = mean([sketches(own.declared) for own in each.details])
    averaged = [n for n in apart if n in each.parts and differs(found[n], over_all[n]) <= CLOSE]
    if averaged:
        return f"ranks have different parts of {named(averaged)}, and average their gradients"
    return ""


def applied(own: Details) -> list[tuple[float, Site]]:
    """Return the factors that all micro-batches of a rank have, without 1 and loss scales."""
    return [
        (float(value), Site.of(site))
        for value, site, scale, _ in (own.factors[0] if own.factors else [])
        if not scale and float(value) != 1.0
    ]


def weights_of(own: Details) -> set[Site]:
    """Return the sites of factors that may weight a part of the loss, whatever their value.

    They make a mean of a loss's terms, or multiply by a number that is written in the line.
    """
    return {
        site
        for value, plain, _, how in (own.factors[0] if own.factors else [])
        if how != "divided" and not is_for_accumulation(value, site := Site.of(plain))
        if how != "times" or any(near(float(text), value) for text in NUMBER.findall(site.source))
    }


def means_of_terms(own: Details) -> set[Site]:
    """Return the sites that divide a sum of the loss's terms by their number, written there."""
    return {
        site
        for value, plain, _, how in (own.factors[0] if own.factors else [])
        if how == "mean of terms" and (site := Site.of(plain)) in weights_of(own)
        if any(near(float(text), 1 / value) for text in NUMBER.findall(site.statement))
    }


def uniform(each: ComparedStep) -> bool:
    """Whether all micro-batches of all ranks were multiplied by the same number."""
    found = {
        round(math.log(abs(math.prod(f[0] for f in factors if not f[2])) or 1e-300), 5)
        for own in each.details
        for factors in own.factors
    }
    return len(found) <= 1


def by_count(each: ComparedStep, *kinds: str) -> float | None:
    """Return the factor by which sums over targets become their mean over all ranks, if sums."""
    counts = [count for ranks in each.losses_of for count in each.details[ranks[0]].counts]
    if not counts or any(count is None or count[0] not in (kinds or SUMS) for count in counts):
        return None
    total = sum(count[1] for count in counts)
    return each.num_losses / total if total else None


def share_of_mean(each: ComparedStep, summed_over: float) -> float | None:
    """Return the gradient as a share of the mean over all targets of all ranks.

    `summed_over`: the factor by which it is the mean of the ranks' gradients, their number where
    they are summed. None where the losses are no sums over targets, or not divided alike.
    """
    wanted = by_count(each)
    if wanted is None or not uniform(each):
        return None
    return math.prod(value for value, _ in applied(each.details[0])) * summed_over / wanted


def is_mean_of_targets(each: ComparedStep, summed_over: float) -> bool:
    share = share_of_mean(each, summed_over)
    return share is not None and near(share, 1.0)


def normalised(each: ComparedStep) -> Verdict | None:
    """Judge losses that are sums over targets; None where something else has to tell."""
    name, world, factors = "accumulation", each.num_losses, applied(each.details[0])
    if (wanted := by_count(each)) is None:
        return None
    summed_over, left = ratio(each.gradients(), each.reference("declared"))
    is_sum = world > 1 and left <= CLOSE and near(summed_over, world)
    share = share_of_mean(each, summed_over if is_sum else 1.0)
    if share is not None and near(share, 1.0):
        return ok(name, f"divided by all {world / wanted:.0f} targets of the step")
    sites = [site for _, site in factors]
    if share is not None and world > 1 and near(share, 1 / world):
        text = f"{share:.2f} of the mean over all targets: divided by those of all {world} ranks, "
        return wrong(name, f"{text}over which gradients are averaged, too", *sites)
    by_num = [site for value, site in factors if each.num > 1 and near(value, 1 / each.num)]
    if share is not None and by_num and near(share, 1 / each.num):
        text = (
            f"{share:.2f} of the mean over all targets: divided by their number, and by {each.num}"
        )
        if weights_of(each.details[0]).issuperset(by_num):
            return unknown(name, f"{text}, if that is not a part of the loss", *by_num)
        return wrong(name, f"{text} micro-batches again", *sites, step=each.step.step)
    if by_count(each, "sum") is None:
        return None
    whole = math.prod(value for value, _ in factors)
    text = f"sums over targets are multiplied by {whole:.4g}; their mean would be {wanted:.4g}"
    return unknown(name, text, *sites)


def accumulation(each: ComparedStep) -> Verdict:
    """Compare the gradient with the mean of the undivided losses' gradients."""
    name, num = "accumulation", each.num
    if again := [step.again_at for step in each.steps if any(step.again_at)]:
        text = "a backward goes through a loss that had one in this step: its gradient counts twice"
        return wrong(name, text, again[0], step=each.step.step)
    factors = applied(each.details[0])
    whole = math.prod(value for value, _ in factors)
    if (found := normalised(each)) is not None:
        return found
    if any(count and count[0] == "own" for own in each.details for count in own.counts):
        why = "a loss of several terms has sums that are divided by numbers of the script's own"
        return unknown(name, why, *(site for _, site in factors))
    if not uniform(each):
        return unknown(name, "micro-batches are multiplied by different numbers")
    factor, left = ratio(each.gradients(), each.reference("base"))
    if not left <= CLOSE or not near(factor, whole * num):
        factor = whole * num  # the check of the gradient tells what else happened to it
    return judged(each, factor / each.losses, factors)


def judged(each: ComparedStep, factor: float, factors: list[tuple[float, Site]]) -> Verdict:
    """Judge a gradient that is `factor` of the mean of the micro-batches' undivided losses."""
    num, number, world = each.num // each.losses, each.step.step, each.num_losses
    name, sites = "accumulation", [site for _, site in factors]
    weights = weights_of(each.details[0])
    by_num = [site for value, site in factors if num > 1 and near(value, 1 / num)]
    shown = f"{factor:.2f} of the mean of {num} micro-batch{'es' * (num > 1)}"
    shown += f", of {each.losses} losses each" if each.losses > 1 else ""
    if near(factor, 1.0) and by_num and weights.issuperset(by_num):
        why = f"{shown}, if what divides by {num} is for that, and not a part of the loss"
        return unknown(name, why, *by_num)
    if near(factor, 1.0):
        how = f", divided by {num} at {by_num[0]}" if by_num else ""
        return ok(name, f"{shown}{how}")
    if len(by_num) > 1 and weights.intersection(by_num):
        why = f"{shown}: divided by {num} twice, if one of them is not a part of the loss"
        return unknown(name, why, *by_num)
    if len(by_num) > 1:
        return wrong(name, f"{shown}: the loss is divided by {num} twice", *by_num, step=number)
    others = [(value, site) for value, site in factors if num == 1 or not near(value, 1 / num)]
    for value, site in others:
        if num < each.usual and near(1 / value, each.usual):
            return unknown(name, f"{shown}, divided by {each.usual}: an epoch's last?", site)
    by_ranks = [site for value, site in others if world > 1 and near(value, 1 / world)]
    if by_ranks and not weights.issuperset(by_ranks):
        text = f"{shown}: divided by the number of ranks, over which gradients are averaged, too"
        return wrong(name, text, *by_ranks, step=number)
    for value, site in others:
        if is_for_accumulation(value, site):
            text = f"{shown}: the loss is divided by {1 / value:.0f}, a step has {num}"
            return wrong(name, text, *sites, step=number)
    by_world = world > 1 and all(near(value, world) for value, _ in factors)
    are_means = by_world and by_count(each, "mean", "none") is not None
    is_sum = num > 1 and (are_means or not factors)
    if is_sum and each.details[0].reached > 1:
        why = "they reach different parameters, and may be different losses"
        return unknown(name, f"{shown}: not divided; {why}", each.step.backward_at)
    if is_sum and each.details[0].hidden:
        why = "a compiled function that was given a number computes the loss, and may divide by it"
        return unknown(name, f"{shown}: {why}", each.step.backward_at)
    if is_sum:
        text = f"{shown}: the loss is not divided, so that a step is the sum of {num}"
        text += f", and is multiplied by {world}, the number of ranks" if factors else ""
        return wrong(name, text, each.step.backward_at, *sites, step=number)
    if by_num:
        rest = math.prod(value for value, _ in others)
        return ok(name, f"{shown}; {rest:.4g} is taken for a part of the loss ({others[0][1]})")
    if (
        sites
        and num == each.usual == 1
        and not by_ranks
        and means_of_terms(each.details[0]).issuperset(sites)
    ):
        return ok(name, f"{shown}: the loss is a mean of its own terms ({sites[0]})")
    why = (
        f"{shown}: multiplied by {math.prod(v for v, _ in factors):.4g}, perhaps a part of the loss"
    )
    return unknown(name, why, *sites)


def is_for_accumulation(value: float, site: Site) -> bool:
    """Whether a factor is 1/n, and its line names accumulation."""
    if not 0 < value <= 0.5 or not near(1 / value, round(1 / value)):
        return False
    if site.library:
        return bool(NAMED_SO_IN_LIBRARIES.search(site.source))
    return "*" not in site.source and bool(NAMED_SO.search(site.source))


def targets(each: ComparedStep) -> Verdict:
    """Check that micro-batches with different numbers of targets do not count the same."""
    name = "targets"
    counts = [count for own in each.details for count in own.counts]
    if not counts or any(count is None for count in counts):
        return ok(name, "not counted: the loss is not one torch cross_entropy")
    if each.num == each.num_losses == 1:
        return ok(name, "one micro-batch in a step")
    judgement = normalised(each)
    is_mean = judgement is not None and judgement.outcome == "ok"
    is_summed = is_mean or by_count(each, "sum") is not None
    numbers = [count[1] for count in counts]
    if is_summed or len(set(numbers)) == 1:
        return ok(name, f"{min(numbers)} to {max(numbers)} targets per micro-batch")
    if any(count[0] in OWN for count in counts):
        return unknown(name, "the script takes the mean over its targets itself")
    if not uniform(each):
        return unknown(name, "micro-batches are multiplied by different numbers")
    few, many = min(numbers), max(numbers)
    text = f"micro-batches of {few} and of {many} targets count the same: a mean of means"
    if all(count[1] == count[2] for count in counts):
        return unknown(name, f"{text}, if not meant: none is left out", each.step.backward_at)
    return wrong(name, text, each.step.backward_at, step=each.step.step)


def update(compared: Sequence[ComparedStep], referenced: ComparedStep | None) -> Verdict:
    """Check that parameters move, and for plain SGD by how much."""
    name = "update"
    if not compared:
        return unchecked(name, "no step was looked into on all ranks")
    each = referenced or compared[0]
    own, change = each.details[0], sketches(each.details[0].change)
    now = {n: v for n, v in sketches(own.gradient).items() if any(change.get(n, ()))} or sketches(
        own.gradient
    )  # whether all parameters change is a check of its own
    for looked_at in compared:
        if ruined := not_finite(looked_at):
            text = f"made parameters that are not finite: {named(ruined)}"
            return wrong(name, text, looked_at.step.site, step=looked_at.step.step)
    if not own.lr:
        return unchecked(name, "the learning rate is zero or not known")
    computed = {n: v for n, v in sketches(own.declared).items() if n in each.held}
    if (norm(now) or norm(computed)) and not norm(change):
        whose = "there are" if norm(now) else "backward computed"
        text = f"no parameter changed, though {whose} gradients"
        return wrong(name, text, each.step.site, step=each.step.step)
    if not own.plain_sgd:
        kind = each.step.optimizer_name
        why = f"{kind}'s step hardly depends on the gradient's size"
        if kind == "SGD":
            why = "SGD has momentum, weight decay or several rates"
        return ok(name, f"parameters change; by how much is not compared: {why}")
    if not now:
        return unchecked(name, "there are no whole gradients to compare with")
    clip = each.clip
    rate = -own.lr * own.engine_clip
    factor, left = ratio(change, {n: [rate * v for v in vs] for n, vs in now.items()})
    limit = CLOSE + rounding(own, norm(now))
    if limit > 0.1:
        return unknown(name, "the change is hardly more than the parameters' rounding error")
    if left > limit or abs(factor - 1.0) > limit:
        text = f"{factor:.2f} of -lr times the gradient, {left:.1e} beside"
        return wrong(name, text, each.step.site, step=each.step.step)
    if referenced is None or by_count(each) is not None:
        return ok(name, f"{factor:.2f} of -lr times the gradient")
    base, rate = each.reference("base"), -own.lr * clip * each.losses
    wanted = {n: [rate * v for v in base[n]] for n in now if n in base}
    whole, left = ratio(change, wanted)
    text = f"{whole:.2f} of plain torch's for the mean of the same micro-batches"
    if left > limit or abs(whole - 1.0) <= limit:
        return ok(name, text if left <= limit else f"{factor:.2f} of -lr times the gradient")
    scale = accumulation(each)
    if scale.outcome == "wrong":
        return wrong(name, text, *[Site(line) for line in scale.sites], step=each.step.step)
    return ok(name, f"{text}; see accumulation")


def not_finite(each: ComparedStep) -> list[str]:
    """Return the parameters that were finite before the step, and are not afterwards."""
    own = each.details[0]
    before = sketches(own.weights)
    return [
        n
        for n, change in sketches(own.change).items()
        if not all(map(math.isfinite, change)) and all(map(math.isfinite, before.get(n, ())))
    ]


def rounding(own: Details, gradient: float) -> float:
    """Return the parameters' rounding error, relative to a change of -lr times the gradient."""
    change = abs(own.lr or 0.0) * gradient
    return 2 * own.epsilon * norm(sketches(own.weights)) / change if change else math.inf
