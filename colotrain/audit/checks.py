"""All checks of an audited command, from what its processes wrote. Without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from colotrain.audit.compared_steps import AVERAGED, ComparedStep, averages_weights, compared_steps
from colotrain.audit.evidence import Evidence, RankEvidence, changed_between_steps, sketches
from colotrain.audit.ratios import norm
from colotrain.audit.scale_checks import FEW_PERCENT, local_norms, scale_checks
from colotrain.audit.sites import Site
from colotrain.audit.verdicts import CHECKS, Verdict, named, ok, unchecked, unknown, wrong

SEED_ALIKE = ("accelerate", "transformers", "trl", "lightning", "pytorch_lightning")
"""Packages that seed all ranks alike: with them, equal dropout masks may be meant."""
SHARDED = ("FullyShardedDataParallel", "fully_shard", "ZeRO-3")


ROUNDING, LARGEST_ROUNDING = 100, 1e-3
"""Errors of a gradient of zero: multiple of the dtype's, and most, relative to all gradients."""


def check(evidence: Evidence) -> list[Verdict]:
    """Return the verdict of every check, in the order of `CHECKS`."""
    if not evidence.ranks:
        why = "no Python process of the command made an optimizer step that could be observed"
        told = [remark for remark in evidence.remarks if remark.what in ("no step", "failure")]
        why, site = (told[0].text, told[0].site) if told else (why, ["", ""])
        return [unchecked(name, why, site) for name in CHECKS]
    compared = compared_steps(evidence)
    found = [
        steps(evidence),
        ranks(evidence),
        *scale_checks(evidence, compared),
        zeroing(evidence),
        clipping(evidence, compared),
        scheduler(evidence),
        parameters(evidence),
        frozen(evidence),
        mode(evidence),
        *between_ranks(evidence, compared),
        checkpointing(evidence),
        *order(evidence),
        *moments(evidence),
    ]
    by_name = {verdict.check: verdict for verdict in found}
    return [by_name[name] for name in CHECKS]


def has_several(evidence: Evidence) -> str:
    num = evidence.first.num_optimizers
    return f"the script has {num} optimizers, which share backwards" if num > 1 else ""


def steps(evidence: Evidence) -> Verdict:
    """Count steps and the micro-batches in each."""
    name, own = "steps", evidence.first
    if why := has_several(evidence):
        return unchecked(name, why)
    for rank in evidence.ranks:
        for step in rank.steps:
            if step.unseen and not step.backwards:
                why = f"the gradients of step {step.step} are of no backward that was seen"
                return unchecked(name, why, step.site)
            if not step.backwards and not step.closure_calls:
                text = f"step {step.step} has no backward before it: step() is called too often"
                return wrong(name, text, step.site, step=step.step)
    sizes = Counter(step.micro_batches for step in own.steps)
    calls = sum(step.step_calls for step in own.steps)
    each = ", ".join(f"{num} of {size}" for size, num in sizes.most_common())
    skipped = sum(step.skips for step in own.steps)
    text = f"{len(own.steps)} steps by {calls} calls; micro-batches per step: {each}"
    if (engine := own.engine) is not None and set(sizes) != {engine.accumulation_steps}:
        text += f"; {engine.name} is set to {engine.accumulation_steps}"
        return wrong(name, text, own.steps[0].site)
    return ok(name, text + (f"; {skipped} skipped, not finite" if skipped else ""))


def ranks(evidence: Evidence) -> Verdict:
    """Compare the ranks' numbers of steps and of micro-batches."""
    name = "ranks"
    if not evidence.has_all_ranks:
        why = f"{len(evidence.ranks)} of {evidence.world_size} ranks were observed"
        return unchecked(name, why)
    if evidence.world_size == 1:
        return ok(name, "one process")
    lengths = [len(rank.steps) for rank in evidence.ranks]
    if len(set(lengths)) > 1:
        text = f"ranks made {', '.join(map(str, lengths))} steps"
        return wrong(name, text, evidence.first.steps[-1].site)
    for each in zip(*(rank.steps for rank in evidence.ranks), strict=True):
        sizes = [step.micro_batches for step in each]
        if len(set(sizes)) > 1:
            text = (
                f"step {each[0].step} has {', '.join(map(str, sizes))} micro-batches on the ranks"
            )
            few = min(each, key=lambda step: step.micro_batches)
            return wrong(name, text, few.backward_at, few.site, step=each[0].step)
    ends = [rank.end for rank in evidence.ranks if rank.end is not None]
    begun = [end.backwards for end in ends]
    if len(ends) == len(lengths) and len(set(begun)) > 1:
        most = max(ends, key=lambda end: end.backwards)
        text = f"after the last step the ranks' backwards number {', '.join(map(str, begun))}"
        return wrong(name, text, most.backward_at)
    alone = [end for end in ends if end.failed and end.forwards > min(e.forwards for e in ends)]
    if len(ends) == len(lengths) and alone:
        text = f"after {lengths[0]} steps {len(alone)} of {len(ends)} ranks went on, and failed"
        return wrong(name, text, alone[0].forward_at)
    return ok(name, f"{lengths[0]} steps on each of {evidence.world_size}")


def zeroing(evidence: Evidence) -> Verdict:
    """Look for gradients that are zeroed before the step, or stay after it."""
    name, known = "zeroing", False
    if why := has_several(evidence):
        return unchecked(name, why)
    aside = any(step.set_aside for rank in evidence.ranks for step in rank.steps)
    for rank in evidence.ranks:
        for step in rank.steps:
            if step.lost and not (aside and step.details is None):
                text = f"{step.lost} of {step.backwards} micro-batches are zeroed before the step"
                return wrong(name, text, step.lost_at, step=step.step)
            if step.stale:
                text = "gradients of the last step are still there at the next one's first backward"
                return wrong(name, text, step.backward_at, step=step.step)
            known = known or step.stale is not None or step.zero_calls > 0
    if known:
        return ok(name, "between each step and the next backward")
    if evidence.first.engine is not None:
        return ok(name, "by the engine, which keeps gradients itself")
    return unchecked(name, "no backward was seen after a step")


def clipping(evidence: Evidence, compared: list[ComparedStep]) -> Verdict:
    """Look at when, by which norm and of which parameters gradients are clipped."""
    name, several = "clipping", has_several(evidence)
    every = [(step, clip) for rank in evidence.ranks for step in rank.steps for clip in step.clips]
    for step, clip in every:
        if clip["scaled"]:
            text = "clipped before unscale_: the limit is compared with the scaled gradient"
            return wrong(name, text, clip["site"], step=step.step)
        if not clip["after"] and not several:
            text = "clipped after the step, where it has no effect"
            return wrong(name, text, clip["site"], step=step.step)
        if clip["after"] < step.backwards and not several:
            text = f"clipped after {clip['after']} of {step.backwards} micro-batches"
            return wrong(name, text, clip["site"], step=step.step)
    for each in compared:
        if different := local_norms(each):
            norms, site = different
            text = f"each rank clips by its own norm: {', '.join(f'{n:.4g}' for n in norms)}"
            return wrong(name, text, site, step=each.step.step)
        if each.is_parallel and (other := other_norm(each)):
            return wrong(name, *other, step=each.step.step)
    for each in compared:
        if not several and clips_nothing(each):
            text, site = (
                "clips nothing: what it is given has no gradients",
                each.step.clips[0]["site"],
            )
            return wrong(name, text, site, step=each.step.step)
    if not every:
        return ok(name, "no call of torch's clip_grad_norm_ or clip_grad_value_")
    if several:
        return unchecked(name, several, every[0][1]["site"])
    for step, details in evidence.first.steps_with_details():
        if details.unclipped:
            num, sites = len(details.unclipped), [clip["site"] for clip in step.clips]
            why = f"{num} parameters that it updates are not clipped: {named(details.unclipped)}"
            return unknown(name, f"{why}; that may be meant", *sites)
    limit = every[0][1]["limit"]
    return ok(name, f"by {every[0][1]['by']}, limit {limit:g}" if limit else "once per step")


def clips_nothing(each: ComparedStep) -> bool:
    """Whether there are gradients at the step, and none in what the script gives to clip."""
    clips, own = each.step.clips, each.details[0]
    none = clips and all(clip["by"] == "norm" and clip["norm"] == 0 for clip in clips)
    return bool(none and norm(sketches(own.gradient)))


def other_norm(each: ComparedStep) -> tuple[str, Sequence[str]] | None:
    """Return why a clip's norm is not that of the whole gradient, and its site; None if it is.

    Several calls with one norm clip what that norm is of.
    """
    whole: dict[float, float] = {}
    if len({len(step.clips) for step in each.steps}) > 1:
        return None  # which calls belong together is not known
    for place, clip in enumerate(each.step.clips):
        for name in clip["norms"] if clip["norm"] is not None else ():
            for ranks in each.parts_of(name):
                own = each.steps[ranks[0]].clips[place]["norms"]
                whole[clip["norm"]] = whole.get(clip["norm"], 0.0) + own.get(name, math.nan) ** 2
    for norm_given, square in whole.items():
        if abs(norm_given - math.sqrt(square)) > FEW_PERCENT * math.sqrt(square):
            text = f"by a norm of {norm_given:.4g}; that of the whole gradient is "
            site = next(clip["site"] for clip in each.step.clips if clip["norm"] == norm_given)
            return f"{text}{math.sqrt(square):.4g}", site
    return None


def scheduler(evidence: Evidence) -> Verdict:
    name, own = "scheduler", evidence.first
    calls = [step.scheduler_steps for step in own.steps]
    where = next((step.scheduler_at for step in own.steps if step.scheduler_steps), [])
    if not sum(calls):
        return ok(name, "no scheduler made a step")
    if why := has_several(evidence):
        return unchecked(name, why, where)
    text = f"{sum(calls)} scheduler steps before {len(calls)} optimizer steps"
    if 1 < max(calls) <= evidence.world_size and "accelerate" in str(where):
        return ok(name, f"{text}: Accelerate makes one per process")
    often = [step for step in own.steps if step.scheduler_steps > 1 + step.skips]
    if calls[0] > 2 and often == own.steps[:1] and len(calls) > 1:
        return unknown(name, f"{calls[0]} before the first optimizer step: a resume?", where)
    if len(often) > 1 or (often and often[0].scheduler_steps > 2):
        most = max(calls)
        text = f"up to {most} scheduler steps per optimizer step ({text})"
        return wrong(name, text, where, step=often[0].step)
    if calls[0] > own.steps[0].skips:
        first = f"{calls[0]} before the first optimizer step: the first rate is left out"
        return wrong(name, first, where, step=1)
    return ok(name, f"{sum(calls)} steps after {len(calls)} of the optimizer")


def between_ranks(evidence: Evidence, compared: list[ComparedStep]) -> Iterator[Verdict]:
    """Compare weights, inputs and generators of the ranks."""
    if evidence.world_size == 1:
        yield from (ok(name, "one process") for name in ("weights", "data", "dropout"))
        return
    if not compared or not evidence.has_all_ranks:
        why = f"{len(evidence.ranks)} of {evidence.world_size} ranks were observed"
        yield from (unchecked(name, why) for name in ("weights", "data", "dropout"))
        return
    yield weights(evidence, compared)
    yield data(compared)
    yield dropout(compared)


def weights(evidence: Evidence, compared: list[ComparedStep]) -> Verdict:
    name = "weights"
    if evidence.first.process.framework in SHARDED:
        return shards(evidence)
    if averages_weights(evidence, compared) and not compared[0].is_parallel:
        return unknown(name, AVERAGED)
    for each in compared:
        differ: dict[tuple[int, int], list[str]] = {}
        for n in each.details[0].weights:
            for first, *others in each.parts_of(n):
                for rank in others:
                    if each.details[rank].weights.get(n) != each.details[first].weights.get(n):
                        differ.setdefault((rank, first), []).append(n)
        if differ and not each.has_one_model:
            return unchecked(name, "ranks have different models, as stages of a pipeline have")
        for (rank, first), names in differ.items():
            text = f"rank {rank} and rank {first} differ before step {each.step.step}: "
            return wrong(name, text + named(names), each.step.site, step=each.step.step)
    text = f"equal on all ranks at {len(compared)} steps, bit for bit"
    if parts := [*compared[0].parts]:
        text += f"; ranks have different parts of {named(parts)}"
    return ok(name, text)


def shards(evidence: Evidence) -> Verdict:
    """Compare the whole weights that the ranks made shards of."""
    name, known = "weights", [rank.sharding for rank in evidence.ranks if rank.sharding is not None]
    if len(known) < len(evidence.ranks):
        return ok(name, "sharded: there is one copy")
    first = known[0]
    differ = [k for k in first.weights if any(o.weights.get(k) != first.weights[k] for o in known)]
    kept = [key for key in differ if all(key in (own.kept or ()) for own in known)]
    if kept:
        text = "ranks made shards of different weights, each of its own: "
        return wrong(name, text + named([key.partition(":")[2] for key in kept]), first.site)
    if differ and first.kept is None:
        why = "ranks made shards of different weights; whether others were loaded is not known"
        return unchecked(name, why, first.site)
    return ok(name, "sharded: there is one copy")


def data(compared: list[ComparedStep]) -> Verdict:
    name, same, total = "data", 0, 0
    if others := other_inputs(compared):
        return others
    if all(each.num_losses == 1 for each in compared):
        return ok(name, "all ranks compute one loss, of equal inputs")
    for each in compared:
        readers = [each.details[ranks[0]] for ranks in each.losses_of]
        for inputs in zip(*(own.inputs for own in readers), strict=False):
            total += all(inputs)
            same += all(inputs) and len(set(inputs)) < len(inputs)
    if not total:
        return unchecked(name, "the model's inputs are no tensors")
    if same == total:
        return wrong(
            name,
            f"ranks have equal inputs in all {total} forwards compared",
            compared[0].step.backward_at,
        )
    if same:
        return unknown(name, f"ranks have equal inputs in {same} of {total} forwards")
    return ok(name, f"different in all {total} forwards compared")


def other_inputs(compared: list[ComparedStep]) -> Verdict | None:
    """Look for ranks that share parameters and have different inputs, or copies with equal ones."""
    for each in compared:
        for group in each.losses_of:
            number, site = each.step.step, each.step.backward_at
            if group == each.readers_apart:
                text = f"ranks {listed(group)} share parameters by parts, and have different inputs"
                return wrong("data", text, site, step=number)
            for parts in each.parts.values():
                copies = [[rank for rank in ranks if rank in group] for ranks in parts]
                if len(copies[0]) > 1:
                    text = f"ranks {listed(copies[0])} have copies of one part, and equal inputs"
                    return wrong("data", text, site, step=number)
    return None


def listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def order(evidence: Evidence) -> list[Verdict]:
    """Look for samplers that shuffle each epoch alike, or not alike on all ranks."""
    drawn: dict[str, set[str]] = {}
    for remark in evidence.remarks:
        if remark.what == "order":
            return [wrong("data", remark.text, remark.site)]
        if remark.what == "sampler":
            drawn.setdefault(str(Site.of(remark.site)), set()).add(remark.text)
    for site, texts in drawn.items():
        if len(texts) > 1:
            text = (
                f"ranks' samplers differ, so that their parts overlap: {'; '.join(sorted(texts))}"
            )
            return [wrong("data", text, [site, ""])]
    return []


def moments(evidence: Evidence) -> list[Verdict]:
    """Look for optimizers that make a single step each."""
    own = evidence.first
    rebuilt = [step for step in own.steps if step.rebuilt and not step.closure_calls]
    if len(rebuilt) < 2 or rebuilt[-1] is not own.steps[-1]:
        return []
    text = f"{len(rebuilt)} of {len(own.steps)} steps are by a new optimizer: its moments are lost"
    made_at = own.members[-1].made_at if own.members else rebuilt[0].site
    return [wrong("update", text, made_at, step=rebuilt[0].step)]


def dropout(compared: list[ComparedStep]) -> Verdict:
    name = "dropout"
    if not any(own.dropout for each in compared for own in each.details):
        return ok(name, "no dropout module is on")
    if all(each.num_losses == 1 for each in compared):
        return ok(name, "all ranks compute one loss")
    pairs = [
        states
        for each in compared
        for states in zip(*(each.details[own[0]].random for own in each.losses_of), strict=False)
        if len(states) > 1
    ]
    if not pairs:
        return unchecked(name, "no forward was looked into")
    if all(len(set(states)) < len(states) for states in pairs):
        text = f"ranks draw the same masks in all {len(pairs)} forwards compared"
        site = Site.of(compared[0].step.backward_at)
        if site.package in SEED_ALIKE:
            return ok(name, f"{text}: {site.package} seeds all ranks alike")
        return wrong(name, f"{text}: seed each rank otherwise", site)
    return ok(name, f"generators differ in {len(pairs)} forwards compared")


def checkpointing(evidence: Evidence) -> Verdict:
    name = "checkpointing"
    found = [remark for remark in evidence.remarks if remark.what == "reentrant"]
    if found:
        text = f"{found[0].text}: what is inside gets none (use_reentrant=False does not need it)"
        return wrong(name, text, found[0].site)
    return ok(name, "no reentrant checkpoint without an input that requires a gradient")


def parameters(evidence: Evidence) -> Verdict:
    """Compare the model's parameters with the optimizers', and look for idle ones."""
    name, own = "parameters", evidence.first
    if not own.members:
        return unchecked(name, "no step was looked into")
    last = own.members[-1]
    if not last.trainable and not last.frozen:
        return unchecked(name, "no module whose parameters are known ran")
    reached = reached_parameters(own)
    missing = [name for name in last.missing if name in reached]
    if last.copies and missing:
        why = f"the optimizer has {last.foreign} parameters that the script gives gradients to"
        return unchecked(name, f"{why}: copies?", last.made_at)
    if last.foreign and missing:
        text = f"the optimizer has {last.foreign} parameters of another model: "
        return wrong(name, f"{text}{named(missing)} are in none", last.made_at)
    if missing:
        text = f"trainable and in no optimizer: {named(missing)}"
        return wrong(name, text, last.made_at)
    if last.twice:
        return wrong(name, f"twice in optimizers: {named(last.twice)}", last.made_at)
    if last.untied:
        text = f"config.tie_word_embeddings is set, but these are two: {named(last.untied)}"
        return wrong(name, text, last.made_at)
    if idle := [n for n in idle_parameters(own, reached) if n not in last.missing]:
        text = f"{len(idle)} trainable parameters never got a gradient: {named(idle)}"
        return wrong(name, text, own.steps[0].backward_at)
    if still := unmoved_parameters(own):
        text = f"have gradients and never change: {named(still)}"
        return wrong(name, text, own.steps[0].site)
    text = f"{len(last.trainable)} trainable, {len(last.frozen)} frozen"
    if resting := resting_parameters(own):
        why = f"{text}; the learning rate is zero in all steps looked into: {named(resting)}"
        return unknown(name, f"{why}; that may be meant", last.made_at)
    if last.missing:
        why = f"{text}; in no optimizer, and never with a gradient: {named(last.missing)}"
        return unknown(name, why, last.made_at)
    if last.apart:
        why = f"{text}; no optimizer has any of a model whose parameters get gradients, too: "
        return unknown(name, f"{why}{named(last.apart)}", last.made_at)
    if last.loose:
        why = f"{text}; in a loss, but in no module that ran and in no optimizer: "
        return unknown(name, f"{why}{named(last.loose)}", last.made_at)
    if last.shared and own.num_optimizers > 1:
        why = f"{text}; several optimizers have {named(last.shared)}"
        return unknown(name, why, last.made_at)
    if not last.complete:
        return unknown(name, f"{text}; the engine's optimizer has copies, not the parameters")
    if last.foreign:
        return unknown(name, f"{text}; {last.foreign} of the optimizer are in no module that ran")
    return ok(name, text)


def reached_parameters(rank: RankEvidence) -> set[str]:
    """Parameters that had a gradient in any step that was looked into."""
    return {n for _, d in rank.steps_with_details() for n in (*d.gradient, *(d.declared or ()))}


def idle_parameters(rank: RankEvidence, reached: set[str]) -> list[str]:
    """Trainable parameters without a gradient in every step that was looked into."""
    every = [member.trainable for member in rank.members]
    return [name for name in every[0] if all(name in m for m in every) and name not in reached]


def unmoved_parameters(rank: RankEvidence) -> list[str]:
    """Parameters that no step changed, though each had a gradient and a learning rate.

    What rounding leaves of a gradient that is zero, as of a bias before BatchNorm, is none.
    """
    moved, pushed = set(), set()
    for _, details in rank.steps_with_details():
        if details.lr:
            moved |= {n for n, v in sketches(details.change).items() if any(v)}
            found = sketches(details.gradient)
            least = norm(found) * min(ROUNDING * details.epsilon, LARGEST_ROUNDING)
            large = {n for n, v in found.items() if norm({n: v}) > least}
            pushed |= large.difference(details.at_rest)
    unseen = {s.optimizer for s in rank.steps} - {s.optimizer for s, _ in rank.steps_with_details()}
    return sorted(pushed - moved) if moved and not unseen else []


def resting_parameters(rank: RankEvidence) -> list[str]:
    """Parameters with gradients whose learning rate is zero, while that of others is not."""
    every = [set(d.at_rest) & d.gradient.keys() for _, d in rank.steps_with_details() if d.lr]
    return sorted(set.intersection(*every)) if every else []


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
    num = max(len(member.frozen) for member in members)
    if by_script := changed_between_steps(evidence.first, "frozen"):
        why = f"of {num} frozen parameters the script itself changes {named(by_script)}"
        site = evidence.first.steps[0].site
        return unknown(name, f"{why} between steps; that may be meant", site)
    if moving := moving_statistics(evidence.first):
        text = f"running statistics of frozen BatchNorms move ({named(moving)}): call .eval()"
        return wrong(name, text, evidence.first.steps[0].backward_at)
    return ok(name, f"{num} frozen parameters are unchanged")


def moving_statistics(rank: RankEvidence) -> list[str]:
    """Return the frozen BatchNorms whose running statistics move in each of several steps."""
    found = [details.moving for _, details in rank.steps_with_details()]
    return [n for n in found[0] if all(n in each for each in found)] if len(found) > 1 else []


def mode(evidence: Evidence) -> Verdict:
    """Look for models that train in eval mode."""
    for rank in evidence.ranks:
        for step in rank.steps:
            if step.off:
                text = f"trained in eval mode, so that these are off: {named(step.off)}"
                return wrong("mode", text, step.off_at, step=step.step)
    return ok("mode", "no dropout or BatchNorm of what trains is in eval mode in all forwards")
